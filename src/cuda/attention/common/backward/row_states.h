#pragma once

#include <cstdint>

namespace tilewise::cuda::simt {

/// What backward knows of a query before it meets a key: P = exp(s − top)·inverse, and dS = P·(dP + shift).
struct RowState {
  float top;      ///< the highest score, or LSE
  float inverse;  ///< 1 / Σ exp(s − top), the sink included; 1 where `top` is LSE
  float shift;    ///< dLSE − delta, where delta = Σ P·dP

  /// The state of a query that sees no key, or that does not exist.
  static constexpr RowState unseen() { return {__builtin_huge_valf(), 0, 0}; }
};

/// One number per query each, [Hq, rows_q].
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
