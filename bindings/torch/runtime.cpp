#include "runtime.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <string>

#include "check.h"
#ifdef TILEWISE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

// A weak symbol, since only builds of torch with CUDA have this function.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(std::int32_t device,
                                                                                   void** stream);

namespace tilewise::torch_binding {
namespace {

using torch::headeronly::ScalarType;

std::int32_t torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::f32: return aoti_torch_dtype_float32();
    case DType::f16: return aoti_torch_dtype_float16();
    case DType::bf16: return aoti_torch_dtype_bfloat16();
    case DType::f64: return aoti_torch_dtype_float64();
    case DType::boolean: return aoti_torch_dtype_bool();
    case DType::i32: return aoti_torch_dtype_int32();
    case DType::i64: return aoti_torch_dtype_int64();
  }
  return -1;
}

DType library_dtype(const TorchTensor& tensor, std::string_view name, std::string_view expected) {
  const ScalarType type = tensor.scalar_type();
  switch (type) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::Half: return DType::f16;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Double: return DType::f64;
    case ScalarType::Bool: return DType::boolean;
    case ScalarType::Int: return DType::i32;
    default: reject(name, expected, torch::headeronly::toString(type));
  }
}

bool is_meta(const TorchTensor& tensor) {
  std::int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type == aoti_torch_device_type_meta();
}

// An address for a view that is checked and never read. The addresses of one call are far apart, so that the
// check for overlaps passes.
void* placeholder_address() {
  constexpr int log2_distance = 46;
  thread_local std::uintptr_t count = 0;
  count = count % 1024 + 1;
  return reinterpret_cast<void*>(count << log2_distance);
}

Tensor view_as(const TorchTensor& tensor, DType dtype, std::string_view name) {
  const auto shape = tensor.sizes();
  const auto strides = tensor.strides();
  if (shape.size() > Tensor::max_rank) {
    reject(name, "at most rank 5", "rank " + std::to_string(shape.size()));
  }
  const Device device = device_of(tensor, name);
  const bool has_data = device.type == Device::Type::cpu || !is_meta(tensor);
  void* data = has_data ? tensor.data_ptr() : placeholder_address();
  Tensor result(data, dtype, std::span(shape.data(), shape.size()), std::span(strides.data(), strides.size()),
                device);
  const bool no_elements = std::find(shape.begin(), shape.end(), 0) != shape.end();
  if (no_elements) result.strides[shape.size() - 1] = 1;
  return result;
}

// The stable ABI only returns an error code. So the text says how much memory was requested, and the Python
// package requests it again to get torch's own exception.
[[noreturn]] void out_of_memory(std::span<const std::int64_t> shape, std::size_t element, Device device) {
  auto bytes = static_cast<std::int64_t>(element);
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) bytes = std::numeric_limits<std::int64_t>::max();
  }
  throw std::runtime_error("tilewise.OutOfMemory: tried to allocate " + std::to_string(bytes) + " bytes on " +
                           to_string(device));
}

TorchTensor empty_strided(std::span<const std::int64_t> shape, const std::int64_t* strides, DType dtype,
                          Device device) {
  const bool on_cpu = device.type == Device::Type::cpu;
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      static_cast<std::int64_t>(shape.size()), shape.data(), strides, torch_dtype(dtype),
      on_cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(), device.index, &handle);
  if (error != AOTI_TORCH_SUCCESS) out_of_memory(shape, size_of(dtype), device);
  return TorchTensor(handle);
}

void* current_stream(Device device) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw DeviceError("this build of torch cannot name its current CUDA stream");
  }
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream));
  return stream;
}

// The threads of torch's backward pass have no current CUDA context until they call the CUDA runtime. Driver
// functions, which kernels with tensor maps need, do not set one. In a library without CUDA this does
// nothing, and no kernel takes the call.
void make_current([[maybe_unused]] Device device) {
#ifdef TILEWISE_HAS_CUDA
  if (const cudaError_t status = cudaSetDevice(device.index); status != cudaSuccess) {
    cudaGetLastError();
    throw DeviceError(std::string("cudaSetDevice: ") + cudaGetErrorString(status));
  }
#endif
}

// Below this many multiply-adds a second thread wakes up too late to help. Measured for f32 with D 64 on two
// cores: H4 S32 (5e5) takes 21 µs on one core and 28 µs on both, H4 S48 (1e6) takes 48 µs and 35 µs.
constexpr double work_worth_threads = 6e5;

}  // namespace

Device device_of(const TorchTensor& tensor, std::string_view name) {
  if (tensor.is_cpu()) return {};
  if (tensor.is_cuda()) return {Device::Type::cuda, tensor.get_device_index()};
  if (is_meta(tensor)) return {Device::Type::cuda, 0};
  reject(name, "memory on the CPU or a CUDA device", "another device");
}

Tensor view(const TorchTensor& tensor, std::string_view name, std::string_view expected) {
  return view_as(tensor, library_dtype(tensor, name, expected), name);
}

Tensor index_view(const TorchTensor& tensor, std::string_view name) {
  const bool wide = tensor.scalar_type() == ScalarType::Long;
  return view_as(tensor, wide ? DType::i64 : library_dtype(tensor, name, "i32 or i64"), name);
}

TorchTensor with_contiguous_last(const TorchTensor& tensor) {
  const std::int64_t last = tensor.dim() - 1;
  if (last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1) return tensor;
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::runtime_error&) {  // the copy of a tensor fails only for lack of memory
    const auto shape = tensor.sizes();
    out_of_memory(std::span(shape.data(), shape.size()), tensor.element_size(), device_of(tensor, ""));
  }
}

TorchTensor empty(std::span<const std::int64_t> shape, DType dtype, Device device) {
  const Tensor row_major(nullptr, dtype, shape, device);
  return empty_strided(shape, row_major.strides.data(), dtype, device);
}

TorchTensor empty_like(const Tensor& like) {
  return empty(std::span(like.shape).first(static_cast<std::size_t>(like.rank)), like.dtype, like.device);
}

TorchTensor empty_beside(const Tensor& like, std::int64_t last_extent) {
  Tensor::Extents shape = like.shape;
  const auto rank = static_cast<std::size_t>(like.rank);
  shape[rank - 1] = last_extent;
  Tensor result(nullptr, like.dtype, std::span(shape).first(rank), like.device);
  const bool heads_inside = rank == 4 && like.stride(1) < like.stride(2);
  if (heads_inside) {
    const std::int64_t heads = std::max<std::int64_t>(shape[1], 1);
    result.strides = {std::max<std::int64_t>(shape[2], 1) * heads * last_extent, last_extent,
                      heads * last_extent, 1};
  }
  return empty_strided(std::span(shape).first(rank), result.strides.data(), like.dtype, like.device);
}

Tensor placeholder(std::span<const std::int64_t> shape, DType dtype, Device device) {
  return Tensor(placeholder_address(), dtype, shape, device);
}

Runtime::Runtime(Device device, double work) : context_{.device = device, .parallel_for = {}} {
  if (device.type == Device::Type::cuda) {
    guard_.emplace(device.index);
    make_current(device);
    context_.stream = current_stream(device);
  } else if (work > work_worth_threads) {
    context_.parallel_for = openmp_parallel_for();  // in this module it runs on torch's threads
  } else {
    context_.parallel_for = serial_parallel_for();
  }
}

const Context& Runtime::with_workspace(std::size_t bytes) {
  if (context_.device.type == Device::Type::cpu && bytes <= small_.size()) {
    context_.workspace = {small_.data(), bytes};
  } else if (bytes > 0) {
    const std::array shape = {static_cast<std::int64_t>(bytes)};
    workspace_ = empty(shape, DType::boolean, context_.device);
    context_.workspace = {workspace_->data_ptr(), bytes};
  }
  return context_;
}

}  // namespace tilewise::torch_binding
