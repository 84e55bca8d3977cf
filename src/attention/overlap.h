#pragma once

#include "tilewise/tensor.h"

namespace tilewise {

/// Whether the two views may share an element. Exact for views whose strides nest, as those of slices of one
/// buffer do; where that cannot be told, ranges of addresses that meet count as sharing.
bool may_overlap(const Tensor& a, const Tensor& b);

/// Whether two indices of the view may name the same element.
bool overlaps_itself(const Tensor& tensor);

}  // namespace tilewise
