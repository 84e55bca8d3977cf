#include "cuda/attention/sm80/forward_f32/forward.h"

#include <algorithm>

#include "cuda/attention/simt/fused.h"
#include "cuda/attention/sm80/forward_f32/tuning.h"

namespace tilewise::cuda::mma_f32 {
namespace {

template <typename Table>
std::size_t table_shared_bytes(std::int64_t dim) {
  std::size_t least = 0;
  for (const ForwardConfig& c : Table::rows) {
    if (c.dim >= dim && (least == 0 || c.shared_bytes() < least)) least = c.shared_bytes();
  }
  return least;
}

}  // namespace

std::size_t forward_shared_bytes(std::int64_t dim) {
  return std::max(table_shared_bytes<FullForward>(dim), table_shared_bytes<Tf32Forward>(dim));
}

Configuration configure_forward(const AttentionCall& call, const Context& context) {
  return (call.allow_tf32 ? configure_tf32_forward : configure_full_forward)(call, context);
}

void forward(const AttentionCall& call, int row, const Context& context) {
  const ForwardSpace space = (call.allow_tf32 ? tf32_forward : full_forward)(call, row, context);
  simt::fused_forward_of(
      call, {.queries = space.unfit.queries, .keys = space.unfit.keys, .any = space.unfit.any}, context);
}

}  // namespace tilewise::cuda::mma_f32
