// The functions of CUDA's runtime and driver that Tilewise and its tests call, for the emulated device. Every
// call is complete when it returns, so streams are only names. Launches into a stream that is being captured
// become a graph.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"
#include "graph.h"
#include "races/races.h"

namespace tilewise::emulator {
namespace {

struct Node {
  cudaGraphNodeType type;
  std::function<void()> work;
};
using Graph = std::vector<std::unique_ptr<Node>>;

std::mutex faults_lock, streams_lock;
std::string next_fault, last_fault;
std::map<void*, std::unique_ptr<Graph>>& captured() {
  static std::map<void*, std::unique_ptr<Graph>> all;
  return all;
}

void run_or_record(void* stream, cudaGraphNodeType type, std::function<void()> work) {
  const std::lock_guard guard(streams_lock);
  const auto found = captured().find(stream);
  if (found == captured().end()) return work();
  found->second->push_back(std::make_unique<Node>(Node{type, std::move(work)}));
}

int number_from(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

int device_capability() { return number_from("TILEWISE_EMULATOR_CAPABILITY", 90); }

}  // namespace

std::size_t most_shared_bytes() {  // from CUDA's table of compute capabilities
  switch (device_capability()) {
    case 75: return 64 << 10;
    case 86:
    case 89:
    case 120: return 99 << 10;
    case 80:
    case 87: return 163 << 10;
    default: return 227 << 10;
  }
}

void report_fault(const std::string& what) {
  const std::lock_guard guard(faults_lock);
  next_fault = last_fault = what;
}
std::string take_fault() {
  const std::lock_guard guard(faults_lock);
  return std::exchange(next_fault, "");
}

namespace {

thread_local cudaError_t last_error = cudaSuccess;
cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

// The error of a call that waits for kernels. The fault remains for the next launch.
cudaError_t any_fault() {
  const std::lock_guard guard(faults_lock);
  return next_fault.empty() ? cudaSuccess : failed(cudaErrorLaunchFailure);
}

constexpr std::size_t alignment = 256;
constexpr std::size_t all_memory = std::size_t{2} << 30;
std::atomic<std::size_t> memory_in_use{0};

CUresult encode_tiled(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* data,
                      const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap map{};
  map.data = data;
  map.rank = static_cast<std::uint8_t>(rank);
  map.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                      : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                                : 2;
  map.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                       : 0;
  // The conditions that the driver checks.
  bool valid = rank >= 1 && rank <= 5 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  for (cuuint32_t dim = 0; dim < rank; ++dim) {
    valid &= extents[dim] > 0 && extents[dim] <= std::uint64_t{1} << 32 && box[dim] > 0 && box[dim] <= 256 &&
             steps[dim] == 1;
    if (dim + 1 < rank) valid &= strides[dim] % 16 == 0 && strides[dim] < std::uint64_t{1} << 40;
    map.extents[dim] = extents[dim];
    map.box[dim] = box[dim];
    if (dim + 1 < rank) map.strides[dim] = strides[dim];
  }
  const std::uint32_t row = box[0] * map.element_bytes;
  valid &= row % 16 == 0 && (map.swizzle == 0 || row <= map.swizzle);
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  static_assert(sizeof map <= sizeof *to);
  std::memcpy(to, &map, sizeof map);
  return CUDA_SUCCESS;
}

}  // namespace

bool capturing(void* stream) {
  const std::lock_guard guard(streams_lock);
  return captured().contains(stream);
}
void record(void* stream, std::function<void()> work) {
  run_or_record(stream, cudaGraphNodeTypeKernel, std::move(work));
}

TensorMap tensor_map(const void* from) {
  TensorMap map{};
  std::memcpy(&map, from, sizeof map);
  return map;
}

}  // namespace tilewise::emulator

using namespace tilewise::emulator;

// Saves the callee-saved registers.
asm(R"(
.text
.globl tilewise_switch_stack
.type tilewise_switch_stack, @function
tilewise_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tilewise_switch_stack, . - tilewise_switch_stack
)");

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice); }
// The attributes of an H200, unless the environment overrides them.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int device) {
  if (device != 0) return failed(cudaErrorInvalidDevice);
  const int capability = device_capability();
  switch (what) {
    case cudaDevAttrMultiProcessorCount:
      *value = number_from("TILEWISE_EMULATOR_MULTIPROCESSORS", 132);
      break;
    case cudaDevAttrComputeCapabilityMajor: *value = capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability % 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(most_shared_bytes()); break;
    default: return failed(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return failed(cudaErrorInvalidDevice);
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "emulated");
  cudaDeviceGetAttribute(&properties->multiProcessorCount, cudaDevAttrMultiProcessorCount, 0);
  cudaDeviceGetAttribute(&properties->major, cudaDevAttrComputeCapabilityMajor, 0);
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->ptxVersion = std::min(device_capability(), TILEWISE_EMULATED_ARCHITECTURE);
  attributes->binaryVersion = attributes->ptxVersion;
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&encode_tiled) : nullptr;
  if (result != nullptr) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t error) {
  static thread_local std::string name;
  name = "cudaError " + std::to_string(error);
  return name.c_str();
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? last_fault.c_str() : cudaGetErrorName(error);
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  // AddressSanitizer reports accesses past the end.
  const std::size_t whole = (bytes + alignment) / alignment * alignment;
  *data = std::aligned_alloc(alignment, whole);
  if (*data == nullptr) return failed(cudaErrorMemoryAllocation);
  memory_in_use += malloc_usable_size(*data);
  races::allocated(*data, bytes);
  poison_behind(static_cast<std::byte*>(*data) + bytes, whole - bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  memory_in_use -= malloc_usable_size(data);
  races::freed(data);
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t) { return cudaMalloc(data, bytes); }
cudaError_t cudaFreeAsync(void* data, cudaStream_t) { return cudaFree(data); }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *total = all_memory;
  *free = all_memory - std::min(all_memory, memory_in_use.load());
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  run_or_record(stream, cudaGraphNodeTypeMemset, [=] {
    races::stream_waits(stream);
    std::memset(data, value, bytes);
  });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* data, int value, std::size_t bytes) {
  return cudaMemsetAsync(data, value, bytes, nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  run_or_record(stream, cudaGraphNodeTypeMemcpy, [=] {
    races::stream_waits(stream);
    std::memcpy(to, from, bytes);
  });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return any_fault();
}

cudaError_t cudaDeviceSynchronize() { return any_fault(); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return any_fault(); }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(new char);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<char*>(stream);
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const std::lock_guard guard(streams_lock);
  captured()[stream] = std::make_unique<Graph>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard guard(streams_lock);
  *graph = reinterpret_cast<cudaGraph_t>(captured().at(stream).release());
  captured().erase(stream);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  const auto& all = *reinterpret_cast<Graph*>(graph);
  if (nodes == nullptr) *count = all.size();
  for (std::size_t n = 0; nodes != nullptr && n < std::min(*count, all.size()); ++n) {
    nodes[n] = reinterpret_cast<cudaGraphNode_t>(all[n].get());
  }
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = reinterpret_cast<Node*>(node)->type;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& node : *reinterpret_cast<Graph*>(executable)) node->work();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

}  // extern "C"
