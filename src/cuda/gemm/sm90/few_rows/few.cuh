#pragma once

#include <cstdint>

#include "cuda/gemm/sm90/few_rows/few_arguments.h"
#include "cuda/gemm/sm90/few_rows/few_chain.h"
#include "cuda/gemm/sm90/few_rows/few_tuning.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/bias.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/ring.cuh"

namespace tilewise::cuda::gemm {

// GEMM of 1 to 64 rows of A by stream-K. The bound is reading B, the weights, once. B is therefore the
// operand with wgmma's 64 rows, and the rows of A, the tokens, are its few columns: the kernel computes outᵀ
// = B·Aᵀ.
//
// A unit is 64 of K of one tile of weights. Every CTA takes an equal run of units, whatever tiles they belong
// to, so that all CTAs read the same number of bytes:
//
//   tile   0              1              2
//   unit   0 1 2 3 4 5    0 1 2 3 4 5    0 1 2 3 4 5
//   CTA    3 3 3 3 2 2    2 2 2 1 1 1    1 0 0 0 0 0      (18 units, 4 CTAs)

/// Which units a CTA has. Runs are dealt in reverse: the CTA with a tile's first units reduces and finishes
/// the tile, and it reaches it at the end of its run. The CTAs whose partial sums it needs have smaller
/// numbers, so they started no later, and they computed their part of the tile at the beginning of their
/// runs.
struct StreamKSchedule {
  int tiles = 0;
  int units_per_tile = 0;
  int blocks = 1;  ///< CTAs

  constexpr int total() const { return tiles * units_per_tile; }
  constexpr int begin(int block) const {
    return static_cast<int>(static_cast<std::int64_t>(total()) * (blocks - 1 - block) / blocks);
  }
  constexpr int end(int block) const {
    return static_cast<int>(static_cast<std::int64_t>(total()) * (blocks - block) / blocks);
  }
};

struct FewArguments : FewOutput {
  StreamKSchedule schedule;
};

template <FewConfig c>
struct FewMemory {
  static_assert(c.shared_bytes() <= shared_beside_late_second);
  std::byte* first;

  __device__ std::byte* weights(int stage) const { return first + stage * c.weight_bytes(); }
  __device__ std::byte* tokens(int stage) const { return weights(c.stages) + stage * c.token_bytes(); }
  __device__ float* staged(int consumer) const {
    return reinterpret_cast<float*>(first + c.tile_bytes()) + consumer * c.staged_tokens() * c.staged_pitch;
  }
  __device__ float* exchanged() const {
    return reinterpret_cast<float*>(first + c.tile_bytes() + c.staged_bytes());
  }
  __device__ Mbarrier* full(int stage) const {
    return reinterpret_cast<Mbarrier*>(first + c.tile_bytes() + c.staged_bytes() + c.exchanged_bytes()) +
           stage;
  }
  __device__ Mbarrier* empty(int stage) const { return full(c.stages + stage); }
};

/// The producer, one lane. The previous kernel does not write the weights, so all stages of weights are
/// requested before that kernel has ended, and before the CTA's other warps have passed the first barrier.
template <FewConfig c>
struct FewLoader {
  const FewMaps& maps;
  const StreamKSchedule& schedule;
  const FewMemory<c>& memory;
  const int begin, end;    ///< units
  const int prologue_end;  ///< weights of units before it are requested in the prologue

  __device__ __forceinline__ FewLoader(const FewMaps& maps_, const StreamKSchedule& schedule_,
                                       const FewMemory<c>& memory_)
      : maps(maps_),
        schedule(schedule_),
        memory(memory_),
        begin(schedule_.begin(static_cast<int>(blockIdx.x))),
        end(schedule_.end(static_cast<int>(blockIdx.x))),
        prologue_end(min(end, begin + c.stages)) {}

  __device__ __forceinline__ void load_weights(int unit, int stage) const {
    arrive_expecting(memory.full(stage), c.weight_bytes() + c.token_bytes());
    const int row = unit / schedule.units_per_tile * c.columns();
    const int k = unit % schedule.units_per_tile * c.depth;
    if constexpr (c.gated) {
      copy_box(memory.weights(stage), maps.gate, memory.full(stage), k, row);
      copy_box(memory.weights(stage) + c.weight_bytes() / 2, maps.b, memory.full(stage), k, row);
    } else {
      copy_box(memory.weights(stage), maps.b, memory.full(stage), k, row);
    }
  }
  __device__ __forceinline__ void load_tokens(int unit, int stage) const {
    copy_box(memory.tokens(stage), maps.a, memory.full(stage), unit % schedule.units_per_tile * c.depth, 0);
  }

  /// Initialises the mbarriers and requests the first weights.
  __device__ __forceinline__ void prologue() const {
    for (int stage = 0; stage < c.stages; ++stage) {
      init_barrier(memory.full(stage), 1);
      init_barrier(memory.empty(stage), 4 * c.consumers);
    }
    fence_barrier_inits();
    for (int unit = begin; unit < prologue_end; ++unit) load_weights(unit, unit - begin);
  }
  __device__ __forceinline__ void mainloop() const {
    wait_for_previous_kernel();  // it may write the tokens
    for (int unit = begin; unit < prologue_end; ++unit) load_tokens(unit, unit - begin);
    Ring<c.stages> ring;
#pragma unroll 1
    for (int unit = begin; unit < end; ++unit, ring.advance()) {
      if (unit < prologue_end) continue;
      wait(memory.empty(ring.stage()), ring.parity() ^ 1);
      load_weights(unit, ring.stage());
      load_tokens(unit, ring.stage());
    }
  }
};

/// A consumer warpgroup. Its accumulators are those of 64 rows of weights by all tokens, in wgmma's layout.
template <typename T, FewConfig c>
struct FewConsumer {
  static constexpr int count = c.tokens / 2;
  const FewArguments& arguments;
  const FewMemory<c>& memory;
  const int index;   ///< of this consumer
  const int thread;  ///< within the warpgroup
  Ring<c.stages> ring;
  float accumulators[count];

  /// A barrier of this warpgroup.
  __device__ __forceinline__ void sync() const { index == 0 ? sync_some<1, 128>() : sync_some<2, 128>(); }

  /// Multiplies the next units, all of one tile. The accumulators start from 0.
  __device__ __forceinline__ void multiply(int units) {
    const auto address = [](const std::byte* smem) {
      return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
    };
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
      wait(memory.full(ring.stage()), ring.parity());
      const TileDescriptor weights = describe_tile(address(memory.weights(ring.stage())) + index * 8192, 0);
      const TileDescriptor tokens = describe_tile(address(memory.tokens(ring.stage())), 0);
      pin(accumulators);
      fence_products();
#pragma unroll
      for (int step = 0; step < c.depth / 16; ++step) {
        WarpgroupProduct<T, c.tokens>::from_shared(accumulators, weights + step * 2, tokens + step * 2,
                                                   unit > 0 || step > 0);
      }
      commit_products();
      wait_products<0>();
      pin(accumulators);
      if (thread % 32 == 0) arrive(memory.empty(ring.stage()));
      ring.advance();
    }
  }

  __device__ __forceinline__ float* partial(int block) const {
    return arguments.partials + static_cast<std::int64_t>(block) * c.partial_floats() +
           index * (64 * c.tokens) + thread * 4;
  }
  __device__ __forceinline__ std::uint32_t* flag(int block) const {
    return arguments.flags + block * c.consumers + index;
  }

  /// Stores the accumulators for the CTA that finishes the tile.
  __device__ __forceinline__ void store_partials() const {
#pragma unroll
    for (int n = 0; n < count / 4; ++n) {
      *reinterpret_cast<float4*>(partial(static_cast<int>(blockIdx.x)) + n * 512) = {
          accumulators[4 * n], accumulators[4 * n + 1], accumulators[4 * n + 2], accumulators[4 * n + 3]};
    }
    sync();  // all threads have stored theirs before the flag is raised
    if (thread == 0) raise_flag(flag(static_cast<int>(blockIdx.x)), arguments.owner);
  }

  /// Adds the partial sums of the `others` CTAs with the numbers before this one, and clears their flags: a
  /// CUDA graph launches the kernel again with the same word in `owner`.
  __device__ __forceinline__ void add_partials(int others) {
    const int block = static_cast<int>(blockIdx.x);
    for (int other = 1 + thread; other <= others; other += 128) {
      await_flag(flag(block - other), arguments.owner);
      *flag(block - other) = 0;
    }
    sync();  // all flags were seen, so all partial sums can be read
#pragma unroll 2
    for (int other = 1; other <= others; ++other) {
#pragma unroll
      for (int n = 0; n < count / 4; ++n) {
        const float4 more = __ldcg(reinterpret_cast<const float4*>(partial(block - other) + n * 512));
        accumulators[4 * n] += more.x;
        accumulators[4 * n + 1] += more.y;
        accumulators[4 * n + 2] += more.z;
        accumulators[4 * n + 3] += more.w;
      }
    }
  }

  /// The lane's two rows of weights among the 64 (`half` is 0 or 1). They are columns of the result.
  __device__ __forceinline__ int row_of(int half) const {
    return thread / 32 * 16 + thread % 32 / 4 + 8 * half;
  }
  __device__ __forceinline__ void add_bias(const Vector& bias, int first) {
    if (bias.data == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = first + row_of(half);
      const float value = at < arguments.n ? bias_at<T>(bias, at) : 0.0f;
#pragma unroll
      for (int n = 0; n < count / 4; ++n) {
        accumulators[4 * n + 2 * half] += value;
        accumulators[4 * n + 2 * half + 1] += value;
      }
    }
  }

  /// Transposes the accumulators through shared memory, up to 16 tokens at a time; then a thread writes eight
  /// columns of one token.
  __device__ __forceinline__ void write(int first) const {
    float* staged = memory.staged(index);
    constexpr int groups = c.staged_tokens() / 8;
#pragma unroll
    for (int n = 0; n < count / 4; n += groups) {
      if (8 * n >= arguments.m) break;
#pragma unroll
      for (int e = 0; e < 4 * groups; ++e) {
        staged[(e / 4 * 8 + thread % 4 * 2 + e % 2) * c.staged_pitch + row_of(e % 4 / 2)] =
            accumulators[4 * n + e];
      }
      sync();  // all threads have stored their elements of these tokens
      const int token = thread / 8;
      if (token < c.staged_tokens() && 8 * n + token < arguments.m) {
        write_eight(staged + token * c.staged_pitch + thread % 8 * 8, 8 * n + token, first + thread % 8 * 8);
      }
      sync();  // all have been read, so the next tokens may overwrite them
    }
  }
  __device__ __forceinline__ void write_eight(const float* from_smem, int token, int column) const {
    const Matrix& residual = arguments.epilogue.residual;
    const Matrix& out = arguments.epilogue.out;
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = from_smem[e];
    T* to = reinterpret_cast<T*>(out.data) + token * out.stride_row + column;
    const T* more = reinterpret_cast<const T*>(residual.data) + token * residual.stride_row + column;
    if (column + 8 <= arguments.n) {
      if (residual.data != nullptr) {
        float add[8];
        load_chunk(add, more);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] += add[e];
      }
      store_chunk(to, x);
      return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (column + e < arguments.n)
        to[e] = narrow<T>(x[e] + (residual.data != nullptr ? widen(more[e]) : 0.0f));
    }
  }

  /// The epilogue of a tile. Where gated, consumer 0 has the gate and consumer 1 what is gated.
  __device__ __forceinline__ void finish(int tile) {
    const Epilogue& epilogue = arguments.epilogue;
    const int first = tile * c.columns() + (c.gated ? 0 : 64 * index);
    add_bias(c.gated && index == 0 ? epilogue.gate_bias : epilogue.bias, first);
    if (!c.gated || index == 0) activate_all<true>(accumulators, epilogue.activation);
    if constexpr (c.gated) {
      float* exchanged = memory.exchanged() + thread;
      if (index == 1) {
#pragma unroll
        for (int n = 0; n < count; ++n) exchanged[n * 128] = accumulators[n];
      }
      sync_some<3, 256>();  // consumer 1 has stored its values
      if (index == 0) {
#pragma unroll
        for (int n = 0; n < count; ++n) accumulators[n] *= exchanged[n * 128];
      }
      sync_some<3, 256>();  // consumer 0 has read them, so the next tile may overwrite them
      if (index == 1) return;
    }
    write(first);
  }

  /// All units of the CTA, tile by tile.
  __device__ __forceinline__ void run() {
    const StreamKSchedule& schedule = arguments.schedule;
    const int block = static_cast<int>(blockIdx.x);
    const int end = schedule.end(block);
    int unit = schedule.begin(block);
#pragma unroll 1
    while (unit < end) {
      const int tile = unit / schedule.units_per_tile;
      const int tile_end = (tile + 1) * schedule.units_per_tile;
      const int until = min(end, tile_end);
      multiply(until - unit);
      if (unit > tile * schedule.units_per_tile) {
        store_partials();
      } else {
        int others = 0;
        while (others < block && schedule.begin(block - 1 - others) < tile_end) ++others;
        if (others > 0) add_partials(others);
        finish(tile);
      }
      unit = until;
    }
  }
};

template <typename T, typename Table, int row>
__global__ void __launch_bounds__(FewConfig::threads, 2)
    few_kernel(const __grid_constant__ FewMaps maps, const __grid_constant__ FewArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr FewConfig c = Table::rows[row];
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const FewMemory<c> memory{first_smem};
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const bool loads = warp == 4 * c.consumers && elected();
  if (loads) FewLoader<c>(maps, arguments.schedule, memory).prologue();
  __syncthreads();  // the mbarriers are initialised
  let_next_kernel_start();
  if (warp == 4 * c.consumers) {
    if (loads) FewLoader<c>(maps, arguments.schedule, memory).mainloop();
  } else {
    wait_for_previous_kernel();  // it may still read what this kernel writes
    FewConsumer<T, c> consumer{arguments, memory, warp / 4, static_cast<int>(threadIdx.x) % 128};
    consumer.run();
  }
#endif
}

}  // namespace tilewise::cuda::gemm
