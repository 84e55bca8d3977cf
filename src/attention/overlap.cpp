#include "attention/overlap.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>

namespace tilewise {
namespace {

struct ByteRange {
  std::intptr_t first;
  std::intptr_t last;  // one past the last byte
};

ByteRange byte_range(const Tensor& tensor) {
  const auto width = static_cast<std::intptr_t>(size_of(tensor.dtype));
  ByteRange range{reinterpret_cast<std::intptr_t>(tensor.data), 0};
  range.last = range.first + width;
  for (int dim = 0; dim < tensor.rank; ++dim) {
    const std::intptr_t reach = (tensor.extent(dim) - 1) * tensor.stride(dim) * width;
    (reach < 0 ? range.first : range.last) += reach;
  }
  return range;
}

// One dimension of two views of equal strides: how far apart their indices can be, a's minus b's.
struct Dimension {
  std::int64_t stride;
  std::int64_t least;  // 0 or below
  std::int64_t most;   // 0 or above
};

// The dimensions that matter, largest stride first. They are nested when each stride is more than all the
// dimensions inside can make up for.
struct Nest {
  std::array<Dimension, Tensor::max_rank> dims{};
  int rank = 0;
  bool nested = true;
};

Nest nest_of(const Tensor& a, const Tensor& b) {
  Nest nest;
  for (int dim = 0; dim < a.rank; ++dim) {
    if (a.extent(dim) <= 1 && b.extent(dim) <= 1) continue;
    const std::int64_t stride = a.extent(dim) > 1 ? a.stride(dim) : b.stride(dim);
    nest.dims[static_cast<std::size_t>(nest.rank++)] = {stride, 1 - b.extent(dim), a.extent(dim) - 1};
  }
  std::sort(nest.dims.begin(), nest.dims.begin() + nest.rank,
            [](const Dimension& x, const Dimension& y) { return x.stride > y.stride; });
  std::int64_t span = 0;  // the largest difference the dimensions inside can make
  for (int dim = nest.rank; dim-- > 0;) {
    const Dimension& d = nest.dims[static_cast<std::size_t>(dim)];
    if (d.stride <= span) nest.nested = false;
    span += d.stride * std::max(-d.least, d.most);
  }
  return nest;
}

// Whether some pair of indices is `delta` elements apart. In a nest only the multiples of a stride next to
// delta can be completed by the dimensions inside.
bool reaches(const Nest& nest, int dim, std::int64_t delta) {
  if (dim == nest.rank) return delta == 0;
  const Dimension& d = nest.dims[static_cast<std::size_t>(dim)];
  const std::int64_t quotient = delta / d.stride;
  for (std::int64_t steps = std::max(quotient - 1, d.least); steps <= std::min(quotient + 1, d.most);
       ++steps) {
    if (reaches(nest, dim + 1, delta - steps * d.stride)) return true;
  }
  return false;
}

bool same_strides(const Tensor& a, const Tensor& b) {
  if (a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int dim = 0; dim < a.rank; ++dim) {
    if (a.extent(dim) > 1 && b.extent(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

}  // namespace

bool may_overlap(const Tensor& a, const Tensor& b) {
  if (a.size() == 0 || b.size() == 0) return false;
  const ByteRange range_a = byte_range(a);
  const ByteRange range_b = byte_range(b);
  if (range_a.last <= range_b.first || range_b.last <= range_a.first) return false;
  if (!same_strides(a, b)) return true;
  const auto width = static_cast<std::intptr_t>(size_of(a.dtype));
  const std::intptr_t bytes =
      reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
  if (bytes % width != 0) return true;
  const Nest nest = nest_of(a, b);
  return !nest.nested || reaches(nest, 0, bytes / width);
}

bool overlaps_itself(const Tensor& tensor) { return tensor.size() > 0 && !nest_of(tensor, tensor).nested; }

}  // namespace tilewise
