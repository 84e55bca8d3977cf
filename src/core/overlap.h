#pragma once

#include "tilewise/tensor.h"

namespace tilewise {

/// Whether the two views may share a byte. The answer is exact for slices of one buffer, with any widths and
/// signs of strides. Where strides are so irregular that the search would take long, the answer is true.
bool may_overlap(const Tensor& a, const Tensor& b);

/// Whether two indices of the view may name the same element, with the same exactness.
bool overlaps_itself(const Tensor& tensor);

}  // namespace tilewise
