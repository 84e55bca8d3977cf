#pragma once

#include <deque>

#include "cuda/device_tensors.h"
#include "layer/plain.h"

namespace tilewise::test {

/// A tensor's memory on the device, laid out as on the host: strides, gaps and alignment.
class PlacedCopy {
 public:
  explicit PlacedCopy(const Tensor& host) : host_(host), memory_(bytes_of(host) + 64), view_(host) {
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(host.data) % 64;
    view_.data = memory_.data() + offset;
    view_.device = first_device;
    memory_.fill(0xFF);  // what lies around the tensor is no number, but set
    if (host.size() > 0) copy_to_device(memory_.data() + offset, host_bytes());
  }
  const Tensor& host() const { return host_; }
  const Tensor& view() const { return view_; }
  void download() const {
    if (host_.size() > 0) copy_to_host(host_bytes(), static_cast<const std::byte*>(view_.data));
  }

 private:
  static std::size_t bytes_of(const Tensor& tensor) {
    std::int64_t last = 0;
    for (int dim = 0; dim < tensor.rank; ++dim) last += (tensor.extent(dim) - 1) * tensor.stride(dim);
    return tensor.size() == 0 ? 0 : static_cast<std::size_t>(last + 1) * size_of(tensor.dtype);
  }
  std::span<std::byte> host_bytes() const { return {static_cast<std::byte*>(host_.data), bytes_of(host_)}; }

  Tensor host_;
  DeviceMemory memory_;
  Tensor view_;
};

/// Tests of the layer's operations on the first CUDA device.
class CudaLayerTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    device_call = call_on_device;
  }

  static Context cuda_context() { return {.device = first_device}; }

  /// Moves tensors to the device, and what the call left there back. Tensors that are the same on the host
  /// are the same there.
  static void call_on_device(const Context& context, const std::vector<Tensor*>& tensors,
                             const std::function<std::size_t(const Context&)>& workspace,
                             const std::function<void(const Context&)>& call) {
    std::deque<PlacedCopy> copies;
    for (Tensor* tensor : tensors) {
      if (!tensor->given()) continue;
      const PlacedCopy* same = nullptr;
      for (const PlacedCopy& copy : copies) {
        const Tensor& other = copy.host();
        if (tensor->data != nullptr && other.data == tensor->data && other.size() == tensor->size())
          same = &copy;
      }
      *tensor = same != nullptr ? same->view() : copies.emplace_back(*tensor).view();
    }
    const Stream stream;
    Context with_stream = context;
    with_stream.stream = stream;
    const std::size_t bytes = workspace(with_stream);
    const DeviceMemory memory(bytes + 1);
    memory.fill(0xFF);
    wait_for_device();
    with_stream.workspace = {memory.data() + (bytes == 0 ? 0 : 1), bytes};
    call(with_stream);
    stream.wait();
    for (const PlacedCopy& copy : copies) copy.download();
  }
};

}  // namespace tilewise::test
