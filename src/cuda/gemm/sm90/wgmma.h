#pragma once

#include "cuda/gemm/sm90/few_rows/few_chain.h"
#include "gemm/call.h"

namespace tilewise::cuda::gemm {

// Entry points of the GEMM kernels for Hopper. Each storage type is compiled in a file of its own.

/// Kernel `wgmma` (tiles/), with the row of the table for the call's layout that wgmma_row() chose.
template <typename T>
void wgmma_of(const GemmCall& call, int row, const Context& context);
int wgmma_row(const GemmCall& call, const Context& context);

/// Kernel `few_rows`.
template <typename T>
void few_of(const GemmCall& call, const Context& context, InChain place);

/// Its bytes of workspace.
std::size_t few_workspace(const GemmCall& call, const Context& context);

}  // namespace tilewise::cuda::gemm
