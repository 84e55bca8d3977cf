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

// A product with one to 64 rows of a: what it takes is the time to read b, the weights, once. They are the
// 64 rows of wgmma's first factor, and tokens the few columns of its second.

/// How weights are shared out. A unit is 64 summands of a block's rows of weights; blocks take equal runs of
/// units, whatever rows they belong to, so that all of them read equally much. Runs are dealt from the end:
/// where a run begins inside rows of weights, a block behind has their first summands and finishes them. It
/// comes to them last, and this block, which started earlier, came to them first.
struct FewShare {
  int row_blocks = 0;
  int depth_blocks = 0;  ///< units of a row block
  int blocks = 1;

  constexpr int total() const { return row_blocks * depth_blocks; }
  constexpr int begin(int block) const {
    return static_cast<int>(static_cast<std::int64_t>(total()) * (blocks - 1 - block) / blocks);
  }
  constexpr int end(int block) const {
    return static_cast<int>(static_cast<std::int64_t>(total()) * (blocks - block) / blocks);
  }
};

struct FewArguments : FewResult {
  FewShare share;
};

template <FewConfig c>
struct FewMemory {
  static_assert(c.shared_bytes() <= beside_late_bytes);
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

/// The lane that loads. Weights are nothing that the kernel ahead writes: as many as there is room for are
/// under way before it has ended, and before the block's other warps know of them.
template <FewConfig c>
struct FewLoader {
  const FewMaps& maps;
  const FewShare& share;
  const FewMemory<c>& memory;
  const int begin, end;
  const int ahead;  ///< those up to it have places from the start

  __device__ __forceinline__ FewLoader(const FewMaps& maps_, const FewShare& share_,
                                       const FewMemory<c>& memory_)
      : maps(maps_),
        share(share_),
        memory(memory_),
        begin(share_.begin(static_cast<int>(blockIdx.x))),
        end(share_.end(static_cast<int>(blockIdx.x))),
        ahead(min(end, begin + c.stages)) {}

  __device__ __forceinline__ void load_weights(int unit, int stage) const {
    arrive_expecting(memory.full(stage), c.weight_bytes() + c.token_bytes());
    const int row = unit / share.depth_blocks * c.columns();
    const int summand = unit % share.depth_blocks * c.depth;
    if constexpr (c.gated) {
      copy_box(memory.weights(stage), maps.gate, memory.full(stage), summand, row);
      copy_box(memory.weights(stage) + c.weight_bytes() / 2, maps.b, memory.full(stage), summand, row);
    } else {
      copy_box(memory.weights(stage), maps.b, memory.full(stage), summand, row);
    }
  }
  __device__ __forceinline__ void load_tokens(int unit, int stage) const {
    copy_box(memory.tokens(stage), maps.a, memory.full(stage), unit % share.depth_blocks * c.depth, 0);
  }

  /// Makes the barriers and starts.
  __device__ __forceinline__ void start() const {
    for (int stage = 0; stage < c.stages; ++stage) {
      init_barrier(memory.full(stage), 1);
      init_barrier(memory.empty(stage), 4 * c.consumers);
    }
    fence_barrier_inits();
    for (int unit = begin; unit < ahead; ++unit) load_weights(unit, unit - begin);
  }
  __device__ __forceinline__ void go_on() const {
    wait_for_kernel_ahead();
    for (int unit = begin; unit < ahead; ++unit) load_tokens(unit, unit - begin);
    Ring<c.stages> ring;
#pragma unroll 1
    for (int unit = begin; unit < end; ++unit, ring.advance()) {
      if (unit < ahead) continue;
      wait(memory.empty(ring.stage()), ring.parity() ^ 1);
      load_weights(unit, ring.stage());
      load_tokens(unit, ring.stage());
    }
  }
};

/// A warpgroup that multiplies: sums[4j ..] of 64 rows of weights and all tokens, as wgmma leaves them.
template <typename T, FewConfig c>
struct FewConsumer {
  static constexpr int count = c.tokens / 2;
  const FewArguments& arguments;
  const FewMemory<c>& memory;
  const int index;   ///< of the consumers
  const int thread;  ///< of the warpgroup's
  Ring<c.stages> ring;
  float sums[count];

  __device__ __forceinline__ void sync() const { index == 0 ? sync_some<1, 128>() : sync_some<2, 128>(); }

  __device__ __forceinline__ void multiply(int units) {
    const auto address = [](const std::byte* smem) {
      return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
    };
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
      wait(memory.full(ring.stage()), ring.parity());
      const TileDescriptor weights = describe_tile(address(memory.weights(ring.stage())) + index * 8192, 0);
      const TileDescriptor tokens = describe_tile(address(memory.tokens(ring.stage())), 0);
      pin(sums);
      fence_products();
#pragma unroll
      for (int step = 0; step < c.depth / 16; ++step) {
        WarpgroupProduct<T, c.tokens>::from_shared(sums, weights + step * 2, tokens + step * 2,
                                                   unit > 0 || step > 0);
      }
      commit_products();
      wait_products<0>();
      pin(sums);
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

  /// Leaves the sums to who has the rest of the row.
  __device__ __forceinline__ void give() const {
#pragma unroll
    for (int n = 0; n < count / 4; ++n) {
      *reinterpret_cast<float4*>(partial(static_cast<int>(blockIdx.x)) + n * 512) = {
          sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]};
    }
    sync();  // all are written
    if (thread == 0) raise_flag(flag(static_cast<int>(blockIdx.x)), arguments.owner);
  }

  /// Adds what `others` blocks before this one left, and takes their flags down for the next launch of a
  /// graph.
  __device__ __forceinline__ void take(int others) {
    const int block = static_cast<int>(blockIdx.x);
    for (int other = 1 + thread; other <= others; other += 128) {
      await_flag(flag(block - other), arguments.owner);
      *flag(block - other) = 0;
    }
    sync();  // they are there
#pragma unroll 2
    for (int other = 1; other <= others; ++other) {
#pragma unroll
      for (int n = 0; n < count / 4; ++n) {
        const float4 more = __ldcg(reinterpret_cast<const float4*>(partial(block - other) + n * 512));
        sums[4 * n] += more.x;
        sums[4 * n + 1] += more.y;
        sums[4 * n + 2] += more.z;
        sums[4 * n + 3] += more.w;
      }
    }
  }

  /// The lane's two rows of weights, of the 64: columns of the result.
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
        sums[4 * n + 2 * half] += value;
        sums[4 * n + 2 * half + 1] += value;
      }
    }
  }

  /// 16 tokens at a time by way of shared memory, turned there; a thread writes eight columns of one.
  __device__ __forceinline__ void write(int first) const {
    float* staged = memory.staged(index);
    constexpr int groups = c.staged_tokens() / 8;
#pragma unroll
    for (int n = 0; n < count / 4; n += groups) {
      if (8 * n >= arguments.m) break;
#pragma unroll
      for (int e = 0; e < 4 * groups; ++e) {
        staged[(e / 4 * 8 + thread % 4 * 2 + e % 2) * c.staged_pitch + row_of(e % 4 / 2)] = sums[4 * n + e];
      }
      sync();  // the tokens are there
      const int token = thread / 8;
      if (token < c.staged_tokens() && 8 * n + token < arguments.m) {
        write_eight(staged + token * c.staged_pitch + thread % 8 * 8, 8 * n + token, first + thread % 8 * 8);
      }
      sync();  // and were read
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

  __device__ __forceinline__ void finish(int row_block) {
    const Epilogue& epilogue = arguments.epilogue;
    const int first = row_block * c.columns() + (c.gated ? 0 : 64 * index);
    add_bias(c.gated && index == 0 ? epilogue.gate_bias : epilogue.bias, first);
    if (!c.gated || index == 0) activate_all<true>(sums, epilogue.activation);
    if constexpr (c.gated) {
      float* exchanged = memory.exchanged() + thread;
      if (index == 1) {
#pragma unroll
        for (int n = 0; n < count; ++n) exchanged[n * 128] = sums[n];
      }
      sync_some<3, 256>();  // what is gated is there
      if (index == 0) {
#pragma unroll
        for (int n = 0; n < count; ++n) sums[n] *= exchanged[n * 128];
      }
      sync_some<3, 256>();  // and was read
      if (index == 1) return;
    }
    write(first);
  }

  __device__ __forceinline__ void run() {
    const FewShare& share = arguments.share;
    const int block = static_cast<int>(blockIdx.x);
    const int end = share.end(block);
    int unit = share.begin(block);
#pragma unroll 1
    while (unit < end) {
      const int row_block = unit / share.depth_blocks;
      const int row_end = (row_block + 1) * share.depth_blocks;
      const int until = min(end, row_end);
      multiply(until - unit);
      if (unit > row_block * share.depth_blocks) {
        give();
      } else {
        int others = 0;
        while (others < block && share.begin(block - 1 - others) < row_end) ++others;
        if (others > 0) take(others);
        finish(row_block);
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
  if (loads) FewLoader<c>(maps, arguments.share, memory).start();
  __syncthreads();  // barriers are there
  let_kernel_behind_begin();
  if (warp == 4 * c.consumers) {
    if (loads) FewLoader<c>(maps, arguments.share, memory).go_on();
  } else {
    wait_for_kernel_ahead();  // before anything is written
    FewConsumer<T, c> consumer{arguments, memory, warp / 4, static_cast<int>(threadIdx.x) % 128};
    consumer.run();
  }
#endif
}

}  // namespace tilewise::cuda::gemm
