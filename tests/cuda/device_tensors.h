#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/runtime/check.h"
#include "support/device.h"
#include "support/forbidden.h"
#include "tilewise/attention.h"

namespace tilewise::test {

inline constexpr Device first_device{Device::Type::cuda, 0};

/// Its tests say that they were skipped, and why, where there is no CUDA device.
class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const CudaPresence cuda = cuda_presence(); !cuda.present) GTEST_SKIP() << cuda.reason;
  }
};

/// Memory of the device. What lies behind it is no number: who takes it for one is found out. And
/// initcheck, for which copies of a part of 16 bytes read all of them, has something to see there. Who writes
/// there fails the test.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) {
    cuda::check_cuda(cudaMalloc(&data_, bytes_ + behind), "test memory");  // of 0 bytes, too
    cuda::check_cuda(cudaMemset(data() + bytes_, untouched, behind), "test memory");
    forbid(data() + bytes_, behind);
  }
  ~DeviceMemory() {
    permit(data() + bytes_, behind);
    std::array<unsigned char, behind> now{};
    // After a fault nothing can be read, and the test has failed already.
    const bool read = cudaMemcpy(now.data(), data() + bytes_, behind, cudaMemcpyDeviceToHost) == cudaSuccess;
    if (read && std::any_of(now.begin(), now.end(), [](unsigned char byte) { return byte != untouched; })) {
      ADD_FAILURE() << "written past the end of " << bytes_ << " bytes of device memory";
    }
    cudaFree(data_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }
  void fill(int byte, cudaStream_t stream = nullptr) const {
    if (bytes_ > 0) cuda::check_cuda(cudaMemsetAsync(data_, byte, bytes_, stream), "filling test memory");
  }

 private:
  static constexpr std::size_t behind = 16;
  static constexpr unsigned char untouched = 0xff;

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// A stream that waits for no other.
class Stream {
 public:
  Stream() { cuda::check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  operator cudaStream_t() const { return stream_; }
  void wait() const { cuda::check_cuda(cudaStreamSynchronize(stream_), "waiting for a stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

inline void wait_for_device() { cuda::check_cuda(cudaDeviceSynchronize(), "waiting for the device"); }

/// Returns when the copy has arrived, for streams that wait for no other.
inline void copy_to_device(std::byte* to, std::span<const std::byte> from) {
  if (from.empty()) return;
  cuda::check_cuda(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyHostToDevice), "to the device");
  cuda::check_cuda(cudaStreamSynchronize(nullptr), "to the device");
}
inline void copy_to_host(std::span<std::byte> to, const std::byte* from) {
  if (to.empty()) return;
  cuda::check_cuda(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyDeviceToHost), "from the device");
}

/// Calls body with the address of every element of a host tensor, the last index fastest.
template <typename Body>
void for_each_element(const Tensor& tensor, const Body& body) {
  const auto width = static_cast<std::int64_t>(size_of(tensor.dtype));
  std::int64_t index[Tensor::max_rank] = {};
  for (std::int64_t n = 0; n < tensor.size(); ++n) {
    std::int64_t offset = 0;
    for (int dim = 0; dim < tensor.rank; ++dim) offset += index[dim] * tensor.stride(dim);
    body(static_cast<std::byte*>(tensor.data) + offset * width);
    for (int dim = tensor.rank; dim-- > 0;) {
      if (++index[dim] < tensor.extent(dim)) break;
      index[dim] = 0;
    }
  }
}

/// The elements of a host tensor without strides and gaps, and back.
inline std::vector<std::byte> elements_of(const Tensor& tensor) {
  const std::size_t width = size_of(tensor.dtype);
  std::vector<std::byte> elements;
  elements.reserve(static_cast<std::size_t>(tensor.size()) * width);
  for_each_element(tensor, [&](const std::byte* at) { elements.insert(elements.end(), at, at + width); });
  return elements;
}
inline void set_elements(const Tensor& tensor, std::span<const std::byte> elements) {
  const std::size_t width = size_of(tensor.dtype);
  std::size_t n = 0;
  for_each_element(tensor, [&](std::byte* at) { std::memcpy(at, elements.data() + n++ * width, width); });
}

/// A row-major copy of a host tensor.
class DeviceTensor {
 public:
  explicit DeviceTensor(const Tensor& host)
      : memory_(static_cast<std::size_t>(host.size()) * size_of(host.dtype)),
        view_(memory_.data(), host.dtype, std::span(host.shape).first(static_cast<std::size_t>(host.rank)),
              first_device) {
    upload(host);
  }

  const Tensor& view() const { return view_; }
  void upload(const Tensor& host) const { copy_to_device(memory_.data(), elements_of(host)); }
  void download(const Tensor& host) const { set_elements(host, bytes()); }
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> bytes(memory_.bytes());
    copy_to_host(bytes, memory_.data());
    return bytes;
  }
  /// What a Buffer's poison is: no kernel writes it.
  void poison(cudaStream_t stream = nullptr) const { memory_.fill(0xFF, stream); }

 private:
  DeviceMemory memory_;
  Tensor view_;
};

/// All tensors of a call's arguments, given or not, always in the same order.
inline std::vector<Tensor*> tensors_of(AttentionInputs& in) {
  return {&in.q,
          &in.k,
          &in.v,
          &in.mask,
          &in.alibi_slopes,
          &in.sinks,
          &in.logit_scale,
          &in.key_lengths,
          &in.page_table,
          &in.dropout_seed,
          &in.packed.cumulative_q,
          &in.packed.cumulative_k,
          &in.blocks.counts,
          &in.blocks.indices,
          &in.blocks.full_counts,
          &in.blocks.full_indices,
          &in.blocks.tile_ids,
          &in.blocks.tiles};
}
inline std::vector<Tensor*> tensors_of(AttentionOutputs& out) { return {&out.o, &out.lse}; }
inline std::vector<Tensor*> read_by(AttentionGradients& gradients) {
  return {&gradients.o, &gradients.lse, &gradients.d_o, &gradients.d_lse};
}
inline std::vector<Tensor*> written_by(AttentionGradients& gradients) {
  return {&gradients.dq,    &gradients.dk,     &gradients.dv,
          &gradients.dmask, &gradients.dsinks, &gradients.dlogit_scale};
}

/// Puts copies on the device in the place of host tensors, and keeps them.
inline void move_to_device(const std::vector<Tensor*>& tensors, std::deque<DeviceTensor>& keeper) {
  for (Tensor* tensor : tensors) {
    if (tensor->given()) *tensor = keeper.emplace_back(*tensor).view();
  }
}

}  // namespace tilewise::test
