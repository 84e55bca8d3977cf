#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tilewise/context.h"
#include "tilewise/error.h"
#include "tilewise/explain.h"
#include "tilewise/tensor.h"

#pragma GCC visibility push(default)
namespace tilewise {

// Exact attention: o = softmax(score(q, k)) v, with everything that may change the score. Shapes:
// B batch, Hq query heads, Hkv key heads (Hq a multiple of Hkv), Sq queries, Sk keys, D and Dv head dims.

/// Packed sequences: q is [total_q, Hq, D], k and v are [total_k, Hkv, ...]; sequence n owns the rows
/// cumulative[n] up to cumulative[n+1]. Both tensors are i32 [sequences + 1] and start at 0.
struct PackedSequences {
  Tensor cumulative_q{};
  Tensor cumulative_k{};
  std::int64_t max_length_q = 0;  ///< upper bounds on the lengths; beyond all rows they cost nothing
  std::int64_t max_length_k = 0;
  bool given() const { return cumulative_q.given() || cumulative_k.given(); }
};

/// A block-sparse mask in FlexAttention's form. For each row of query blocks, `indices` lists the key blocks
/// to be computed (its first `counts` entries) and `full_indices` those in which nothing is hidden.
/// Blocks in neither list are hidden. Shapes broadcast over B and Hq. A block may be longer than the queries
/// or keys there are: the rest of it is not looked at, and costs nothing.
struct BlockMask {
  std::int64_t block_q = 128;
  std::int64_t block_k = 128;
  Tensor counts{};        ///< i32 [B|1, Hq|1, query blocks]
  Tensor indices{};       ///< i32 [B|1, Hq|1, query blocks, slots]
  Tensor full_counts{};   ///< as counts; optional
  Tensor full_indices{};  ///< as indices; optional
  /// What is visible inside the blocks of `indices`: tile_ids (shape of indices) names one of
  /// tiles (boolean [tiles, block_q, block_k]) for each. Without them all of a block is visible.
  Tensor tile_ids{};
  Tensor tiles{};
  bool given() const {
    return counts.given() || indices.given() || full_counts.given() || full_indices.given() ||
           tile_ids.given() || tiles.given();
  }
};

struct AttentionInputs {
  Tensor q{};             ///< [B, Hq, Sq, D]
  Tensor k{};             ///< [B, Hkv, Sk, D]; paged: [pages, Hkv, page, D]
  Tensor v{};             ///< [B, Hkv, Sk, Dv]; paged: [pages, Hkv, page, Dv]
  Tensor mask{};          ///< broadcast to [B, Hq, Sq, Sk]: boolean (true attends), or added to the score
  Tensor alibi_slopes{};  ///< [Hq] or [B, Hq], f32 (f64 allowed when q is f64)
  Tensor sinks{};         ///< [Hq], likewise: a logit that joins the denominator alone
  Tensor logit_scale{};   ///< [Hq], likewise: multiplies the scale, a factor for each query head
  Tensor key_lengths{};   ///< i32 [B]: how many keys of each entry are in use; required when paged
  Tensor page_table{};    ///< i32 [B, max_pages]
  /// i64 [2]: dropout's seed and offset, in place of those in the options. Kernels read it as they run, so
  /// that a CUDA graph draws another mask in each replay if these words change.
  Tensor dropout_seed{};
  PackedSequences packed{};
  BlockMask blocks{};
};

/// Which corner of the score matrix causal and window line up with: query i stands at key i, or the last
/// query at the last key.
enum class Alignment : std::uint8_t { top_left, bottom_right };

/// A query standing at key p sees keys p - left up to p + right; an absent side is unbounded.
struct Window {
  std::optional<std::int64_t> left{};
  std::optional<std::int64_t> right{};
};

/// Drops attention weights with `probability`, from 0 to 1; the mask is a function of (seed, offset, b, h, i,
/// j) alone.
struct Dropout {
  float probability = 0;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
};

/// Where the tensors of a dense call stand in a whole of which they are a piece: query i is query
/// q_offset + i·step of the whole, key j is key k_offset + j·step, entry b is entry batch_offset + b and
/// query head h is head head_offset + h. Band, ALiBi and dropout are those of the whole.
struct Piece {
  std::int64_t q_offset = 0;
  std::int64_t k_offset = 0;
  std::int64_t step = 1;
  std::int64_t length_q = 0;  ///< of the whole
  std::int64_t length_k = 0;
  std::int64_t batch_offset = 0;
  std::int64_t head_offset = 0;
  std::int64_t heads_q = 0;  ///< of the whole
};

struct AttentionOptions {
  std::optional<float> scale{};  ///< 1/√D when absent
  bool causal = false;
  Alignment alignment = Alignment::top_left;
  Window window{};
  float softcap = 0;  ///< 0: none
  Dropout dropout{};
  bool deterministic = false;  ///< backward bitwise repeatable; forward always is
  Precision precision = Precision::standard;
  std::string_view kernel = "auto";
  /// Pieces are joined without another rounding: with one, o and the gradients of 16-bit rows may be f32, and
  /// lse may be f64. Dense tensors alone, without key lengths and block masks.
  std::optional<Piece> piece{};
};

struct AttentionOutputs {
  Tensor o{};    ///< [B, Hq, Sq, Dv]; packed: [total_q, Hq, Dv]
  Tensor lse{};  ///< f32 (f64 when q is) [B, Hq, Sq]; packed: [Hq, total_q]; optional
};

/// What backward reads (o, lse, d_o, d_lse) and what it writes. Only the gradients given are computed.
struct AttentionGradients {
  Tensor o{};
  Tensor lse{};
  Tensor d_o{};    ///< gradient of o
  Tensor d_lse{};  ///< gradient of lse; optional, type of lse
  /// Of a piece: Σ d_o·o of each row, shape and type of lse. Then lse and delta are those of rows that saw
  /// more keys than the call has, sinks among them, and the gradients are this call's share of the sums. o
  /// and sinks are not given.
  Tensor delta{};
  Tensor dq{};
  Tensor dk{};
  Tensor dv{};
  Tensor dmask{};         ///< shape of mask, in mask's type or f32: summed over broadcast dimensions
  Tensor dsinks{};        ///< shape and type of sinks
  Tensor dlogit_scale{};  ///< shape and type of logit_scale; made from dq, which is to be given with it
};

/// Every check is made before anything is written.
void attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                       const AttentionOutputs& outputs, const Context& context);
void attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                        const AttentionGradients& gradients, const Context& context);

/// Bytes of workspace the call will need.
std::size_t attention_forward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                        const AttentionOutputs& outputs, const Context& context);
std::size_t attention_backward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                         const AttentionGradients& gradients, const Context& context);

/// Each kernel in order of preference: chosen, able, or why not.
Explanation explain_attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                                      const AttentionOutputs& outputs, const Context& context);
Explanation explain_attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                                       const AttentionGradients& gradients, const Context& context);

/// Names of all attention kernels, fastest first.
std::vector<std::string_view> attention_kernels();

}  // namespace tilewise
#pragma GCC visibility pop
