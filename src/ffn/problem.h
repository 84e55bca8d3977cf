#pragma once

#include <cstdint>
#include <string>

#include "core/pass.h"
#include "tilewise/ffn.h"

namespace tilewise {

/// What a feed-forward network computes, apart from how.
struct FfnProblem {
  Pass pass = Pass::forward;
  Device device{};
  DType dtype = DType::f32;
  std::int64_t tokens = 0;
  std::int64_t embed = 0;   ///< E
  std::int64_t hidden = 0;  ///< F
  std::int64_t out = 0;     ///< O
  Activation activation = Activation::gelu;
  bool gated = false;
  bool bias = false;  ///< any of the three
  bool residual = false;
  bool kept = false;  ///< the products before the activation are written by forward and read by backward
  bool allow_tf32 = false;
  bool by_rows = true;   ///< the rows of all weights are contiguous
  bool aligned = false;  ///< rows (or columns) of all matrices begin at multiples of 16 bytes
  friend bool operator==(const FfnProblem&, const FfnProblem&) = default;
};

/// "ffn forward bf16 M512 E4096 F11008 O4096 on cuda:0, silu, gated"
std::string to_string(const FfnProblem& problem);

}  // namespace tilewise
