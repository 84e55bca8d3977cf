#include "cuda/attention/sm80/decode/stream.cuh"

#include <limits>

#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {
namespace {

template <typename T, int dim, bool paged>
void run(const AttentionCall& call, const Splits& splits, cudaStream_t stream) {
  const auto heads = static_cast<int>(call.group());
  launch<stream_kernel<T, dim, paged>>({.name = "tilewise mma forward, a stream of keys",
                                        .blocks = call.problem.batch * call.problem.heads_kv,
                                        .threads = StreamShape::threads,
                                        .layers = splits.count,
                                        .stream = stream,
                                        .early = begins_early(call.problem.device)},
                                       call, heads, (65536 + heads - 1) / heads, splits);
}

template <typename T, bool paged>
void run_dim(const AttentionCall& call, const Splits& splits, cudaStream_t stream) {
  call.problem.dim_v == 64 ? run<T, 64, paged>(call, splits, stream)
                           : run<T, 128, paged>(call, splits, stream);
}
template <typename T>
void run_layout(const AttentionCall& call, const Splits& splits, cudaStream_t stream) {
  call.problem.layout == Layout::paged ? run_dim<T, true>(call, splits, stream)
                                       : run_dim<T, false>(call, splits, stream);
}

}  // namespace

bool suits_stream(const AttentionCall& call, const DeviceProperties& device) {
  const AttentionProblem& problem = call.problem;
  // On an H200, of 512 heads of 4096 keys: 257 µs, and 244 in larger tiles; of 128, 73 and 73.
  if (problem.batch * problem.heads_kv > 2 * device.multiprocessors) return false;
  return !problem.piece.wide_rows && problem.length_q * call.group() <= StreamShape::rows &&
         problem.dim_qk == problem.dim_v && (problem.dim_v == 64 || problem.dim_v == 128) &&
         !problem.features.needs_more_than_band() &&
         (problem.layout != Layout::paged || call.page % StreamShape::keys == 0) && aligned_chunks(call.q) &&
         aligned_chunks(call.k) && aligned_chunks(call.v) && aligned_chunks(call.o);
}

// As many as make the time of all rounds of blocks least, a block's being that of its keys and of some more.
Splits stream_splits(const AttentionCall& call, int multiprocessors, void* space) {
  constexpr std::int64_t constant_keys = 64;
  constexpr std::int64_t least_keys = 128;
  const std::int64_t heads = call.problem.batch * call.problem.heads_kv;
  const std::int64_t room = std::int64_t{multiprocessors} * StreamShape::blocks(call.problem.dim_v);
  const std::int64_t keys = call.problem.length_k;
  const auto most = static_cast<int>(std::clamp<std::int64_t>(keys / least_keys, 1, most_splits));
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  int chosen = 1;
  for (int count = 1; count <= most; ++count) {
    const std::int64_t rounds = (heads * count + room - 1) / room;
    const std::int64_t time = rounds * ((keys + count - 1) / count + constant_keys);
    if (time < least) {
      least = time;
      chosen = count;
    }
    if (heads * count > 8 * room) break;
  }
  return Splits::of(call, chosen, space);
}

void stream_forward(const AttentionCall& call, const Context& context) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const Splits splits = stream_splits(call, multiprocessors, context.workspace.data);
  auto* stream = static_cast<cudaStream_t>(context.stream);
  call.problem.dtype == DType::f16 ? run_layout<__half>(call, splits, stream)
                                   : run_layout<__nv_bfloat16>(call, splits, stream);
  if (splits.count > 1) combine_splits(call, splits, context.stream);
}

}  // namespace tilewise::cuda::mma
