#include "cuda/gemm/sm90/split/split.h"
#include "cuda/gemm/sm90/split/split_kernel.cuh"

namespace tilewise::cuda::gemm {
namespace {

/// What a tile costs beside its stages, in stages. An estimate.
constexpr double tile_cost = 3;

}  // namespace

int longest_slice(const VisibleBand& visible, int slices) {
  int most = 1;
  for (int first = 0; first < visible.rows; first += item_tile) {
    most = std::max(most, visible_stages(visible, first).count());
  }
  return (most + slices - 1) / slices;
}

int choose_slices(const VisibleBand& visible, std::int64_t items, std::int64_t n, int most,
                  int multiprocessors) {
  const std::int64_t tiles_each = items * ((n + item_tile - 1) / item_tile);
  int best = 1;
  double least = 0;
  for (int slices = 1; slices <= most; ++slices) {
    const int longest = longest_slice(visible, slices);
    std::int64_t units = 0, stages = 0;
    for (int first = 0; first < visible.rows; first += item_tile) {
      const Span own = visible_stages(visible, first);
      units += slices_of(own, longest);
      stages += own.count();
    }
    if (units == 0) return 1;
    // All rounds but the last have slices of the mean length; the last one may have the longest.
    const std::int64_t rounds = (units * tiles_each + multiprocessors - 1) / multiprocessors;
    const double mean = static_cast<double>(stages) / static_cast<double>(units);
    const double cost = static_cast<double>(rounds - 1) * (mean + tile_cost) + longest + tile_cost;
    if (slices > 1 && cost >= least) continue;
    least = cost;
    best = slices;
  }
  return best;
}

std::size_t split_items_workspace(const GemmCall& call, const Items& items) {
  return ItemsWorkspace(call, nullptr, items).bytes;
}

void run_split_items(const GemmCall& call, const Items& items, const Context& context) {
  run_items(call, items, context);
}

}  // namespace tilewise::cuda::gemm
