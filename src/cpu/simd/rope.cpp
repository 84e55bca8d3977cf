#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/rope.cpp"
#include "hwy/foreach_target.h"  // compiles this file once for each target
//
#include <cstring>

#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/simd/passes.h"
#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {
namespace {

struct Scratch {
  float* cos;  // [R/2]
  float* sin;
  float* row;  // [R]
};

Scratch take_scratch(Arena& arena, const RopeProblem& problem) {
  return {.cos = arena.take<float>(problem.rotary_dim / 2),
          .sin = arena.take<float>(problem.rotary_dim / 2),
          .row = arena.take<float>(problem.rotary_dim)};
}

std::size_t scratch_stride(const RopeProblem& problem) {
  Arena arena(nullptr);
  take_scratch(arena, problem);
  return arena.rounded();
}

// The rotated pair (x, y). Both elements are read before either is written, so that `to` may be `from` below.
struct Rotated {
  VF x, y;
};

HWY_INLINE Rotated rotate(VF x, VF y, VF cos, VF sin) {
  return {hn::NegMulAdd(y, sin, hn::Mul(x, cos)), hn::MulAdd(x, sin, hn::Mul(y, cos))};
}

void rotate_pair(const float* x, const float* y, float cos, float sin, float* to_x, float* to_y) {
  const float a = *x, b = *y;
  *to_x = a * cos - b * sin;
  *to_y = b * cos + a * sin;
}

void rotate_halves(const float* from, const Scratch& scratch, std::int64_t pairs, float* to) {
  std::int64_t n = 0;
  for (; n + lanes <= pairs; n += lanes) {
    const Rotated rotated =
        rotate(load(from + n), load(from + pairs + n), load(scratch.cos + n), load(scratch.sin + n));
    store(rotated.x, to + n);
    store(rotated.y, to + pairs + n);
  }
  for (; n < pairs; ++n) {
    rotate_pair(from + n, from + pairs + n, scratch.cos[n], scratch.sin[n], to + n, to + pairs + n);
  }
}

void rotate_interleaved(const float* from, const Scratch& scratch, std::int64_t pairs, float* to) {
  std::int64_t n = 0;
  for (; n + lanes <= pairs; n += lanes) {
    VF x, y;
    hn::LoadInterleaved2(F(), from + 2 * n, x, y);
    const Rotated rotated = rotate(x, y, load(scratch.cos + n), load(scratch.sin + n));
    hn::StoreInterleaved2(rotated.x, rotated.y, F(), to + 2 * n);
  }
  for (; n < pairs; ++n) {
    rotate_pair(from + 2 * n, from + 2 * n + 1, scratch.cos[n], scratch.sin[n], to + 2 * n, to + 2 * n + 1);
  }
}

// Rotates one row. `to` may be `from`; one of `to` and `to_cache` may be null.
void rotate_row(const RopeProblem& problem, const Scratch& scratch, const std::byte* from, std::byte* to,
                std::byte* to_cache) {
  const auto count = static_cast<int>(problem.rotary_dim);
  const std::size_t rotated = static_cast<std::size_t>(count) * size_of(problem.dtype);
  const std::size_t all = static_cast<std::size_t>(problem.dim) * size_of(problem.dtype);
  std::byte* const first = to != nullptr ? to : to_cache;
  const auto rotate_into = problem.pairs == RopePairs::halves ? rotate_halves : rotate_interleaved;
  if (problem.dtype == DType::f32) {
    rotate_into(reinterpret_cast<const float*>(from), scratch, count / 2, reinterpret_cast<float*>(first));
  } else {
    widen(scratch.row, from, problem.dtype, count, 1.0f);
    rotate_into(scratch.row, scratch, count / 2, scratch.row);
    narrow(first, problem.dtype, scratch.row, count);
  }
  if (first != from && all > rotated) std::memcpy(first + rotated, from + rotated, all - rotated);
  if (to != nullptr && to_cache != nullptr) std::memcpy(to_cache, to, all);
}

void rotate_token(const RopeCall& call, const Scratch& scratch, std::int64_t b, std::int64_t s) {
  const RopeProblem& problem = call.problem;
  const std::int64_t row = call.angle_row(b, s);
  const auto pairs = static_cast<int>(problem.rotary_dim / 2);
  widen(scratch.cos, call.cos.at(b, row), call.cos.dtype, pairs, 1.0f);
  widen(scratch.sin, call.sin.at(b, row), call.sin.dtype, pairs, problem.inverse ? -1.0f : 1.0f);
  for (std::int64_t h = 0; h < problem.heads_q; ++h) {
    rotate_row(problem, scratch, call.q.at(b, h, s), call.out_q.at(b, h, s), nullptr);
  }
  for (std::int64_t h = 0; h < problem.heads_kv; ++h) {
    rotate_row(problem, scratch, call.k.at(b, h, s), call.out_k.wanted ? call.out_k.at(b, h, s) : nullptr,
               call.k_cache.wanted ? call.cache_row(call.k_cache, b, h, s) : nullptr);
    if (call.v.wanted) {
      std::memcpy(call.cache_row(call.v_cache, b, h, s), call.v.at(b, h, s),
                  static_cast<std::size_t>(problem.dim_v) * size_of(problem.dtype));
    }
  }
}

std::int64_t tokens_per_task(const RopeProblem& problem) {
  return rows_per_task((problem.heads_q + problem.heads_kv) * problem.dim);
}

std::int64_t tasks_of(const RopeProblem& problem) {
  const std::int64_t chunk = tokens_per_task(problem);
  return (problem.batch * problem.length + chunk - 1) / chunk;
}

}  // namespace

std::size_t rope_workspace(const RopeCall& call, const Context& context) {
  Arena arena(nullptr);
  arena.take<std::byte>(scratch_stride(call.problem),
                        workers_for(context.parallel_for, tasks_of(call.problem)));
  return arena.used();
}

void rope(const RopeCall& call, const Context& context) {
  const RopeProblem& problem = call.problem;
  const std::size_t stride = scratch_stride(problem);
  const std::int64_t tokens = problem.batch * problem.length;
  const std::int64_t chunk = tokens_per_task(problem);
  for_each_task(context.parallel_for, tasks_of(problem), [&](std::int64_t worker, std::int64_t task) {
    Arena own(static_cast<std::byte*>(context.workspace.data) + stride * static_cast<std::size_t>(worker));
    const Scratch scratch = take_scratch(own, problem);
    const std::int64_t last = std::min(tokens, (task + 1) * chunk);
    for (std::int64_t token = task * chunk; token < last; ++token) {
      rotate_token(call, scratch, token / problem.length, token % problem.length);
    }
  });
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
