#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tilewise/context.h"
#include "tilewise/explain.h"
#include "tilewise/tensor.h"

#pragma GCC visibility push(default)
namespace tilewise {

// Rotary embedding: rotates pairs of elements of each row of q and k by an angle that depends on the position
// of the token. It can also write keys and values into a cache.
//   (x, y) -> (x·cos − y·sin, y·cos + x·sin)
// The first R = 2·(last extent of the tables) elements of a row are rotated, the others are copied.

/// The elements of pair n: n and n + R/2 (Llama in Hugging Face Transformers), or 2n and 2n + 1 (GPT-J).
enum class RopePairs : std::uint8_t { halves, interleaved };

struct RopeInputs {
  Tensor q{};  ///< [B, Hq, S, D], with a contiguous last dimension; optional if k is given
  Tensor k{};  ///< [B, Hkv, S, D], likewise
  Tensor v{};  ///< [B, Hkv, S, Dv], for the cache; optional
  /// cos and sin of the angles, f32 or in the type of q (f64 if q is): a table [positions, R/2], or [B|1, S,
  /// R/2] with the angles of each token.
  Tensor cos{};
  Tensor sin{};
  /// i32 or i64 [B|1, S]: the row of the table for each token. Without it, token s takes row s. Not given
  /// with tables of rank 3. On a GPU, a position outside the table takes its first or last row: see
  /// docs/debugging.md.
  Tensor positions{};
  /// i32 [B]: the place in the cache of each entry's first token; 0 if not given. On a GPU, tokens whose
  /// place is outside the cache are not written.
  Tensor cache_starts{};
  Tensor page_table{};  ///< i32 [B, max_pages]; given if the caches are paged
  /// i32 [B], in place of cache_starts: the number of each entry's tokens in the cache, of which these are
  /// the last. Without positions, a token then takes the table's row that its place in the cache names.
  Tensor cache_ends{};
};

struct RopeOptions {
  RopePairs pairs = RopePairs::halves;
  bool inverse = false;  ///< rotates back: the backward pass, with the gradients as q and k
  std::string_view kernel = "auto";
};

struct RopeOutputs {
  Tensor q{};        ///< shape of q; may be the same memory
  Tensor k{};        ///< shape of k; may be the same memory; optional with a cache
  Tensor k_cache{};  ///< [B, Hkv, C, D] or, with page_table, [pages, Hkv, page, D]; optional
  Tensor v_cache{};  ///< likewise with Dv; given if v is
};

/// All arguments are checked before anything is written.
void rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
          const Context& context);

/// The bytes of workspace that the call needs.
std::size_t rope_workspace(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                           const Context& context);

Explanation explain_rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                         const Context& context);

/// Names of all rope kernels, fastest first.
std::vector<std::string_view> rope_kernels();

}  // namespace tilewise
#pragma GCC visibility pop
