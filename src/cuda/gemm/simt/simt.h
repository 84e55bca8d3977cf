#pragma once

#include "gemm/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::gemm {

/// A product in f32 on any GPU, for any strides.
void run_simt(const GemmCall& call, const Context& context);

/// Tiles of 128 rows, and of 128 columns: nonzero where they are meant.
struct TileMarks {
  const int* rows = nullptr;
  const int* columns = nullptr;
};

/// The same of f32 for those tiles of the result alone whose rows or columns are marked.
void run_simt_marked(const GemmCall& call, const TileMarks& marks, const Context& context);

}  // namespace tilewise::cuda::gemm
