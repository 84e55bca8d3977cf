#include "norm/problem.h"

#include <sstream>

namespace tilewise {

std::string to_string(const NormProblem& problem) {
  std::ostringstream text;
  text << (problem.norm == Norm::rms ? "rms norm " : "layer norm ")
       << (problem.pass == Pass::forward ? "forward " : "backward ") << to_string(problem.dtype) << " M"
       << problem.rows << " D" << problem.dim << " on " << to_string(problem.device);
  if (problem.residual) text << ", residual";
  if (problem.weight) text << ", weight";
  if (problem.bias) text << ", bias";
  if ((problem.weight || problem.bias) && problem.weight_dtype != problem.dtype) {
    text << " in " << to_string(problem.weight_dtype);
  }
  if (problem.pass == Pass::backward && !problem.x_gradient) text << ", without dx";
  if (problem.weight_gradient) text << ", weight gradient";
  return text.str();
}

}  // namespace tilewise
