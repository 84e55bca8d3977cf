#include "attention/call.h"

namespace tilewise {

void AttentionCall::block_states(std::int64_t b, std::int64_t h, std::int64_t qb,
                                 std::span<std::int32_t> states) const {
  std::fill(states.begin(), states.end(), block_hidden);
  const std::int32_t partial = blocks.count(b, h, qb);
  for (std::int32_t slot = 0; slot < partial; ++slot) {
    const auto block = static_cast<std::size_t>(blocks.indices.at(b, h, qb, slot));
    states[block] = blocks.tile(b, h, qb, slot);
  }
  if (blocks.full_counts.data == nullptr) return;
  const std::int32_t full = blocks.full_count(b, h, qb);
  for (std::int32_t slot = 0; slot < full; ++slot) {
    states[static_cast<std::size_t>(blocks.full_indices.at(b, h, qb, slot))] = block_full;
  }
}

AttentionCall representative(const AttentionCall& call) {
  AttentionCall found = call;
  found.problem = representative(call.problem);
  if (call.problem.queries > 0 && call.problem.keys > 0) found.most_length = found.problem.length_k;
  return found;
}

}  // namespace tilewise
