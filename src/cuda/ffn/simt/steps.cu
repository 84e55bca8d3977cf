#include "ffn/steps.h"

#include <algorithm>

#include "core/arena.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/column_sums.h"
#include "cuda/tile/with_type.h"

namespace tilewise::cuda {
namespace {

constexpr int threads = 256;

/// Loads `width` elements of a row: a chunk of 16 bytes, or one element where rows are not aligned to chunks.
template <typename T, int width>
__device__ __forceinline__ void load(float (&to)[width], const Matrix& matrix, std::int64_t m,
                                     std::int64_t n) {
  const T* from = reinterpret_cast<const T*>(matrix.data) + m * matrix.stride_row + n;
  if constexpr (width == 1) {
    to[0] = widen(*from);
  } else {
    load_chunk(to, from);
  }
}
template <typename T, int width>
__device__ __forceinline__ void store(const Matrix& matrix, std::int64_t m, std::int64_t n,
                                      const float (&from)[width]) {
  T* to = reinterpret_cast<T*>(matrix.data) + m * matrix.stride_row + n;
  if constexpr (width == 1) {
    *to = narrow<T>(from[0]);
  } else {
    store_chunk(to, from);
  }
}

/// ActivationPass. After the loop, `dh` has h, `up` has d_up, and `gate` has d_gate.
template <typename T, int width>
__global__ void __launch_bounds__(threads) activation_kernel(const __grid_constant__ ActivationPass work) {
  constexpr bool approximate = sizeof(T) == 2;
  const std::int64_t per_row = work.up.columns / width;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  const std::int64_t m = index / per_row, n = index % per_row * width;
  if (m >= work.up.rows) return;
  const bool gated = work.gate.data != nullptr, gradients = work.dh.data != nullptr;
  float up[width], dh[width] = {}, gate[width];
  load<T>(up, work.up, m, n);
  if (gradients) load<T>(dh, work.dh, m, n);
  if (gated) load<T>(gate, work.gate, m, n);
  with_activation(work.activation, [&]<Activation f>() {
#pragma unroll
    for (int e = 0; e < width; ++e) {
      const float gradient = dh[e];
      if (gated) {
        const float active = activate<f, approximate>(gate[e]);
        dh[e] = active * up[e];
        gate[e] = gradient * up[e] * slope<f, approximate>(gate[e]);
        up[e] = gradient * active;
      } else {
        dh[e] = activate<f, approximate>(up[e]);
        up[e] = gradient * slope<f, approximate>(up[e]);
      }
    }
  });
  store<T>(work.h, m, n, dh);
  if (!gradients) return;
  store<T>(work.d_up, m, n, up);
  if (gated) store<T>(work.d_gate, m, n, gate);
}

template <typename T>
void run_activation(const ActivationPass& work, const Context& context) {
  constexpr int size = chunk_size<T>;
  const bool vectorized = work.up.columns % size == 0 && work.up.aligned() && work.gate.aligned() &&
                          work.dh.aligned() && work.h.aligned() && work.d_up.aligned() &&
                          work.d_gate.aligned();
  const std::int64_t items = work.up.rows * (work.up.columns / (vectorized ? size : 1));
  const Launch how{.name = "tilewise activation",
                   .blocks = (items + threads - 1) / threads,
                   .threads = threads,
                   .stream = static_cast<cudaStream_t>(context.stream)};
  vectorized ? launch<activation_kernel<T, size>>(how, work) : launch<activation_kernel<T, 1>>(how, work);
}

void activation_pass(const ActivationPass& work, const Context& context) {
  const DeviceGuard guard(context.device.index);
  with_type(work.up.dtype, [&]<typename T>() { run_activation<T>(work, context); });
}

int strips_of(const Matrix& x, const Context& context) {
  return row_strips(x.rows, x.columns, device_properties(context.device.index).multiprocessors);
}

std::size_t sum_rows_workspace(const Matrix& x, const Context& context) {
  Arena arena(nullptr);
  arena.take<float>(strips_of(x, context) * x.columns);
  return arena.used();
}

void sum_rows(const Matrix& x, const Vector& sums, const Context& context) {
  const DeviceGuard guard(context.device.index);
  Arena arena(context.workspace.data);
  const int strips = strips_of(x, context);
  auto* partials = arena.take<float>(strips * x.columns);
  sum_strips(x, partials, strips, context);
  sum_partials(partials, strips, x.columns, sums, context);
}

__global__ void __launch_bounds__(threads)
    round_kernel(const __grid_constant__ Matrix from, const __grid_constant__ Matrix to) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  const std::int64_t m = index / from.columns, n = index % from.columns;
  if (m < from.rows) store_element(to.at(m, n), to.dtype, load_element(from.at(m, n), from.dtype));
}

void round(const Matrix& from, const Matrix& to, const Context& context) {
  const DeviceGuard guard(context.device.index);
  launch<round_kernel>({.name = "tilewise rounding",
                        .blocks = (from.rows * from.columns + threads - 1) / threads,
                        .threads = threads,
                        .stream = static_cast<cudaStream_t>(context.stream)},
                       from, to);
}

template <typename T, int width>
__global__ void __launch_bounds__(threads)
    add_kernel(const __grid_constant__ Matrix x, const __grid_constant__ Matrix to) {
  const std::int64_t per_row = x.columns / width;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  const std::int64_t m = index / per_row, n = index % per_row * width;
  if (m >= x.rows) return;
  float terms[width], sums[width];
  load<T>(terms, x, m, n);
  load<T>(sums, to, m, n);
#pragma unroll
  for (int e = 0; e < width; ++e) sums[e] += terms[e];
  store<T>(to, m, n, sums);
}

template <typename T>
void run_add(const Matrix& x, const Matrix& to, const Context& context) {
  constexpr int size = chunk_size<T>;
  const bool vectorized = x.columns % size == 0 && x.aligned() && to.aligned();
  const std::int64_t items = x.rows * (x.columns / (vectorized ? size : 1));
  const Launch how{.name = "tilewise addition",
                   .blocks = (items + threads - 1) / threads,
                   .threads = threads,
                   .stream = static_cast<cudaStream_t>(context.stream)};
  vectorized ? launch<add_kernel<T, size>>(how, x, to) : launch<add_kernel<T, 1>>(how, x, to);
}

void add(const Matrix& x, const Matrix& to, const Context& context) {
  const DeviceGuard guard(context.device.index);
  with_type(x.dtype, [&]<typename T>() { run_add<T>(x, to, context); });
}

}  // namespace

constinit const FfnSteps ffn_steps = {.activation_pass = activation_pass,
                                      .sum_rows = sum_rows,
                                      .sum_rows_workspace = sum_rows_workspace,
                                      .round = round,
                                      .add = add};

}  // namespace tilewise::cuda
