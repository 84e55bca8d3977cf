#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "attention/problem.h"
#include "tilewise/dtype.h"

namespace tilewise::bench {

struct Shape {
  std::int64_t b = 1, hq = 1, hkv = 1, sq = 1, sk = 1, d = 64, dv = 64;
  friend bool operator==(const Shape&, const Shape&) = default;
};

/// The features of a problem beyond plain attention.
struct Features {
  /// additive: [Sq, Sk] in the type of the inputs; boolean: padding, [B, 1, 1, Sk].
  MaskKind mask = MaskKind::none;
  std::optional<std::int64_t> window;  ///< keys that a query sees on either side; with causal, on the left
  double blocks = 1;                   ///< fraction of blocks that a block mask keeps; 1: no block mask
  double dropout = 0;
  bool deterministic = false;  ///< for backward; forward always is
  friend bool operator==(const Features&, const Features&) = default;
};

inline constexpr std::int64_t block_size = 128;

/// The problem that one row of a report measures.
struct Problem {
  std::string suite;
  std::string name;
  Shape shape;
  Features features;
  DType dtype = DType::f32;
  Pass pass = Pass::forward;
  bool causal = false;

  /// The keys that query i sees by causal and window. If Sq ≠ Sk, the last query stands at the last key.
  struct Keys {
    std::int64_t first, last;
  };
  Keys keys_of(std::int64_t i) const;
  Alignment alignment() const;
  /// Whether the block mask keeps a block: those of the diagonal, and a fixed random choice of the others.
  bool keeps_block(std::int64_t query_block, std::int64_t key_block) const;
  /// The number of keys of each entry that the padding mask shows.
  std::int64_t unpadded() const { return shape.sk - shape.sk / 4; }
  /// Whether query i sees key j.
  bool sees(std::int64_t i, std::int64_t j) const;
};

/// The pairs of query and key in all heads that causal, window and block mask show. A boolean mask does not
/// reduce them, since a kernel only knows what it hides after reading it.
double visible_pairs(const Problem& problem);
/// The useful FLOPs of one call: 2·(D + Dv) per pair forward and 2.5 times that backward.
double useful_flops(const Problem& problem);
/// The bytes that a call has to move at least: every input is read once, every output is written once.
double compulsory_bytes(const Problem& problem);

/// A short text such as "h32/8 sq1 sk4096 d128".
std::string describe(const Shape& shape);
/// A text such as "mask=additive window=256"; empty without features.
std::string describe(const Features& features);
std::string describe(Pass pass);

}  // namespace tilewise::bench
