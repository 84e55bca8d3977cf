#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/call.h"
#include "cuda/attention/common/turns.h"

namespace tilewise::cuda::wgmma_tma {

/// What the three kernels share in the workspace. Rows of queries are padded to whole tiles, so that the
/// statistics of a tile are one aligned run.
struct Workspace {
  float* lse =
      nullptr;  ///< [B, Hq, tiles, queries]: LSE times log2 e; +inf for rows that see nothing or are padding
  float* delta = nullptr;  ///< the same: rowsum(dO ∘ O) − dLSE
  float* dq = nullptr;  ///< [B, Hq, tiles, dim / 16, queries / 8, 128]: dQ / scale, as wgmma's lanes hold its
                        ///< transpose
  int tiles = 0;        ///< of a head
};

/// Which keys a query sees, and how long sequences are.
struct Sizes {
  int batch, heads_q, heads_kv, group;
  int length_q, length_k;
  int dim_qk, dim_v;
  std::int64_t left, right;  ///< of the band
  bool bottom_right;
  const std::int32_t* key_lengths;  ///< [B] with a stride, or null
  std::int64_t key_lengths_stride;
};

struct DeltaParams {
  Sizes sizes;
  Rows o, d_o, lse, d_lse;
  Workspace workspace;
};

struct TileParams {
  CUtensorMap q, k, v, d_o;
  Sizes sizes;
  Rows k_rows, v_rows;  ///< for tiles that end inside the tensor, at a key length
  Rows dk, dv;
  Workspace workspace;
  Turns turns;
  float scale;
  bool wants_dq;
};

struct DqParams {
  Sizes sizes;
  Rows dq;
  Workspace workspace;
  float scale;
};

}  // namespace tilewise::cuda::wgmma_tma
