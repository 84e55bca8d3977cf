#include "cuda/attention/sm90/forward_f32/forward.h"

#include <algorithm>

#include "cuda/attention/common/tuning_problem.h"
#include "cuda/attention/simt/fused.h"
#include "cuda/attention/sm90/forward_f32/forward.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::wgmma_f32 {
namespace {

/// Which row of a table a call runs by.
template <typename Table>
int row_of(const AttentionCall& call) {
  const int dim = std::max(call.problem.dim_qk, call.problem.dim_v) <= 64 ? 64 : 128;
  const auto able = [&](const ForwardConfig& c) { return c.dim == dim; };
  const ForwardConfig& usual = Table::rows[first_row<Table>(able)];
  const auto cost = [&](int row) {
    const ForwardConfig& c = Table::rows[row];
    if (c.use == Use::any) return 1;
    if (c.use == Use::few_keys) return call.problem.most_keys <= 4 * c.keys ? 0 : 2;
    const int multiprocessors = device_properties(call.problem.device.index).multiprocessors;
    const std::int64_t room = std::int64_t{usual.blocks} * multiprocessors;
    const bool few = mma::QueryBlocks::of(call, usual.rows(), multiprocessors).count() <= room;
    return Turns::uneven(call) && few ? 0 : 2;
  };
  return choose_row_of<Table>(call, able, cost);
}

template <typename Table>
mma_f32::ForwardSpace space_in(const AttentionCall& call, int row, void* base) {
  const ForwardConfig& c = Table::rows[row];
  return {call, base, tile_keys, c.parts, c.dim};
}
mma_f32::ForwardSpace space_of(const AttentionCall& call, int row, void* base) {
  return (call.allow_tf32 ? space_in<Tf32Forward> : space_in<FullForward>)(call, row, base);
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

Configuration configure_forward(const AttentionCall& call) {
  const int row = call.allow_tf32 ? row_of<Tf32Forward>(call) : row_of<FullForward>(call);
  return {.workspace_bytes = space_of(call, row, nullptr).bytes, .row = row};
}

void forward(const AttentionCall& call, int chosen, const Context& context) {
  const mma_f32::ForwardSpace space = space_of(call, chosen, context.workspace.data);
  const auto run = [&]<typename Table>() {
    with_row<Table>(chosen, [&](auto row) { run_row<Table, row>(call, space, context); });
  };
  call.allow_tf32 ? run.template operator()<Tf32Forward>() : run.template operator()<FullForward>();
  simt::fused_forward_of(
      call, {.queries = space.unfit.queries, .keys = space.unfit.keys, .any = space.unfit.any}, context);
}

}  // namespace tilewise::cuda::wgmma_f32
