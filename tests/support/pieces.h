#pragma once

#include <cstdint>

#include "support/random_problem.h"
#include "tilewise/attention.h"

namespace tilewise::test {

/// Whether a problem can be cut into pieces whose joined results keep the whole's bound on errors: dense,
/// with small scores, and no row in which one key has all the weight. A piece's gradients are made from lse
/// and delta, and are as precise as these tell of the weights. Where one key has all the weight, the whole's
/// gradients are differences of equal numbers, exactly 0, which those of a piece are to a rounding.
bool suits_pieces(const RandomProblem& problem);

/// Who computes the pieces: the CPU, or the kernels on the first CUDA device.
struct PieceRunner {
  Device device{};
  DType statistics = DType::f64;  ///< of lse, delta and d_lse, where rows are not f64
  std::int64_t taken = 0;         ///< pieces that the kernel asked for took
  std::int64_t left = 0;          ///< those it refused, which `fused` computed

  void forward(const AttentionInputs& inputs, AttentionOptions options, const AttentionOutputs& outputs,
               const Context& context);
  void backward(const AttentionInputs& inputs, AttentionOptions options, const AttentionGradients& gradients,
                const Context& context);
};

/// attention_forward and attention_backward of a dense problem, cut into pieces of entries, heads, queries
/// and keys and joined again in f64. The cuts are drawn from the seed.
void forward_in_pieces(std::uint64_t seed, const AttentionInputs& inputs, const AttentionOptions& options,
                       const AttentionOutputs& outputs, const Context& context, PieceRunner& runner);
void backward_in_pieces(std::uint64_t seed, const AttentionInputs& inputs, const AttentionOptions& options,
                        const AttentionGradients& gradients, const Context& context, PieceRunner& runner);

}  // namespace tilewise::test
