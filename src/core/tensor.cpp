#include "tilewise/tensor.h"

#include <algorithm>

#include "core/check.h"
#include "core/sizes.h"

namespace tilewise {

std::string to_string(Device device) {
  return device.type == Device::Type::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

Tensor::Tensor(void* data_, DType dtype_, std::span<const std::int64_t> shape_, Device device_)
    : data(data_), dtype(dtype_), device(device_), rank(static_cast<int>(shape_.size())) {
  check(shape_.size() <= max_rank, "shape", "at most 5 dimensions", shape_.size());
  std::int64_t step = 1;
  for (std::size_t dim = shape_.size(); dim-- > 0;) {
    shape[dim] = shape_[dim];
    strides[dim] = step;
    step = bounded_product(step, std::max<std::int64_t>(shape_[dim], 1));
  }
}

Tensor::Tensor(void* data_, DType dtype_, std::span<const std::int64_t> shape_,
               std::span<const std::int64_t> strides_, Device device_)
    : Tensor(data_, dtype_, shape_, device_) {
  check(shape_.size() == strides_.size(), "strides", "as many strides as extents", strides_.size());
  for (std::size_t dim = 0; dim < strides_.size(); ++dim) strides[dim] = strides_[dim];
}

std::int64_t Tensor::size() const {
  std::int64_t count = 1;
  for (int dim = 0; dim < std::min(rank, max_rank); ++dim) {
    if (extent(dim) == 0) return 0;
    count = bounded_product(count, extent(dim));
  }
  return count;
}

std::string shape_string(const Tensor& tensor) {
  if (tensor.rank < 0 || tensor.rank > Tensor::max_rank) return "[rank " + std::to_string(tensor.rank) + "]";
  std::string text = "[";
  for (int dim = 0; dim < tensor.rank; ++dim) {
    if (dim > 0) text += ", ";
    text += std::to_string(tensor.extent(dim));
  }
  return text + "]";
}

std::string to_string(const Tensor& tensor) {
  return std::string(to_string(tensor.dtype)) + shape_string(tensor);
}

}  // namespace tilewise
