#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/norm.cpp"
#include "hwy/foreach_target.h"  // compiles this file once for each target
//
#include <cmath>

#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/simd/passes.h"
#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {
namespace {

// The buffers of a worker, each for one row as f32.
struct Scratch {
  float* x;
  float* residual_or_dy;  // the residual in forward, dy in backward
  float* d_sum;
  float* result;
};

// The buffers that all workers share: weight and bias as f32, and the partial sums of their gradients.
struct Shared {
  float* weight;
  float* bias;
  float* d_weight;  // [chunks, D]
  float* d_bias;
};

Scratch take_scratch(Arena& arena, const NormProblem& problem) {
  return {.x = arena.take<float>(problem.dim),
          .residual_or_dy = arena.take<float>(problem.dim),
          .d_sum = arena.take<float>(problem.dim),
          .result = arena.take<float>(problem.dim)};
}

Shared take_shared(Arena& arena, const NormProblem& problem) {
  const std::int64_t chunks = problem.weight_gradient ? row_chunks(problem.rows) * problem.dim : 0;
  return {.weight = arena.take<float>(problem.dim),
          .bias = arena.take<float>(problem.dim),
          .d_weight = arena.take<float>(chunks),
          .d_bias = arena.take<float>(chunks)};
}

std::size_t scratch_stride(const NormProblem& problem) {
  Arena arena(nullptr);
  take_scratch(arena, problem);
  return arena.rounded();
}

void load_weights(const NormCall& call, const Shared& shared) {
  const auto dim = static_cast<int>(call.problem.dim);
  const auto load_one = [&](float* to, const Vector& from, float otherwise) {
    if (from.data == nullptr) {
      std::fill_n(to, dim, otherwise);
    } else {
      widen(to, from.data, from.dtype, dim, 1.0f);
    }
  };
  load_one(shared.weight, call.weight, 1.0f);
  load_one(shared.bias, call.bias, 0.0f);
}

float& statistic(const Vector& vector, std::int64_t m) {
  return reinterpret_cast<float*>(vector.data)[m * vector.stride];
}

void forward_row(const NormCall& call, const Shared& shared, const Scratch& scratch, std::int64_t m) {
  const std::int64_t dim = call.problem.dim;
  const auto count = static_cast<float>(dim);
  const float* x = row_as_f32(call.x, m, scratch.x);
  if (call.problem.residual) {
    const float* residual = row_as_f32(call.residual, m, scratch.residual_or_dy);
    map_row(dim, scratch.x, [&](const auto& at) HWY_ATTR { return hn::Add(at(x), at(residual)); });
    x = scratch.x;
    if (call.x.dtype != DType::f32 || call.sum.data != nullptr) {
      // The rounded sum is what is normalised. Where the sum is no output, it is rounded in the memory of y.
      const Matrix& to = call.sum.data != nullptr ? call.sum : call.y;
      narrow(to.at(m, 0), to.dtype, x, static_cast<int>(dim));
      widen(scratch.x, to.at(m, 0), to.dtype, static_cast<int>(dim), 1.0f);
    }
  }
  float mean = 0;
  if (call.problem.norm == Norm::layer) {
    mean = sum_row(dim, [&](const auto& at) HWY_ATTR { return at(x); }) / count;
  }
  const VF mean_vector = set(mean);
  float squares = 0;
  if (call.problem.norm == Norm::layer) {
    // The last vector is padded with zeros, each of which adds mean² to the sum. That is subtracted again.
    const float padding = static_cast<float>((lanes - dim % lanes) % lanes);
    squares = sum_row(dim, [&](const auto& at) HWY_ATTR {
      const VF distance = hn::Sub(at(x), mean_vector);
      return hn::Mul(distance, distance);
    });
    squares = std::max(0.0f, squares - padding * mean * mean);
  } else {
    squares = sum_row(dim, [&](const auto& at) HWY_ATTR { return hn::Mul(at(x), at(x)); });
  }
  const float rstd = 1 / std::sqrt(squares / count + static_cast<float>(call.epsilon));
  if (call.mean.data != nullptr) statistic(call.mean, m) = mean;
  if (call.rstd.data != nullptr) statistic(call.rstd, m) = rstd;
  const VF factor = set(rstd);
  float* y = row_to_fill(call.y, m, scratch.result);
  map_row(dim, y, [&](const auto& at) HWY_ATTR {
    const VF normal = hn::Mul(hn::Sub(at(x), mean_vector), factor);
    return hn::MulAdd(normal, at(shared.weight), at(shared.bias));
  });
  store_row(call.y, m, y);
}

// With n = (x − mean)·rstd and g = dy·weight: dx = rstd·(g − mean(g) − n·mean(g·n)), without mean(g) in an
// rms norm. Adds the terms of this row to d_weight and d_bias, which are the sums of its chunk.
void backward_row(const NormCall& call, const Shared& shared, const Scratch& scratch, std::int64_t m,
                  float* d_weight, float* d_bias) {
  const std::int64_t dim = call.problem.dim;
  const auto count = static_cast<float>(dim);
  const float* x = row_as_f32(call.x, m, scratch.x);
  const float* dy = row_as_f32(call.dy, m, scratch.residual_or_dy);
  const bool layer = call.problem.norm == Norm::layer;
  const VF mean = set(layer ? statistic(call.mean, m) : 0.0f);
  const float rstd = statistic(call.rstd, m);
  const VF factor = set(rstd);
  if (d_weight != nullptr) {
    map_row(dim, d_weight, [&](const auto& at) HWY_ATTR {
      return hn::MulAdd(at(dy), hn::Mul(hn::Sub(at(x), mean), factor), at(d_weight));
    });
    map_row(dim, d_bias, [&](const auto& at) HWY_ATTR { return hn::Add(at(dy), at(d_bias)); });
  }
  if (call.dx.data == nullptr) return;
  const float product = sum_row(dim, [&](const auto& at) HWY_ATTR {
    return hn::Mul(hn::Mul(at(dy), at(shared.weight)), hn::Mul(hn::Sub(at(x), mean), factor));
  });
  float sum = 0;
  if (layer) {
    sum = sum_row(dim, [&](const auto& at) HWY_ATTR { return hn::Mul(at(dy), at(shared.weight)); });
  }
  const VF mean_sum = set(sum / count);
  const VF mean_product = set(product / count);
  const auto gradient = [&](const auto& at) HWY_ATTR {
    const VF n = hn::Mul(hn::Sub(at(x), mean), factor);
    const VF g = hn::Sub(hn::Mul(at(dy), at(shared.weight)), mean_sum);
    return hn::Mul(factor, hn::NegMulAdd(n, mean_product, g));
  };
  float* dx = row_to_fill(call.dx, m, scratch.result);
  if (call.d_sum.data == nullptr) {
    map_row(dim, dx, gradient);
  } else {
    const float* d_sum = row_as_f32(call.d_sum, m, scratch.d_sum);
    map_row(dim, dx, [&](const auto& at) HWY_ATTR { return hn::Add(gradient(at), at(d_sum)); });
  }
  store_row(call.dx, m, dx);
}

// The number of tasks of either pass. With weight gradients, each task is one chunk of rows.
std::int64_t tasks_of(const NormProblem& problem) {
  if (problem.weight_gradient) return row_chunks(problem.rows);
  return (problem.rows + rows_per_task(problem.dim) - 1) / rows_per_task(problem.dim);
}

void backward(const NormCall& call, const Shared& shared, const Context& context, std::byte* scratches) {
  const NormProblem& problem = call.problem;
  const bool sums = problem.weight_gradient;
  const std::int64_t chunks = tasks_of(problem);
  const std::size_t stride = scratch_stride(problem);
  for_each_task(context.parallel_for, chunks, [&](std::int64_t worker, std::int64_t chunk) {
    Arena own(scratches + stride * static_cast<std::size_t>(worker));
    const Scratch scratch = take_scratch(own, problem);
    float* d_weight = sums ? shared.d_weight + chunk * problem.dim : nullptr;
    float* d_bias = sums ? shared.d_bias + chunk * problem.dim : nullptr;
    if (sums) {
      std::fill_n(d_weight, problem.dim, 0.0f);
      std::fill_n(d_bias, problem.dim, 0.0f);
    }
    for (std::int64_t m = problem.rows * chunk / chunks; m < problem.rows * (chunk + 1) / chunks; ++m) {
      backward_row(call, shared, scratch, m, d_weight, d_bias);
    }
  });
  if (!sums) return;
  join_partial_sums(shared.d_weight, chunks, problem.dim, call.d_weight);
  join_partial_sums(shared.d_bias, chunks, problem.dim, call.d_bias);
}

// The scratch of all workers, scratch_stride bytes each.
std::byte* take_scratches(Arena& arena, const NormProblem& problem, const Context& context) {
  return arena.take<std::byte>(scratch_stride(problem), workers_for(context.parallel_for, tasks_of(problem)));
}

}  // namespace

std::size_t norm_workspace(const NormCall& call, const Context& context) {
  Arena arena(nullptr);
  take_shared(arena, call.problem);
  take_scratches(arena, call.problem, context);
  return arena.used();
}

void norm(const NormCall& call, const Context& context) {
  const NormProblem& problem = call.problem;
  Arena arena(context.workspace.data);
  const Shared shared = take_shared(arena, problem);
  std::byte* const scratches = take_scratches(arena, problem, context);
  load_weights(call, shared);
  if (problem.pass == Pass::backward) return backward(call, shared, context, scratches);
  const std::size_t stride = scratch_stride(problem);
  const std::int64_t rows = rows_per_task(problem.dim);
  for_each_task(context.parallel_for, tasks_of(problem), [&](std::int64_t worker, std::int64_t task) {
    Arena own(scratches + stride * static_cast<std::size_t>(worker));
    const Scratch scratch = take_scratch(own, problem);
    const std::int64_t last = std::min(problem.rows, (task + 1) * rows);
    for (std::int64_t m = task * rows; m < last; ++m) forward_row(call, shared, scratch, m);
  });
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
