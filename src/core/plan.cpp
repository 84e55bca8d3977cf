#include "core/plan.h"

#include "core/check.h"

namespace tilewise {

std::string_view PlannedContext::lasting(std::string_view level) {
  for (const std::string_view name : simd_levels()) {
    if (name == level) return name;
  }
  return {};
}

void PlannedContext::reject(const Context& context) const {
  if (context.device != device) {
    tilewise::reject("device", to_string(device) + ", as planned", to_string(context.device));
  }
  if (context.parallel_for.run == nullptr) tilewise::reject("parallel_for.run", "a function", "none");
  if (context.simd_level != simd_level) {
    tilewise::reject("simd_level", "'" + std::string(simd_level) + "', as planned",
                     "'" + std::string(context.simd_level) + "'");
  }
  tilewise::reject("parallel_for.threads", "from 1 to " + std::to_string(threads) + ", as planned",
                   context.parallel_for.threads);
}

}  // namespace tilewise
