#pragma once

namespace tilewise::cuda {

/// Rows [rows, dim] of 16-bit elements in shared memory as wgmma reads them, in panels of 64 columns
/// (ptx/wgmma.cuh).
template <int dim, int rows>
struct PanelTile {
  static constexpr int chunks = dim / 8;
  static constexpr int row_bytes = dim * 2;  ///< in all panels
  static constexpr int panel_bytes = rows * 128;

  static constexpr int offset(int row, int chunk) {
    return chunk / 8 * panel_bytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
  }
};

}  // namespace tilewise::cuda
