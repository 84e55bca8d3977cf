#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "cuda/attention/graph.h"
#include "cuda/attention/plain_f32.h"

namespace tilewise::test::graph_test {
namespace {

class GraphCapture : public CudaKernelTest {};

TEST_P(GraphCapture, HoldsKernelsAlone) {
  const RandomProblem problem = suited_problem(GetParam(), 20, types.front());
  const DeviceProblem on_device(problem, GetParam());
  const Stream stream;
  const Graph graph(stream, [&] {
    on_device.forward(stream);
    on_device.backward(stream);
  });
  const std::vector<cudaGraphNodeType> nodes = graph.nodes();
  EXPECT_FALSE(nodes.empty());
  for (const cudaGraphNodeType type : nodes) {
    // No copies from or to the host, no callbacks, no allocations.
    EXPECT_TRUE(type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemset) << "node type " << type;
  }
}

TEST_P(GraphCapture, ReplaysWithNewData) {
  for (const DType dtype : types) {
    for (const bool featured : {false, true}) {
      const auto make_problem = [&](std::uint64_t seed) {
        return featured ? suited_problem(GetParam(), seed, dtype)
                        : dense_problem(seed, dtype, sizes_for(GetParam()));
      };
      // Shapes and options, dropout's seed among them, are part of a graph; data is not.
      const AttentionOptions options = make_problem(21).options;
      const auto problem_of = [&](std::uint64_t seed) {
        RandomProblem problem = make_problem(seed);
        problem.options = options;
        return problem;
      };
      const DeviceProblem captured(problem_of(21), GetParam());
      const Stream stream;
      const Graph graph(stream, [&] {
        captured.forward(stream);
        captured.backward(stream);
      });
      for (const std::uint64_t seed : {22, 23}) {
        const DeviceProblem direct(problem_of(seed), GetParam());
        const std::vector<std::byte> expected = direct.run(stream);
        captured.upload(problem_of(seed));
        captured.poison(stream);
        graph.replay(stream);
        stream.wait();
        EXPECT_TRUE(captured.results() == expected) << to_string(dtype) << ", seed " << seed;
      }
    }
  }
}

TEST_P(GraphCapture, DrawsDropoutAnewWhereItsSeedInMemoryChanges) {
  int with_dropout = 0;
  for (const DType dtype : types) {
    const auto problem_of = [&](std::uint64_t seed) {
      RandomProblem problem = suited_problem(GetParam(), 24, dtype);
      problem.dropout_seed = seed_words({.seed = seed, .offset = seed << 40});
      return problem;
    };
    const RandomProblem first = problem_of(1);  // without dropout where the kernel takes none in this type
    if (!(first.options.dropout.probability > 0) || !reason_against(first, GetParam()).empty()) continue;
    ++with_dropout;
    const DeviceProblem captured(problem_of(1), GetParam());
    const Stream stream;
    const Graph graph(stream, [&] {
      captured.forward(stream);
      captured.backward(stream);
    });
    std::vector<std::vector<std::byte>> replays;
    for (const std::uint64_t seed : {2, 3, 2}) {
      captured.upload(problem_of(seed));
      captured.poison(stream);
      graph.replay(stream);
      stream.wait();
      replays.push_back(captured.results());
      RandomProblem by_value = problem_of(seed);
      by_value.dropout_seed = {};
      by_value.options.dropout.seed = seed;
      by_value.options.dropout.offset = seed << 40;
      EXPECT_TRUE(replays.back() == DeviceProblem(by_value, GetParam()).run(stream))
          << to_string(dtype) << ", seed " << seed;
    }
    EXPECT_TRUE(replays[0] == replays[2] && replays[0] != replays[1]) << to_string(dtype);
  }
  EXPECT_GT(with_dropout, 0);
}

// A plan is made once, on tensors of its own, and run on those of others.
TEST_P(GraphCapture, HoldsThePlanOfOtherTensors) {
  for (const DType dtype : types) {
    const RandomProblem first = suited_problem(GetParam(), 25, dtype);
    const auto problem_of = [&](std::uint64_t seed) {
      RandomProblem problem = suited_problem(GetParam(), seed, dtype);
      problem.options = first.options;
      return problem;
    };
    const DeviceProblem planned(first, GetParam());
    const AttentionPlan forward = planned.forward_plan();
    const std::optional<AttentionBackwardPlan> backward = planned.backward_plan();
    EXPECT_EQ(forward.kernel(), GetParam());
    const DeviceProblem captured(problem_of(26), GetParam());
    const Stream stream;
    const Graph graph(stream, [&] { captured.run(forward, backward, stream); });
    for (const std::uint64_t seed : {26, 27}) {
      const std::vector<std::byte> expected = DeviceProblem(problem_of(seed), GetParam()).run(stream);
      captured.upload(problem_of(seed));
      captured.poison(stream);
      graph.replay(stream);
      stream.wait();
      EXPECT_TRUE(captured.results() == expected) << to_string(dtype) << ", seed " << seed;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, GraphCapture, testing::ValuesIn(cuda_kernels()), kernel_name);

// A decoding loop: one plan, one graph, and keys that become more.
TEST(DecodingGraph, ReplaysThePlanWithOtherKeyLengths) {
  if (const CudaPresence cuda = cuda_presence(); !cuda.present) GTEST_SKIP() << cuda.reason;
  const auto problem_of = [](const std::vector<double>& lengths) {
    RandomProblem problem =
        dense_problem(28, DType::bf16, {.b = 3, .hq = 8, .hkv = 2, .sq = 1, .sk = 200, .d = 64, .dv = 64});
    problem.options.alignment = Alignment::bottom_right;
    problem.options.causal = true;
    problem.key_lengths = Buffer(DType::i32, {3});
    problem.key_lengths.set_values(lengths);
    problem.asked.backward = false;
    return problem;
  };
  for (const std::string kernel : {"auto", "fused"}) {
    const DeviceProblem captured(problem_of({1, 1, 1}), kernel);
    const AttentionPlan plan = captured.forward_plan();
    const Stream stream;
    const Graph graph(stream, [&] { captured.run(plan, {}, stream); });
    for (const double more : {0, 1, 64, 130}) {
      const RandomProblem problem = problem_of({1 + more, 70 + more, more});
      const DeviceProblem direct(problem, kernel);
      direct.poison(stream);
      direct.forward(stream);
      captured.upload(problem);
      captured.poison(stream);
      graph.replay(stream);
      stream.wait();
      EXPECT_TRUE(captured.outputs() == direct.outputs()) << kernel << ", " << more << " keys more";
    }
  }
}

class PlainF32Graph : public CudaKernelFixture<80>, public testing::WithParamInterface<std::string> {};

TEST_P(PlainF32Graph, ReplaysWithNewDataWithinTheContract) {
  const DeviceProblem captured(plain_f32_problem(27, Data::usual), GetParam(), Bits::any);
  const Stream stream;
  const Graph graph(stream, [&] {
    captured.forward(stream);
    captured.backward(stream);
  });
  for (const cudaGraphNodeType type : graph.nodes()) {
    EXPECT_TRUE(type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemset) << "node type " << type;
  }
  std::uint64_t seed = 28;
  for (const Data data : {Data::mixed, Data::sharp, Data::usual}) {
    const RandomProblem problem = plain_f32_problem(seed++, data);
    SCOPED_TRACE(to_string(problem));
    const Checker checker(problem, all_cores());
    captured.upload(problem);
    for (int replay = 0; replay < 3; ++replay) {
      captured.poison(stream);
      graph.replay(stream);
      stream.wait();
      expect_within_contract(checker, captured, GetParam());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, PlainF32Graph, testing::ValuesIn(plain_f32_kernels()), kernel_name);

}  // namespace
}  // namespace tilewise::test::graph_test
