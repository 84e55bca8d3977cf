#pragma once

#include "attention/call.h"

namespace tilewise::cuda {

/// Which of the four keys from 4 · `four` on dropout keeps for a query: half of a draw. `head` counts the
/// heads of all batch entries. Kernels whose lanes hold other keys share draws by shuffles.
struct KeptFour {
  bool keeps[4];
};
__device__ __forceinline__ KeptFour draw_four(const DropoutMask& dropout, std::uint32_t four,
                                              std::uint32_t query, std::uint32_t head) {
  const auto words = philox({four / 2, query, head, dropout.stream}, dropout.key);
  KeptFour kept;
#pragma unroll
  for (int n = 0; n < 4; ++n) kept.keeps[n] = DropoutMask::half(words[n], 4 * four) >= dropout.threshold;
  return kept;
}

/// The same as factors of P, 0 or keep_scale, for the keys from `first_key` on. The call may be a placed
/// piece.
struct DropoutFactors {
  float factor[4];

  /// Whether the four keys from `first_key` on share half a draw; if so, all later fours do, too.
  __device__ static bool share_counters(const AttentionCall& call, std::int64_t first_key) {
    return call.place.key(first_key) % 4 == 0 && call.place.step == 1;
  }

  __device__ DropoutFactors(const AttentionCall& call, std::int64_t b, std::int64_t h, std::int64_t i,
                            std::int64_t first_key) {
    const DropoutMask dropout = call.dropout.drawn();
    const KeptFour four =
        draw_four(dropout, static_cast<std::uint32_t>(call.place.key(first_key) / 4),
                  static_cast<std::uint32_t>(call.place.query(i)), call.place.head_index(b, h));
    for (int n = 0; n < 4; ++n) factor[n] = four.keeps[n] ? dropout.keep_scale : 0.0f;
  }
};

/// The factor of P for one key. `placed`: the call may be a placed piece.
template <bool placed = false>
__device__ __forceinline__ float dropout_factor(const AttentionCall& call, std::int64_t b, std::int64_t h,
                                                std::int64_t i, std::int64_t j) {
  const std::uint32_t head =
      placed ? call.place.head_index(b, h) : static_cast<std::uint32_t>(b * call.problem.heads_q + h);
  const auto query = static_cast<std::uint32_t>(placed ? call.place.query(i) : i);
  const auto key = static_cast<std::uint32_t>(placed ? call.place.key(j) : j);
  const bool kept = call.dropout.drawn().keeps(head, query, key);
  return kept ? call.dropout.keep_scale : 0.0f;
}

}  // namespace tilewise::cuda
