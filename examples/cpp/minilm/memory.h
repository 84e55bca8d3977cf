#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "tilewise/tilewise.h"

namespace minilm {

// Memory of the CPU or of a GPU, freed with the object.
class Memory {
 public:
  Memory() = default;
  Memory(tilewise::Device device, std::size_t bytes);
  /// With a copy of the host's bytes.
  Memory(tilewise::Device device, std::span<const std::byte> contents);

  /// Makes room for more, for which what is there is given up.
  void reserve(std::size_t bytes) {
    if (bytes > bytes_) *this = Memory(device_, bytes);
  }
  void upload(std::span<const std::byte> from);
  /// Waits for what was launched before.
  void download(std::span<std::byte> to) const;

  void* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }
  /// A row-major view of it.
  tilewise::Tensor view(tilewise::DType dtype, std::span<const std::int64_t> shape) const {
    return tilewise::Tensor(data(), dtype, shape, device_);
  }

 private:
  tilewise::Device device_{};
  std::size_t bytes_ = 0;
  std::shared_ptr<void> data_;
};

}  // namespace minilm
