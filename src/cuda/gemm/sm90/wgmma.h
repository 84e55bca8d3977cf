#pragma once

#include "cuda/gemm/sm90/few_rows/few_chain.h"
#include "gemm/call.h"

namespace tilewise::cuda::gemm {

// The kernels of a storage type, each compiled in a file of its own.

/// By a row of the table for the call's layout, which wgmma_row() chooses.
template <typename T>
void wgmma_of(const GemmCall& call, int row, const Context& context);
int wgmma_row(const GemmCall& call, const Context& context);

/// For few rows.
template <typename T>
void few_of(const GemmCall& call, const Context& context, InChain place);

/// Bytes of workspace of the latter.
std::size_t few_workspace(const GemmCall& call, const Context& context);

}  // namespace tilewise::cuda::gemm
