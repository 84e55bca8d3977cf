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

/// The results that the calls ask for, besides o.
struct Asked {
  bool backward = true;
  bool dq = true;
  bool dk = true;
  bool dv = true;
  bool dmask = false;
  bool dsinks = false;
  bool dlogit_scale = false;
  DType dmask_dtype = DType::f32;
  bool own_forward = true;      ///< backward gets o and lse of the kernel's own forward, not the reference's
  bool packed_outputs = false;  ///< dq, dk and dv are slices of one buffer
};

/// A random problem of the whole contract: any combination of options that validation allows. It is a
/// function of its seed alone. Memory that no call may read (rows past a sequence's end, unused pages,
/// entries past a count) is poisoned.
struct RandomProblem {
  std::uint64_t seed = 0;
  DType dtype = DType::f32;
  Layout layout = Layout::dense;
  std::int64_t batch = 0;  ///< batch entries, or packed sequences
  std::int64_t heads_q = 0;
  std::int64_t heads_kv = 0;
  std::int64_t length_q = 0;  ///< bound on the lengths, when packed
  std::int64_t length_k = 0;  ///< capacity, when paged
  std::int64_t dim_qk = 0;
  std::int64_t dim_v = 0;
  bool aligned = false;  ///< rows of q, k and v begin at multiples of 16 bytes, and no stride is negative
  bool aligned_results = false;  ///< the same for o, d_o, dq, dk and dv

  Buffer q, k, v;
  Buffer mask, alibi_slopes, sinks, logit_scale;
  Buffer key_lengths, page_table, cumulative_q, cumulative_k;
  RandomBlocks blocks;
  Buffer dropout_seed;  ///< not given in random problems; some tests set it
  Buffer d_o, d_lse;
  AttentionOptions options;
  Asked asked;

  AttentionInputs inputs() const;
  /// The shape of o with another last extent, and the shape of lse.
  Shape beside_q(std::int64_t dim) const;
  Shape statistics_shape() const;
};

RandomProblem random_problem(std::uint64_t seed);
/// The same with the choices of `rng`; the seed determines only the placement of results. B·Hq·Sq·Sk·(D+Dv)
/// is at most max_cost.
RandomProblem random_problem(Random& rng, std::uint64_t seed, double max_cost);

/// A forward problem for the wgmma kernel, of which random_problem() has few: 16-bit types, aligned rows,
/// also of masks, and many results. In f32 the head dims are 32 to 128, and only a band hides keys.
RandomProblem random_wgmma_problem(std::uint64_t seed, bool f32 = false);

/// A problem with a block mask for the forward of wgmma, which has them on trial: block sizes are multiples
/// of 128 or the whole length, and there are often other features.
RandomProblem random_wgmma_block_problem(std::uint64_t seed);

/// A problem with a mask or dropout for the forward of wgmma and with any other features, most of which it
/// has on trial.
RandomProblem random_wgmma_mask_problem(std::uint64_t seed);

/// A problem for the backward of mma, in f16 or bf16 with any features, larger than those of
/// random_problem(): usually more than 64 keys, and gradients of at least 16384 elements. One in seven has so
/// many that mma rounds P to 16 bits; half of these have only a band and aligned rows, as the plain kernel
/// takes them.
RandomProblem random_mma_problem(std::uint64_t seed);

/// A problem for the backward of wgmma: many results, aligned rows, and only a band and lengths hide keys.
RandomProblem random_wgmma_backward_problem(std::uint64_t seed);
/// The same with any features.
RandomProblem random_wgmma_features_problem(std::uint64_t seed);

/// A problem for the plain kernels, in both passes: dense, with aligned rows and more than 64 keys, of which
/// only a band hides some.
RandomProblem random_plain_problem(std::uint64_t seed);
/// The same in f16 and bf16 with head dims of 257 to 512. Forward alone.
RandomProblem random_wide_heads_problem(std::uint64_t seed);
/// The same in f32 with head dims of 129 to 320 and several heads, in both passes, also with masks and other
/// features.
RandomProblem random_wide_f32_problem(std::uint64_t seed);

/// A problem for mma in f32, forward and mostly backward: only a band and lengths hide keys, and there are
/// many queries.
RandomProblem random_mma_f32_problem(std::uint64_t seed);

/// The same problem in f64, which only the reference takes, with all gradients.
RandomProblem widened(const RandomProblem& problem);

/// A description in one line.
std::string to_string(const RandomProblem& problem);

/// The results of forward and backward: poisoned buffers with random placement. Only the gradients that the
/// problem asks for are given.
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
