#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <source_location>
#include <string>
#include <vector>

#include "support/buffer.h"
#include "support/random.h"
#include "tilewise/attention.h"

namespace tilewise::test {

/// Random numbers whose seed stands in the message of every failure while they live.
struct SeededRandom : Random {
  explicit SeededRandom(std::uint64_t seed, std::source_location where = std::source_location::current())
      : Random(seed),
        trace(where.file_name(), static_cast<int>(where.line()), "seed " + std::to_string(seed)) {}
  testing::ScopedTrace trace;
};

/// One thread: the calls are small.
inline Context serial_context() { return {.parallel_for = serial_parallel_for()}; }

inline AttentionOptions reference_options() {
  AttentionOptions options;
  options.kernel = "reference";
  return options;
}

/// A call of the reference kernel that owns its tensors, all f64 unless a test says otherwise.
struct Case {
  Buffer q, k, v;
  Buffer mask, alibi_slopes, sinks, logit_scale;
  Buffer key_lengths, page_table, cumulative_q, cumulative_k;
  Buffer dropout_seed;
  std::int64_t max_length_q = 0, max_length_k = 0;
  Buffer counts, indices, full_counts, full_indices, tile_ids, tiles;
  std::int64_t block_q = 1, block_k = 1;
  AttentionOptions options = reference_options();

  bool packed() const { return cumulative_q.given(); }

  AttentionInputs inputs() const {
    AttentionInputs in;
    in.q = q.view();
    in.k = k.view();
    in.v = v.view();
    in.mask = mask.view();
    in.alibi_slopes = alibi_slopes.view();
    in.sinks = sinks.view();
    in.logit_scale = logit_scale.view();
    in.key_lengths = key_lengths.view();
    in.page_table = page_table.view();
    in.dropout_seed = dropout_seed.view();
    in.packed = {cumulative_q.view(), cumulative_k.view(), max_length_q, max_length_k};
    in.blocks = {
        block_q,         block_k,     counts.view(), indices.view(), full_counts.view(), full_indices.view(),
        tile_ids.view(), tiles.view()};
    return in;
  }
};

/// A tensor whose elements are value(index).
template <typename Value>
Buffer tabulate(Shape shape, const Value& value, DType dtype = DType::f64) {
  Buffer buffer(dtype, shape);
  std::vector<double> values(static_cast<std::size_t>(buffer.size()));
  Shape index(shape.size());
  for (double& element : values) {
    element = value(index);
    for (std::size_t dim = shape.size(); dim-- > 0;) {
      if (++index[dim] < shape[dim]) break;
      index[dim] = 0;
    }
  }
  buffer.set_values(values);
  return buffer;
}

inline Buffer random_buffer(Random& random, Shape shape, double deviation = 1) {
  Buffer buffer(DType::f64, std::move(shape));
  buffer.fill_random(random, deviation);
  return buffer;
}

inline Buffer indices_buffer(Shape shape, const std::vector<double>& values) {
  Buffer buffer(DType::i32, std::move(shape));
  buffer.set_values(values);
  return buffer;
}

struct Sizes {
  std::int64_t b = 2, hq = 4, hkv = 2, sq = 3, sk = 5, d = 3, dv = 2;
};

inline Case random_case(Random& random, const Sizes& n = {}) {
  Case c;
  c.q = random_buffer(random, {n.b, n.hq, n.sq, n.d});
  c.k = random_buffer(random, {n.b, n.hkv, n.sk, n.d});
  c.v = random_buffer(random, {n.b, n.hkv, n.sk, n.dv});
  return c;
}

/// Key j's value is the j-th unit vector, so that o is the matrix of weights.
inline Buffer unit_values(std::int64_t b, std::int64_t hkv, std::int64_t sk) {
  return tabulate({b, hkv, sk, sk}, [](const Shape& x) { return x[2] == x[3] ? 1.0 : 0.0; });
}

/// Gives the case a random block mask, with blocks of its block_q and block_k, and returns the dense boolean
/// mask it stands for. Slots past the counts hold garbage.
inline Buffer add_random_blocks(Case& c, Random& random, bool per_head, bool with_tiles) {
  const std::int64_t sq = c.q.extent(2), sk = c.k.extent(2), tiles = 3;
  const std::int64_t b = per_head ? c.q.extent(0) : 1, h = per_head ? c.q.extent(1) : 1;
  const std::int64_t rows = (sq + c.block_q - 1) / c.block_q, columns = (sk + c.block_k - 1) / c.block_k;
  for (Buffer* counts : {&c.counts, &c.full_counts}) {
    *counts = Buffer(DType::i32, {b, h, rows});
    counts->fill(0);
  }
  for (Buffer* list : {&c.indices, &c.full_indices, &c.tile_ids})
    *list = Buffer(DType::i32, {b, h, rows, columns});
  c.tiles = Buffer(DType::boolean, {tiles, c.block_q, c.block_k});
  c.tiles.fill_random(random);

  constexpr double hidden = -2, full = -1;  // or a tile
  const Buffer states = tabulate({b, h, rows, columns}, [&](const Shape& x) {
    const double tile = static_cast<double>(random.between(0, tiles - 1));
    const double state = random.pick({hidden, full, tile});
    if (state == hidden) return state;
    Buffer& counts = state == full ? c.full_counts : c.counts;
    const double slot = counts.at(x[0], x[1], x[2]);
    const auto at = static_cast<std::int64_t>(slot);
    (state == full ? c.full_indices : c.indices).set({x[0], x[1], x[2], at}, static_cast<double>(x[3]));
    if (state != full) c.tile_ids.set({x[0], x[1], x[2], at}, tile);
    counts.set({x[0], x[1], x[2]}, slot + 1);
    return state;
  });
  const auto shown = [&](const Shape& x) {
    const double state = states.at(x[0], x[1], x[2] / c.block_q, x[3] / c.block_k);
    if (state < 0 || !with_tiles) return state == hidden ? 0.0 : 1.0;
    return c.tiles.at(state, x[2] % c.block_q, x[3] % c.block_k);
  };
  const Buffer mask = tabulate({b, h, sq, sk}, shown, DType::boolean);
  if (!with_tiles) c.tiles = c.tile_ids = {};
  return mask;
}

struct CaseResults {
  Buffer o, lse;
};

inline CaseResults forward(const Case& c, const Context& context = serial_context()) {
  Shape o_shape = c.q.shape();
  o_shape.back() = c.v.shape().back();
  const Shape lse_shape =
      c.packed() ? Shape{o_shape[1], o_shape[0]} : Shape{o_shape[0], o_shape[1], o_shape[2]};
  const CaseResults results{Buffer(c.q.dtype(), o_shape),
                            Buffer(c.q.dtype() == DType::f64 ? DType::f64 : DType::f32, lse_shape)};
  run_forward(c.inputs(), c.options, {results.o.view(), results.lse.view()}, context);
  EXPECT_TRUE(results.o.all_written() && results.lse.all_written());
  EXPECT_TRUE(results.o.guards_intact() && results.lse.guards_intact());
  return results;
}

struct Gradients {
  Buffer dq, dk, dv, dmask, dsinks, dlogit_scale;
};

inline Gradients backward(const Case& c, const Buffer& d_o, const Buffer& d_lse,
                          const Context& context = serial_context()) {
  const CaseResults results = forward(c);
  Gradients out{.dq = Buffer(c.q.dtype(), c.q.shape()),
                .dk = Buffer(c.k.dtype(), c.k.shape()),
                .dv = Buffer(c.v.dtype(), c.v.shape()),
                .dmask = {},
                .dsinks = {},
                .dlogit_scale = {}};
  if (c.mask.given() && c.mask.dtype() != DType::boolean) out.dmask = Buffer(c.mask.dtype(), c.mask.shape());
  if (c.sinks.given()) out.dsinks = Buffer(c.sinks.dtype(), c.sinks.shape());
  if (c.logit_scale.given()) out.dlogit_scale = Buffer(c.logit_scale.dtype(), c.logit_scale.shape());
  AttentionGradients gradients;
  gradients.o = results.o.view();
  gradients.lse = results.lse.view();
  gradients.d_o = d_o.view();
  gradients.d_lse = d_lse.view();
  gradients.dq = out.dq.view();
  gradients.dk = out.dk.view();
  gradients.dv = out.dv.view();
  gradients.dmask = out.dmask.view();
  gradients.dsinks = out.dsinks.view();
  gradients.dlogit_scale = out.dlogit_scale.view();
  run_backward(c.inputs(), c.options, gradients, context);
  for (const Buffer* written : {&out.dq, &out.dk, &out.dv, &out.dmask, &out.dsinks, &out.dlogit_scale}) {
    EXPECT_TRUE(!written->given() || (written->all_written() && written->guards_intact()));
  }
  return out;
}

/// Equal but for the last bits of f64. An infinity equals itself, a NaN nothing.
inline bool close(double a, double b, double tolerance = 1e-14) {
  return a == b || std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b));
}

inline void expect_close(const Buffer& given, const Buffer& expected, const char* what) {
  ASSERT_EQ(given.shape(), expected.shape()) << what;
  const std::vector<double> a = given.values(), b = expected.values();
  for (std::size_t n = 0; n < a.size(); ++n) {
    ASSERT_TRUE(close(a[n], b[n])) << what << " element " << n << ": " << a[n] << " instead of " << b[n];
  }
}

inline void expect_close(const CaseResults& given, const CaseResults& expected) {
  expect_close(given.o, expected.o, "o");
  expect_close(given.lse, expected.lse, "lse");
}

}  // namespace tilewise::test
