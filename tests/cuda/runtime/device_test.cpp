#include "cuda/runtime/device.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "attention/kernel.h"
#include "cuda/runtime/cublaslt.h"
#include "ffn/kernel.h"
#include "gemm/kernel.h"
#include "norm/kernel.h"
#include "rope/kernel.h"

// What is said of a device, without one: the properties are made up.
namespace tilewise::cuda {
namespace {

constexpr Device with_code{Device::Type::cuda, 62}, without_code{Device::Type::cuda, 63};

void assume_devices() {
  DeviceProperties properties{.multiprocessors = 100, .compute_capability = 121, .shared_bytes = 100 << 10};
  assume_device(with_code.index, properties);
  properties.has_code = false;
  assume_device(without_code.index, properties);
}

// Whatever takes the problem where there is code says that there is none on the other device.
template <typename K>
void expect_no_code(std::span<const K> kernels, typename K::Problem problem) {
  assume_devices();
  int able = 0;
  for (const K& kernel : kernels) {
    problem.device = with_code;
    const bool takes = kernel.supports(problem).empty();
    problem.device = without_code;
    const std::string reason = kernel.supports(problem);
    EXPECT_FALSE(reason.empty()) << kernel.name << " takes " << to_string(problem);
    if (!takes) continue;
    ++able;
    const bool composed = kernel.name == "chunked";  // of products, which it asks
    EXPECT_EQ(reason, composed ? "no kernel of gemm computes its products on cuda:63"
                               : "this build has no code for compute capability 12.1")
        << kernel.name;
  }
  EXPECT_GT(able, 0) << to_string(problem);
  EXPECT_THROW(choose_kernel(kernels, problem, "auto"), Unsupported);
}

TEST(DeviceWithoutCode, is_taken_by_no_kernel) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      expect_no_code(attention_kernel_list(), {.pass = pass,
                                               .dtype = dtype,
                                               .batch = 1,
                                               .heads_q = 2,
                                               .heads_kv = 2,
                                               .length_q = 64,
                                               .length_k = 64,
                                               .dim_qk = 64,
                                               .dim_v = 64,
                                               .queries = 64,
                                               .most_keys = 64,
                                               .aligned = true});
      expect_no_code(norm_kernel_list(),
                     {.pass = pass, .dtype = dtype, .weight_dtype = dtype, .rows = 4, .dim = 64});
      expect_no_code(ffn_kernel_list(),
                     {.pass = pass, .dtype = dtype, .tokens = 64, .embed = 64, .hidden = 64, .out = 64});
    }
    expect_no_code(gemm_kernel_list(), {.dtype = dtype, .out_dtype = dtype, .m = 64, .n = 64, .k = 64});
    expect_no_code(
        rope_kernel_list(),
        {.dtype = dtype, .batch = 1, .heads_q = 1, .heads_kv = 1, .length = 4, .dim = 64, .rotary_dim = 64});
  }
}

TEST(DeviceWithLittleSharedMemory, gets_mma_in_f32_only_where_its_tiles_fit) {
  assume_devices();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    AttentionProblem problem{.pass = pass,
                             .device = with_code,
                             .dtype = DType::f32,
                             .batch = 1,
                             .heads_q = 2,
                             .heads_kv = 2,
                             .length_q = 2048,
                             .length_k = 2048,
                             .dim_qk = 64,
                             .dim_v = 64,
                             .queries = 2048,
                             .most_keys = 2048,
                             .aligned = true};
    for (const std::int64_t dim : {64, 128, 136, 256}) {
      problem.dim_qk = problem.dim_v = dim;
      const bool room = pass == Pass::forward && dim <= 128;  // in 100 KiB
      EXPECT_EQ(choose_kernel(attention_kernel_list(), problem, "auto").name == "mma", room)
          << to_string(problem);
    }
  }
}

TEST(CublasLt, that_makes_no_handle_is_missing_and_says_why) {
  CublasLt lt{};
  lt.create = [](CublasLt::Handle* handle) {
    *handle = reinterpret_cast<CublasLt::Handle>(std::uintptr_t{64});
    return 3;
  };
  CublasLt::Handle handle = nullptr;
  EXPECT_EQ(make_handle(lt, handle), "cuBLASLt failed to create a handle: status 3");
  EXPECT_EQ(handle, nullptr);
  lt.create = [](CublasLt::Handle* made) {
    *made = reinterpret_cast<CublasLt::Handle>(std::uintptr_t{64});
    return 0;
  };
  EXPECT_EQ(make_handle(lt, handle), "");
  EXPECT_NE(handle, nullptr);
}

// There is no device of this number, whatever there is: neither way ends in an exception of the library's.
TEST(CublasLt, is_missing_for_a_device_that_cannot_be_made_current) {
  assume_devices();
  EXPECT_NE(missing_cublaslt(with_code.index), "");
  const GemmProblem problem{.device = with_code,
                            .dtype = DType::f16,
                            .out_dtype = DType::f16,
                            .m = 64,
                            .n = 64,
                            .k = 64,
                            .aligned = true,
                            .as_blas = true};
  EXPECT_EQ(cublaslt_gemm.supports(problem), missing_cublaslt(with_code.index));
  EXPECT_EQ(choose_kernel(gemm_kernel_list(), problem, "auto").name, "mma");
}

}  // namespace
}  // namespace tilewise::cuda
