#include "cuda/attention/sm80/decode/decode.h"

#include <cstddef>
#include <cstdint>

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/sm80/decode/config.h"
#include "cuda/attention/sm80/decode/finish.cuh"
#include "cuda/attention/sm80/decode/ring.cuh"
#include "cuda/attention/sm80/decode/rows.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma {

// Decoding, which is bound by reading K and V once. Each warp has a ring of stages in shared memory, one
// stage for K and V of 16 keys. It fills its ring by cp.async: as soon as a K tile or a V tile has been
// multiplied, the copy of a later one into its place begins. So nearly the whole ring is in flight all the
// time, and no warp waits for another before the end. Splits are joined by the combine kernel of split_kv.cu.

/// Prefetches the first K and V of the split into the L2 while the previous kernel still runs. If that kernel
/// writes them, the L2 gets its results. Lengths may be out of date, and they are read past the L1, which
/// would keep the old ones.
template <int dim, typename C>
__device__ __forceinline__ void prefetch_split(const AttentionCall& call, std::uint32_t b,
                                               std::uint32_t head_kv, int split, int splits) {
  if (call.problem.layout != Layout::dense) return;
  auto length = static_cast<int>(call.problem.length_k);
  if (call.key_lengths.data != nullptr) {
    length = max(0, min(length, __ldcg(call.key_lengths.data + b * call.key_lengths.stride[0])));
  }
  const int share = (length + splits - 1) / splits;
  const int first = split * share;
  const int count = min(min(length - first, share), C::step_keys * C::stages(dim));
  if (count <= 0) return;
  constexpr std::uint32_t row_bytes = dim * 2;
  if (call.k.stride_s == dim && call.v.stride_s == dim) {  // the keys of a head are contiguous
    const auto bytes = static_cast<std::uint32_t>(count) * row_bytes;
    if (threadIdx.x == 0) prefetch_l2(call.k.at(b, head_kv, first), bytes);
    if (threadIdx.x == 32) prefetch_l2(call.v.at(b, head_kv, first), bytes);
    return;
  }
  const int key = first + static_cast<int>(threadIdx.x);
  if (key >= first + count) return;
  prefetch_l2(call.k.at(b, head_kv, key), row_bytes);
  prefetch_l2(call.v.at(b, head_kv, key), row_bytes);
}

/// Hides the keys outside a row's band.
struct DecodeBand {
  int first, last;          ///< the keys that the lane's row sees, up to the split's end
  int all_first, all_last;  ///< every row sees all keys of a step that begins in [all_first, all_last]

  __device__ DecodeBand(const AttentionCall& call, const QueryRows& rows, int row, int split_end,
                        int step_keys) {
    const KeyRange seen = call.keys_of(rows.queries.sequence, rows.query(row));
    first = static_cast<int>(seen.first);
    last = min(static_cast<int>(seen.last), split_end);
    const KeyRange all = rows.queries.all(call);
    all_first = static_cast<int>(all.first);
    all_last = min(static_cast<int>(all.last), split_end) - step_keys;
  }
  /// `s` are the scores of lane t with the keys of a step, as DecodeRows::multiply_keys() has them.
  __device__ __forceinline__ void hide(float (&s)[4], int step_first, int t) const {
    if (step_first >= all_first && step_first <= all_last) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = step_first + 2 * t + e % 2 + e / 2 * 8;
      if (key < first || key >= last) s[e] = minus_infinity;
    }
  }
};

template <typename T, int dim, bool paged, typename C>
__global__ void __launch_bounds__(C::threads, 1)
    decode_kernel(const __grid_constant__ AttentionCall call, const int heads, const int inverse,
                  const Splits splits) {
#if __CUDA_ARCH__ >= 800
  using Ring = KeyRing<dim, paged, C>;
  TILEWISE_DYNAMIC_SHARED(std::byte, shared_bytes, 128);
  const DecodeMemory<dim, C> shared{shared_bytes};
  let_next_kernel_start();
  const auto heads_kv = static_cast<std::uint32_t>(call.problem.heads_kv);
  const std::uint32_t b = blockIdx.x / heads_kv, head_kv = blockIdx.x % heads_kv;
  const auto split = static_cast<int>(blockIdx.y);
  if constexpr (!paged) prefetch_split<dim, C>(call, b, head_kv, split, splits.count);
  wait_for_previous_kernel();  // it may have written Q, K, V, lengths or pages
  const Sequence sequence = call.sequence(b);
  const QueryRows rows{{.b = b,
                        .h = static_cast<std::int64_t>(head_kv) * heads,
                        .first = 0,
                        .count = static_cast<int>(sequence.length_q),
                        .sequence = sequence},
                       static_cast<int>(head_kv),
                       heads,
                       inverse};
  if (rows.count() <= 0) return;
  Ring ring(shared.ring(static_cast<int>(threadIdx.x) / 32), call, rows, split, splits.count);
  DecodeRows<T, dim> own;
  const int row = min(own.g, rows.count() - 1);
  own.load_queries(rows.row_of(call.q, row));
  const DecodeBand band(call, rows, row, ring.steps.last, C::keys);
  const auto scale = static_cast<float>(call.scale);
  const auto matrices =
      MatrixPointer<dim>::by_columns(static_cast<std::uint32_t>(__cvta_generic_to_shared(ring.smem)));

  int at = 0;  // the stage's offset in the ring
#pragma unroll 1
  for (int first = ring.steps.own; first < ring.steps.last; first += ring.steps.stride) {
    float s[4];
    Ring::wait();
    own.multiply_keys(s, {matrices.at_smem + static_cast<std::uint32_t>(at)});
    __syncwarp();  // all lanes have read the K tile, which is overwritten
    ring.load_k(at);
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] *= scale;
    band.hide(s, first, own.t);
    own.exponentiate(s);
    Ring::wait();
    own.add_values(s, {matrices.at_smem + static_cast<std::uint32_t>(at + Ring::tile_bytes)});
    __syncwarp();  // all lanes have read the V tile, which is overwritten
    ring.load_v(at);
    at = at + Ring::stage_bytes == C::ring_bytes ? 0 : at + Ring::stage_bytes;
  }
  wait_copies<0>();  // of zero copies: shared memory belongs to the results from here on
  finish<T, dim, C>(call, rows, splits, shared, own);
#endif
}

namespace {

template <typename T, int dim, bool paged, typename C>
void run(const AttentionCall& call, const Splits& splits, cudaStream_t stream) {
  const auto heads = static_cast<int>(call.group());
  launch<decode_kernel<T, dim, paged, C>>({.name = "tilewise mma forward, decode",
                                           .blocks = call.problem.batch * call.problem.heads_kv,
                                           .threads = C::threads,
                                           .layers = splits.count,
                                           .shared_bytes = C::shared_bytes,
                                           .stream = stream,
                                           .early = has_pdl(call.problem.device),
                                           .beside = true},  // CTAs of the combine kernel, which starts early
                                          call, heads, (65536 + heads - 1) / heads, splits);
}

template <typename T, int dim, bool paged>
void run_config(const AttentionCall& call, const Splits& splits, const DeviceProperties& device,
                cudaStream_t stream) {
  LargeDecode::shared_bytes <= device.shared_bytes ? run<T, dim, paged, LargeDecode>(call, splits, stream)
                                                   : run<T, dim, paged, SmallDecode>(call, splits, stream);
}
template <typename T, bool paged>
void run_dim(const AttentionCall& call, const Splits& splits, const DeviceProperties& device,
             cudaStream_t stream) {
  call.problem.dim_v == 64 ? run_config<T, 64, paged>(call, splits, device, stream)
                           : run_config<T, 128, paged>(call, splits, device, stream);
}
template <typename T>
void run_layout(const AttentionCall& call, const Splits& splits, const DeviceProperties& device,
                cudaStream_t stream) {
  call.problem.layout == Layout::paged ? run_dim<T, true>(call, splits, device, stream)
                                       : run_dim<T, false>(call, splits, device, stream);
}

}  // namespace

bool suits_decode(const AttentionCall& call, const DeviceProperties& device) {
  using C = SmallDecode;  // what is asked of a call is the same in both
  const AttentionProblem& problem = call.problem;
  return C::shared_bytes <= device.shared_bytes && !problem.piece.wide_rows &&
         problem.length_q * call.group() <= C::rows && problem.dim_qk == problem.dim_v &&
         (problem.dim_v == 64 || problem.dim_v == 128) && !problem.features.needs_more_than_band() &&
         (problem.layout != Layout::paged || call.page % C::keys == 0) && aligned_chunks(call.q) &&
         aligned_chunks(call.k) && aligned_chunks(call.v) && aligned_chunks(call.o);
}

Splits decode_splits(const AttentionCall& call, int multiprocessors, void* space) {
  const int count = choosing_by(call, [&](const AttentionCall& asked) {
    return decode_split_count(asked.problem.batch * asked.problem.heads_kv, asked.problem.length_k,
                              multiprocessors);
  });
  return Splits::of(call, count, space);
}

void decode_forward(const AttentionCall& call, const Context& context) {
  const DeviceProperties& device = device_properties(context.device.index);
  const Splits splits = decode_splits(call, device.multiprocessors, context.workspace.data);
  auto* stream = static_cast<cudaStream_t>(context.stream);
  call.problem.dtype == DType::f16 ? run_layout<__half>(call, splits, device, stream)
                                   : run_layout<__nv_bfloat16>(call, splits, device, stream);
  if (splits.count > 1) combine_splits(call, splits, context.stream);
}

}  // namespace tilewise::cuda::mma
