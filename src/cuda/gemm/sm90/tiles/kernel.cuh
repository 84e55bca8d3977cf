#pragma once

#include "cuda/gemm/sm90/arguments.h"
#include "cuda/gemm/sm90/tiles/choice.h"
#include "cuda/gemm/sm90/tiles/output.cuh"
#include "cuda/gemm/sm90/tiles/pipeline.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tensor_map.h"

namespace tilewise::cuda::gemm {

/// The producer, one lane. It loads tiles of A and B, 64 of K at a time, as stages become free. Of the
/// operand that a pair of CTAs shares it loads half, into both CTAs.
template <GemmConfig c>
struct Loader {
  static constexpr int panel_bytes = c.depth * 128;  ///< of a transposed matrix: 64 of K by 64 rows

  const GemmMaps& maps;
  const SharedMemory<c>& shared;
  Ring<c.stages> ring;

  /// Which half of the shared operand this CTA loads.
  static __device__ int half(Pair pair) { return c.pair == pair ? rank_in_pair() : 0; }

  template <Pair pair>
  static __device__ void copy(std::byte* to, const CUtensorMap& map, Mbarrier* full, int column, int row) {
    if constexpr (c.pair == pair) {
      copy_box_to_both(to, map, full, column, row);
    } else {
      copy_box(to, map, full, column, row);
    }
  }

  /// Copies panels of 64 rows of a transposed matrix.
  template <Pair pair, int panels>
  static __device__ void copy_panels(std::byte* to, const CUtensorMap& map, Mbarrier* full, int row, int k) {
    constexpr int count = c.pair == pair ? panels / 2 : panels;
    const int first = half(pair) * count;
#pragma unroll
    for (int p = 0; p < count; ++p) {
      copy<pair>(to + (first + p) * panel_bytes, map, full, row + 64 * (first + p), k);
    }
  }

  __device__ void load_a(Mbarrier* full, int row, int k) const {
    std::byte* to = shared.a(ring.stage());
    if constexpr (c.transposed_a) {
      copy_panels<Pair::shares_a, c.rows() / 64>(to, maps.a, full, row, k);
    } else {
      const int first = half(Pair::shares_a) * c.a_box();
      copy<Pair::shares_a>(to + first * 128, maps.a, full, k, row + first);
    }
  }

  __device__ void load_b(Mbarrier* full, int column, int k) const {
    std::byte* to = shared.b(ring.stage());
    if constexpr (c.transposed_b) {
      copy_panels<Pair::shares_b, c.columns / 64>(to, maps.b, full, column, k);
    } else if constexpr (c.gated) {
      const bool both = c.pair != Pair::shares_b;
      if (both || rank_in_pair() == 0) copy<Pair::shares_b>(to, maps.gate, full, k, column);
      if (both || rank_in_pair() == 1) {
        copy<Pair::shares_b>(to + c.columns / 2 * 128, maps.b, full, k, column);
      }
    } else {
      const int first = half(Pair::shares_b) * (c.columns - c.b_box());
      copy<Pair::shares_b>(to + first * 128, maps.b, full, k, column + first);
    }
  }

  __device__ void load(const GemmArguments& arguments) {
    Barriers<c>& barriers = shared.barriers();
    for_each_tile<c>(arguments, [&](int row, int column) {
#pragma unroll 1
      for (int stage = 0; stage < stages_of<c>(arguments); ++stage) {
        const int k = stage * c.depth;
        wait(&barriers.empty[ring.stage()], ring.parity() ^ 1);
        Mbarrier* full = &barriers.full[ring.stage()];
        arrive_expecting(full, c.loaded_bytes());
        load_a(full, row, k);
        load_b(full, column, k);
        ring.advance();
      }
    });
  }
};

/// Waits until thread 0 has initialised the mbarriers. The producer warp, to which that thread belongs, does
/// not wait for the other warps to start, except in a pair: there it also loads into the other CTA, whose
/// mbarriers must be initialised, too.
template <GemmConfig c>
__device__ __forceinline__ void wait_for_barriers(int warp) {
  constexpr int threads = 32 + c.consumers * 128;
  if constexpr (c.pair != Pair::none) {
    sync_pair();
  } else if (warp == 0) {
    __syncwarp();
    arrive_some<1, threads>();
  } else if (warp >= 4) {
    sync_some<1, threads>();
  }
}

/// The body of the kernel. docs/gemm.md draws who waits for whom.
template <typename T, GemmConfig c>
__device__ __forceinline__ void multiply_tiles(const GemmMaps& maps, const GemmArguments& arguments) {
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const SharedMemory<c> shared{first_smem};
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    prefetch_map(maps.a);
    prefetch_map(maps.b);
    if constexpr (c.gated) prefetch_map(maps.gate);
    shared.barriers().init();
  }
  // PDL: the next kernel may be launched now, because it waits for this one's results itself.
  let_next_kernel_start();
  wait_for_previous_kernel();  // it may write A and B, and read what this kernel writes
  wait_for_barriers<c>(warp);

  if (warp < 4) {
    keep_registers<c.producer_registers()>();
    if (warp == 0 && elected()) Loader<c>{maps, shared}.load(arguments);
  } else {
    take_registers<c.consumer_registers()>();
    const int index = warp / 4 - 1;
    Consumer<T, c> consumer(shared, index);
    Writer<T, c> writer{maps, arguments, shared.slabs(warp - 4), static_cast<int>(threadIdx.x) % 32};
    const auto multiply_tile = [&](int row, int column, const auto& meanwhile) {
      writer.begin(row + index * c.consumer_rows() + warp % 4 * 16, column);
      consumer.multiply(stages_of<c>(arguments), writer, meanwhile);
      writer.finish(consumer.accumulators);
    };
    if constexpr (c.overlaps_epilogue()) {
      Tiles<c> tiles(arguments);
      if (tiles.more()) tiles.find();
#pragma unroll 1
      while (tiles.more()) {
        multiply_tile(tiles.row, tiles.column, [&] {
          tiles.advance();
          if (tiles.more()) tiles.find();
        });
      }
    } else {
      for_each_tile<c>(arguments, [&](int row, int column) { multiply_tile(row, column, [] {}); });
    }
    writer.end();
  }
  // The other CTA of a pair may still have to arrive at this one's mbarriers.
  if constexpr (c.pair != Pair::none) sync_pair();
}

/// Kernel `wgmma`: GEMM on tensor cores by wgmma, for sm_90a only.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), 1)
    gemm_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  multiply_tiles<T, Table::rows[row]>(maps, arguments);
#endif
}

/// The same, with CTAs in clusters of two.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), 1) __cluster_dims__(2)
    gemm_pair_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  multiply_tiles<T, Table::rows[row]>(maps, arguments);
#endif
}

// From a call to the row of a tuning table that it uses.

/// The tensor map of an operand [length, K], with boxes of `rows` of its rows; if transposed, with boxes of
/// 64 of K.
inline CUtensorMap map_of_operand(const Matrix& operand, bool transposed, int rows) {
  return transposed ? map_of_matrix(operand.data, operand.dtype, operand.columns, operand.rows,
                                    operand.stride_column, GemmConfig::depth)
                    : map_of_matrix(operand.data, operand.dtype, operand.rows, operand.columns,
                                    operand.stride_row, rows);
}

template <typename T, typename Table, int row>
void run_row(const GemmCall& call, int multiprocessors, cudaStream_t stream) {
  constexpr GemmConfig c = Table::rows[row];
  const GemmProblem& problem = call.problem;
  GemmMaps maps{.a = map_of_operand(call.a, c.transposed_a, c.a_box()),
                .b = map_of_operand(call.b, c.transposed_b, c.b_box())};
  maps.gate = c.gated ? map_of_operand(call.gate, c.transposed_b, c.b_box()) : maps.b;
  const auto map_of_out = [&](int columns) {
    return c.out_f32 ? maps.b
                     : map_of_matrix(call.out.data, call.out.dtype, problem.m, problem.n, call.out.stride_row,
                                     16, columns);
  };
  maps.out = map_of_out(64);
  maps.out_tail = c.out_columns() % 64 == 0 ? maps.out : map_of_out(c.out_columns() % 64);
  // A pair of CTAs takes two neighbouring tiles, which count as one in the order.
  const int tiles_m = tiles_of(problem.m, c.rows_together());
  const int tiles_n = tiles_of(problem.n, c.columns_together());
  const int pairs =
      static_cast<int>(std::min<std::int64_t>(std::int64_t{tiles_m} * tiles_n, multiprocessors / c.blocks()));
  const int b_rows = c.columns * c.columns_together() / c.out_columns();
  const GemmArguments arguments{.order = TileOrder::of(tiles_m, tiles_n, pairs, c.rows_together(), b_rows),
                                .m = static_cast<int>(problem.m),
                                .n = static_cast<int>(problem.n),
                                .k = static_cast<int>(problem.k),
                                .epilogue = Epilogue::of(call)};
  const Launch how{.name = "tilewise wgmma gemm",
                   .blocks = pairs * c.blocks(),
                   .threads = c.threads(),
                   .shared_bytes = c.shared_bytes(),
                   .stream = stream,
                   .early = true};
  if constexpr (c.pair == Pair::none) {
    launch<gemm_kernel<T, Table, row>>(how, maps, arguments);
  } else {
    launch<gemm_pair_kernel<T, Table, row>>(how, maps, arguments);
  }
}

/// Calls body.operator()<Table>() with the table for a problem with 16-bit results.
template <typename Body>
auto with_table(const GemmProblem& problem, const Body& body) {
  if (problem.gated) return body.template operator()<Gated>();
  if (problem.a_by_rows) {
    return problem.b_by_rows ? body.template operator()<Plain>() : body.template operator()<TransposedB>();
  }
  return problem.b_by_rows ? body.template operator()<TransposedA>()
                           : body.template operator()<TransposedBoth>();
}

template <typename T>
void run_out_f32(const GemmCall& call, int multiprocessors, cudaStream_t stream) {
  const GemmProblem& problem = call.problem;
  if (problem.gated) return run_row<T, OutF32Gated, 0>(call, multiprocessors, stream);
  if (problem.a_by_rows) {
    return problem.b_by_rows ? run_row<T, OutF32<false, false>, 0>(call, multiprocessors, stream)
                             : run_row<T, OutF32<false, true>, 0>(call, multiprocessors, stream);
  }
  return problem.b_by_rows ? run_row<T, OutF32<true, false>, 0>(call, multiprocessors, stream)
                           : run_row<T, OutF32<true, true>, 0>(call, multiprocessors, stream);
}

/// Runs a row that chosen_row() returned. All rows of the tables are compiled.
template <typename T>
void run_chosen(const GemmCall& call, int chosen, const Context& context) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  if (call.problem.out_dtype == DType::f32) return run_out_f32<T>(call, multiprocessors, stream);
  with_table(call.problem, [&]<typename Table>() {
    with_row<Table>(chosen, [&](auto row) { run_row<T, Table, row>(call, multiprocessors, stream); });
  });
}

/// The row of the problem's table that is expected to be the fastest.
inline int chosen_row(const GemmProblem& problem, int multiprocessors) {
  if (problem.out_dtype == DType::f32) return 0;
  return with_table(problem, [&]<typename Table>() { return choose_row<Table>(problem, multiprocessors); });
}

}  // namespace tilewise::cuda::gemm
