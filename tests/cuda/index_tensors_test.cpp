#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include "cuda/attention/device_problem.h"
#include "cuda/layer/device_call.h"
#include "layer/rope_case.h"
#include "support/garbage.h"

// Garbage in every index tensor: no kernel leaves its tensors, leaves rows unwritten, or waits for ever.

namespace tilewise::test::index_tensors_test {
namespace {

/// Random problems of the kinds that a kernel takes.
RandomProblem problem_for(const std::string& kernel, std::uint64_t seed) {
  if (kernel == "wgmma") {
    switch (seed % 3) {
      case 0: return random_wgmma_problem(seed);
      case 1: return random_wgmma_backward_problem(seed);
      default: return random_mma_f32_problem(seed);
    }
  }
  if (kernel == "mma" && seed % 3 != 0) {
    return seed % 3 == 1 ? random_mma_problem(seed) : random_mma_f32_problem(seed);
  }
  return random_problem(seed);
}

/// A stream that does not come to an end cannot be stopped, so the process ends. Under a sanitizer all is
/// many times as slow.
void wait_or_abort(const Stream& stream, std::uint64_t seed) {
  using namespace std::chrono;
  const auto begin = steady_clock::now();
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
    if (steady_clock::now() - begin > minutes(2)) {
      std::fprintf(stderr, "seed %llu: the call does not come to an end\n",
                   static_cast<unsigned long long>(seed));
      std::_Exit(1);
    }
    std::this_thread::sleep_for(microseconds(50));
  }
  stream.wait();  // throws what went wrong
}

class GarbageIndices : public CudaKernelTest {
 protected:
#ifdef TILEWISE_EMULATOR
  static constexpr int problems = 25;
#else
  static constexpr int problems = 250;  // two calls each, where there is a backward
#endif
  static constexpr std::uint64_t most_seeds = 20'000;

  /// Calls body with as many problems as a kernel takes.
  static void for_each_problem(const std::function<void(const RandomProblem&)>& body) {
    int taken = 0;
    for (std::uint64_t seed = 1; seed <= most_seeds && taken < problems && !HasFatalFailure(); ++seed) {
      const RandomProblem problem = garbled(problem_for(GetParam(), seed));
      if (!has_indices(problem) || !reason_against(problem, GetParam()).empty()) continue;
      SCOPED_TRACE("seed " + std::to_string(seed) + ": " + to_string(problem));
      body(problem);
      ++taken;
    }
    if (GetParam() == "wide") {
      EXPECT_EQ(taken, 0);
      GTEST_SKIP() << "takes no index tensors";
    }
    EXPECT_EQ(taken, problems);
  }
};

// Each tensor has an allocation of its own, so that compute-sanitizer sees who reads past one.
TEST_P(GarbageIndices, KeepKernelsInsideTheirAllocations) {
  const Stream stream;
  for_each_problem([&](const RandomProblem& problem) {
    const DeviceProblem on_device(problem, GetParam(),
                                  problem.options.deterministic ? Bits::same : Bits::any);
    on_device.poison(stream);
    on_device.forward(stream);
    wait_or_abort(stream, problem.seed);
    on_device.backward(stream);
    wait_or_abort(stream, problem.seed);
  });
}

// Guards stand around each tensor, in its gaps and around the workspace; and every row is written.
TEST_P(GarbageIndices, LeaveGuardsAloneAndNoRowUnwritten) {
  for_each_problem([&](const RandomProblem& problem) {
    const OutputBuffers outputs = make_outputs(problem);
    AttentionOptions options = problem.options;
    options.kernel = GetParam();
    ASSERT_NO_THROW(run_forward_on_cuda(problem.inputs(), options, outputs.view()));
    EXPECT_TRUE(outputs.o.all_written());
    EXPECT_TRUE(outputs.lse.all_written());
    if (!reason_against(problem, GetParam(), Pass::backward).empty()) return;
    const GradientBuffers gradients = make_gradients(problem);
    ASSERT_NO_THROW(
        run_backward_on_cuda(problem.inputs(), options, backward_arguments(problem, outputs, gradients)));
    for (const Buffer* gradient : {&gradients.dq, &gradients.dk, &gradients.dv}) {
      EXPECT_TRUE(!gradient->given() || gradient->all_written());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Kernels, GarbageIndices, testing::ValuesIn(cuda_kernels()), kernel_name);

class GarbageGradients : public CudaKernelFixture<90, 90> {};

// The same of the backward of wgmma, with o and lse of another kernel: it takes more than its forward does.
TEST_F(GarbageGradients, StayInsideTheirTensors) {
#ifdef TILEWISE_EMULATOR
  constexpr int problems = 25;
#else
  constexpr int problems = 250;
#endif
  int taken = 0;
  for (std::uint64_t seed = 1; seed <= 20'000 && taken < problems; ++seed) {
    const RandomProblem problem = garbled(random_wgmma_features_problem(seed));
    if (!has_indices(problem) || !reason_against(problem, "wgmma", Pass::backward).empty()) continue;
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + to_string(problem));
    ++taken;
    const OutputBuffers outputs = make_outputs(problem);
    const GradientBuffers gradients = make_gradients(problem);
    AttentionOptions options = problem.options;
    options.kernel = "fused";
    ASSERT_NO_THROW(run_forward_on_cuda(problem.inputs(), options, outputs.view()));
    options.kernel = "wgmma";
    ASSERT_NO_THROW(
        run_backward_on_cuda(problem.inputs(), options, backward_arguments(problem, outputs, gradients)));
    for (const Buffer* gradient : {&gradients.dq, &gradients.dk, &gradients.dv}) {
      EXPECT_TRUE(!gradient->given() || gradient->all_written());
    }
  }
  EXPECT_EQ(taken, problems);
}

/// What a call says; empty where it is taken.
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

class CheckedIndices : public CudaLayerTest {};

TEST_F(CheckedIndices, OfAttentionAreWhatTheCpuSaysTheyAre) {
  int faults = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    RandomProblem problem = random_problem(seed);
    if (!has_indices(problem)) continue;
    if (seed % 3 != 0) problem = garbled(std::move(problem));
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + to_string(problem));
    const OutputBuffers outputs = make_outputs(problem);
    const std::string expected =
        message_of([&] { run_forward(problem.inputs(), problem.options, outputs.view()); });
    AttentionOptions options = problem.options;
    options.kernel = "fused";
    const std::string found = message_of(
        [&] { run_forward_on_cuda(problem.inputs(), options, outputs.view(), {.check_indices = true}); });
    ASSERT_EQ(found, expected);
    faults += found.empty() ? 0 : 1;
  }
  EXPECT_GT(faults, 30);
}

/// A rotary embedding with garbage in its index tensors.
struct GarbledRope {
  rope_case::Problem problem;
  bool by_ends = false;

  explicit GarbledRope(std::uint64_t seed) {
    Random random(seed);
    const std::int64_t dim = random.chance(0.5) ? 16 * random.between(1, 8) : random.between(2, 70);
    const rope_case::Sizes n{random.between(1, 3),
                             random.between(1, 9),
                             random.between(1, 3),
                             random.between(1, 20),
                             dim,
                             random.chance(0.5) ? dim / 16 * 16 : dim / 2 * 2,
                             random.chance(0.5) ? 8 * random.between(1, 9) : random.between(1, 40)};
    problem = rope_case::random_problem(random, n, random.pick({DType::f32, DType::f16, DType::bf16}));
    add_cache(problem, random, n, random.chance(0.5));
    by_ends = random.chance(0.5);
    garble(random, problem.positions, rope_case::table_rows);
    garble(random, problem.cache_starts, problem.k_cache.extent(2));
    garble(random, problem.page_table, problem.k_cache.extent(0));
  }

  void run(const Context& context) const {
    RopeInputs in = problem.inputs();
    RopeOutputs out = problem.outputs();
    if (by_ends) std::swap(in.cache_starts, in.cache_ends);
    call_on(
        context,
        {&in.q, &in.k, &in.v, &in.cos, &in.sin, &in.positions, &in.cache_starts, &in.cache_ends,
         &in.page_table, &out.q, &out.k, &out.k_cache, &out.v_cache},
        [&](const Context& c) { return rope_workspace(in, problem.options, out, c); },
        [&](const Context& c) { rope(in, problem.options, out, c); });
  }
};

class GarbageRope : public CudaLayerTest {};

// Gaps between rows of the caches, and what stands around them, are as they were.
TEST_F(GarbageRope, WritesInsideTheCachesAlone) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const GarbledRope garbled(seed);
    garbled.run(cuda_context());
    const rope_case::Problem& p = garbled.problem;
    for (const Buffer* buffer : {&p.out_q, &p.out_k, &p.k_cache, &p.v_cache}) {
      if (!buffer->given()) continue;
      EXPECT_TRUE(buffer->guards_intact());
      EXPECT_TRUE(buffer->all_written());
    }
  }
}

TEST_F(CheckedIndices, OfRopeAreWhatTheCpuSaysTheyAre) {
  int faults = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const GarbledRope garbled(seed);
    const std::string expected = message_of([&] { garbled.run(serial_context()); });
    Context context = cuda_context();
    context.check_indices = true;
    ASSERT_EQ(message_of([&] { garbled.run(context); }), expected);
    faults += expected.empty() ? 0 : 1;
  }
  EXPECT_GT(faults, 30);
}

}  // namespace
}  // namespace tilewise::test::index_tensors_test
