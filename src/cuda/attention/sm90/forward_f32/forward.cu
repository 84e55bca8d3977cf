#include "cuda/attention/sm90/forward_f32/forward.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/attention/simt/fused.h"
#include "cuda/attention/sm90/forward_f32/forward.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::wgmma_f32 {
namespace {

bool suits(const AttentionCall& call, const ForwardConfig& c, const ForwardConfig& before) {
  if (c.use == Use::few_keys) return call.problem.most_keys <= 4 * c.keys;
  if (c.use == Use::any) return true;
  const int multiprocessors = device_properties(call.problem.device.index).multiprocessors;
  const std::int64_t room = std::int64_t{before.blocks} * multiprocessors;
  return Turns::uneven(call) && mma::QueryBlocks::of(call, before.rows(), multiprocessors).count() <= room;
}

/// Which row of a table a call runs by.
template <typename Table>
int row_of(const AttentionCall& call) {
  const int dim = std::max(call.problem.dim_qk, call.problem.dim_v) <= 64 ? 64 : 128;
  int chosen = 0;
  for (int row = 0; row < static_cast<int>(std::size(Table::rows)); ++row) {
    const ForwardConfig& c = Table::rows[row];
    if (c.dim == dim && suits(call, c, Table::rows[chosen])) chosen = row;
  }
  return chosen;
}

template <typename Table>
mma_f32::ForwardSpace space_in(const AttentionCall& call, void* base) {
  const ForwardConfig& c = Table::rows[row_of<Table>(call)];
  return {call, base, tile_keys, c.parts, c.dim};
}
mma_f32::ForwardSpace space_of(const AttentionCall& call, void* base) {
  return (call.allow_tf32 ? space_in<Tf32Forward> : space_in<FullForward>)(call, base);
}

template <typename Table, int row>
void run_row(const AttentionCall& call, const mma_f32::ForwardSpace& space, const Context& context) {
  constexpr ForwardConfig c = Table::rows[row];
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const auto dim_qk = static_cast<int>(call.problem.dim_qk);
  const auto dim_v = static_cast<int>(call.problem.dim_v);
  mma_f32::split<c.dim, c.keys, c.parts, PanelTile<c.dim, c.keys>>(
      call, {.count = 2, .tensors = {{call.k, dim_qk, space.k}, {call.v, dim_v, space.v}}}, stream,
      mma_f32::ClearBeside{.unfit = space.unfit});
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const auto blocks = mma::QueryBlocks::of(call, c.rows(), multiprocessors);
  launch<forward_kernel<Table, row>>({.name = "tilewise wgmma f32 forward",
                                      .blocks = blocks.count(),
                                      .threads = c.threads(),
                                      .shared_bytes = c.shared_bytes(),
                                      .stream = stream,
                                      .early = true},
                                     call, blocks, space.k, space.v, space.unfit);
}

}  // namespace

std::size_t forward_workspace(const AttentionCall& call) { return space_of(call, nullptr).bytes; }

void forward(const AttentionCall& call, const Context& context) {
  const mma_f32::ForwardSpace space = space_of(call, context.workspace.data);
  const auto run = [&]<typename Table>() {
    const int chosen = row_of<Table>(call);
    [&]<int... row>(std::integer_sequence<int, row...>) {
      ((row == chosen ? run_row<Table, row>(call, space, context) : void()), ...);
    }(std::make_integer_sequence<int, static_cast<int>(std::size(Table::rows))>{});
  };
  call.allow_tf32 ? run.template operator()<Tf32Forward>() : run.template operator()<FullForward>();
  simt::fused_forward_of(
      call, {.queries = space.unfit.queries, .keys = space.unfit.keys, .any = space.unfit.any}, context);
}

}  // namespace tilewise::cuda::wgmma_f32
