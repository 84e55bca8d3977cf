#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/device_tensors.h"
#include "cuda/runtime/check.h"

namespace tilewise::test {

/// A graph made of what `issue` puts on a stream. Under the global mode of capture every call that allocates
/// or synchronises is an error, whichever thread makes it, so that a graph at all shows that there was none.
class Graph {
 public:
  template <typename Issue>
  Graph(const Stream& stream, const Issue& issue, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
    cuda::check_cuda(cudaStreamBeginCapture(stream, mode), "beginning a capture");
    issue();
    cuda::check_cuda(cudaStreamEndCapture(stream, &graph_), "ending a capture");
    cuda::check_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "instantiating a graph");
  }
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void replay(const Stream& stream) const {
    cuda::check_cuda(cudaGraphLaunch(executable_, stream), "a replay");
  }

  std::vector<cudaGraphNodeType> nodes() const {
    std::size_t count = 0;
    cuda::check_cuda(cudaGraphGetNodes(graph_, nullptr, &count), "counting nodes");
    std::vector<cudaGraphNode_t> nodes(count);
    cuda::check_cuda(cudaGraphGetNodes(graph_, nodes.data(), &count), "reading nodes");
    std::vector<cudaGraphNodeType> types(count);
    for (std::size_t n = 0; n < count; ++n) {
      cuda::check_cuda(cudaGraphNodeGetType(nodes[n], &types[n]), "reading a node");
    }
    return types;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace tilewise::test
