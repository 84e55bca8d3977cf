#pragma once

#include <algorithm>
#include <string>

#include "attention/problem.h"
#include "core/reasons.h"

namespace tilewise::cuda {

// Pieces of a whole in the kernels with products in 16 bits. The f32 results of a piece are the partial
// results that split-KV and shared K tiles write to the workspace anyway: a piece always has at least two
// splits, and the kernel that joins them writes f32. So the other kernels need nothing for pieces.

/// Why such a kernel cannot take a piece; empty where it can.
inline std::string unsuited_16_bit_piece(const AttentionProblem& problem) {
  const PieceDetails& piece = problem.piece;
  const AttentionFeatures& features = problem.features;
  if (piece.placed) return "does not support ALiBi or dropout in pieces with offsets or steps";
  if (piece.wide_statistics) return "needs lse in f32, got f64";
  if (piece.share_of_keys && (features.alibi || features.mask == MaskKind::additive)) {
    // Rows of a large LSE need the softmax of all their keys again (far_rows.cuh), and a share has only some.
    return "needs all keys of each query in backward with ALiBi or an additive mask";
  }
  constexpr std::int64_t most_length = std::int64_t{1} << 30;  // positions off the diagonal fit into 32 bits
  const std::int64_t length = std::max(problem.length_q, problem.length_k);
  if (piece.off_diagonal && length > most_length) {
    return supports_up_to("sequence lengths", most_length, length, " if the band is off the diagonal");
  }
  return {};
}

}  // namespace tilewise::cuda
