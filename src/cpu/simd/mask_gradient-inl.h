// The gradient of an additive mask: dS summed over the dimensions along which the mask was
// broadcast. It is a separate pass over the elements of the mask, so that each element is written by one task
// and its sum has a fixed order.

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
  float* sum;       // [tile keys, width]: over the batch entries and heads that share the mask
  float* error;     // [tile keys, width]: the rounding errors of sum
  double* key_sum;  // [tile keys]: over the queries, too
};

inline MaskScratch take_mask_scratch(Arena& arena, const AttentionCall& call, int width, int keys) {
  return {.tile = take_gradient_scratch(arena, call, width, keys, keys),
          .sum = arena.take<float>(std::int64_t{keys} * width),
          .error = arena.take<float>(std::int64_t{keys} * width),
          .key_sum = arena.take<double>(keys)};
}

/// The indices of one dimension that a task sums over: one index, or all where the mask is broadcast.
struct MaskRange {
  std::int64_t first, last;
};

inline MaskRange mask_range(const MaskView& mask, int dim, std::int64_t index, std::int64_t whole) {
  return mask.extent[dim] == 1 ? MaskRange{0, whole} : MaskRange{index, index + 1};
}

/// The task that computes one block of dmask: one panel of queries by one tile of keys, or one key tile of a
/// row that all queries share. Tasks are numbered over (mask batch, mask head, panel or 1, key tile).
class MaskTask {
 public:
  MaskTask(const AttentionCall& call, const PanelGrid& grid, int keys, const RowStatistics& rows,
           const MaskScratch& scratch)
      : call_(call), grid_(grid), keys_(keys), statistics_(rows), scratch_(scratch) {}

  static std::int64_t panel_tasks(const AttentionCall& call, const PanelGrid& grid) {
    return call.dmask.extent[2] == 1 ? 1 : grid.panels();
  }
  static std::int64_t tile_tasks(const AttentionCall& call, int keys) {
    return (call.problem.length_k + keys - 1) / keys;
  }

  void run(std::int64_t mask_b, std::int64_t mask_h, std::int64_t panel_task, std::int64_t tile_task) {
    const MaskView& mask = call_.dmask;
    b_ = mask_range(mask, 0, mask_b, call_.problem.batch);
    h_ = mask_range(mask, 1, mask_h, call_.problem.heads_q);
    if (mask.extent[2] != 1) {
      sum_tile(panel_task, tile_task);
      if (rows_ > 0) write_block(mask_b, mask_h);
      return;
    }
    std::fill_n(scratch_.key_sum, keys_, 0.0);
    for (std::int64_t panel = 0; panel < grid_.panels(); ++panel) {
      sum_tile(panel, tile_task);
      for (int j = 0; j < count_; ++j) {
        for (int lane = 0; lane < rows_; ++lane)
          scratch_.key_sum[j] += static_cast<double>(scratch_.sum[j * width_ + lane]);
      }
    }
    const std::int64_t first = tile_task * keys_;
    for (std::int64_t j = first; j < std::min(first + keys_, call_.problem.length_k); ++j) {
      write(mask_b, mask_h, 0, j, scratch_.key_sum[j - first]);
    }
  }

 private:
  // scratch.sum = the dS of one panel and one key tile, summed over all batch entries and heads that share
  // the mask.
  void sum_tile(std::int64_t index, std::int64_t tile_index) {
    rows_ = 0;
    first_key_ = tile_index * keys_;
    count_ = static_cast<int>(std::min<std::int64_t>(keys_, call_.problem.length_k - first_key_));
    Panel& panel = *scratch_.tile.panel;
    for (std::int64_t b = b_.first; b < b_.last; ++b) {
      for (std::int64_t h = h_.first; h < h_.last; ++h) {
        if (!fill_panel(call_, grid_, b, h, index, scratch_.tile)) continue;
        if (rows_ == 0) {
          rows_ = panel.rows;
          width_ = panel.width;
          std::copy_n(panel.query, rows_, queries_);
          std::fill_n(scratch_.sum, count_ * width_, 0.0f);
          std::fill_n(scratch_.error, count_ * width_, 0.0f);
        }
        bool loaded = false;
        for_each_key_tile(call_, panel, {first_key_, first_key_ + count_}, keys_, [&](const KeyTile& tile) {
          if (!loaded) {
            load_panel(call_, panel, scratch_.tile);
            load_statistics(call_, panel, statistics_, scratch_.tile);
          }
          loaded = true;
          add_tile(panel, tile, (tile.first - first_key_) * width_);
        });
      }
    }
    if (rows_ == 0) return;
    map_tile(scratch_.sum, count_, width_, [&](int j, int lane, VF sum) HWY_ATTR {
      return hn::Add(sum, load(scratch_.error + j * width_ + lane));
    });
  }

  // Adds dS of a tile to the sum, from element `first` on.
  void add_tile(const Panel& panel, const KeyTile& tile, std::int64_t first) const {
    const GradientScratch& scratch = scratch_.tile;
    recompute_scores(call_, panel, tile, scratch.p, scratch.score.tanh_values, scratch);
    compute_dp(call_, panel, tile, scratch.ds, scratch);
    map_tile(scratch.ds, tile.count, width_, [&](int j, int lane, VF dp) HWY_ATTR {
      const int at = j * width_ + lane;
      const VF exp_s = exp_of(hn::Sub(load(scratch.p + at), load(scratch.maximum + lane)));
      const VF p = hn::Mul(exp_s, load(scratch.inverse_sum + lane));
      const VF ds = hn::Mul(p, hn::Add(dp, load(scratch.dlse_minus_delta + lane)));
      add_compensated(ds, scratch_.sum + first + at, scratch_.error + first + at);
      return ds;
    });
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
  RowStatistics statistics_;
  const MaskScratch& scratch_;
  MaskRange b_{}, h_{};
  int rows_ = 0;
  int width_ = 0;
  int count_ = 0;
  std::int64_t first_key_ = 0;
  std::int32_t queries_[max_panel_width];
};

/// Sets dmask to 0. For calls without scores, in which the mask may still have elements.
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

/// The gradient of a mask that is broadcast along the keys: the statistics have the sum of dS of each row.
inline void row_mask_gradient(const AttentionCall& call, const RowStatistics& statistics) {
  const MaskView& mask = call.dmask;
  const auto row_sum = [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    return statistics.ds_sum[h * call.rows_q() + call.first_row_q(b) + i];
  };
  for (std::int64_t mask_b = 0; mask_b < mask.extent[0]; ++mask_b) {
    const MaskRange entries = mask_range(mask, 0, mask_b, call.problem.batch);
    for (std::int64_t mask_h = 0; mask_h < mask.extent[1]; ++mask_h) {
      const MaskRange heads = mask_range(mask, 1, mask_h, call.problem.heads_q);
      for (std::int64_t mask_i = 0; mask_i < mask.extent[2]; ++mask_i) {
        const MaskRange queries = mask_range(mask, 2, mask_i, call.problem.length_q);
        double sum = 0;
        for (std::int64_t b = entries.first; b < entries.last; ++b) {
          for (std::int64_t h = heads.first; h < heads.last; ++h) {
            for (std::int64_t i = queries.first; i < queries.last; ++i) sum += row_sum(b, h, i);
          }
        }
        store_element(mask.at(mask_b, mask_h, mask_i, 0), mask.dtype, 0, sum);
      }
    }
  }
}

/// The number of tasks that need scratch memory; none where the mask is broadcast along the keys.
inline std::int64_t mask_tasks(const AttentionCall& call, const PanelGrid& grid, int keys) {
  const MaskView& mask = call.dmask;
  if (mask.extent[3] == 1) return 0;
  return mask.extent[0] * mask.extent[1] * MaskTask::panel_tasks(call, grid) *
         MaskTask::tile_tasks(call, keys);
}

/// Computes all of dmask. `scratch_of(worker)` returns the scratch of a worker.
template <typename ScratchOf>
void mask_gradient(const AttentionCall& call, const Context& context, const PanelGrid& grid, int keys,
                   const RowStatistics& rows, const ScratchOf& scratch_of) {
  const MaskView& mask = call.dmask;
  if (call.problem.batch * call.problem.heads_q == 0 || call.problem.length_q == 0 ||
      call.problem.length_k == 0) {
    return clear_mask_gradient(mask);
  }
  if (mask.extent[3] == 1) return row_mask_gradient(call, rows);
  const std::int64_t panels = MaskTask::panel_tasks(call, grid);
  const std::int64_t tiles = MaskTask::tile_tasks(call, keys);
  for_each_task(context.parallel_for, mask_tasks(call, grid, keys),
                [&](std::int64_t worker, std::int64_t index) {
                  const MaskScratch scratch = scratch_of(worker);
                  MaskTask task(call, grid, keys, rows, scratch);
                  task.run(index / tiles / panels / mask.extent[1], index / tiles / panels % mask.extent[1],
                           index / tiles % panels, index % tiles);
                });
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
