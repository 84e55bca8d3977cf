#include "cuda/attention/common/f32/split_rows.h"

#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma_f32 {
namespace {

constexpr int clear_threads = 256;

__global__ void __launch_bounds__(clear_threads) clear(int* marks, std::size_t count) {
  let_next_kernel_start();
  const std::size_t index = std::size_t{blockIdx.x} * clear_threads + threadIdx.x;
  if (index < count) marks[index] = 0;
}

}  // namespace

// This is a kernel and not a cudaMemsetAsync, because no kernel can start early (PDL) behind a memset.
void clear_marks(const Unfit& unfit, cudaStream_t stream) {
  launch<clear>({.name = "tilewise mma, marks",
                 .blocks = static_cast<std::int64_t>((unfit.count + clear_threads - 1) / clear_threads),
                 .threads = clear_threads,
                 .stream = stream},
                unfit.queries, unfit.count);
}

}  // namespace tilewise::cuda::mma_f32
