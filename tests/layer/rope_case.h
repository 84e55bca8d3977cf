#pragma once

#include "layer/plain.h"

// Random problems of rope and what is expected of them, on any device.

namespace tilewise::test::rope_case {

struct Problem {
  Buffer q, k, v, cos, sin, positions, cache_starts, page_table;
  Buffer out_q, out_k, k_cache, v_cache;
  RopeOptions options;

  RopeInputs inputs() const {
    return {
        q.view(),         k.view(), v.view(), cos.view(), sin.view(), positions.view(), cache_starts.view(),
        page_table.view()};
  }
  RopeOutputs outputs() const { return {out_q.view(), out_k.view(), k_cache.view(), v_cache.view()}; }
};

struct Sizes {
  std::int64_t batch, heads_q, heads_kv, length, dim, rotary, dim_v;
};

inline void run(const Problem& p, const Context& context = serial_context()) {
  RopeInputs in = p.inputs();
  RopeOutputs out = p.outputs();
  call_on(
      context,
      {&in.q, &in.k, &in.v, &in.cos, &in.sin, &in.positions, &in.cache_starts, &in.page_table, &out.q, &out.k,
       &out.k_cache, &out.v_cache},
      [&](const Context& c) { return rope_workspace(in, p.options, out, c); },
      [&](const Context& c) { rope(in, p.options, out, c); });
}

// Heads inside or outside of positions.
inline Placement heads_placement(Random& random) {
  Placement placement;
  if (random.chance(0.5)) placement.order = {0, 2, 1, 3};
  if (random.chance(0.3)) placement.padding = {0, 0, 0, random.between(1, 7)};
  return placement;
}

constexpr std::int64_t table_rows = 50;

inline Problem random_problem(Random& random, const Sizes& n, DType dtype) {
  Problem p;
  p.q = random_buffer(random, dtype, {n.batch, n.heads_q, n.length, n.dim}, 1, heads_placement(random));
  p.k = random_buffer(random, dtype, {n.batch, n.heads_kv, n.length, n.dim}, 1, heads_placement(random));
  p.out_q = Buffer(dtype, p.q.shape(), heads_placement(random));
  p.out_k = Buffer(dtype, p.k.shape(), heads_placement(random));
  p.out_q.poison();
  p.out_k.poison();
  const DType angles = random.chance(0.3) ? dtype : DType::f32;
  const bool of_tokens = random.chance(0.3);
  const Shape shape = of_tokens ? Shape{random.chance(0.5) ? 1 : n.batch, n.length, n.rotary / 2}
                                : Shape{table_rows, n.rotary / 2};
  p.cos = Buffer(angles, shape, random.chance(0.3) ? Placement{.padding = {0, 3}} : Placement());
  p.sin = Buffer(angles, shape);
  std::vector<double> cos(static_cast<std::size_t>(p.cos.size())), sin = cos;
  for (std::size_t i = 0; i < cos.size(); ++i) {
    const double angle = 8 * random.noise() - 4;
    cos[i] = std::cos(angle);
    sin[i] = std::sin(angle);
  }
  p.cos.set_values(cos);
  p.sin.set_values(sin);
  if (!of_tokens && random.chance(0.6)) {
    const std::int64_t entries = random.chance(0.5) ? 1 : n.batch;
    p.positions = Buffer(random.chance(0.5) ? DType::i32 : DType::i64, {entries, n.length});
    std::vector<double> rows(static_cast<std::size_t>(p.positions.size()));
    for (double& row : rows) row = static_cast<double>(random.between(0, table_rows - 1));
    p.positions.set_values(rows);
  }
  p.options.pairs = random.pick({RopePairs::halves, RopePairs::interleaved});
  p.options.inverse = random.chance(0.3);
  return p;
}

inline void add_cache(Problem& p, Random& random, const Sizes& n, bool paged) {
  const DType dtype = p.q.dtype();
  p.v = random_buffer(random, dtype, {n.batch, n.heads_kv, n.length, n.dim_v}, 1, heads_placement(random));
  std::vector<double> starts(static_cast<std::size_t>(n.batch));
  for (double& start : starts) start = static_cast<double>(random.between(0, 5));
  p.cache_starts = Buffer(DType::i32, {n.batch});
  p.cache_starts.set_values(starts);
  const std::int64_t capacity = n.length + 5;
  if (paged) {
    constexpr std::int64_t page = 3;
    const std::int64_t pages = (capacity + page - 1) / page;
    std::vector<double> table(static_cast<std::size_t>(n.batch * pages));
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<double>(i);
    random.shuffle(table);
    p.page_table = Buffer(DType::i32, {n.batch, pages});
    p.page_table.set_values(table);
    p.k_cache = random_buffer(random, dtype, {n.batch * pages, n.heads_kv, page, n.dim});
    p.v_cache = random_buffer(random, dtype, {n.batch * pages, n.heads_kv, page, n.dim_v});
  } else {
    p.k_cache = random_buffer(random, dtype, {n.batch, n.heads_kv, capacity, n.dim});
    p.v_cache = random_buffer(random, dtype, {n.batch, n.heads_kv, capacity, n.dim_v});
  }
  if (random.chance(0.5)) p.out_k = {};
}

inline Problem exact_problem(const Problem& p) {
  Problem e = p;
  for (const auto member : {&Problem::q, &Problem::k, &Problem::v, &Problem::cos, &Problem::sin,
                            &Problem::out_q, &Problem::out_k, &Problem::k_cache, &Problem::v_cache}) {
    e.*member = exact(p.*member);
  }
  e.options.kernel = "reference";
  return e;
}

// As a framework turns: products and their sum in f32, and rounded.
inline Plain flat(const Buffer& buffer) {
  Plain plain(buffer.dtype(), 1, buffer.size());
  plain.values = buffer.values();
  return plain;
}

inline void check(Problem& p, const Context& context) {
  const Problem e = exact_problem(p);
  run(e);
  run(p, context);
  // A turn is two products and a sum, as near as rounding the truth.
  for (const auto member : {&Problem::out_q, &Problem::out_k, &Problem::k_cache, &Problem::v_cache}) {
    const Buffer& got = p.*member;
    if (!got.given()) continue;
    Buffer rounded(got.dtype(), got.shape());
    rounded.set_values((e.*member).values());
    expect_near(got, (e.*member).values(), flat(rounded), "output", 4);
  }
}

}  // namespace tilewise::test::rope_case
