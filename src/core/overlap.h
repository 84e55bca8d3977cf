#pragma once

#include "tilewise/tensor.h"

namespace tilewise {

/// Whether the two views may share a byte. Exact for slices of one buffer, whatever their widths and the
/// signs of their strides; where strides are so odd that telling would take long, views count as sharing.
bool may_overlap(const Tensor& a, const Tensor& b);

/// Whether two indices of the view may name the same element, told in the same way.
bool overlaps_itself(const Tensor& tensor);

}  // namespace tilewise
