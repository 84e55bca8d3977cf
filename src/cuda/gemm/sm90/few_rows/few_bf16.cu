#include "cuda/gemm/sm90/few_rows/few_rows.cuh"
#include "cuda/gemm/sm90/wgmma.h"

namespace tilewise::cuda::gemm {

template <>
void few_of<__nv_bfloat16>(const GemmCall& call, const Context& context, InChain place) {
  run_few<__nv_bfloat16>(call, context, place);
}

std::size_t few_workspace(const GemmCall& call, const Context& context) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  if (suits_stream(call, multiprocessors)) return 0;
  Arena arena(nullptr);
  take_few_workspace(arena, call.problem.m, multiprocessors);
  return arena.used();
}

}  // namespace tilewise::cuda::gemm
