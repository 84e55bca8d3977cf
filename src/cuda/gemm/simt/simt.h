#pragma once

#include "gemm/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::gemm {

/// GEMM with f32 arithmetic on any GPU, for any strides.
void run_simt(const GemmCall& call, const Context& context);

/// Marks for every 128 rows and every 128 columns of the result; null for all tiles.
struct TileMarks {
  const int* rows = nullptr;
  const int* columns = nullptr;
};

/// The same for f32 tensors, but computes only tiles whose rows or columns have a mark that is not 0.
void run_simt_marked(const GemmCall& call, const TileMarks& marks, const Context& context);

}  // namespace tilewise::cuda::gemm
