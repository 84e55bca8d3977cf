// The gradient of an additive mask: score gradients, summed over the dimensions the mask was broadcast along.
// It is a pass of its own over the mask's elements, so each is written by one task and the sums have one
// order.

#if defined(TILEWISE_CPU_SIMD_MASK_GRADIENT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_MASK_GRADIENT_INL_H
#undef TILEWISE_CPU_SIMD_MASK_GRADIENT_INL_H
#else
#define TILEWISE_CPU_SIMD_MASK_GRADIENT_INL_H
#endif

#include "core/load.h"
#include "core/parallel.h"
#include "cpu/simd/gradient_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

struct MaskScratch {
  GradientScratch tile;
  float* sum;         // [tile keys, width]: over the batch entries and heads that share the mask
  double* key_sum;    // [tile keys]: over queries too
  double* query_sum;  // [max_panel_width]: over keys too
};

inline MaskScratch take_mask_scratch(Arena& arena, const AttentionCall& call, int width, int keys) {
  return {.tile = take_gradient_scratch(arena, call, width, keys),
          .sum = arena.take<float>(std::int64_t{keys} * width),
          .key_sum = arena.take<double>(keys),
          .query_sum = arena.take<double>(max_panel_width)};
}

/// A range that a task loops over: one index, or all of a dimension the mask is broadcast along.
struct MaskRange {
  std::int64_t first, last;
};

inline MaskRange mask_range(const MaskView& mask, int dim, std::int64_t index, std::int64_t whole) {
  return mask.extent[dim] == 1 ? MaskRange{0, whole} : MaskRange{index, index + 1};
}

/// One element, block or line of the mask's gradient. Tasks are numbered over (mask batch, mask head, panel
/// or 1, key tile or 1).
class MaskTask {
 public:
  MaskTask(const AttentionCall& call, const PanelGrid& grid, int keys, const float* shifts,
           const MaskScratch& scratch)
      : call_(call), grid_(grid), keys_(keys), shifts_(shifts), scratch_(scratch) {}

  static std::int64_t panel_tasks(const AttentionCall& call, const PanelGrid& grid) {
    return call.dmask.extent[2] == 1 ? 1 : grid.panels();
  }
  static std::int64_t tile_count(const AttentionCall& call, int keys) {
    return (call.problem.length_k + keys - 1) / keys;
  }
  static std::int64_t tile_tasks(const AttentionCall& call, int keys) {
    return call.dmask.extent[3] == 1 ? 1 : tile_count(call, keys);
  }

  void run(std::int64_t mask_b, std::int64_t mask_h, std::int64_t panel_task, std::int64_t tile_task) {
    const MaskView& mask = call_.dmask;
    b_ = mask_range(mask, 0, mask_b, call_.problem.batch);
    h_ = mask_range(mask, 1, mask_h, call_.problem.heads_q);
    const MaskRange panels = mask_range(mask, 2, panel_task, grid_.panels());
    const MaskRange tiles = mask_range(mask, 3, tile_task, tile_count(call_, keys_));
    const bool keeps_queries = mask.extent[2] != 1;
    const bool keeps_keys = mask.extent[3] != 1;
    std::fill_n(scratch_.key_sum, keys_, 0.0);
    std::fill_n(scratch_.query_sum, max_panel_width, 0.0);
    for (std::int64_t panel = panels.first; panel < panels.last; ++panel) {
      for (std::int64_t tile = tiles.first; tile < tiles.last; ++tile) {
        sum_tile(panel, tile);
        if (rows_ == 0) continue;
        if (keeps_queries && keeps_keys) {
          write_block(mask_b, mask_h);
        } else if (keeps_keys) {
          reduce([&](int j, int) -> double& { return scratch_.key_sum[j]; });
        } else {
          reduce([&](int, int lane) -> double& { return scratch_.query_sum[keeps_queries ? lane : 0]; });
        }
      }
    }
    if (keeps_queries && keeps_keys) return;
    if (keeps_keys) {
      const std::int64_t first = tile_task * keys_;
      for (std::int64_t j = first; j < std::min(first + keys_, call_.problem.length_k); ++j) {
        write(mask_b, mask_h, 0, j, scratch_.key_sum[j - first]);
      }
    } else if (keeps_queries) {
      for (int lane = 0; lane < rows_; ++lane)
        write(mask_b, mask_h, queries_[lane], 0, scratch_.query_sum[lane]);
    } else {
      write(mask_b, mask_h, 0, 0, scratch_.query_sum[0]);
    }
  }

 private:
  // scratch.sum = the score gradients of a panel by a tile, over all batch entries and heads that share the
  // mask.
  void sum_tile(std::int64_t index, std::int64_t tile_index) {
    rows_ = 0;
    first_key_ = tile_index * keys_;
    count_ = static_cast<int>(std::min<std::int64_t>(keys_, call_.problem.length_k - first_key_));
    Panel& panel = *scratch_.tile.panel;
    for (std::int64_t b = b_.first; b < b_.last; ++b) {
      for (std::int64_t h = h_.first; h < h_.last; ++h) {
        if (!fill_panel(call_, grid_, b, h, index, scratch_.tile)) return;
        if (rows_ == 0) {
          rows_ = panel.rows;
          width_ = panel.width;
          std::copy_n(panel.query, rows_, queries_);
          std::fill_n(scratch_.sum, count_ * width_, 0.0f);
        }
        bool loaded = false;
        for_each_key_tile(call_, panel, {first_key_, first_key_ + count_}, keys_, [&](const KeyTile& tile) {
          if (!loaded) load_panel(call_, panel, shifts_, scratch_.tile);
          loaded = true;
          gradient_tile(call_, panel, tile, true, scratch_.tile);
          float* sum = scratch_.sum + (tile.first - first_key_) * width_;
          map_tile(sum, tile.count, width_, [&](int j, int lane, VF s) HWY_ATTR {
            return hn::Add(s, load(scratch_.tile.dscores + j * width_ + lane));
          });
        });
      }
    }
  }

  template <typename Target>
  void reduce(const Target& target) const {
    for (int j = 0; j < count_; ++j) {
      for (int lane = 0; lane < rows_; ++lane)
        target(j, lane) += static_cast<double>(scratch_.sum[j * width_ + lane]);
    }
  }

  void write_block(std::int64_t mask_b, std::int64_t mask_h) const {
    const MaskView& mask = call_.dmask;
    if (mask.stride[3] == 1) {
      panel_to_rows(scratch_.sum, width_, count_, rows_, mask.dtype, scratch_.tile.score.staging,
                    [&](int lane) { return mask.at(mask_b, mask_h, queries_[lane], first_key_); });
      return;
    }
    for (int lane = 0; lane < rows_; ++lane) {
      for (int j = 0; j < count_; ++j) {
        write(mask_b, mask_h, queries_[lane], first_key_ + j,
              static_cast<double>(scratch_.sum[j * width_ + lane]));
      }
    }
  }

  void write(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, double value) const {
    store_element(call_.dmask.at(b, h, i, j), call_.dmask.dtype, 0, value);
  }

  const AttentionCall& call_;
  const PanelGrid& grid_;
  int keys_;
  const float* shifts_;
  const MaskScratch& scratch_;
  MaskRange b_{}, h_{};
  int rows_ = 0;
  int width_ = 0;
  int count_ = 0;
  std::int64_t first_key_ = 0;
  std::int32_t queries_[max_panel_width];
};

/// Nothing to sum over: the mask may still have elements.
inline void clear_mask_gradient(const MaskView& mask) {
  for (std::int64_t b = 0; b < mask.extent[0]; ++b) {
    for (std::int64_t h = 0; h < mask.extent[1]; ++h) {
      for (std::int64_t i = 0; i < mask.extent[2]; ++i) {
        for (std::int64_t j = 0; j < mask.extent[3]; ++j)
          store_element(mask.at(b, h, i, j), mask.dtype, 0, 0.0);
      }
    }
  }
}

/// All of dmask. `scratch_of(worker)` gives each worker its own.
template <typename ScratchOf>
void mask_gradient(const AttentionCall& call, const Context& context, const PanelGrid& grid, int keys,
                   const float* shifts, const ScratchOf& scratch_of) {
  const MaskView& mask = call.dmask;
  if (call.problem.batch * call.problem.heads_q * call.problem.length_q * call.problem.length_k == 0) {
    return clear_mask_gradient(mask);
  }
  const std::int64_t panels = MaskTask::panel_tasks(call, grid);
  const std::int64_t tiles = MaskTask::tile_tasks(call, keys);
  const std::int64_t tasks = mask.extent[0] * mask.extent[1] * panels * tiles;
  for_each_task(context.parallel_for, tasks, [&](std::int64_t worker, std::int64_t index) {
    const MaskScratch scratch = scratch_of(worker);
    MaskTask task(call, grid, keys, shifts, scratch);
    task.run(index / tiles / panels / mask.extent[1], index / tiles / panels % mask.extent[1],
             index / tiles % panels, index % tiles);
  });
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
