#pragma once

#include "cuda/gemm/simt/simt.h"
#include "cuda/gemm/sm90/split/split.h"
#include "cuda/gemm/sm90/split/split_parts.h"
#include "cuda/gemm/sm90/split/split_pass.cuh"
#include "cuda/gemm/sm90/tiles/kernel.cuh"
#include "cuda/gemm/sm90/tiles/output.cuh"
#include "cuda/gemm/sm90/tiles/pipeline.cuh"
#include "cuda/gemm/sm90/tiles/tuning.h"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/runtime/dynamic_shared.cuh"

namespace tilewise::cuda::gemm {

/// The shape of a CTA of split_gemm_kernel: a producer warp, and two consumer warpgroups with 64 rows of a
/// tile each.
struct SplitConfig {
  int parts = 2;  ///< of f16; bf16 has one more
  int columns = 128;
  int stages = 3;  ///< each with all f16 parts of 64 of K of A and B
  /// f16: accumulators are added to totals every so many stages. bf16: after all terms of 64 of K.
  int promotion_interval = 1;
  bool gated = false;

  static constexpr int depth = GemmConfig::depth;

  constexpr int terms() const { return parts == 2 ? 3 : 1; }       ///< products of f16 parts
  constexpr int bf16_terms() const { return parts == 2 ? 6 : 3; }  ///< products of bf16 parts
  constexpr int rows() const { return 128; }
  constexpr int a_bytes() const { return rows() * depth * 2; }  ///< of one part
  constexpr int b_bytes() const { return columns * depth * 2; }
  constexpr int stage_bytes() const { return parts * (a_bytes() + b_bytes()); }
  /// The configuration of `wgmma` whose tile order, pipeline and f32 epilogue this kernel uses.
  constexpr GemmConfig output() const {
    return {.columns = columns, .stages = stages, .gated = gated, .out_f32 = true};
  }
  constexpr int slabs_bytes() const { return output().slabs_bytes(); }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(stages * stage_bytes() + slabs_bytes() + output().barrier_bytes());
  }
  friend constexpr bool operator==(const SplitConfig&, const SplitConfig&) = default;
};

/// Tables of one row each. `tf32`: TF32 is allowed.
template <bool tf32, bool gated>
struct Split;
template <bool gated>
struct Split<false, gated> {
  static constexpr SplitConfig rows[] = {{.parts = 2, .stages = 3, .promotion_interval = 1, .gated = gated}};
};
template <bool gated>
struct Split<true, gated> {
  static constexpr SplitConfig rows[] = {{.parts = 1, .stages = 6, .promotion_interval = 8, .gated = gated}};
};

// The GEMM of split operands. f16: a stage holds all parts of 64 of K, of which up to three products are
// made. bf16: a stage holds the two parts of one product. Tensor cores truncate as they accumulate, an error
// that grows with K. So accumulators are added to totals in f32 registers every `promotion_interval` stages,
// while the other consumer's products run.

/// A product of parts: which part of A, and which of B.
struct Term {
  int a = 0, b = 0;
};

/// The terms in the order in which they are added: small ones first, so that the sum loses less.
template <int terms, typename T>
constexpr Term term_of(int index) {
  constexpr Term of_f16[] = {{1, 0}, {0, 1}, {0, 0}};
  constexpr Term of_bf16[] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
  return std::is_same_v<T, __half> ? of_f16[index + 3 - terms] : of_bf16[index + 6 - terms];
}

/// Where a GEMM's rows are among those of all GEMMs of a launch, and what is computed of them. One GEMM has
/// them from 0 on, and all of it is computed.
template <bool items>
struct Stacking {
  struct Tile {
    int first_b = 0;  ///< the first row of its B in the parts
    int out = 0;      ///< the row of the result, less that of A in the parts
    int end = 0;      ///< the end of its rows of the result
  };
  int a_rows = 0, b_rows = 0;            ///< of all parts
  int a_item_rows = 1, b_item_rows = 0;  ///< from one matrix to the next
  int out_item_rows = 0, slice_rows = 0;
  int first_bf16_b = 0;  ///< the first row of the bf16 parts of B
  UnitPlan plan;

  __device__ int rows_a(const GemmArguments& arguments) const { return items ? a_rows : arguments.m; }
  __device__ int rows_b(const GemmArguments& arguments) const { return items ? b_rows : arguments.n; }
  __device__ Tile of_tile(int row, int m = 0, int slice = 0) const {
    if constexpr (!items) return {0, 0, m};
    const int item = row / a_item_rows, first = item * out_item_rows + slice * slice_rows;
    return {item * b_item_rows, first - item * a_item_rows, first + m};
  }
};

/// What a CTA computes next.
struct Work {
  int row, column;  ///< of the tile: in the parts of A, and in the result
  int slice;
  Span stages;
  bool f16;  ///< where there are several GEMMs
};

/// Calls body(work) for each of the CTA's tiles. The next unit is read while a tile is computed.
template <SplitConfig c, bool items, typename Body>
__device__ __forceinline__ void for_each_unit(const GemmArguments& arguments, const Stacking<items>& stacking,
                                              const Body& body) {
  if constexpr (items) {
    const UnitPlan& plan = stacking.plan;
    const int total = *plan.count * plan.across;
    const auto find = [&](int index) {
      const Unit unit = plan.units[index / plan.across];
      return Work{.row = unit.m * c.rows(),
                  .column = (unit.n + index % plan.across) * c.columns,
                  .slice = unit.slice,
                  .stages = unit.stages,
                  .f16 = plan.fit_f16[unit.m] != 0};
    };
    auto index = static_cast<int>(blockIdx.x);
    Work next{};
    if (index < total) next = find(index);
#pragma unroll 1
    while (index < total) {
      const Work work = next;
      index += static_cast<int>(gridDim.x);
      if (index < total) next = find(index);
      body(work);
    }
  } else {
    const Span all{0, (arguments.k + c.depth - 1) / c.depth};
    for_each_tile<c.output()>(arguments,
                              [&](int row, int column) { body(Work{row, column, 0, all, false}); });
  }
}

/// What an epilogue reads, of one tile.
struct TileArguments {
  int m, n;  ///< m: the end of the rows that the tile may write
  const Epilogue& epilogue;
};
template <bool first, typename A, typename B>
__device__ __forceinline__ const auto& choose(const A& a, const B& b) {
  if constexpr (first) {
    return a;
  } else {
    return b;
  }
}

template <SplitConfig c>
struct SplitShared {
  static_assert(c.shared_bytes() <= 232448);  // the most a CTA can have on Hopper

  std::byte* first;

  __device__ std::byte* a(int stage, int part) const {
    return first + stage * c.stage_bytes() + part * c.a_bytes();
  }
  __device__ std::byte* b(int stage, int part) const { return a(stage, c.parts) + part * c.b_bytes(); }
  __device__ std::byte* slabs(int warp) const {
    return first + c.stages * c.stage_bytes() + warp * (2 * c.output().slab_bytes());
  }
  __device__ Barriers<c.output()>& barriers() const {
    return *reinterpret_cast<Barriers<c.output()>*>(first + c.stages * c.stage_bytes() + c.slabs_bytes());
  }
};

/// The producer, one lane.
template <SplitConfig c, bool items>
struct SplitLoader {
  const GemmMaps& maps;
  const SplitShared<c>& shared;
  const GemmArguments& arguments;
  const Stacking<items>& stacking;
  Ring<c.stages> ring;

  /// Loads the parts of a term into slot `slot` of the stage.
  __device__ __forceinline__ void load_parts(Mbarrier* full, int slot, Term term, int row, int column,
                                             int k) const {
    copy_box(shared.a(ring.stage(), slot), maps.a, full, k, row + term.a * stacking.rows_a(arguments));
    std::byte* to = shared.b(ring.stage(), slot);
    const int from = column + term.b * stacking.rows_b(arguments);
    if constexpr (c.gated) {
      copy_box(to, maps.gate, full, k, from);
      copy_box(to + c.b_bytes() / 2, maps.b, full, k, from);
    } else {
      copy_box(to, maps.b, full, k, from);
    }
  }

  /// Loads a tile. T is the type of the parts.
  template <typename T>
  __device__ __forceinline__ void load_tile(int row, int tile_column, const Span& stages) {
    constexpr bool f16 = std::is_same_v<T, __half>;
    Barriers<c.output()>& barriers = shared.barriers();
    const int column = stacking.of_tile(row).first_b + tile_column;
    const auto load_stage = [&](int k) {
#pragma unroll 1
      for (int term = 0; term < (f16 ? 1 : c.bf16_terms()); ++term) {
        wait(&barriers.empty[ring.stage()], ring.parity() ^ 1);
        Mbarrier* full = &barriers.full[ring.stage()];
        arrive_expecting(full, f16 ? c.stage_bytes() : c.a_bytes() + c.b_bytes());
        if constexpr (f16) {
#pragma unroll
          for (int part = 0; part < c.parts; ++part) {
            load_parts(full, part, {part, part}, row, column, k);
          }
        } else {
          load_parts(full, 0, term_of<c.bf16_terms(), T>(term), row, column, k);
        }
        ring.advance();
      }
    };
    if constexpr (items) {
      const UnitPlan& plan = stacking.plan;
      const int* list = plan.stage_lists == nullptr
                            ? nullptr
                            : plan.stage_lists + std::int64_t{row / item_tile} * plan.stages;
#pragma unroll 1
      for (int at = stages.first; at < stages.last; ++at) {
        load_stage((list == nullptr ? at : list[at]) * c.depth);
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < arguments.k; k += c.depth) load_stage(k);
    }
  }
  /// Loads all tiles of one GEMM.
  template <typename T>
  __device__ void load() {
    for_each_tile<c.output()>(arguments, [&](int row, int column) { load_tile<T>(row, column, {}); });
  }
  /// Loads all units of several GEMMs.
  __device__ void load_units() {
    for_each_unit<c>(arguments, stacking, [&](const Work& work) {
      work.f16 ? load_tile<__half>(work.row, work.column, work.stages)
               : load_tile<__nv_bfloat16>(work.row, work.column + stacking.first_bf16_b, work.stages);
    });
  }
};

/// A consumer warpgroup.
template <SplitConfig c>
struct SplitConsumer {
  Barriers<c.output()>& barriers;
  const TileDescriptor a_tile, b_tile;  ///< of part 0 of stage 0
  Ring<c.stages> ring;
  Accumulators<c.output()> totals;

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  __device__ __forceinline__ SplitConsumer(const SplitShared<c>& shared, int index)
      : barriers(shared.barriers()),
        a_tile(describe_tile(address(shared.a(0, 0)) + index * 64 * 128, 0)),
        b_tile(describe_tile(address(shared.b(0, 0)), 0)) {}

  __device__ __forceinline__ void release(int stage) {
    if (threadIdx.x % 32 == 0) arrive(&barriers.empty[stage]);
  }

  /// Starts the products of a stage.
  template <typename T>
  __device__ __forceinline__ void start_products(float (&accumulators)[c.columns / 2], bool add) {
    constexpr int terms = std::is_same_v<T, __half> ? c.terms() : 1;
    const TileDescriptor a = a_tile + ring.stage() * (c.stage_bytes() / 16);
    const TileDescriptor b = b_tile + ring.stage() * (c.stage_bytes() / 16);
    pin(accumulators);
    fence_products();
#pragma unroll
    for (int n = 0; n < terms; ++n) {
      const Term term = terms == 1 ? Term{} : term_of<terms, T>(n);
#pragma unroll
      for (int step = 0; step < c.depth / 16; ++step) {
        WarpgroupProduct<T, c.columns>::template from_shared<0, 0>(
            accumulators, a + term.a * (c.a_bytes() / 16) + 2 * step,
            b + term.b * (c.b_bytes() / 16) + 2 * step, add || n > 0 || step > 0);
      }
    }
    commit_products();
  }

  /// The mainloop of a tile. A stage is released when the products of the next one have been started.
  template <typename T>
  __device__ __forceinline__ void multiply(int stages) {
    constexpr int promotion_interval = std::is_same_v<T, __half> ? c.promotion_interval : c.bf16_terms();
    float accumulators[c.columns / 2];
#pragma unroll
    for (int n = 0; n < c.columns / 2; ++n) totals[0][n] = 0;
#pragma unroll 1
    for (int first = 0; first < stages; first += promotion_interval) {
      const int count = promotion_interval == 1 ? 1 : min(promotion_interval, stages - first);
      wait(&barriers.full[ring.stage()], ring.parity());
      start_products<T>(accumulators, false);
      int before = ring.stage();
      ring.advance();
#pragma unroll 1
      for (int stage = 1; stage < count; ++stage) {
        wait(&barriers.full[ring.stage()], ring.parity());
        start_products<T>(accumulators, true);
        wait_products<1>();
        release(before);
        before = ring.stage();
        ring.advance();
      }
      wait_products<0>();
      pin(accumulators);
      release(before);
#pragma unroll
      for (int n = 0; n < c.columns / 2; ++n) totals[0][n] += accumulators[n];
    }
  }
};

/// x · 2^exponent, multiplied in two halves: 2^exponent alone may be outside the range of f32.
__device__ __forceinline__ float scaled(float x, int exponent) {
  const int half = exponent / 2;
  return x * __int_as_float((half + 127) << 23) * __int_as_float((exponent - half + 127) << 23);
}

/// Undoes the scaling of the rows of A and B. Totals are in the layout of wgmma's accumulators (wgmma.cuh);
/// `row` and `column` are the lane's first. `rows` and `first_b` are those of Stacking.
template <SplitConfig c, typename Totals>  // Accumulators<c.output()>, which GCC cannot mangle
__device__ __forceinline__ void scale_back(Totals& totals, const GemmArguments& arguments,
                                           const SplitWorkspace& workspace, int row, int rows, int first_b,
                                           int column) {
  int row_exponents[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row_exponents[half] = row + 8 * half < rows ? workspace.a.exponents[row + 8 * half] : 0;
  }
#pragma unroll
  for (int n = 0; n < c.columns / 8; ++n) {
    const bool of_gate = c.gated && n < c.columns / 16;
    const int* exponents = (of_gate ? workspace.gate.exponents : workspace.b.exponents) + first_b;
    const int first = column + 8 * (c.gated ? n % (c.columns / 16) : n);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column_exponent = first + e < arguments.n ? exponents[first + e] : 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = totals[0][4 * n + 2 * half + e];
        x = scaled(x, -row_exponents[half] - column_exponent);
      }
    }
  }
}

template <typename Table, int row, bool items>
__global__ void __launch_bounds__(Table::rows[row].output().threads(), 1)
    split_gemm_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments arguments,
                      const __grid_constant__ SplitWorkspace workspace,
                      const __grid_constant__ Stacking<items> stacking) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr SplitConfig c = Table::rows[row];
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const SplitShared<c> shared{first_smem};
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) shared.barriers().init();
  const bool all_f16 =
      !items && fits_f16(workspace.findings->a, workspace.findings->b, arguments.k, c.parts == 1);
  __syncthreads();  // the mbarriers are initialised; the last barrier of the whole CTA

  if (warp < 4) {
    keep_registers<c.output().producer_registers()>();
    if (warp == 0 && elected()) {
      SplitLoader<c, items> loader{maps, shared, arguments, stacking, {}};
      if constexpr (items) {
        loader.load_units();
      } else {
        all_f16 ? loader.template load<__half>() : loader.template load<__nv_bfloat16>();
      }
    }
  } else {
    take_registers<c.output().consumer_registers()>();
    const int index = warp / 4 - 1;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    SplitConsumer<c> consumer(shared, index);
    TileArguments of_tile{arguments.m, arguments.n, arguments.epilogue};
    using Arguments = std::conditional_t<items, TileArguments, GemmArguments>;
    Writer<float, c.output(), Arguments> writer{maps, choose<items>(of_tile, arguments),
                                                shared.slabs(warp - 4), lane};
    for_each_unit<c>(arguments, stacking, [&](const Work& work) {
      const int first_row = work.row, column = work.column;
      const int stages = work.stages.last - work.stages.first;
      const int warp_row = first_row + index * 64 + warp % 4 * 16;
      const auto tile = stacking.of_tile(first_row, arguments.m, work.slice);
      if constexpr (items) of_tile.m = tile.end;
      writer.begin(warp_row + tile.out, column);
      const int marked = workspace.row_marks[first_row / marked_rows] |
                         workspace.column_marks[(tile.first_b + column) / marked_rows];
      const bool f16 = items ? work.f16 : all_f16;
      if (f16) {
        consumer.template multiply<__half>(stages);
        scale_back<c>(consumer.totals, arguments, workspace, warp_row + lane / 4, stacking.rows_a(arguments),
                      tile.first_b, column + lane % 4 * 2);
      } else {
        consumer.template multiply<__nv_bfloat16>(stages * c.bf16_terms());
      }
      if (marked == 0)
        writer.finish(consumer.totals);  // else a kernel without tensor cores computes the tile
    });
    writer.end();
  }
#endif
}

/// The operands for which `suits` is true; `ctas_of` says how many CTAs one takes. `tile_spreads`: those of
/// A, for each tile of rows, if there are several GEMMs.
template <typename Suits, typename Blocks>
Splitting splitting_of(const GemmCall& call, const SplitWorkspace& workspace, const Items& items,
                       Spread* tile_spreads, const Suits& suits, const Blocks& ctas_of) {
  Splitting splitting;
  const auto add = [&](const Splitting::Operand& operand) {
    if (suits(operand.matrix)) splitting.add(operand, ctas_of(operand.parts.rows));
  };
  const auto whole = [](const Matrix& matrix) {
    return VisibleBand{static_cast<int>(matrix.rows), static_cast<int>(matrix.columns)};
  };
  add({.matrix = call.a,
       .parts = workspace.a,
       .spread = tile_spreads != nullptr ? tile_spreads : &workspace.findings->a,
       .marks = workspace.row_marks,
       .item_stride = items.a,
       .visible = items.over_k ? items.visible : whole(call.a),
       .shown = items.over_k ? items.shown : ShownTiles{},
       .tiles_have_spreads = tile_spreads != nullptr});
  add({.matrix = call.b,
       .parts = workspace.b,
       .spread = &workspace.findings->b,
       .marks = workspace.column_marks,
       .item_stride = items.b,
       .visible = whole(call.b)});
  if (call.problem.gated) {
    add({.matrix = call.gate,
         .parts = workspace.gate,
         .spread = &workspace.findings->b,
         .marks = workspace.column_marks});
  }
  return splitting;
}

template <int parts, bool many>
void split_into_f16(const GemmCall& call, const SplitWorkspace& workspace, const Items& items,
                    Spread* tile_spreads, cudaStream_t stream) {
  const Splitting rows = splitting_of(
      call, workspace, items, tile_spreads, [](const Matrix& x) { return x.by_rows(); },
      [](std::int64_t x) { return x; });
  const Splitting columns = splitting_of(
      call, workspace, items, tile_spreads, [](const Matrix& x) { return !x.by_rows(); },
      [](std::int64_t x) { return (x + across_rows - 1) / across_rows; });
  const auto how = [&](const Splitting& splitting, int threads) {
    return Launch{.name = "tilewise split gemm, f16 parts",
                  .blocks = splitting.blocks,
                  .threads = threads,
                  .stream = stream};
  };
  call.problem.k <= 2 * 8 * split_threads
      ? launch<split_by_rows<parts, 2, many>>(how(rows, split_threads), rows)
      : launch<split_by_rows<parts, 6, many>>(how(rows, split_threads), rows);
  launch<split_by_columns<parts, many>>(how(columns, across_threads), columns);
}

template <typename Table, int row, bool many>
void multiply(const GemmCall& call, const SplitWorkspace& workspace, const Stacking<many>& stacking,
              std::int64_t units, int multiprocessors, cudaStream_t stream) {
  constexpr SplitConfig c = Table::rows[row];
  const GemmProblem& problem = call.problem;
  const int b_box = c.gated ? c.columns / 2 : c.columns;
  GemmMaps maps{.a = map_of_operand(workspace.a.matrix(call.a), false, c.rows()),
                .b = map_of_operand(workspace.b.matrix(call.b), false, b_box)};
  maps.gate = c.gated ? map_of_operand(workspace.gate.matrix(call.gate), false, b_box) : maps.b;
  maps.out = maps.out_tail = maps.b;  // unused: results in f32 are not stored by TMA
  const int tiles_m = tiles_of(problem.m, c.rows());
  const int tiles_n = tiles_of(problem.n, c.output().out_columns());
  const std::int64_t tiles = many ? units : std::int64_t{tiles_m} * tiles_n;
  const int blocks = static_cast<int>(std::min<std::int64_t>(tiles, multiprocessors));
  const GemmArguments arguments{.order = TileOrder::of(tiles_m, tiles_n, blocks, c.rows(), c.columns),
                                .m = static_cast<int>(problem.m),
                                .n = static_cast<int>(problem.n),
                                .k = static_cast<int>(problem.k),
                                .epilogue = Epilogue::of(call)};
  launch<split_gemm_kernel<Table, row, many>>({.name = "tilewise split gemm",
                                               .blocks = blocks,
                                               .threads = c.output().threads(),
                                               .shared_bytes = c.shared_bytes(),
                                               .stream = stream},
                                              maps, arguments, workspace, stacking);
}

/// Computes the marked tiles of several GEMMs, which contain infinities or NaN. A CTA has a tile of 128 x
/// 128. `tiles_m` are those of one GEMM.
template <typename Unused = void>
__global__ void __launch_bounds__(split_threads)
    mend_items_kernel(const __grid_constant__ GemmCall call, int tiles_m, int tiles_n,
                      const __grid_constant__ Items items, TileMarks marks) {
  const int tile_m = static_cast<int>(blockIdx.x / tiles_n), tile_n = static_cast<int>(blockIdx.x % tiles_n);
  const int item = tile_m / tiles_m;
  if ((marks.rows[tile_m] | marks.columns[item * tiles_n + tile_n]) == 0) return;
  const int first_row = tile_m % tiles_m * marked_rows;
  const Span visible = items.visible.of_rows(first_row, marked_rows);
  if (!items.over_k) {
    const Span tiles = visible.in_units(marked_rows);
    if (tile_n < tiles.first || tile_n >= tiles.last || !items.shown.at(item, tile_m % tiles_m, tile_n))
      return;
  }
  const Span over = items.over_k ? visible : Span{0, static_cast<int>(call.problem.k)};
  const Span own = over.whole_units(item_stage, static_cast<int>(call.problem.k));
  const bool listed = items.over_k && items.shown.any_hidden();
  const int slices = listed         ? items.slices
                     : items.over_k ? slices_of(over.in_units(item_stage), items.longest_slice)
                                    : 1;
  const auto* a = reinterpret_cast<const float*>(call.a.data) + item * items.a;
  const auto* b = reinterpret_cast<const float*>(call.b.data) + item * items.b;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < marked_rows * marked_rows; index += split_threads) {
    const std::int64_t m = first_row + index / marked_rows;
    const std::int64_t n = std::int64_t{tile_n} * marked_rows + index % marked_rows;
    if (m >= call.problem.m || n >= call.problem.n) continue;
    double sum = 0;
    for (std::int64_t k = own.first; k < own.last; ++k) {
      if (listed && !items.shown.at(item, tile_m % tiles_m, static_cast<int>(k / marked_rows))) continue;
      sum =
          fma(static_cast<double>(a[call.a.offset(m, k)]), static_cast<double>(b[call.b.offset(n, k)]), sum);
    }
    auto* to = reinterpret_cast<float*>(call.out.at(item * items.out_rows + m, n));
    *to = call.problem.accumulate ? *to + static_cast<float>(sum) : static_cast<float>(sum);
    if (call.problem.accumulate) continue;
    for (int slice = 1; slice < slices; ++slice) {  // the first one has all
      *reinterpret_cast<float*>(call.out.at(slice * items.slice_rows + item * items.out_rows + m, n)) = 0;
    }
  }
}

inline void mend_items(const GemmCall& call, const Items& items, const TileMarks& marks,
                       cudaStream_t stream) {
  const int tiles_m = tiles_of(call.problem.m, marked_rows), tiles_n = tiles_of(call.problem.n, marked_rows);
  launch<mend_items_kernel<>>({.name = "tilewise split gemm, marked tiles",
                               .blocks = items.count * tiles_m * tiles_n,
                               .threads = split_threads,
                               .stream = stream},
                              call, tiles_m, tiles_n, items, marks);
}

/// The operands in blocks of 32 rows and `columns` of K.
inline Splitting squares_of(const GemmCall& call, const SplitWorkspace& workspace, const Items& items,
                            Spread* tile_spreads, int columns) {
  return splitting_of(
      call, workspace, items, tile_spreads, [](const Matrix&) { return true; },
      [&](std::int64_t rows) {
        return (rows + square - 1) / square * ((call.problem.k + columns - 1) / columns);
      });
}
inline Launch bf16_launch(const Splitting& squares, int multiprocessors, cudaStream_t stream) {
  return {.name = "tilewise split gemm, bf16 parts",
          .blocks = std::min<std::int64_t>(squares.blocks, 8 * multiprocessors),
          .threads = split_threads,
          .stream = stream};
}

/// Launches the kernels of one GEMM.
template <bool tf32>
void run(const GemmCall& call, const Context& context) {
  const SplitWorkspace workspace(call, context.workspace.data);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  check_cuda(cudaMemsetAsync(workspace.findings, 0, workspace.zeroed, stream), "tilewise split gemm");
  split_into_f16<(tf32 ? 1 : 2), false>(call, workspace, {}, nullptr, stream);
  const Splitting squares = squares_of(call, workspace, {}, nullptr, square);
  launch<split_into_bf16<tf32>>(bf16_launch(squares, multiprocessors, stream), squares, workspace.findings);
  call.problem.gated
      ? multiply<Split<tf32, true>, 0, false>(call, workspace, {}, 0, multiprocessors, stream)
      : multiply<Split<tf32, false>, 0, false>(call, workspace, {}, 0, multiprocessors, stream);
  run_simt_marked(call, {workspace.row_marks, workspace.column_marks}, context);
}

/// Launches the kernels of several GEMMs.
template <typename Unused = void>
void run_items(const GemmCall& call, const Items& items, const Context& context) {
  const ItemsWorkspace workspace(call, context.workspace.data, items);
  const UnitPlan& plan = workspace.plan;
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  launch<plan_units<>>(
      {.name = "tilewise split gemm, units", .blocks = 1, .threads = plan_threads, .stream = stream}, items,
      plan, call.problem.accumulate, reinterpret_cast<int*>(workspace.findings),
      static_cast<int>(workspace.zeroed / sizeof(int)));
  split_into_f16<2, true>(call, workspace, items, plan.spreads, stream);
  const Splitting squares = squares_of(call, workspace, items, plan.spreads, bf16_columns);
  launch<split_tiles_into_bf16<>>(bf16_launch(squares, multiprocessors, stream), squares, workspace.findings,
                                  plan);
  const auto b_rows = static_cast<int>(workspace.b.rows);
  multiply<Split<false, false>, 0, true>(call, workspace,
                                         {.a_rows = static_cast<int>(workspace.a.rows),
                                          .b_rows = b_rows,
                                          .a_item_rows = static_cast<int>(workspace.a.item_rows),
                                          .b_item_rows = static_cast<int>(workspace.b.item_rows),
                                          .out_item_rows = static_cast<int>(items.out_rows),
                                          .slice_rows = static_cast<int>(items.slice_rows),
                                          .first_bf16_b = workspace.b.first_bf16 * b_rows,
                                          .plan = plan},
                                         plan.most_units, multiprocessors, stream);
  mend_items(call, items, {workspace.row_marks, workspace.column_marks}, stream);
}

}  // namespace tilewise::cuda::gemm
