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

// Rotary embedding: pairs of elements of each row of q and k are turned by an angle that depends on the
// position of its token, and keys and values may be written into a cache on the way:
//   (x, y) -> (x·cos − y·sin, y·cos + x·sin)
// The first R = 2·(extent of the tables) elements of a row are turned, the rest is left as it is.

/// Which elements make pair n: n and n + R/2 (Llama as in Hugging Face), or 2n and 2n + 1 (GPT-J).
enum class RopePairs : std::uint8_t { halves, interleaved };

struct RopeInputs {
  Tensor q{};  ///< [B, Hq, S, D], any strides with a contiguous last dimension; optional where k is given
  Tensor k{};  ///< [B, Hkv, S, D], likewise
  Tensor v{};  ///< [B, Hkv, S, Dv]: to be written into the cache; optional
  /// The angles, f32 or in the type of q (f64 where q is): a table [positions, R/2], or [B|1, S, R/2] with
  /// those of each token.
  Tensor cos{};
  Tensor sin{};
  /// i32 or i64 [B|1, S]: row of the table for each token; without it token s takes row s. None with tables
  /// of rank 3. On a GPU a position outside the table takes its first row or its last: docs/debugging.md.
  Tensor positions{};
  /// i32 [B]: place in the cache for the first of each entry's tokens; without it 0. On a GPU tokens whose
  /// place the cache does not have are not written.
  Tensor cache_starts{};
  Tensor page_table{};  ///< i32 [B, max_pages]: makes the caches paged
  /// i32 [B], in place of cache_starts: how many tokens of each entry the cache has with these, its last.
  /// Without positions, a token then takes the table's row of its place.
  Tensor cache_ends{};
};

struct RopeOptions {
  RopePairs pairs = RopePairs::halves;
  bool inverse = false;  ///< turns back: the backward pass, given the gradients as q and k
  std::string_view kernel = "auto";
};

struct RopeOutputs {
  Tensor q{};        ///< as q, which it may be
  Tensor k{};        ///< as k, which it may be; optional with a cache
  Tensor k_cache{};  ///< [B, Hkv, C, D] or, with page_table, [pages, Hkv, page, D]; optional
  Tensor v_cache{};  ///< likewise with Dv; given where v is
};

/// Every check is made before anything is written.
void rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
          const Context& context);

/// Bytes of workspace the call will need.
std::size_t rope_workspace(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                           const Context& context);

Explanation explain_rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                         const Context& context);

/// Names of all rope kernels, fastest first.
std::vector<std::string_view> rope_kernels();

}  // namespace tilewise
#pragma GCC visibility pop
