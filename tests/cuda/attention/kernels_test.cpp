#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "property/check.h"

namespace tilewise::test::kernels_test {
namespace {

// Random problems over the whole contract are tilewise_property's; these show that each kernel is there under
// its name, right, and repeatable where many blocks run at once.

Subject subject_of(const std::string& kernel) {
  return {.kernel = kernel,
          .device = first_device,
          .forward = run_forward_on_cuda,
          .backward = run_backward_on_cuda};
}

class EveryKernel : public CudaKernelTest {};

TEST_P(EveryKernel, IsWithinTheContractInItsTypesAndPasses) {
  for (const DType dtype : types) {
    SCOPED_TRACE(to_string(dtype));
    for (const RandomProblem& problem :
         {dense_problem(1, dtype, sizes_for(GetParam())), suited_problem(GetParam(), 2, dtype)}) {
      const Checker checker(problem, all_cores());
      Passes ran;
      for (const std::string& failure : checker.check(subject_of(GetParam()), &ran)) ADD_FAILURE() << failure;
      EXPECT_TRUE(ran.forward);
      const bool refused = GetParam() == "wgmma" && dtype == DType::f32;  // it has one for f16 and bf16
      EXPECT_EQ(ran.backward, !refused);
    }
  }
}

TEST_P(EveryKernel, GivesTheSameBitsAgain) {
  // A thread a pair makes many blocks of a ninth of the pairs, and takes long for each. One head after
  // another has the products of `wide`.
  const Sizes many_blocks =
      GetParam() == "naive"  ? Sizes{.b = 3, .hq = 8, .hkv = 2, .sq = 172, .sk = 257, .d = 64, .dv = 64}
      : GetParam() == "wide" ? Sizes{.b = 1, .hq = 4, .hkv = 2, .sq = 515, .sk = 772, .d = 320, .dv = 288}
                             : Sizes{.b = 3, .hq = 8, .hkv = 2, .sq = 515, .sk = 772, .d = 64, .dv = 64};
  const Stream stream;
  for (const DType dtype : types) {
    for (const RandomProblem& problem :
         {dense_problem(3, dtype, many_blocks), suited_problem(GetParam(), 4, dtype, many_blocks)}) {
      const DeviceProblem on_device(problem, GetParam());
      const std::vector<std::byte> first = on_device.run(stream);
      for (int run = 0; run < 5; ++run) EXPECT_TRUE(on_device.run(stream) == first) << to_string(dtype);
    }
  }
}

// Kernels may round factors to TF32 where that is allowed, and lose no more than it would.
TEST_P(EveryKernel, StaysNearFullPrecisionWhereTf32IsAllowed) {
  const Stream stream;
  Sizes sizes = sizes_for(GetParam());
  if (GetParam() != "wide") {
    sizes.sq = 130;
    sizes.sk = 200;
  }
  RandomProblem problem = dense_problem(5, DType::f32, sizes);
  if (const std::string reason = reason_against(problem, GetParam()); !reason.empty()) GTEST_SKIP() << reason;
  const auto values = [&](Precision precision) {
    problem.options.precision = precision;
    const std::vector<std::byte> bytes = DeviceProblem(problem, GetParam()).run(stream);
    std::vector<float> floats(bytes.size() / sizeof(float));
    std::memcpy(floats.data(), bytes.data(), bytes.size());
    return floats;
  };
  const std::vector<float> full = values(Precision::standard);
  const std::vector<float> allowed = values(Precision::allow_tf32);
  ASSERT_EQ(full.size(), allowed.size());
  double error = 0;
  double size = 0;
  for (std::size_t n = 0; n < full.size(); ++n) {
    error += std::pow(static_cast<double>(full[n]) - static_cast<double>(allowed[n]), 2);
    size += std::pow(static_cast<double>(full[n]), 2);
  }
  EXPECT_LT(std::sqrt(error / size), 1.0 / 2048);  // half a unit of TF32
}

INSTANTIATE_TEST_SUITE_P(Kernels, EveryKernel, testing::ValuesIn(cuda_kernels()), kernel_name);

}  // namespace
}  // namespace tilewise::test::kernels_test
