#pragma once

#include "attention/call.h"
#include "cuda/attention/sm80/forward/split_kv.h"
#include "cuda/runtime/device.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma {

// Decoding: few queries, and keys and values that are read once. See stream.cu.

/// How such a call is cut. A block of four warps has the queries of a key head, and all its keys or a split
/// of them; of those a warp takes every fourth 16.
struct StreamShape {
  static constexpr int warps = 4;
  static constexpr int threads = warps * 32;
  static constexpr int keys = 16;  ///< a step of a warp
  static constexpr int rows = 8;   ///< queries of all heads that share keys, at most

  /// Blocks of a multiprocessor, for the registers that keys and values take on their way.
  static constexpr int blocks(std::int64_t dim) { return dim == 64 ? 5 : 3; }
};

/// Whether a call is one of those: lengths and band alone hide keys, rows can be read 16 bytes at a time, a
/// step's keys lie in one page, and heads are not so many that blocks of whole heads fill the GPU.
bool suits_stream(const AttentionCall& call, const DeviceProperties& device);

Splits stream_splits(const AttentionCall& call, int multiprocessors, void* space);

void stream_forward(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::mma
