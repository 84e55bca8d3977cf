#pragma once

#include <cstdint>
#include <string>

#include "attention/problem.h"
#include "support/buffer.h"
#include "tilewise/attention.h"

namespace tilewise::test {

struct RandomBlocks {
  std::int64_t block_q = 0;
  std::int64_t block_k = 0;
  Buffer counts, indices, full_counts, full_indices, tile_ids, tiles;
};

/// What the calls ask for beside o.
struct Asked {
  bool backward = true;
  bool dq = true;
  bool dk = true;
  bool dv = true;
  bool dmask = false;
  bool dsinks = false;
  bool dlogit_scale = false;
  DType dmask_dtype = DType::f32;
  bool own_forward = true;  ///< backward gets o and lse from the kernel's own forward, not the reference's
  bool packed_outputs = false;  ///< dq, dk and dv are slices of one buffer
};

/// A problem over the whole contract, every option mixed with every other where validation allows. A function
/// of its seed alone. Memory that no call may read (rows past a sequence's end, pages not in use, entries
/// past a count) is poisoned.
struct RandomProblem {
  std::uint64_t seed = 0;
  DType dtype = DType::f32;
  Layout layout = Layout::dense;
  std::int64_t batch = 0;  ///< sequences, when packed
  std::int64_t heads_q = 0;
  std::int64_t heads_kv = 0;
  std::int64_t length_q = 0;  ///< bound on the lengths, when packed
  std::int64_t length_k = 0;  ///< capacity, when paged
  std::int64_t dim_qk = 0;
  std::int64_t dim_v = 0;
  bool aligned = false;  ///< rows of q, k and v begin at multiples of 16 bytes, in order of their indices
  bool aligned_results = false;  ///< and so do those of o, d_o, dq, dk and dv

  Buffer q, k, v;
  Buffer mask, alibi_slopes, sinks, logit_scale;
  Buffer key_lengths, page_table, cumulative_q, cumulative_k;
  RandomBlocks blocks;
  Buffer dropout_seed;  ///< none in random problems: tests that give one say so
  Buffer d_o, d_lse;
  AttentionOptions options;
  Asked asked;

  AttentionInputs inputs() const;
  /// Shape of o with last extent `dim`; of lse.
  Shape beside_q(std::int64_t dim) const;
  Shape statistics_shape() const;
};

RandomProblem random_problem(std::uint64_t seed);
/// The same from somebody else's choices, of which the seed draws where results lie; the cost bounds
/// B·Hq·Sq·Sk·(D+Dv).
RandomProblem random_problem(Random& rng, std::uint64_t seed, double max_cost);

/// One of those that the wgmma kernel takes, of which random_problem() has few: 16 bits, aligned rows, many
/// results; masks have such rows too. Forward alone. In f32 the head dims are 32 to 64, and nothing but a
/// band hides.
RandomProblem random_wgmma_problem(std::uint64_t seed, bool f32 = false);

/// One with a block mask for the forward of wgmma, which has these on trial: blocks of multiples of 128
/// queries and keys, or of all, and beside a band often other features.
RandomProblem random_wgmma_block_problem(std::uint64_t seed);

/// One with a mask or dropout for the forward of wgmma, and with everything else, most of which it has on
/// trial.
RandomProblem random_wgmma_mask_problem(std::uint64_t seed);

/// In f16 or bf16 and larger than those of random_problem(), as tiles of the mma kernel's backward are: more
/// than 64 keys, and gradients of 16384 elements or, one in seven, of so many that it rounds weights; with
/// everything else. Half of those with many have nothing but a band and aligned rows, as its plain kernel.
RandomProblem random_mma_problem(std::uint64_t seed);

/// One for the backward of wgmma: mostly many results, of aligned rows, of which only a band and lengths hide
/// keys.
RandomProblem random_wgmma_backward_problem(std::uint64_t seed);
/// The same with all features.
RandomProblem random_wgmma_features_problem(std::uint64_t seed);

/// One for the plain kernels: dense, of aligned rows, of which only a band hides keys, with more than 64 of
/// them and both passes.
RandomProblem random_plain_problem(std::uint64_t seed);
/// The same in f16 and bf16 with head dims of 257 to 512. Forward alone.
RandomProblem random_wide_heads_problem(std::uint64_t seed);

/// What mma takes in f32, forward and mostly backward: nothing but a band and lengths hides, and no sequence
/// is short.
RandomProblem random_mma_f32_problem(std::uint64_t seed);

/// The same problem in f64 (the reference alone takes it), with every gradient asked for.
RandomProblem widened(const RandomProblem& problem);

/// One line.
std::string to_string(const RandomProblem& problem);

/// What forward and backward write, poisoned, in random places. Of the gradients only those asked for are
/// given.
struct OutputBuffers {
  Buffer o, lse;
  AttentionOutputs view(bool with_lse = true) const;
};
struct GradientBuffers {
  Buffer dq, dk, dv, dmask, dsinks, dlogit_scale;
};
OutputBuffers make_outputs(const RandomProblem& problem);
GradientBuffers make_gradients(const RandomProblem& problem);

}  // namespace tilewise::test
