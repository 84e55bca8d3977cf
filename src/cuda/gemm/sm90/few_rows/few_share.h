#pragma once

#include <cstdint>

namespace tilewise::cuda::gemm {

/// How weights are shared out. A unit is 64 summands of a block's rows of weights; blocks take equal runs of
/// units, whatever rows they belong to, so that all of them read equally much. Runs are dealt from the end:
/// where a run begins inside rows of weights, a block behind has their first summands and finishes them. It
/// comes to them last, and this block, which started earlier, came to them first.
struct FewShare {
  int row_blocks = 0;
  int depth_blocks = 0;  ///< units of a row block
  int blocks = 1;

  constexpr int total() const { return row_blocks * depth_blocks; }
  constexpr int begin(int block) const {
    return static_cast<int>(static_cast<std::int64_t>(total()) * (blocks - 1 - block) / blocks);
  }
  constexpr int end(int block) const {
    return static_cast<int>(static_cast<std::int64_t>(total()) * (blocks - block) / blocks);
  }
};

}  // namespace tilewise::cuda::gemm
