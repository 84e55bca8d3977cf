#include "cuda/runtime/check_indices.h"

#include <algorithm>

#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda {
namespace {

constexpr const char* check_name = "tilewise check of index tensors";
constexpr int check_threads = 128;

__device__ AttentionFault fault_of(const AttentionIndices& indices, std::int64_t item) {
  SearchedBlocks blocks;
  return indices.fault(item, blocks);
}
__device__ RopeFault fault_of(const RopeIndices& indices, std::int64_t item) { return indices.fault(item); }

/// Finds the number of the first item with a fault; leaves *first as it is if there is none.
template <typename Indices>
__global__ void __launch_bounds__(check_threads)
    find_fault(const __grid_constant__ Indices indices, std::int64_t items, unsigned long long* first) {
  const std::int64_t step = std::int64_t{gridDim.x} * check_threads;
  for (std::int64_t item = std::int64_t{blockIdx.x} * check_threads + threadIdx.x; item < items;
       item += step) {
    if (!fault_of(indices, item).found()) continue;
    atomicMin(first, static_cast<unsigned long long>(item));
    return;  // the thread's other items come later
  }
}

/// Writes the fault of item *first, or none if no item has one.
template <typename Indices, typename Fault>
__global__ void write_fault(const __grid_constant__ Indices indices, std::int64_t items,
                            const unsigned long long* first, Fault* fault) {
  *fault = *first < static_cast<unsigned long long>(items)
               ? fault_of(indices, static_cast<std::int64_t>(*first))
               : Fault{};
}

/// The kernels' results, in memory allocated on the stream: the size of a caller's workspace does not depend
/// on the check.
template <typename Fault>
struct Found {
  unsigned long long* first = nullptr;
  Fault* fault = nullptr;
  cudaStream_t stream;

  explicit Found(cudaStream_t stream_) : stream(stream_) {
    void* memory = nullptr;
    check_cuda(cudaMallocAsync(&memory, 64 + sizeof(Fault), stream), check_name);
    first = static_cast<unsigned long long*>(memory);
    fault = reinterpret_cast<Fault*>(static_cast<std::byte*>(memory) + 64);
  }
  Found(const Found&) = delete;
  Found& operator=(const Found&) = delete;
  ~Found() { cudaFreeAsync(first, stream); }
};

template <typename Fault, typename Indices>
Fault find(const Indices& indices, const Context& context) {
  const DeviceGuard guard(context.device.index);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const std::int64_t items = indices.items();
  if (items == 0) return {};
  cudaStreamCaptureStatus captured{};
  check_cuda(cudaStreamIsCapturing(stream, &captured), check_name);
  if (captured != cudaStreamCaptureStatusNone) {
    throw Unsupported(
        "index tensors cannot be checked while a stream is captured into a graph: make the same call once "
        "before the capture, or capture without TILEWISE_CHECK and check_indices");
  }
  const Found<Fault> found(stream);
  check_cuda(cudaMemsetAsync(found.first, 0xff, sizeof(*found.first), stream), check_name);
  const std::int64_t blocks = std::min<std::int64_t>((items + check_threads - 1) / check_threads, 1024);
  launch<find_fault<Indices>>(
      {.name = check_name, .blocks = blocks, .threads = check_threads, .stream = stream}, indices, items,
      found.first);
  launch<write_fault<Indices, Fault>>({.name = check_name, .blocks = 1, .threads = 1, .stream = stream},
                                      indices, items, found.first, found.fault);
  Fault fault;
  check_cuda(cudaMemcpyAsync(&fault, found.fault, sizeof(fault), cudaMemcpyDeviceToHost, stream), check_name);
  check_cuda(cudaStreamSynchronize(stream), check_name);
  return fault;
}

}  // namespace

AttentionFault first_fault(const AttentionIndices& indices, const Context& context) {
  return find<AttentionFault>(indices, context);
}
RopeFault first_fault(const RopeIndices& indices, const Context& context) {
  return find<RopeFault>(indices, context);
}

}  // namespace tilewise::cuda
