#pragma once

#include "cuda/attention/common/backward/config.h"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma {

// One row a line. The first of those with the smallest sufficient dim is taken whose tiles fit into the GPU's
// shared memory. bench/sweep_mma_backward.cu measures candidates.

/// For calls whose scores only a band hides, of aligned rows.
struct PlainBackward {
  static constexpr std::string_view name = "attention.sm80.backward";
  static constexpr bool general = false;
  static constexpr BackwardConfig rows[] = {
      {.dim = 64,
       .warps = 4,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 1,
       .dq_dim_warps = 2,
       .weights_stay = true,
       .blocks = 2},
      {.dim = 128,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 2,
       .dq_dim_warps = 4,
       .pairs_ahead = true,
       .stages = 3,
       .matrix_stores = true},
      {.dim = 128,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 2,
       .dq_dim_warps = 4},
      {.dim = 128,
       .warps = 8,
       .queries = 32,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 16,
       .dim_warps = 4,
       .dq_dim_warps = 4},
      {.dim = 256,
       .warps = 8,
       .queries = 64,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 4,
       .dq_dim_warps = 4,
       .pairs_ahead = true},
      {.dim = 256,
       .warps = 8,
       .queries = 32,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 16,
       .dim_warps = 4,
       .dq_dim_warps = 4},
  };
};

/// For all others.
struct GeneralBackward {
  static constexpr std::string_view name = "attention.sm80.backward_general";
  static constexpr bool general = true;
  static constexpr BackwardConfig rows[] = {
      {.dim = 64,
       .warps = 4,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 1,
       .dq_dim_warps = 2,
       .weights_stay = true,
       .blocks = 2},
      {.dim = 128,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 2,
       .dq_dim_warps = 4},
      {.dim = 128,
       .warps = 8,
       .queries = 32,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 16,
       .dim_warps = 4,
       .dq_dim_warps = 4},
      {.dim = 256,
       .warps = 8,
       .queries = 64,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 4,
       .dq_dim_warps = 4},
      {.dim = 256,
       .warps = 8,
       .queries = 32,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 16,
       .dim_warps = 4,
       .dq_dim_warps = 4},
  };
};

static_assert(dims_rise<PlainBackward>() && dims_rise<GeneralBackward>(),
              "choose_backward_row() takes the first row that is large enough and fits");
static_assert(dims_are_powers_of_two<PlainBackward>() && dims_are_powers_of_two<GeneralBackward>(),
              "warps share dims out evenly, in parts that MatrixPointer::from() can point at");

}  // namespace tilewise::cuda::mma
