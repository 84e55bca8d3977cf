#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/call.h"
#include "core/arena.h"
#include "cuda/attention/common/backward/row_states.h"
#include "cuda/attention/simt/fused.h"

namespace tilewise::cuda::simt {

// Where P of a pair is nearly 1, its dS = P·(dP − delta + dLSE) is a difference of nearly equal numbers. With
// delta = Σ P·dP, from the same dP, the errors would cancel, but that takes two more products. delta = dO·O
// costs nothing, but has an error of its own, which is then all that is left. For low weights this makes no
// difference. So backward takes delta = dO·O, leaves out the few pairs of high weight, the peaks, and adds
// their gradients at the end. With x = dP − delta + dLSE, which is known up to a constant that all keys of a
// row share,
//
//   dS_f = P_f / Σ_j P_j · (Σ_j P_j·(x_f − x_j) / Σ_j P_j + dLSE)
//
// where the mainloop computes the sums over the other keys, and the constant cancels. P of a peak is off by
// the rounding of LSE, and so is what it adds to dV. The row's sum of P, which should be 1, tells by how
// much. So no sink may have a part in that sum.

/// Pairs of higher weight are peaks, at most three per row.
constexpr float peak_weight = 0.26f;
constexpr int most_peaks = 3;

/// With few keys the other weights matter as much as the peaks, and with few queries the rounding of LSE does
/// not average out in dV. For such sequences the rows' states are computed again, and no pair is a peak.
constexpr std::int64_t short_keys = 64;
constexpr std::int64_t short_queries = 64;
constexpr bool is_short(const Sequence& sequence) {
  return sequence.length_k <= short_keys || sequence.length_q < short_queries;
}

/// A pair of high weight that the mainloop left out.
struct Peak {
  std::int64_t key;  // in its sequence
  float weight;
  float gradient;  // dP − delta + dLSE
};

/// The peaks of every query, and the sums over its other keys, [Hq, rows_q].
struct Peaks {
  int* count = nullptr;            // of peaks; the mainloop looks for none where this is null
  float* rest_weight = nullptr;    // Σ P over the other keys
  float* rest_gradient = nullptr;  // Σ P·(dP − delta + dLSE) over the other keys
  Peak* first = nullptr;           // [Hq, rows_q, most_peaks]

  Peaks() = default;
  Peaks(Arena& arena, std::int64_t rows)
      : count(arena.take<int>(rows)),
        rest_weight(arena.take<float>(rows)),
        rest_gradient(arena.take<float>(rows)),
        first(arena.take<Peak>(rows * most_peaks)) {}

  constexpr void clear(std::int64_t row) const {
    count[row] = 0;
    rest_weight[row] = rest_gradient[row] = 0;
  }
};

/// Computes the state of every query from O and LSE, and clears dQ and the peaks. Short sequences get other
/// states from row_states().
void row_states_of_outputs(const AttentionCall& call, const RowStates& states, const Peaks& peaks,
                           const SomeHeads& heads, cudaStream_t stream);

/// Adds what the peaks give to dQ and dK, and corrects what they gave to dV.
void mend_peaks(const AttentionCall& call, const Peaks& peaks, const SomeHeads& heads, cudaStream_t stream);

}  // namespace tilewise::cuda::simt
