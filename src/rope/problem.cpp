#include "rope/problem.h"

#include <sstream>

namespace tilewise {

std::string to_string(const RopeProblem& problem) {
  std::ostringstream text;
  text << "rope " << to_string(problem.dtype) << " B" << problem.batch << " Hq" << problem.heads_q << " Hkv"
       << problem.heads_kv << " S" << problem.length << " D" << problem.dim << " R" << problem.rotary_dim
       << " on " << to_string(problem.device)
       << (problem.pairs == RopePairs::halves ? ", halves" : ", interleaved");
  if (problem.inverse) text << ", inverse";
  if (problem.cache == CacheLayout::dense) text << ", cache";
  if (problem.cache == CacheLayout::paged) text << ", paged cache";
  return text.str();
}

}  // namespace tilewise
