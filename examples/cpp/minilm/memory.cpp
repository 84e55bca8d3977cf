#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#ifdef MINILM_CUDA
#include <cuda_runtime_api.h>
#endif

namespace minilm {
namespace {

bool on_gpu(tilewise::Device device) { return device.type == tilewise::Device::Type::cuda; }

#ifdef MINILM_CUDA
void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}
std::shared_ptr<void> allocate_on_gpu(std::size_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes));
  return {data, cudaFree};
}
void copy(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}
#else
std::shared_ptr<void> allocate_on_gpu(std::size_t) {
  throw std::runtime_error("--device cuda: this program was built without the CUDA toolkit");
}
void copy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
#endif

std::shared_ptr<void> allocate(std::size_t bytes) {
  if (void* data = std::malloc(bytes); data != nullptr) return {data, std::free};
  throw std::bad_alloc();
}

}  // namespace

Memory::Memory(tilewise::Device device, std::size_t bytes)
    : device_(device),
      bytes_(bytes),
      data_(on_gpu(device) ? allocate_on_gpu(bytes + 1) : allocate(bytes + 1)) {}

Memory::Memory(tilewise::Device device, std::span<const std::byte> contents)
    : Memory(device, contents.size()) {
  upload(contents);
}

void Memory::upload(std::span<const std::byte> from) {
  if (from.size() > bytes_) throw std::logic_error("upload: more bytes than there are");
  if (on_gpu(device_)) {
    copy(data(), from.data(), from.size());
  } else {
    std::memcpy(data(), from.data(), from.size());
  }
}

void Memory::download(std::span<std::byte> to) const {
  if (to.size() > bytes_) throw std::logic_error("download: more bytes than there are");
  if (on_gpu(device_)) {
    copy(to.data(), data(), to.size());
  } else {
    std::memcpy(to.data(), data(), to.size());
  }
}

}  // namespace minilm
