#pragma once

#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "property/check.h"

namespace tilewise::test {

// The default backward of f32, whose atomic additions come in any order: no run has the bits of another, and
// all are held to the contract. Row states come from o and lse, those of short sequences are made anew, peaks
// are mended, and mma leaves heads to fused that its parts do not fit. Which of that there is to do hangs on
// the data alone.

inline constexpr Sizes plain_f32_sizes{.b = 3, .hq = 4, .hkv = 2, .sq = 150, .sk = 203, .d = 64, .dv = 64};

/// Kernels that have such a backward.
inline std::vector<std::string> plain_f32_kernels() { return {"fused", "mma"}; }

enum class Data {
  usual,
  sharp,  ///< in most rows one weight is all but 1
  mixed,  ///< the first head's rows mix sizes, so that it is unfit for mma's parts
};

/// Dense, with key lengths, of which one is short: another one with each seed.
inline RandomProblem plain_f32_problem(std::uint64_t seed, Data data) {
  constexpr Sizes n = plain_f32_sizes;
  RandomProblem problem = dense_problem(seed, DType::f32, n);
  const auto change = [](Buffer& buffer, const auto& factor_of) {
    std::vector<double> values = buffer.values();
    for (std::size_t at = 0; at < values.size(); ++at) values[at] *= factor_of(at);
    buffer.set_values(values);
  };
  if (data == Data::sharp) change(problem.q, [](std::size_t) { return 60.0; });
  if (data == Data::mixed) {
    const auto dim = static_cast<std::size_t>(n.d);
    const auto factor = [&](std::size_t at, std::int64_t rows) {
      const bool first_head = at < static_cast<std::size_t>(rows) * dim;
      return first_head && at % dim % 3 == 0 ? 1e8 : 1.0;
    };
    change(problem.q, [&](std::size_t at) { return factor(at, n.sq); });
    change(problem.k, [&](std::size_t at) { return 1 / factor(at, n.sk); });
  }
  std::vector<double> lengths = {203, 131, 97};
  lengths[seed % 3] = 40;
  problem.key_lengths = Buffer(DType::i32, {n.b});
  problem.key_lengths.set_values(lengths);
  return problem;
}

/// Holds what a problem on the device has computed to the contract. The caller has waited for it.
inline void expect_within_contract(const Checker& checker, const DeviceProblem& computed,
                                   const std::string& kernel) {
  const Subject subject{
      .kernel = kernel,
      .device = first_device,
      .repetition = 0,
      .forward = [&](const AttentionInputs&, const AttentionOptions&, const AttentionOutputs& outputs,
                     const Context&) { computed.download(outputs); },
      .backward = [&](const AttentionInputs&, const AttentionOptions&, const AttentionGradients& gradients,
                      const Context&) { computed.download(gradients); }};
  Passes ran;
  for (const std::string& failure : checker.check(subject, &ran)) ADD_FAILURE() << failure;
  EXPECT_TRUE(ran.forward && ran.backward);
}

}  // namespace tilewise::test
