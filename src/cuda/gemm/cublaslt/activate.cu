#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/gemm/cublaslt/cublaslt.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/chunk.cuh"

namespace tilewise::cuda::gemm {
namespace {

constexpr int threads = 256;

/// Each thread has a chunk of 16 bytes or, where rows are not aligned for that, one element.
template <typename T, bool vectorized>
__global__ void __launch_bounds__(threads)
    activate_kernel(const __grid_constant__ Matrix out, const Activation activation) {
  constexpr int size = vectorized ? chunk_size<T> : 1;
  const std::int64_t index = std::int64_t{blockIdx.x} * threads + threadIdx.x;
  const std::int64_t per_row = out.columns / size;
  if (index >= out.rows * per_row) return;
  const std::int64_t row = out.rows == 1 ? 0 : index / per_row;  // a division takes many instructions
  T* const at = reinterpret_cast<T*>(out.at(row, (index - row * per_row) * size));
  if constexpr (vectorized) {
    float x[size];
    load_chunk(x, at);
    activate_all<true>(x, activation);
    store_chunk(at, x);
  } else {
    float x[1] = {widen(*at)};
    activate_all<true>(x, activation);
    *at = narrow<T>(x[0]);
  }
}

template <typename T>
void activate_of(const GemmCall& call, cudaStream_t stream) {
  const bool vectorized = call.out.aligned() && call.out.columns % chunk_size<T> == 0;
  const std::int64_t count = call.out.rows * call.out.columns / (vectorized ? chunk_size<T> : 1);
  Matrix out = call.out;
  if (out.stride_row == out.columns) {  // contiguous: one long row
    out.columns *= out.rows;
    out.rows = 1;
  }
  const Launch how{.name = "tilewise activation",
                   .blocks = (count + threads - 1) / threads,
                   .threads = threads,
                   .stream = stream};
  vectorized ? launch<activate_kernel<T, true>>(how, out, call.problem.activation)
             : launch<activate_kernel<T, false>>(how, out, call.problem.activation);
}

}  // namespace

void activate_in_place(const GemmCall& call, const Context& context) {
  auto* stream = static_cast<cudaStream_t>(context.stream);
  call.problem.dtype == DType::f16 ? activate_of<__half>(call, stream)
                                   : activate_of<__nv_bfloat16>(call, stream);
}

}  // namespace tilewise::cuda::gemm
