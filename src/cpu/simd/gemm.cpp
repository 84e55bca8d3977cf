#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/gemm.cpp"
#include "hwy/foreach_target.h"  // compiles this file once for each target
//
#include <algorithm>

#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/simd/epilogue-inl.h"
#include "cpu/simd/few_queries-inl.h"
#include "cpu/simd/gemm_tuning.h"
#include "cpu/simd/multiply-inl.h"
#include "cpu/simd/pairs-inl.h"
#include "cpu/simd/passes.h"

// Products out = A·Bᵀ. In general both operands are packed into panels for the micro-kernel (multiply-inl.h):
// A in slabs that all threads share, B by each thread for its tile. With few rows of A packing B does not
// pay, and dot products along K read it once.

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {
namespace {

// The block of out that the micro-kernel computes. Panels of A are `block_rows` wide, panels of B
// `block_columns`. With 16 registers of four lanes a block has four rows and not six, since packing writes
// whole vectors of four.
constexpr int block_vectors = 2;
constexpr int block_rows = registers == 16 && lanes == 4 ? 4 : rows_for(block_vectors);
constexpr int block_columns = block_vectors * lanes;
static_assert(block_rows < lanes || block_rows % lanes == 0);

constexpr std::int64_t rounded(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// How out is divided into tiles, and A into slabs of rows that are packed one after another.
struct Tiling {
  std::int64_t tile_rows, tile_columns, slab_rows;

  explicit Tiling(const GemmProblem& problem) {
    const std::int64_t across = (problem.m + gemm_tile_rows - 1) / gemm_tile_rows;
    tile_rows = rounded((problem.m + across - 1) / across, block_rows);
    tile_columns = std::min(rounded(gemm_tile_columns, block_columns), rounded(problem.n, block_columns));
    // Narrower tiles until there are enough for many threads; at least one block wide.
    constexpr std::int64_t enough = 32;
    while (tile_columns > block_columns &&
           across * ((problem.n + tile_columns - 1) / tile_columns) < enough) {
      tile_columns = rounded(tile_columns / 2, block_columns);
    }
    const std::int64_t row_bytes = std::max<std::int64_t>(problem.k, 1) * 4;
    const std::int64_t tiles = std::max<std::int64_t>(gemm_slab_bytes / row_bytes / tile_rows, 1);
    slab_rows = std::min(tiles, across) * tile_rows;
  }
};

// The buffers in which a worker computes a tile.
struct Scratch {
  float* b;     // [K chunk, tile columns] in panels
  float* gate;  // likewise
  float* sums;  // [tile rows, tile columns]: accumulators
  float* gate_sums;
  float* staging;
  EpilogueColumns columns;
};

Scratch take_scratch(Arena& arena, const GemmProblem& problem, const Tiling& tiling) {
  const std::int64_t tile = tiling.tile_rows * tiling.tile_columns;
  const std::int64_t panels = tiling.tile_columns * gemm_k_chunk;
  return {.b = arena.take<float>(panels),
          .gate = arena.take<float>(problem.gated ? panels : 0),
          .sums = arena.take<float>(tile),
          .gate_sums = arena.take<float>(problem.gated ? tile : 0),
          .staging = arena.take<float>(pack_staging),
          .columns = {.first = 0,
                      .count = 0,
                      .bias = arena.take<float>(tiling.tile_columns),
                      .gate_bias = arena.take<float>(problem.gated ? tiling.tile_columns : 0),
                      .addend = arena.take<float>(tiling.tile_columns)}};
}

std::size_t scratch_stride(const GemmProblem& problem, const Tiling& tiling) {
  Arena arena(nullptr);
  take_scratch(arena, problem, tiling);
  return arena.rounded();
}

// The size of one panel of the slab: block_rows rows of A with all K columns. There is a gap between panels,
// since packing one panel writes past its end while another thread packs the next.
std::int64_t slab_panel(const GemmProblem& problem) { return problem.k * block_rows + pack_slack; }

float* take_slab(Arena& arena, const GemmProblem& problem, const Tiling& tiling) {
  return arena.take<float>(tiling.slab_rows / block_rows, slab_panel(problem));
}

// sums (+)= A·Bᵀ of one tile over `depth` of K. The panels of A are a_stride apart.
template <typename Element, Into into>
void multiply_tile(const float* a, std::int64_t a_stride, const float* b, std::int64_t rows,
                   std::int64_t columns, float* sums, std::int64_t stride, std::int64_t depth) {
  for (std::int64_t column = 0; column < columns; column += block_columns) {
    for (std::int64_t row = 0; row < rows; row += block_rows) {
      const Product block{.a = a + row / block_rows * a_stride,
                          .lda = block_rows,
                          .b = b + column * depth,
                          .ldb = block_columns,
                          .c = sums + row * stride + column,
                          .ldc = stride,
                          .depth = static_cast<int>(depth)};
      multiply_block<block_rows, block_vectors, ALayout::columns, into, Element>(block, 0, 0);
    }
  }
}

// Computes the tile at (first_row, first_column). `slab` has the panels of A from first_row on.
template <typename Element>
void compute_tile(const GemmCall& call, const Tiling& tiling, const float* slab, std::int64_t first_row,
                  std::int64_t first_column, Scratch& scratch) {
  const GemmProblem& problem = call.problem;
  const std::int64_t rows = std::min(tiling.tile_rows, problem.m - first_row);
  const std::int64_t columns = std::min(tiling.tile_columns, problem.n - first_column);
  for (std::int64_t k = 0; k < problem.k; k += gemm_k_chunk) {
    const std::int64_t depth = std::min(gemm_k_chunk, problem.k - k);
    const auto multiply_by = [&](const Matrix& b, float* panels, float* sums) {
      for (std::int64_t column = 0; column < columns; column += block_columns) {
        pack_elements<Element>(panels + column * depth, block_columns, b, first_column + column, k, depth,
                               scratch.staging);
      }
      (k == 0 ? multiply_tile<Element, Into::set>
              : multiply_tile<Element, Into::add>)(slab + k * block_rows, slab_panel(problem), panels, rows,
                                                   columns, sums, tiling.tile_columns, depth);
    };
    multiply_by(call.b, scratch.b, scratch.sums);
    if (problem.gated) multiply_by(call.gate, scratch.gate, scratch.gate_sums);
  }
  if (problem.k == 0) {
    std::fill_n(scratch.sums, tiling.tile_rows * tiling.tile_columns, 0.0f);
    if (problem.gated) std::fill_n(scratch.gate_sums, tiling.tile_rows * tiling.tile_columns, 0.0f);
  }
  scratch.columns.first = first_column;
  scratch.columns.count = static_cast<int>(columns);
  load_biases(call, scratch.columns);
  for (std::int64_t row = 0; row < rows; ++row) {
    finish_row(call, scratch.columns, first_row + row, scratch.sums + row * tiling.tile_columns,
               scratch.gate_sums + row * tiling.tile_columns);
  }
}

// The number of tasks of the larger of the two passes: packing a slab, or computing its tiles.
std::int64_t tasks_of(const GemmProblem& problem, const Tiling& tiling) {
  const std::int64_t rows = std::min(tiling.slab_rows, problem.m);
  const std::int64_t across = (problem.n + tiling.tile_columns - 1) / tiling.tile_columns;
  return std::max((rows + block_rows - 1) / block_rows,
                  across * ((rows + tiling.tile_rows - 1) / tiling.tile_rows));
}

// The scratch of all workers, scratch_stride bytes each.
std::byte* take_scratches(Arena& arena, const GemmProblem& problem, const Tiling& tiling,
                          const Context& context) {
  return arena.take<std::byte>(scratch_stride(problem, tiling),
                               workers_for(context.parallel_for, tasks_of(problem, tiling)));
}

// For each slab, all threads first pack its rows of A. Then they compute its tiles, and each thread packs the
// panels of B that it needs.
template <typename Element>
void multiply_packed(const GemmCall& call, const Context& context) {
  const GemmProblem& problem = call.problem;
  const Tiling tiling(problem);
  Arena arena(context.workspace.data);
  float* const slab = take_slab(arena, problem, tiling);
  std::byte* const scratches = take_scratches(arena, problem, tiling, context);
  const std::size_t stride = scratch_stride(problem, tiling);
  const auto scratch_of = [&](std::int64_t worker) {
    Arena own(scratches + stride * static_cast<std::size_t>(worker));
    return take_scratch(own, problem, tiling);
  };
  for (std::int64_t first = 0; first < problem.m; first += tiling.slab_rows) {
    const std::int64_t rows = std::min(tiling.slab_rows, problem.m - first);
    for_each_task(context.parallel_for, (rows + block_rows - 1) / block_rows,
                  [&](std::int64_t worker, std::int64_t panel) {
                    pack_elements<Element>(slab + panel * slab_panel(problem), block_rows, call.a,
                                           first + panel * block_rows, 0, problem.k,
                                           scratch_of(worker).staging);
                  });
    const std::int64_t down = (rows + tiling.tile_rows - 1) / tiling.tile_rows;
    const std::int64_t across = (problem.n + tiling.tile_columns - 1) / tiling.tile_columns;
    // Tiles of the same columns follow one another, so that their rows of B are still in a cache.
    for_each_task(context.parallel_for, across * down, [&](std::int64_t worker, std::int64_t index) {
      Scratch scratch = scratch_of(worker);
      const std::int64_t row = index % down * tiling.tile_rows;
      compute_tile<Element>(call, tiling, slab + row / block_rows * slab_panel(problem), first + row,
                            index / down * tiling.tile_columns, scratch);
    });
  }
}

// Few rows of A: B is not packed and is read once. Vectors run along K, and blocks of both stay in the L1.

bool has_few_rows(const GemmProblem& problem) {
  return problem.m <= gemm_max_few_rows && problem.a_by_rows && problem.b_by_rows;
}

constexpr int dot_rows = 4;                                 // of a
constexpr int dot_columns = registers == 32 ? 4 : 2;        // rows of b
constexpr std::int64_t dot_stride = gemm_few_rows_columns;  // of sums
static_assert(gemm_few_rows_columns % lanes == 0 && gemm_few_rows_columns % dot_columns == 0);

struct FewRowsScratch {
  float* b;     // [dot columns, K chunk]: rows of B, converted where B is not f32
  float* sums;  // [M, task columns]
  float* gate;
  EpilogueColumns columns;
};

FewRowsScratch take_few_rows_scratch(Arena& arena, const GemmProblem& problem) {
  return {.b = arena.take<float>(dot_columns * gemm_few_rows_k_chunk),
          .sums = arena.take<float>(problem.m * dot_stride),
          .gate = arena.take<float>(problem.gated ? problem.m * dot_stride : 0),
          .columns = {.first = 0,
                      .count = 0,
                      .bias = arena.take<float>(dot_stride),
                      .gate_bias = arena.take<float>(dot_stride),
                      .addend = arena.take<float>(dot_stride)}};
}

// sums[r·dot_stride + j] += Σ_k a[r][k]·b[j][k] for R rows. Past `depth`, a is 0 up to a whole vector.
template <typename Element, int R>
void add_dots(const float* a, std::int64_t a_stride, const float* const* b, int depth, float* sums) {
  VF sum[R][dot_columns];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < dot_columns; ++j) sum[r][j] = hn::Zero(F());
  }
  const auto step = [&](int k, const auto& load_b) HWY_ATTR {
    VF column[dot_columns];
#pragma GCC unroll 8
    for (int j = 0; j < dot_columns; ++j) column[j] = load_b(b[j] + k);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const VF row = load(a + r * a_stride + k);
#pragma GCC unroll 8
      for (int j = 0; j < dot_columns; ++j) sum[r][j] = Element::multiply_add(row, column[j], sum[r][j]);
    }
  };
  const int whole = depth / lanes * lanes;
  for (int k = 0; k < whole; k += lanes) step(k, [](const float* from) HWY_ATTR { return load(from); });
  if (whole < depth) {
    step(whole, [&](const float* from) HWY_ATTR { return load_first(from, depth - whole); });
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < dot_columns; ++j) {
      sums[r * dot_stride + j] += hn::GetLane(hn::SumOfLanes(F(), sum[r][j]));
    }
  }
}

// Computes `sums` [M, task columns]: A·Bᵀ for the columns of out that the scratch names.
template <typename Element>
void compute_columns(const GemmProblem& problem, const Matrix& b, const float* a,
                     const FewRowsScratch& scratch, float* sums) {
  const std::int64_t stride = padded(problem.k);
  std::fill_n(sums, problem.m * dot_stride, 0.0f);
  for (std::int64_t k = 0; k < problem.k; k += gemm_few_rows_k_chunk) {
    const auto depth = static_cast<int>(std::min(gemm_few_rows_k_chunk, problem.k - k));
    for (int n = 0; n < scratch.columns.count; n += dot_columns) {
      const float* rows[dot_columns];
      for (int j = 0; j < dot_columns; ++j) {  // past the last row of B, repeat it
        const int column = std::min(n + j, scratch.columns.count - 1);
        std::byte* from = b.at(scratch.columns.first + column, k);
        rows[j] = reinterpret_cast<const float*>(from);
        if (b.dtype == DType::f32) continue;
        widen(scratch.b + j * gemm_few_rows_k_chunk, from, b.dtype, depth, 1.0f);
        rows[j] = scratch.b + j * gemm_few_rows_k_chunk;
      }
      for (std::int64_t m = 0; m < problem.m; m += dot_rows) {
        const auto count = static_cast<int>(std::min<std::int64_t>(dot_rows, problem.m - m));
        with_row_count(count, [&](auto r) HWY_ATTR {
          add_dots<Element, r>(a + m * stride + k, stride, rows, depth, sums + m * dot_stride + n);
        });
      }
    }
  }
}

std::int64_t few_rows_tasks(const GemmProblem& problem) {
  return (problem.n + gemm_few_rows_columns - 1) / gemm_few_rows_columns;
}

struct FewRowsWorkspace {
  float* a;            // [M, padded K]: A as f32, 0 past K
  std::byte* workers;  // the scratch of all workers
  std::size_t stride;  // bytes of scratch per worker
};

FewRowsWorkspace take_few_rows_workspace(Arena& arena, const GemmProblem& problem, const Context& context) {
  Arena own(nullptr);
  take_few_rows_scratch(own, problem);
  FewRowsWorkspace workspace{};
  workspace.stride = own.rounded();
  workspace.a = arena.take<float>(problem.m, padded(problem.k));
  workspace.workers =
      arena.take<std::byte>(workspace.stride, workers_for(context.parallel_for, few_rows_tasks(problem)));
  return workspace;
}

template <typename Element>
void multiply_few_rows(const GemmCall& call, const Context& context) {
  const GemmProblem& problem = call.problem;
  Arena arena(context.workspace.data);
  const FewRowsWorkspace workspace = take_few_rows_workspace(arena, problem, context);
  for (std::int64_t m = 0; m < problem.m; ++m) {
    float* row = workspace.a + m * padded(problem.k);
    if (call.a.dtype == DType::f32) {  // copied as bytes: the elements may be pairs of bf16
      std::copy_n(call.a.at(m, 0), problem.k * std::int64_t{sizeof(float)},
                  reinterpret_cast<std::byte*>(row));
    } else {
      widen(row, call.a.at(m, 0), call.a.dtype, static_cast<int>(problem.k), 1.0f);
    }
    std::fill(row + problem.k, row + padded(problem.k), 0.0f);
  }
  for_each_task(context.parallel_for, few_rows_tasks(problem), [&](std::int64_t worker, std::int64_t index) {
    Arena own(workspace.workers + workspace.stride * static_cast<std::size_t>(worker));
    FewRowsScratch scratch = take_few_rows_scratch(own, problem);
    scratch.columns.first = index * gemm_few_rows_columns;
    scratch.columns.count =
        static_cast<int>(std::min(gemm_few_rows_columns, problem.n - scratch.columns.first));
    load_biases(call, scratch.columns);
    compute_columns<Element>(problem, call.b, workspace.a, scratch, scratch.sums);
    if (problem.gated) compute_columns<Element>(problem, call.gate, workspace.a, scratch, scratch.gate);
    for (std::int64_t m = 0; m < problem.m; ++m) {
      finish_row(call, scratch.columns, m, scratch.sums + m * dot_stride, scratch.gate + m * dot_stride);
    }
  });
}

}  // namespace

std::size_t gemm_workspace(const GemmCall& call, const Context& context) {
  const GemmProblem problem = can_pair(call) ? paired(call).problem : call.problem;
  if (problem.m == 0 || problem.n == 0) return 0;
  Arena arena(nullptr);
  if (has_few_rows(problem)) {
    take_few_rows_workspace(arena, problem, context);
  } else {
    const Tiling tiling(problem);
    take_slab(arena, problem, tiling);
    take_scratches(arena, problem, tiling, context);
  }
  return arena.used();
}

void gemm(const GemmCall& call, const Context& context) {
  if (call.problem.m == 0 || call.problem.n == 0) return;
  const bool few_rows = has_few_rows(call.problem);
  if (can_pair(call)) {
    (few_rows ? multiply_few_rows<Bf16Pairs> : multiply_packed<Bf16Pairs>)(paired(call), context);
  } else {
    (few_rows ? multiply_few_rows<F32Elements> : multiply_packed<F32Elements>)(call, context);
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
