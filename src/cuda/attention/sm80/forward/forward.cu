#include "cuda/attention/sm80/forward/forward.h"

#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/attention/sm80/decode/decode.h"
#include "cuda/attention/sm80/forward/choice.h"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {
namespace {

// Whether rows are less than 2^31 bytes apart.
bool near_rows(const Rows& rows) {
  const std::int64_t bytes = rows.stride_s * 2;
  return bytes == static_cast<std::int32_t>(bytes);
}

// Whether the plain kernel takes a call: only scale and band lie between Q·Kᵀ and P, rows can be copied 16
// bytes at a time, and P may be rounded to 16 bits.
bool plain(const AttentionCall& call) {
  // The scale must be positive, and so large that the slack of a maximum, 8 over the scale, is finite.
  constexpr double least_scale = 1e-20;
  return !call.problem.features.needs_more_than_band() && call.problem.layout != Layout::paged &&
         call.scale >= least_scale && aligned_chunks(call.q) && aligned_chunks(call.k) &&
         aligned_chunks(call.v) && near_rows(call.k) && near_rows(call.v) && !keeps_p_exact(call);
}

template <typename Table>
Configuration configuration_of(const AttentionCall& call, const DeviceProperties& device) {
  const int row =
      choosing_by(call, [&](const AttentionCall& asked) { return choose_row<Table>(asked, device); });
  return {.workspace_bytes = splits_for(call, Table::rows[row], device, nullptr).bytes(), .row = row};
}

template <typename T>
void forward_of(const AttentionCall& call, const Context& context, int row) {
  plain(call) ? plain_forward_of<T>(call, context, row) : general_forward_of<T>(call, context, row);
}

}  // namespace

Configuration configure_forward(const AttentionCall& call, const Context& context) {
  const DeviceProperties& device = device_properties(context.device.index);
  if (choosing_by(call, [&](const AttentionCall& asked) { return suits_decode(asked, device); })) {
    return {.workspace_bytes = decode_splits(call, device.multiprocessors, nullptr).bytes()};
  }
  return plain(call) ? configuration_of<PlainForward>(call, device)
                     : configuration_of<GeneralForward>(call, device);
}

void forward(const AttentionCall& call, const Configuration& configuration, const Context& context) {
  simt::clear_unused_outputs(call, static_cast<cudaStream_t>(context.stream));
  const int row = configuration.row;
  if (row < 0) return decode_forward(call, context);
  call.problem.dtype == DType::f16 ? forward_of<__half>(call, context, row)
                                   : forward_of<__nv_bfloat16>(call, context, row);
}

}  // namespace tilewise::cuda::mma
