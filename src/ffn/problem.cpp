#include "ffn/problem.h"

#include <sstream>

namespace tilewise {

std::string to_string(const FfnProblem& problem) {
  std::ostringstream text;
  text << "ffn " << (problem.pass == Pass::forward ? "forward " : "backward ") << to_string(problem.dtype)
       << " M" << problem.tokens << " E" << problem.embed << " F" << problem.hidden << " O" << problem.out
       << " on " << to_string(problem.device) << ", " << to_string(problem.activation);
  if (problem.gated) text << ", gated";
  if (problem.bias) text << ", bias";
  if (problem.residual) text << ", residual";
  if (problem.kept) text << ", products kept";
  return text.str();
}

}  // namespace tilewise
