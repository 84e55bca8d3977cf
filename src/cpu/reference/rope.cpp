#include <cstring>

#include "core/load.h"
#include "core/parallel.h"
#include "rope/kernel.h"

namespace tilewise::cpu {
namespace {

// The positions of the two elements of pair n in a row.
struct Pair {
  std::int64_t x, y;
};

Pair pair_of(const RopeProblem& problem, std::int64_t n) {
  if (problem.pairs == RopePairs::interleaved) return {2 * n, 2 * n + 1};
  return {n, n + problem.rotary_dim / 2};
}

// Rotates one row. `to` may be `from`; `to` and `to_cache` may each be null.
void rotate_row(const RopeCall& call, const std::byte* from, std::byte* to, std::byte* to_cache,
                std::int64_t b, std::int64_t s) {
  const RopeProblem& problem = call.problem;
  const std::int64_t row = call.angle_row(b, s);
  const auto store = [&](std::int64_t at, double value) {
    if (to != nullptr) store_element(to, problem.dtype, at, value);
    if (to_cache != nullptr) store_element(to_cache, problem.dtype, at, value);
  };
  for (std::int64_t n = 0; n < problem.rotary_dim / 2; ++n) {
    const auto [at_x, at_y] = pair_of(problem, n);
    const double cos = load_element(call.cos.at(b, row), call.cos.dtype, n);
    double sin = load_element(call.sin.at(b, row), call.sin.dtype, n);
    if (problem.inverse) sin = -sin;
    const double x = load_element(from, problem.dtype, at_x);
    const double y = load_element(from, problem.dtype, at_y);
    store(at_x, x * cos - y * sin);
    store(at_y, y * cos + x * sin);
  }
  for (std::int64_t d = problem.rotary_dim; d < problem.dim; ++d) {
    store(d, load_element(from, problem.dtype, d));
  }
}

std::string supports(const RopeProblem& problem) {
  return problem.device.type == Device::Type::cpu ? "" : "runs on the CPU only";
}

std::size_t workspace(const RopeCall&, const Context&) { return 0; }

void launch(const RopeCall& call, const Context& context) {
  const RopeProblem& problem = call.problem;
  for_each_task(context.parallel_for, problem.batch * problem.length, [&](std::int64_t, std::int64_t token) {
    const std::int64_t b = token / problem.length, s = token % problem.length;
    for (std::int64_t h = 0; h < problem.heads_q; ++h) {
      rotate_row(call, call.q.at(b, h, s), call.out_q.at(b, h, s), nullptr, b, s);
    }
    for (std::int64_t h = 0; h < problem.heads_kv; ++h) {
      rotate_row(call, call.k.at(b, h, s), call.out_k.wanted ? call.out_k.at(b, h, s) : nullptr,
                 call.k_cache.wanted ? call.cache_row(call.k_cache, b, h, s) : nullptr, b, s);
      if (call.v.wanted) {
        std::memcpy(call.cache_row(call.v_cache, b, h, s), call.v.at(b, h, s),
                    static_cast<std::size_t>(problem.dim_v) * size_of(problem.dtype));
      }
    }
  });
}

}  // namespace

constinit const RopeKernel reference_rope = {
    .name = "reference", .supports = supports, .workspace = workspace, .launch = launch};

}  // namespace tilewise::cpu
