#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/call.h"

namespace tilewise::cuda::wgmma {

/// A tensor [B, H, S, D] of 16-bit elements for copies of boxes of `rows` rows and 64 columns, swizzled as
/// products want them. Past the tensor's bounds, D's too, boxes have zeros.
CUtensorMap map_of(const Rows& rows, std::int64_t batch, std::int64_t heads, std::int64_t length,
                   std::int64_t dim, int box_rows);

}  // namespace tilewise::cuda::wgmma
