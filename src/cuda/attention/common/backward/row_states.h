#pragma once

#include <cstdint>

namespace tilewise::cuda::simt {

/// What backward knows of a query before it meets a key: weights are exp(s − top)·inverse, and the gradient
/// of a score is weight·(d_o·v + shift).
struct RowState {
  float top;      ///< the highest score, or lse
  float inverse;  ///< 1 / Σ exp(s − top), the sink included; 1 with lse
  float shift;    ///< d_lse − Σ weight·(d_o·v)

  /// Of a query that saw nothing, or is not there.
  static constexpr RowState unseen() { return {__builtin_huge_valf(), 0, 0}; }
};

/// [Hq, rows_q] of each.
struct RowStates {
  float* top;
  float* inverse;
  float* shift;

  constexpr void set(std::int64_t row, const RowState& state) const {
    top[row] = state.top;
    inverse[row] = state.inverse;
    shift[row] = state.shift;
  }
};

}  // namespace tilewise::cuda::simt
