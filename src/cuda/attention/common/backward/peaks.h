#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/call.h"
#include "core/arena.h"
#include "cuda/attention/common/backward/row_states.h"
#include "cuda/attention/simt/fused.h"

namespace tilewise::cuda::simt {

// Where a weight is all but 1, the gradient of its score, weight·(d_o·v − Σ weight·(d_o·v)), is a difference
// of two numbers that are all but equal. Two products more would give the sum from the same d_o·v, so that
// their errors cancel; d_o·o gives it for nothing, but with an error of its own, which is then all there is.
// For small weights that makes no difference. So backward takes d_o·o, leaves the few high weights out, and
// mends them at the end: with x = d_o·v + shift, known up to a constant that all keys of a row share,
//
//   gradient of f = weight_f / Σ_j weight_j · (Σ_j weight_j·(x_f − x_j) / Σ_j weight_j + d_lse)
//
// where the sums over all other keys are made on the way, and the constant drops out. A weight that is all
// but 1 is off by as much as lse was rounded, and so is what it adds to dv: the sum of all weights of its row
// says by how much. So no sink may have a part in that sum.

/// Weights above this are left out: of a row, three at most.
constexpr float peak_weight = 0.26f;
constexpr int most_peaks = 3;

/// Of few keys more than the peaks matter, and over few queries what rounding lse does to dv does not average
/// out. The states of such a sequence's queries are made anew, and none of its weights is a peak.
constexpr std::int64_t short_keys = 64;
constexpr std::int64_t short_queries = 64;
constexpr bool is_short(const Sequence& sequence) {
  return sequence.length_k <= short_keys || sequence.length_q < short_queries;
}

/// A pair that was left out.
struct Peak {
  std::int64_t key;  // in its sequence
  float weight;
  float gradient;  // d_o·v + shift
};

/// Of every query, [Hq, rows_q].
struct Peaks {
  int* count = nullptr;            // of peaks; none are looked for where this is null
  float* rest_weight = nullptr;    // Σ weight over the other keys
  float* rest_gradient = nullptr;  // Σ weight·(d_o·v + shift) over the other keys
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

/// The state of every query from o and lse. Makes dq 0, and clears the peaks. Of short sequences
/// row_states() gives others.
void row_states_of_outputs(const AttentionCall& call, const RowStates& states, const Peaks& peaks,
                           const SomeHeads& heads, cudaStream_t stream);

/// Adds what was left out of dq and dk, and what dv lacks.
void mend_peaks(const AttentionCall& call, const Peaks& peaks, const SomeHeads& heads, cudaStream_t stream);

}  // namespace tilewise::cuda::simt
