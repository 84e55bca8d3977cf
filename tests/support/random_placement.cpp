#include "support/random_placement.h"

#include <numeric>

namespace tilewise::test {

Placement random_placement(Random& rng, const Shape& shape, const PlacementRules& rules) {
  Placement placement{.lead = rng.chance(0.5) ? rng.between(0, 9) * rules.grain : 0};
  if (rng.chance(0.3)) return placement;

  const auto rank = static_cast<int>(shape.size());
  placement.order.resize(shape.size());
  std::iota(placement.order.begin(), placement.order.end(), 0);
  // A last dimension of extent 1 may have any stride.
  const bool fixed_last = rules.contiguous_rows && shape.back() > 1;
  std::span<int> movable(placement.order.data(), shape.size() - (fixed_last ? 1 : 0));
  if (rank == 4 && rng.chance(0.4)) {
    placement.order = {0, 2, 1, 3};
  } else if (rng.chance(0.5)) {
    rng.shuffle(movable);
  }
  placement.padding.resize(shape.size());
  for (std::int64_t& padding : placement.padding) {
    padding = rng.chance(0.25) ? rng.between(1, 5) * rules.grain : 0;
  }
  for (int dim = 0; dim < rank - (fixed_last ? 1 : 0); ++dim) {
    if ((rules.expandable >> dim & 1u) != 0 && rng.chance(0.08)) {
      placement.expanded.push_back(dim);
    } else if (rules.flip && rng.chance(0.03)) {
      placement.flipped.push_back(dim);
    }
  }
  if (!fixed_last && rng.chance(0.2)) placement.step = rng.between(2, 3);
  return placement;
}

}  // namespace tilewise::test
