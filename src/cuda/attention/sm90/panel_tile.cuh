#pragma once

namespace tilewise::cuda {

/// A tile [rows, dim] of 16-bit elements in shared memory, in the layout that wgmma reads: swizzled panels of
/// 64 columns (ptx/wgmma.cuh).
template <int dim, int rows>
struct PanelTile {
  static constexpr int chunks = dim / 8;
  static constexpr int row_bytes = dim * 2;  ///< over all panels
  static constexpr int panel_bytes = rows * 128;

  static constexpr int offset(int row, int chunk) {
    return chunk / 8 * panel_bytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
  }
};

}  // namespace tilewise::cuda
