#pragma once

#include <algorithm>
#include <string>

#include "attention/problem.h"

namespace tilewise::cuda {

// Pieces of a whole in the kernels with products in 16 bits. The f32 results of a piece are the partial
// results that split-KV and shared K tiles write to the workspace anyway: a piece always has at least two
// splits, and the kernel that joins them writes f32. So the other kernels need nothing for pieces.

/// Why such a kernel cannot take a piece; empty where it can.
inline std::string unsuited_16_bit_piece(const AttentionProblem& problem) {
  const PieceDetails& piece = problem.piece;
  const AttentionFeatures& features = problem.features;
  if (piece.placed) return "counts positions of ALiBi and dropout from the first query, key and head alone";
  if (piece.wide_statistics) return "takes lse in f32 alone";
  if (piece.share_of_keys && (features.alibi || features.mask == MaskKind::additive)) {
    // Rows of a large LSE need the softmax of all their keys again (far_rows.cuh), and a share has only some.
    return "takes shares of keys without ALiBi and additive masks, beside which lse may be large";
  }
  constexpr std::int64_t most_length = std::int64_t{1} << 30;  // positions off the diagonal fit into 32 bits
  if (piece.off_diagonal && std::max(problem.length_q, problem.length_k) > most_length) {
    return "takes bands off the diagonal of sequences to 2^30";
  }
  return {};
}

}  // namespace tilewise::cuda
