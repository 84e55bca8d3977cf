#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/device_problem.h"
#include "property/check.h"

namespace tilewise::test {
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

TEST_P(EveryKernel, IsWithinTheContractInAllTypesAndBothPasses) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    SCOPED_TRACE(to_string(dtype));
    for (const RandomProblem& problem : {dense_problem(1, dtype), featured_problem(2, dtype)}) {
      if (const std::string reason = reason_against(problem, GetParam()); !reason.empty()) {
        GTEST_SKIP() << reason;
      }
      const Checker checker(problem, 2);
      for (const std::string& failure : checker.check(subject_of(GetParam()))) ADD_FAILURE() << failure;
    }
  }
}

TEST_P(EveryKernel, GivesTheSameBitsAgain) {
  const Sizes many_blocks{.b = 3, .hq = 8, .hkv = 2, .sq = 515, .sk = 770, .d = 64, .dv = 64};
  const Stream stream;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const RandomProblem& problem :
         {dense_problem(3, dtype, many_blocks), featured_problem(4, dtype, many_blocks)}) {
      if (const std::string reason = reason_against(problem, GetParam()); !reason.empty()) {
        GTEST_SKIP() << reason;
      }
      const DeviceProblem on_device(problem, GetParam());
      const std::vector<std::byte> first = on_device.run(stream);
      for (int run = 0; run < 5; ++run) EXPECT_TRUE(on_device.run(stream) == first) << to_string(dtype);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, EveryKernel, testing::ValuesIn(cuda_kernels()), kernel_name);

}  // namespace
}  // namespace tilewise::test
