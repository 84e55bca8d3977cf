#pragma once

#include "attention/call.h"
#include "cuda/attention/sm80/forward/split_kv.h"
#include "cuda/runtime/device.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma {

// Decoding: few queries, for which K and V are read once. See stream.cu.

/// The tile sizes. A CTA of four warps takes the queries of a key head, with all its keys or one split of
/// them. A warp takes every fourth 16 of these keys.
struct StreamShape {
  static constexpr int warps = 4;
  static constexpr int threads = warps * 32;
  static constexpr int keys = 16;  ///< per step of a warp
  static constexpr int rows = 8;   ///< queries of all heads that share keys, at most

  /// CTAs per SM, which leaves registers for the K and V being loaded.
  static constexpr int blocks(std::int64_t dim) { return dim == 64 ? 5 : 3; }
};

/// Whether this kernel takes a call: only lengths and band hide keys, rows can be read 16 bytes at a time,
/// the keys of a step are in one page, and there are not so many heads that larger tiles are faster.
bool suits_stream(const AttentionCall& call, const DeviceProperties& device);

Splits stream_splits(const AttentionCall& call, int multiprocessors, void* space);

void stream_forward(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::mma
