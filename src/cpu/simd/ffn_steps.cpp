#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/ffn_steps.cpp"
#include "hwy/foreach_target.h"  // compiles this file once for each target
//
#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/simd/activation-inl.h"
#include "cpu/simd/passes.h"
#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {
namespace {

// Rows are processed in chunks of this many columns, in buffers on the stack.
constexpr std::int64_t chunk_columns = 512;

// Columns [first, first + count) of row m.
template <Activation activation>
void activate_chunk(const ActivationPass& call, std::int64_t m, std::int64_t first, std::int64_t count) {
  alignas(64) float up[chunk_columns], gate[chunk_columns], dh[chunk_columns];
  const auto elements = static_cast<int>(count);
  const auto load_one = [&](float* to, const Matrix& from) {
    widen(to, from.at(m, first), from.dtype, elements, 1.0f);
    std::fill(to + elements, to + (elements + lanes - 1) / lanes * lanes, 0.0f);
  };
  const auto store_one = [&](const Matrix& to, const float* from) {
    narrow(to.at(m, first), to.dtype, from, elements);
  };
  const bool gated = call.gate.data != nullptr;
  load_one(up, call.up);
  if (gated) load_one(gate, call.gate);
  if (call.dh.data == nullptr) {
    for (std::int64_t n = 0; n < count; n += lanes) {
      const VF u = load(up + n);
      const VF value = activate_with_derivative<activation>(gated ? load(gate + n) : u).value;
      store(gated ? hn::Mul(value, u) : value, dh + n);
    }
    return store_one(call.h, dh);
  }
  load_one(dh, call.dh);
  for (std::int64_t n = 0; n < count; n += lanes) {
    const VF d = load(dh + n), u = load(up + n);
    const auto [value, derivative] = activate_with_derivative<activation>(gated ? load(gate + n) : u);
    if (gated) {
      store(hn::Mul(value, u), dh + n);
      store(hn::Mul(d, value), up + n);
      store(hn::Mul(hn::Mul(d, u), derivative), gate + n);
    } else {
      store(value, dh + n);
      store(hn::Mul(d, derivative), up + n);
    }
  }
  store_one(call.h, dh);
  store_one(call.d_up, up);
  if (gated) store_one(call.d_gate, gate);
}

// Sums the rows of one chunk of rows.
void sum_row_chunk(const Matrix& x, std::int64_t chunk, std::int64_t chunks, float* sums) {
  std::fill_n(sums, x.columns, 0.0f);
  alignas(64) float buffer[chunk_columns];
  for (std::int64_t m = x.rows * chunk / chunks; m < x.rows * (chunk + 1) / chunks; ++m) {
    for (std::int64_t first = 0; first < x.columns; first += chunk_columns) {
      const std::int64_t count = std::min(chunk_columns, x.columns - first);
      widen(buffer, x.at(m, first), x.dtype, static_cast<int>(count), 1.0f);
      float* to = sums + first;
      map_row(count, to, [&](const auto& at) HWY_ATTR { return hn::Add(at(to), at(buffer)); });
    }
  }
}

}  // namespace

void activation_pass(const ActivationPass& call, const Context& context) {
  const Matrix& up = call.up;
  with_activation(call.activation, [&](auto tag) {
    constexpr Activation activation = decltype(tag)::activation;
    for_each_task(context.parallel_for, up.rows, [&](std::int64_t, std::int64_t m) {
      for (std::int64_t first = 0; first < up.columns; first += chunk_columns) {
        activate_chunk<activation>(call, m, first, std::min(chunk_columns, up.columns - first));
      }
    });
  });
}

std::size_t sum_rows_workspace(const Matrix& x, const Context&) {
  Arena arena(nullptr);
  arena.take<float>(row_chunks(x.rows) * x.columns);
  return arena.rounded();
}

void sum_rows(const Matrix& x, const Vector& sums, const Context& context) {
  const std::int64_t chunks = row_chunks(x.rows);
  Arena arena(context.workspace.data);
  float* partial = arena.take<float>(chunks * x.columns);
  for_each_task(context.parallel_for, chunks, [&](std::int64_t, std::int64_t chunk) {
    sum_row_chunk(x, chunk, chunks, partial + chunk * x.columns);
  });
  join_partial_sums(partial, chunks, x.columns, sums);
}

void round(const Matrix& from, const Matrix& to, const Context& context) {
  for_each_task(context.parallel_for, from.rows, [&](std::int64_t, std::int64_t m) {
    for (std::int64_t first = 0; first < from.columns; first += chunk_columns) {
      narrow(to.at(m, first), to.dtype, reinterpret_cast<const float*>(from.at(m, first)),
             static_cast<int>(std::min(chunk_columns, from.columns - first)));
    }
  });
}

void add(const Matrix& x, const Matrix& to, const Context& context) {
  for_each_task(context.parallel_for, x.rows, [&](std::int64_t, std::int64_t m) {
    alignas(64) float terms[chunk_columns], sums[chunk_columns];
    for (std::int64_t first = 0; first < x.columns; first += chunk_columns) {
      const auto count = static_cast<int>(std::min(chunk_columns, x.columns - first));
      widen(terms, x.at(m, first), x.dtype, count, 1.0f);
      widen(sums, to.at(m, first), to.dtype, count, 1.0f);
      map_row(count, sums, [&](const auto& at) HWY_ATTR { return hn::Add(at(sums), at(terms)); });
      narrow(to.at(m, first), to.dtype, sums, count);
    }
  });
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
