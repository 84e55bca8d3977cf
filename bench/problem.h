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

/// What is asked besides plain attention.
struct Features {
  MaskKind mask =
      MaskKind::none;  ///< additive: [Sq, Sk] in the inputs' type; boolean: padding, [B, 1, 1, Sk]
  std::optional<std::int64_t> window;  ///< keys seen to either side; causal cuts off the right one
  double blocks = 1;                   ///< fraction of blocks a block mask keeps; 1 is no block mask
  double dropout = 0;
  bool deterministic = false;  ///< gradients; forward always is
  friend bool operator==(const Features&, const Features&) = default;
};

inline constexpr std::int64_t block_size = 128;

/// What one row measures.
struct Problem {
  std::string suite;
  std::string name;
  Shape shape;
  Features features;
  DType dtype = DType::f32;
  Pass pass = Pass::forward;
  bool causal = false;

  /// Keys that causal and window leave to query i. Where Sq ≠ Sk the last query stands at the last key.
  struct Keys {
    std::int64_t first, last;
  };
  Keys keys_of(std::int64_t i) const;
  Alignment alignment() const;
  /// Whether the block mask keeps a block: the diagonal, and others at random but always the same.
  bool keeps_block(std::int64_t query_block, std::int64_t key_block) const;
  /// How many keys of each entry the padding leaves.
  std::int64_t unpadded() const { return shape.sk - shape.sk / 4; }
  /// Whether query i sees key j.
  bool sees(std::int64_t i, std::int64_t j) const;
};

/// Pairs of query and key in all heads that causal, window and block mask keep. A boolean mask takes none
/// away: what it hides is known to nobody before it is read.
double visible_pairs(const Problem& problem);
/// Useful FLOPs of one call: a pair costs 2·(D + Dv) forward and 2.5 times that backward.
double useful_flops(const Problem& problem);
/// Bytes a call cannot help moving: every input read once, every output written once.
double compulsory_bytes(const Problem& problem);

/// "h32/8 sq1 sk4096 d128", as short as it can be said.
std::string describe(const Shape& shape);
/// "mask=additive window=256", empty where there are none.
std::string describe(const Features& features);
std::string describe(Pass pass);

}  // namespace tilewise::bench
