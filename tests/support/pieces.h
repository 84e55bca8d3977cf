#pragma once

#include <cstdint>

#include "support/random_problem.h"
#include "tilewise/attention.h"

namespace tilewise::test {

/// Whether a problem can be cut into pieces whose joined results keep the whole's error bound: it is dense,
/// scores are small, and in no row one key has all the weight. Gradients of a piece come from LSE and delta,
/// whose rounding limits their accuracy. Where one key has all the weight, the gradients of the whole are
/// differences of equal numbers and exactly 0, but those of a piece are 0 only up to a rounding error.
bool suits_pieces(const RandomProblem& problem);

/// Computes pieces, on the CPU or with the kernels on the first CUDA device.
struct PieceRunner {
  Device device{};
  DType statistics = DType::f64;  ///< type of LSE, delta and dLSE, unless the inputs are f64
  std::int64_t taken = 0;         ///< pieces that the named kernel computed
  std::int64_t left = 0;          ///< pieces that it cannot compute, which `fused` computed

  void forward(const AttentionInputs& inputs, AttentionOptions options, const AttentionOutputs& outputs,
               const Context& context);
  void backward(const AttentionInputs& inputs, AttentionOptions options, const AttentionGradients& gradients,
                const Context& context);
};

/// attention_forward and attention_backward of a dense problem that is cut into pieces by entries, heads,
/// queries and keys. Results are joined in f64. The seed determines the cuts.
void forward_in_pieces(std::uint64_t seed, const AttentionInputs& inputs, const AttentionOptions& options,
                       const AttentionOutputs& outputs, const Context& context, PieceRunner& runner);
void backward_in_pieces(std::uint64_t seed, const AttentionInputs& inputs, const AttentionOptions& options,
                        const AttentionGradients& gradients, const Context& context, PieceRunner& runner);

}  // namespace tilewise::test
