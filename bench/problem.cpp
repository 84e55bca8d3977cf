#include "problem.h"

#include <algorithm>
#include <sstream>

namespace tilewise::bench {
namespace {

std::int64_t blocks_in(std::int64_t length) { return (length + block_size - 1) / block_size; }

std::int64_t pairs_of_query(const Problem& problem, std::int64_t i) {
  const Problem::Keys keys = problem.keys_of(i);
  if (problem.features.blocks >= 1) return std::max<std::int64_t>(0, keys.last - keys.first);
  std::int64_t pairs = 0;
  for (std::int64_t block = 0; block < blocks_in(problem.shape.sk); ++block) {
    if (!problem.keeps_block(i / block_size, block)) continue;
    const std::int64_t first = std::max(keys.first, block * block_size);
    const std::int64_t last = std::min(keys.last, (block + 1) * block_size);
    pairs += std::max<std::int64_t>(0, last - first);
  }
  return pairs;
}

// "h8" if the numbers of heads are equal, else "h32/8"; likewise "s1024" or "sq1 sk4096".
void write_sizes(std::ostream& text, const Shape& shape) {
  if (shape.b != 1) text << 'b' << shape.b << ' ';
  text << 'h' << shape.hq;
  if (shape.hkv != shape.hq) text << '/' << shape.hkv;
  if (shape.sq == shape.sk) {
    text << " s" << shape.sq;
  } else {
    text << " sq" << shape.sq << " sk" << shape.sk;
  }
  text << " d" << shape.d;
  if (shape.dv != shape.d) text << " dv" << shape.dv;
}

}  // namespace

Alignment Problem::alignment() const {
  return shape.sq == shape.sk ? Alignment::top_left : Alignment::bottom_right;
}

Problem::Keys Problem::keys_of(std::int64_t i) const {
  const std::int64_t position = i + shape.sk - shape.sq;
  const std::int64_t left = features.window.value_or(shape.sk + shape.sq);
  const std::int64_t right = causal ? 0 : left;
  return {std::max<std::int64_t>(0, position - left), std::min(shape.sk, position + right + 1)};
}

bool Problem::keeps_block(std::int64_t query_block, std::int64_t key_block) const {
  if (features.blocks >= 1 || query_block == key_block) return true;
  // A number in [0, 1) from splitmix64 of the block's position.
  std::uint64_t word =
      (static_cast<std::uint64_t>(query_block) << 32) + static_cast<std::uint64_t>(key_block);
  word = (word + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((word ^ (word >> 31)) >> 11) * 0x1p-53 < features.blocks;
}

bool Problem::sees(std::int64_t i, std::int64_t j) const {
  const Keys keys = keys_of(i);
  if (j < keys.first || j >= keys.last) return false;
  if (features.mask == MaskKind::boolean && j >= unpadded()) return false;
  return keeps_block(i / block_size, j / block_size);
}

double visible_pairs(const Problem& problem) {
  std::int64_t pairs = 0;
  for (std::int64_t i = 0; i < problem.shape.sq; ++i) pairs += pairs_of_query(problem, i);
  return static_cast<double>(pairs) * static_cast<double>(problem.shape.b * problem.shape.hq);
}

double useful_flops(const Problem& problem) {
  const double forward = visible_pairs(problem) * 2 * static_cast<double>(problem.shape.d + problem.shape.dv);
  return problem.pass == Pass::forward ? forward : 2.5 * forward;
}

double compulsory_bytes(const Problem& problem) {
  const Shape& s = problem.shape;
  const auto element = static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t queries = s.b * s.hq * s.sq;
  const std::int64_t q_and_o = queries * (s.d + s.dv) * element;
  const std::int64_t k_and_v = s.b * s.hkv * s.sk * (s.d + s.dv) * element;
  const std::int64_t lse = queries * static_cast<std::int64_t>(sizeof(float));
  std::int64_t bytes = q_and_o + k_and_v + lse;
  if (problem.pass == Pass::backward) bytes += q_and_o + k_and_v;  // dq and d_o, dk and dv
  if (problem.features.mask == MaskKind::additive) bytes += s.sq * s.sk * element;
  if (problem.features.mask == MaskKind::boolean) bytes += s.b * s.sk;
  return static_cast<double>(bytes);
}

std::string describe(const Shape& shape) {
  std::ostringstream text;
  write_sizes(text, shape);
  return text.str();
}

std::string describe(const Features& features) {
  std::ostringstream text;
  if (features.mask == MaskKind::additive) text << " mask=additive";
  if (features.mask == MaskKind::boolean) text << " mask=padding";
  if (features.window) text << " window=" << *features.window;
  if (features.blocks < 1) text << " blocks=" << features.blocks;
  if (features.dropout > 0) text << " dropout=" << features.dropout;
  if (features.deterministic) text << " deterministic=true";
  return text.str().empty() ? "" : text.str().substr(1);
}

std::string describe(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

}  // namespace tilewise::bench
