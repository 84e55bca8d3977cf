#include <sstream>

#include "support/random_problem.h"

namespace tilewise::test {
namespace {

const char* name(Layout layout) {
  switch (layout) {
    case Layout::dense: return "dense";
    case Layout::packed: return "packed";
    case Layout::paged: return "paged";
  }
  return "";
}

// A text such as "f32[2, 3, 1, 7]/(21, 7, 7, 1)", with the strides in round brackets.
std::string text_of(const Buffer& buffer) {
  std::string text = to_string(buffer.view()) + "/(";
  for (const std::int64_t stride : buffer.strides()) {
    text += (text.back() == '(' ? "" : ", ") + std::to_string(stride);
  }
  return text + ")";
}

std::string listed(const Buffer& buffer) {
  std::ostringstream text;
  for (const double value : buffer.values()) text << (text.tellp() == 0 ? "" : ",") << value;
  return text.str();
}

std::string text_of(const std::optional<std::int64_t>& side) { return side ? std::to_string(*side) : "any"; }

}  // namespace

std::string to_string(const RandomProblem& p) {
  std::ostringstream text;
  const AttentionOptions& options = p.options;
  text << to_string(p.dtype) << ' ' << name(p.layout) << " B" << p.batch << " Hq" << p.heads_q << " Hkv"
       << p.heads_kv << " Sq" << p.length_q << " Sk" << p.length_k << " D" << p.dim_qk << " Dv" << p.dim_v;
  text << "; q " << text_of(p.q) << " k " << text_of(p.k) << " v " << text_of(p.v);
  if (p.cumulative_q.given()) {
    text << "; ends_q " << listed(p.cumulative_q) << " ends_k " << listed(p.cumulative_k);
  }
  if (p.key_lengths.given()) text << "; key lengths " << listed(p.key_lengths);
  if (p.mask.given()) text << "; mask " << text_of(p.mask);
  if (p.blocks.counts.given()) {
    text << "; blocks " << p.blocks.block_q << "x" << p.blocks.block_k << ' ' << text_of(p.blocks.indices)
         << (p.blocks.full_counts.given() ? " full" : "") << (p.blocks.tiles.given() ? " tiles" : "");
  }
  if (options.scale) text << "; scale " << *options.scale;
  if (options.causal) text << "; causal";
  if (options.window.left || options.window.right) {
    text << "; window " << text_of(options.window.left) << ',' << text_of(options.window.right);
  }
  if (options.alignment == Alignment::bottom_right) text << "; bottom right";
  if (options.softcap > 0) text << "; softcap " << options.softcap;
  if (p.alibi_slopes.given()) text << "; alibi " << text_of(p.alibi_slopes);
  if (p.sinks.given()) text << "; sinks " << listed(p.sinks);
  if (p.logit_scale.given()) text << "; logit scale " << listed(p.logit_scale);
  if (options.dropout.probability > 0) text << "; dropout " << options.dropout.probability;
  if (options.deterministic) text << "; deterministic";
  text << "; asks" << (p.asked.dq ? " dq" : "") << (p.asked.dk ? " dk" : "") << (p.asked.dv ? " dv" : "");
  if (p.asked.dmask) text << " dmask:" << to_string(p.asked.dmask_dtype);
  text << (p.asked.dsinks ? " dsinks" : "") << (p.asked.dlogit_scale ? " dlogit_scale" : "")
       << (p.d_lse.given() ? "; d_lse" : "")
       << (p.asked.own_forward ? "; own o and lse" : "; reference's o and lse")
       << (p.asked.packed_outputs ? "; packed gradients" : "");
  return text.str();
}

}  // namespace tilewise::test
