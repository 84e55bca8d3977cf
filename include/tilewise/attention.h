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

// Exact attention: o = softmax(score(q, k)) v. In shapes, B is the batch size, Hq and Hkv are the numbers of
// query and key heads (Hq is a multiple of Hkv), Sq and Sk the numbers of queries and keys, D and Dv the head
// dims of q and k, and of v.

/// Packed sequences: q is [total_q, Hq, D], k and v are [total_k, Hkv, ...]. Sequence n owns the rows
/// cumulative[n] up to cumulative[n+1]. Both cumulative tensors are i32 [sequences + 1] and start at 0.
struct PackedSequences {
  Tensor cumulative_q{};
  Tensor cumulative_k{};
  std::int64_t max_length_q = 0;  ///< upper bounds on the lengths; one above the total counts as the total
  std::int64_t max_length_k = 0;
  bool given() const { return cumulative_q.given() || cumulative_k.given(); }
};

/// A block-sparse mask in FlexAttention's form. For each row of query blocks, the first `counts` entries of
/// `indices` list the key blocks that may hide keys, and those of `full_indices` the blocks in which nothing
/// is hidden. Blocks in neither list are hidden. Shapes broadcast over B and Hq. A block may be longer than
/// the sequence: the part beyond the last query or key is ignored and costs nothing.
struct BlockMask {
  std::int64_t block_q = 128;
  std::int64_t block_k = 128;
  Tensor counts{};        ///< i32 [B|1, Hq|1, query blocks]
  Tensor indices{};       ///< i32 [B|1, Hq|1, query blocks, slots]
  Tensor full_counts{};   ///< as counts; optional
  Tensor full_indices{};  ///< as indices; optional
  /// What is visible inside the blocks of `indices`. For each of them, tile_ids (shape of indices) names one
  /// of tiles (boolean [tiles, block_q, block_k]). Without tiles, everything inside a block is visible.
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
  Tensor mask{};          ///< broadcasts to [B, Hq, Sq, Sk]; boolean (true: attend) or added to the score
  Tensor alibi_slopes{};  ///< [Hq] or [B, Hq], f32 (f64 allowed when q is f64)
  Tensor sinks{};         ///< [Hq], same types: one logit per head that joins the denominator alone
  Tensor logit_scale{};   ///< [Hq], same types: a factor of the scale for each query head
  Tensor key_lengths{};   ///< i32 [B]: how many keys of each entry are in use; required when paged
  Tensor page_table{};    ///< i32 [B, max_pages]
  /// i64 [2]: seed and offset of dropout, in place of those in the options. Kernels read them when they run,
  /// so a CUDA graph draws a new mask in each replay if they changed in between.
  Tensor dropout_seed{};
  PackedSequences packed{};
  BlockMask blocks{};
};

/// The corner of the score matrix from which causal and window count. top_left: query i stands at key i.
/// bottom_right: the last query stands at the last key.
enum class Alignment : std::uint8_t { top_left, bottom_right };

/// A query that stands at key p sees keys p - left up to p + right. A side that is not given is unbounded.
struct Window {
  std::optional<std::int64_t> left{};
  std::optional<std::int64_t> right{};
};

/// Drops attention weights with `probability`, from 0 to 1. The mask is a function of (seed, offset, b, h, i,
/// j) alone.
struct Dropout {
  float probability = 0;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
};

/// Says that the tensors of a dense call are a piece of a larger problem, the whole. Query i is query
/// q_offset + i·step of the whole, key j is key k_offset + j·step, entry b is entry batch_offset + b and
/// query head h is head head_offset + h. Causal, window, ALiBi and dropout count in the whole.
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
  bool deterministic = false;  ///< backward gives the same bits each time; forward always does
  /// The bits of a sequence's o, lse, dq, dk and dv depend on this sequence alone: not on the others in the
  /// batch, their number and lengths, nor on its place among them or the capacity of a cache. A packed
  /// sequence has the bits of the same sequence alone, packed or dense. Implies `deterministic`. Not for
  /// pieces. The same device, alignment of the rows and other options are assumed. Dropout stays a function
  /// of the entry's number.
  bool batch_invariant = false;
  Precision precision = Precision::standard;
  std::string_view kernel = "auto";
  /// Makes the call a piece of a whole. So that pieces are joined without another rounding, o and the
  /// gradients of f16 and bf16 inputs may then be f32, and lse may be f64. Only for dense tensors without key
  /// lengths and block masks.
  std::optional<Piece> piece{};
};

struct AttentionOutputs {
  Tensor o{};    ///< [B, Hq, Sq, Dv]; packed: [total_q, Hq, Dv]
  Tensor lse{};  ///< f32 (f64 when q is) [B, Hq, Sq]; packed: [Hq, total_q]; optional
};

/// What backward reads (o, lse, d_o, d_lse, delta) and what it writes. It computes only the gradients for
/// which tensors are given.
struct AttentionGradients {
  Tensor o{};
  Tensor lse{};
  Tensor d_o{};    ///< gradient of o
  Tensor d_lse{};  ///< gradient of lse; optional, type of lse
  /// For a piece that has only some of the keys: Σ d_o·o of each row, with the shape and type of lse. lse and
  /// delta are then those of the whole row, with all its keys and its sink, and each gradient is this call's
  /// part of a sum over pieces. o and sinks are not given.
  Tensor delta{};
  Tensor dq{};
  Tensor dk{};
  Tensor dv{};
  Tensor dmask{};         ///< shape of mask, its type or f32; summed over broadcast dimensions
  Tensor dsinks{};        ///< shape and type of sinks
  Tensor dlogit_scale{};  ///< shape and type of logit_scale; computed from dq, which must be given with it
};

/// All arguments are checked before anything is written.
void attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                       const AttentionOutputs& outputs, const Context& context);
void attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                        const AttentionGradients& gradients, const Context& context);

/// The bytes of workspace that the call needs.
std::size_t attention_forward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                        const AttentionOutputs& outputs, const Context& context);
std::size_t attention_backward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                         const AttentionGradients& gradients, const Context& context);

/// All kernels in order of preference: the chosen one, those that could compute the call, and why the others
/// cannot.
Explanation explain_attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                                      const AttentionOutputs& outputs, const Context& context);
Explanation explain_attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                                       const AttentionGradients& gradients, const Context& context);

/// Names of all attention kernels, fastest first.
std::vector<std::string_view> attention_kernels();

}  // namespace tilewise
#pragma GCC visibility pop
