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

struct Dimension {
  std::int64_t stride;
  std::int64_t extent;
};

// Dimensions that matter, largest stride first, each stride at least the span of what lies inside it.
struct Nest {
  std::array<Dimension, Tensor::max_rank> dims{};
  int rank = 0;
  bool nested = true;
};

Nest nest_of(const Tensor& tensor) {
  Nest nest;
  for (int dim = 0; dim < tensor.rank; ++dim) {
    if (tensor.extent(dim) > 1) {
      nest.dims[static_cast<std::size_t>(nest.rank++)] = {tensor.stride(dim), tensor.extent(dim)};
    }
  }
  std::sort(nest.dims.begin(), nest.dims.begin() + nest.rank,
            [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; });
  std::int64_t span = 0;  // distance between the first and last element inside
  for (int dim = nest.rank; dim-- > 0;) {
    const Dimension& d = nest.dims[static_cast<std::size_t>(dim)];
    if (d.stride <= span) nest.nested = false;
    span += d.stride * (d.extent - 1);
  }
  return nest;
}

// Whether `delta` is a difference of two index vectors of the nest. In a nest only the two multiples of a
// stride that enclose delta can be completed by the dimensions inside.
bool reaches(const Nest& nest, int dim, std::int64_t delta) {
  if (dim == nest.rank) return delta == 0;
  const Dimension& d = nest.dims[static_cast<std::size_t>(dim)];
  const std::int64_t quotient = delta / d.stride;
  for (std::int64_t steps = quotient - 1; steps <= quotient + 1; ++steps) {
    if (std::abs(steps) < d.extent && reaches(nest, dim + 1, delta - steps * d.stride)) return true;
  }
  return false;
}

bool same_layout(const Tensor& a, const Tensor& b) {
  if (a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int dim = 0; dim < a.rank; ++dim) {
    if (a.extent(dim) > 1 && b.extent(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

// A view with the larger extents of the two: what it can reach, each of them can.
Tensor hull(const Tensor& a, const Tensor& b) {
  Tensor result = a;
  for (int dim = 0; dim < a.rank; ++dim) {
    const auto d = static_cast<std::size_t>(dim);
    if (a.extent(dim) <= 1) result.strides[d] = b.stride(dim);
    result.shape[d] = std::max(a.extent(dim), b.extent(dim));
  }
  return result;
}

}  // namespace

bool may_overlap(const Tensor& a, const Tensor& b) {
  if (a.size() == 0 || b.size() == 0) return false;
  const ByteRange range_a = byte_range(a);
  const ByteRange range_b = byte_range(b);
  if (range_a.last <= range_b.first || range_b.last <= range_a.first) return false;
  if (!same_layout(a, b)) return true;
  const auto width = static_cast<std::intptr_t>(size_of(a.dtype));
  const std::intptr_t bytes =
      reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
  if (bytes % width != 0) return true;
  const Nest nest = nest_of(hull(a, b));
  return !nest.nested || reaches(nest, 0, bytes / width);
}

bool overlaps_itself(const Tensor& tensor) { return tensor.size() > 0 && !nest_of(tensor).nested; }

}  // namespace tilewise
