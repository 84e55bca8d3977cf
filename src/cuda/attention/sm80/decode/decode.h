#pragma once

#include "attention/call.h"
#include "cuda/attention/sm80/forward/split_kv.h"
#include "cuda/runtime/device.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma {

// Decoding: few queries, for which K and V are read once. See decode.cu.

/// Whether the decode kernel takes a call: at most eight query rows per key head, only lengths and band hide
/// keys, rows can be read 16 bytes at a time, and the keys of a step are in one page.
bool suits_decode(const AttentionCall& call, const DeviceProperties& device);

Splits decode_splits(const AttentionCall& call, int multiprocessors, void* space);

void decode_forward(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::mma
