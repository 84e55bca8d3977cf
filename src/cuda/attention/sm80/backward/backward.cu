#include "cuda/attention/sm80/backward/backward.h"

#include "cuda/attention/sm80/backward/choice.h"
#include "cuda/tile/with_type.h"

namespace tilewise::cuda::mma {
namespace {

template <typename Table>
std::size_t least_shared_bytes(const AttentionProblem& problem) {
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  std::size_t least = 0;
  for (const BackwardConfig& c : Table::rows) {
    const std::size_t bytes = c.shared_bytes(Table::general);
    if (c.dim >= dim && (least == 0 || bytes < least)) least = bytes;
  }
  return least;
}

}  // namespace

Configuration configure_backward(const AttentionCall& call, const Context& context) {
  const int row = backward_row(call, device_properties(context.device.index));
  return {.workspace_bytes = backward_space(call, row, context).bytes, .row = row};
}

std::size_t backward_shared_bytes(const AttentionProblem& problem) {
  return general_backward(problem) ? least_shared_bytes<GeneralBackward>(problem)
                                   : least_shared_bytes<PlainBackward>(problem);
}

void backward(const AttentionCall& call, int row, const Context& context) {
  const BackwardSpace space = backward_space(call, row, context);
  prepare_backward(call, space, context);
  with_16_bit_type(call.problem.dtype, [&]<typename T>() {
    general_backward(call) ? general_backward_of<T>(call, space, context, row)
                           : plain_backward_of<T>(call, space, context, row);
  });
  finish_backward(call, space, context);
}

}  // namespace tilewise::cuda::mma
