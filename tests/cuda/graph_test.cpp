#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/device_problem.h"

namespace tilewise::test::graph_test {
namespace {

using cuda::check_cuda;

// A graph made of what `issue` puts on a stream. Under this mode of capture every call that allocates or
// synchronises is an error, so that a graph at all shows that there was none.
class Graph {
 public:
  template <typename Issue>
  Graph(const Stream& stream, const Issue& issue) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "beginning a capture");
    issue();
    check_cuda(cudaStreamEndCapture(stream, &graph_), "ending a capture");
    check_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "instantiating a graph");
  }
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void replay(const Stream& stream) const { check_cuda(cudaGraphLaunch(executable_, stream), "a replay"); }

  std::vector<cudaGraphNodeType> nodes() const {
    std::size_t count = 0;
    check_cuda(cudaGraphGetNodes(graph_, nullptr, &count), "counting nodes");
    std::vector<cudaGraphNode_t> nodes(count);
    check_cuda(cudaGraphGetNodes(graph_, nodes.data(), &count), "reading nodes");
    std::vector<cudaGraphNodeType> types(count);
    for (std::size_t n = 0; n < count; ++n) {
      check_cuda(cudaGraphNodeGetType(nodes[n], &types[n]), "reading a node");
    }
    return types;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

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
    for (const auto& make_problem : {dense_problem, featured_problem}) {
      // Shapes and options, dropout's seed among them, are part of a graph; data is not.
      const AttentionOptions options = make_problem(21, dtype, {}).options;
      if (!reason_against(make_problem(21, dtype, {}), GetParam()).empty()) continue;
      const auto problem_of = [&](std::uint64_t seed) {
        RandomProblem problem = make_problem(seed, dtype, {});
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
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const auto problem_of = [&](std::uint64_t seed) {
      RandomProblem problem = featured_problem(24, dtype);
      problem.dropout_seed = seed_words({.seed = seed, .offset = seed << 40});
      return problem;
    };
    if (const std::string reason = reason_against(problem_of(1), GetParam()); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
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
}

INSTANTIATE_TEST_SUITE_P(Kernels, GraphCapture, testing::ValuesIn(cuda_kernels()), kernel_name);

}  // namespace
}  // namespace tilewise::test::graph_test
