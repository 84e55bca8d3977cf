#include "support/device.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "support/buffer.h"
#include "support/forbidden.h"

#ifdef TILEWISE_HAS_CUDA
#include <cuda_runtime_api.h>

#include "cuda/runtime/check.h"
#endif

namespace tilewise::test {
namespace {

std::vector<Tensor*> tensors_of(AttentionInputs& inputs) {
  return {&inputs.q,
          &inputs.k,
          &inputs.v,
          &inputs.mask,
          &inputs.alibi_slopes,
          &inputs.sinks,
          &inputs.logit_scale,
          &inputs.key_lengths,
          &inputs.page_table,
          &inputs.dropout_seed,
          &inputs.packed.cumulative_q,
          &inputs.packed.cumulative_k,
          &inputs.blocks.counts,
          &inputs.blocks.indices,
          &inputs.blocks.full_counts,
          &inputs.blocks.full_indices,
          &inputs.blocks.tile_ids,
          &inputs.blocks.tiles};
}
std::vector<Tensor*> tensors_of(AttentionOutputs& outputs) { return {&outputs.o, &outputs.lse}; }
std::vector<Tensor*> read_tensors_of(AttentionGradients& gradients) {
  return {&gradients.o, &gradients.lse, &gradients.d_o, &gradients.d_lse, &gradients.delta};
}
std::vector<Tensor*> written_tensors_of(AttentionGradients& gradients) {
  return {&gradients.dq,    &gradients.dk,     &gradients.dv,
          &gradients.dmask, &gradients.dsinks, &gradients.dlogit_scale};
}

template <typename Tensors>
void set_device(const Tensors& tensors, Device device) {
  for (Tensor* tensor : tensors) tensor->device = device;
}

}  // namespace

AttentionInputs on_device(AttentionInputs inputs, Device device) {
  set_device(tensors_of(inputs), device);
  return inputs;
}
AttentionOutputs on_device(AttentionOutputs outputs, Device device) {
  set_device(tensors_of(outputs), device);
  return outputs;
}
AttentionGradients on_device(AttentionGradients gradients, Device device) {
  set_device(read_tensors_of(gradients), device);
  set_device(written_tensors_of(gradients), device);
  return gradients;
}

#ifdef TILEWISE_HAS_CUDA

namespace {

using cuda::check_cuda;

constexpr Device device{Device::Type::cuda, 0};
constexpr std::size_t guard = 128;
constexpr std::byte guard_byte{0xA5};

// Memory of the device, which is allocated once and divided anew for each call.
class DeviceMemory {
 public:
  void reset() {
    used_ = 0;
    guards_.clear();
  }

  // Returns `bytes` at an address that equals `like` modulo 256, so that the alignment is that of the host,
  // with guards around them.
  std::byte* take(std::size_t bytes, std::uintptr_t like) {
    if (base_ == nullptr) check_cuda(cudaMalloc(&base_, capacity), "test memory");
    used_ = (used_ + 255) / 256 * 256 + guard + like % 256;
    if (used_ + bytes + guard > capacity) throw std::runtime_error("test memory of the device is exhausted");
    std::byte* memory = static_cast<std::byte*>(base_) + used_;
    used_ += bytes + guard;
    guards_.push_back(memory - guard);
    guards_.push_back(memory + bytes);
    return memory;
  }

  // Makes accesses to guards errors while kernels run.
  class Forbidden {
   public:
    explicit Forbidden(const DeviceMemory& memory) : guards_(memory.guards_) {
      for (const std::byte* at : guards_) forbid(at, guard);
    }
    ~Forbidden() {
      for (const std::byte* at : guards_) permit(at, guard);
    }
    Forbidden(const Forbidden&) = delete;
    Forbidden& operator=(const Forbidden&) = delete;

   private:
    const std::vector<std::byte*>& guards_;
  };

 private:
  static constexpr std::size_t capacity = std::size_t{1} << 30;
  void* base_ = nullptr;
  std::size_t used_ = 0;
  std::vector<std::byte*> guards_;
};

DeviceMemory& device_memory() {
  static DeviceMemory memory;
  return memory;
}

// A copy of a tensor on the device: the memory from its lowest to its highest element, gaps included, and
// guards.
class Mirror {
 public:
  explicit Mirror(Tensor& tensor) : host_(tensor) {
    std::ptrdiff_t low = 0;
    std::ptrdiff_t high = 0;
    const auto width = static_cast<std::ptrdiff_t>(size_of(tensor.dtype));
    for (int dim = 0; dim < tensor.rank; ++dim) {
      const std::ptrdiff_t reach = (tensor.extent(dim) - 1) * tensor.stride(dim) * width;
      (reach < 0 ? low : high) += reach;
    }
    if (tensor.size() == 0) high = -width;
    first_ = static_cast<std::byte*>(tensor.data) + low;
    bytes_.resize(static_cast<std::size_t>(high - low + width) + 2 * guard, guard_byte);
    if (tensor.size() > 0) std::memcpy(bytes_.data() + guard, first_, bytes_.size() - 2 * guard);
    device_ = device_memory().take(bytes_.size() - 2 * guard, reinterpret_cast<std::uintptr_t>(first_));
    check_cuda(cudaMemcpy(device_ - guard, bytes_.data(), bytes_.size(), cudaMemcpyHostToDevice),
               "to the device");
    tensor.data = tensor.data == nullptr ? nullptr : device_ - low;
    tensor.device = device;
    view_ = tensor;
  }

  // Whether another tensor is the same as this one.
  bool is(const Tensor& tensor) const {
    return tensor.data != nullptr && tensor.data == host_.data && tensor.size() == host_.size();
  }
  const Tensor& view() const { return view_; }

  // Copies the elements back. All other bytes must be unchanged.
  void download() {
    std::vector<std::byte> now(bytes_.size());
    check_cuda(cudaMemcpy(now.data(), device_ - guard, now.size(), cudaMemcpyDeviceToHost),
               "from the device");
    const std::size_t width = size_of(host_.dtype);
    std::int64_t index[Tensor::max_rank] = {};
    for (std::int64_t n = 0; n < host_.size(); ++n) {
      std::int64_t offset = 0;
      for (int dim = 0; dim < host_.rank; ++dim) offset += index[dim] * host_.stride(dim);
      std::byte* to = static_cast<std::byte*>(host_.data) + offset * static_cast<std::int64_t>(width);
      const std::size_t at = guard + static_cast<std::size_t>(to - first_);
      std::memcpy(to, now.data() + at, width);
      std::memcpy(bytes_.data() + at, now.data() + at, width);
      for (int dim = host_.rank; dim-- > 0;) {
        if (++index[dim] < host_.extent(dim)) break;
        index[dim] = 0;
      }
    }
    if (now != bytes_) throw GuardError("written outside a tensor's elements on the device");
  }

 private:
  Tensor host_;
  Tensor view_;
  std::byte* first_ = nullptr;
  std::byte* device_ = nullptr;
  std::vector<std::byte> bytes_;  // the expected guards, elements and gaps
};

std::vector<Mirror> mirror(const std::vector<Tensor*>& tensors) {
  std::vector<Mirror> mirrors;
  for (Tensor* tensor : tensors) {
    if (tensor->given()) mirrors.emplace_back(*tensor);
  }
  return mirrors;
}

// Runs body with a poisoned workspace of exactly this size, at an odd address, and waits for the device.
template <typename Body>
void with_device_workspace(std::size_t bytes, Context& context, const Body& body) {
  std::byte* data = device_memory().take(bytes, 1);
  check_cuda(cudaMemset(data - guard, static_cast<int>(guard_byte), bytes + 2 * guard), "guards");
  check_cuda(cudaMemset(data, 0xFF, bytes), "poison");
  context.device = device;
  context.workspace = {data, bytes};
  {
    const DeviceMemory::Forbidden guards(device_memory());
    body(context);
    check_cuda(cudaDeviceSynchronize(), "running the kernels");
  }
  std::vector<std::byte> guards(2 * guard);
  check_cuda(cudaMemcpy(guards.data(), data - guard, guard, cudaMemcpyDeviceToHost), "guards");
  check_cuda(cudaMemcpy(guards.data() + guard, data + bytes, guard, cudaMemcpyDeviceToHost), "guards");
  if (guards != std::vector<std::byte>(2 * guard, guard_byte))
    throw GuardError("written around the workspace");
}

}  // namespace

CudaPresence cuda_presence() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return {false, cudaGetErrorString(status)};
  return {count > 0, count > 0 ? "" : "no CUDA device"};
}

void run_forward_on_cuda(const AttentionInputs& inputs_, const AttentionOptions& options,
                         const AttentionOutputs& outputs_, Context context) {
  AttentionInputs inputs = inputs_;
  AttentionOutputs outputs = outputs_;
  device_memory().reset();
  std::vector<Mirror> read = mirror(tensors_of(inputs));
  std::vector<Mirror> written = mirror(tensors_of(outputs));
  context.device = device;
  const std::size_t bytes = attention_forward_workspace(inputs, options, outputs, context);
  with_device_workspace(bytes, context,
                        [&](const Context& ready) { attention_forward(inputs, options, outputs, ready); });
  for (Mirror& tensor : written) tensor.download();
  for (Mirror& tensor : read) tensor.download();
}

void run_backward_on_cuda(const AttentionInputs& inputs_, const AttentionOptions& options,
                          const AttentionGradients& gradients_, Context context) {
  AttentionInputs inputs = inputs_;
  AttentionGradients gradients = gradients_;
  device_memory().reset();
  std::vector<Mirror> read = mirror(tensors_of(inputs));
  std::vector<Mirror> statistics = mirror(read_tensors_of(gradients));
  std::vector<Mirror> written = mirror(written_tensors_of(gradients));
  context.device = device;
  const std::size_t bytes = attention_backward_workspace(inputs, options, gradients, context);
  with_device_workspace(bytes, context,
                        [&](const Context& ready) { attention_backward(inputs, options, gradients, ready); });
  for (Mirror& tensor : written) tensor.download();
  for (Mirror& tensor : read) tensor.download();
  for (Mirror& tensor : statistics) tensor.download();
}

void call_on_cuda(const Context& context, const std::vector<Tensor*>& tensors,
                  const std::function<std::size_t(const Context&)>& workspace,
                  const std::function<void(const Context&)>& call) {
  device_memory().reset();
  std::vector<Mirror> mirrors;
  for (Tensor* tensor : tensors) {
    if (!tensor->given()) continue;
    const auto same = std::find_if(mirrors.begin(), mirrors.end(),
                                   [&](const Mirror& mirror) { return mirror.is(*tensor); });
    if (same != mirrors.end()) {
      *tensor = same->view();
    } else {
      mirrors.emplace_back(*tensor);
    }
  }
  Context there = context;
  there.device = device;
  with_device_workspace(workspace(there), there, call);
  for (Mirror& tensor : mirrors) tensor.download();
}

#else

void call_on_cuda(const Context&, const std::vector<Tensor*>&,
                  const std::function<std::size_t(const Context&)>&,
                  const std::function<void(const Context&)>&) {
  throw std::logic_error("built without CUDA");
}

CudaPresence cuda_presence() { return {false, "built without CUDA"}; }

void run_forward_on_cuda(const AttentionInputs&, const AttentionOptions&, const AttentionOutputs&, Context) {
  throw std::logic_error("built without CUDA");
}
void run_backward_on_cuda(const AttentionInputs&, const AttentionOptions&, const AttentionGradients&,
                          Context) {
  throw std::logic_error("built without CUDA");
}

#endif

}  // namespace tilewise::test
