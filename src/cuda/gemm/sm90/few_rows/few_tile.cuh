#pragma once

#include "cuda/gemm/sm90/few_rows/few_arguments.h"
#include "cuda/gemm/sm90/few_rows/few_tile_tuning.h"
#include "cuda/gemm/sm90/few_rows/few_tiles.h"
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
#include "cuda/tile/element.cuh"
#include "cuda/tile/ring.cuh"

namespace tilewise::cuda::gemm {

// GEMM of 2 to 64 rows of A, the tokens, by one tile per CTA. As in few.cuh, the bound is reading B, the
// weights, once. A CTA computes a tile of some rows of weights with all of K, so that no CTA waits for
// another. Where tokens are many and tiles narrow, `splits` CTAs share K of a wider tile (split-K), so that
// tokens are read less often.
//
// Tokens are the 64 rows of wgmma's operand A, and rows of weights its columns. A gate and what it gates use
// two such products over the same tokens, so that both accumulators of an element are in one thread.

/// The grid is [tiles, splits].
struct FewTileArguments : FewOutput {
  FewTiles tiles;
};

template <FewTileConfig c>
struct FewTileMemory {
  static_assert(c.is_sound());
  std::byte* first;

  __device__ std::byte* tokens(int stage) const { return first + stage * c.token_bytes(); }
  /// `matrix` is 0 for the gate's weights and 1 for those that it gates; 0 without a gate.
  __device__ std::byte* weights(int stage, int matrix = 0) const {
    return first + c.token_stages * c.token_bytes() +
           (stage * c.matrices() + matrix) * (c.panels * c.weight_panel_bytes());
  }
  /// Accumulators on their way to the other consumer. They reuse the stages after the last unit.
  __device__ float* exchanged() const { return reinterpret_cast<float*>(first); }
  __device__ Mbarrier* full(int stage) const {
    return reinterpret_cast<Mbarrier*>(first + c.ring_bytes()) + stage;
  }
  __device__ Mbarrier* empty(int stage) const { return full(c.stages + stage); }
};

/// The producer, one lane. Weights and tokens have rings of their own, of `stages` and of `token_stages`
/// stages, but share the mbarriers, one pair for each stage of weights. When unit n has been multiplied, its
/// stage of weights is free for unit n + stages, and its stage of tokens for unit n + token_stages, whose
/// weights were requested earlier.
template <FewTileConfig c>
struct FewTileLoader {
  const FewMaps& maps;
  const FewTileArguments& arguments;
  const FewTileMemory<c>& memory;
  const int row;           ///< of weights, the tile's first
  const int begin, count;  ///< units of this CTA's split

  __device__ __forceinline__ FewTileLoader(const FewMaps& maps_, const FewTileArguments& arguments_,
                                           const FewTileMemory<c>& memory_)
      : maps(maps_),
        arguments(arguments_),
        memory(memory_),
        row(static_cast<int>(blockIdx.x) * arguments_.tiles.rows),
        begin(arguments_.tiles.begin(static_cast<int>(blockIdx.y))),
        count(arguments_.tiles.count(static_cast<int>(blockIdx.y))) {}

  /// Loads the panels of a unit, one behind the other.
  __device__ __forceinline__ void load(std::byte* to, const CUtensorMap& map, int unit, int stage,
                                       int first_row) const {
    if constexpr (c.panels > 1) {
      copy_panels(to, map, memory.full(stage), (begin + unit) * c.panels, first_row);
    } else {
      copy_box(to, map, memory.full(stage), (begin + unit) * c.depth(), first_row);
    }
  }
  /// The expected bytes include the unit's tokens.
  __device__ __forceinline__ void load_weights(int unit, int stage) const {
    arrive_expecting(memory.full(stage),
                     c.panels * (c.matrices() * arguments.tiles.rows * 128 + c.token_panel_bytes()));
    if constexpr (c.gated) load(memory.weights(stage), maps.gate, unit, stage, row);
    load(memory.weights(stage, c.matrices() - 1), maps.b, unit, stage, row);
  }
  __device__ __forceinline__ void load_tokens(int unit, int stage, int token_stage) const {
    load(memory.tokens(token_stage), maps.a, unit, stage, 0);
  }

  /// Initialises the mbarriers and requests the first weights, which the previous kernel does not write.
  __device__ __forceinline__ void prologue() const {
    for (int stage = 0; stage < c.stages; ++stage) {
      init_barrier(memory.full(stage), 1);
      init_barrier(memory.empty(stage), c.by_columns() ? 4 * c.consumers : 4);
    }
    fence_barrier_inits();
    for (int unit = 0; unit < min(count, c.stages); ++unit) load_weights(unit, unit);
  }
  __device__ __forceinline__ void mainloop() const {
    wait_for_previous_kernel();  // it may write the tokens
    for (int unit = 0; unit < min(count, c.token_stages); ++unit) load_tokens(unit, unit, unit);
    Ring<c.stages> ring;                               // weights of `unit`, which has been multiplied
    Ring<c.stages> behind(c.token_stages % c.stages);  // weights of unit + token_stages
    Ring<c.token_stages> tokens;                       // tokens of both
#pragma unroll 1
    for (int unit = 0; unit + c.token_stages < count; ++unit) {
      wait(memory.empty(ring.stage()), ring.parity());
      if (unit + c.stages < count) load_weights(unit + c.stages, ring.stage());
      load_tokens(unit + c.token_stages, behind.stage(), tokens.stage());
      ring.advance();
      behind.advance();
      tokens.advance();
    }
  }
};

/// A consumer warpgroup. accumulators[f] are those of all tokens by its rows of weight matrix f, in wgmma's
/// layout: four elements of each group of eight rows of weights.
template <typename T, FewTileConfig c>
struct FewTileConsumer {
  static constexpr int matrices = c.matrices();
  static constexpr int groups = c.columns() / 8;
  /// wgmma has 64 rows, two of each four neighbouring threads. The rows of the other threads are padding.
  static constexpr int active_threads = 2 * c.tokens;
  const FewTileArguments& arguments;
  const FewTileMemory<c>& memory;
  const int index;   ///< of this consumer
  const int thread;  ///< within the warpgroup
  float accumulators[matrices][c.columns() / 2];

  /// A barrier of this warpgroup.
  __device__ __forceinline__ void sync() const { index == 0 ? sync_some<1, 128>() : sync_some<2, 128>(); }
  __device__ __forceinline__ bool active() const { return thread < active_threads; }

  /// The groups of eight columns that consumer `which` finishes, among those that it has accumulators of.
  static constexpr int first_group(int which) { return c.by_columns() || which == 0 ? 0 : groups / 2; }
  static constexpr int end_group(int which) { return !c.by_columns() && which == 0 ? groups / 2 : groups; }

  /// The mainloop.
  __device__ __forceinline__ void multiply(int units) {
    const auto address = [](const std::byte* smem) {
      return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
    };
    constexpr int step_units = c.by_columns() ? 1 : c.consumers;
    const int first = c.by_columns() ? 0 : index;
    const int first_byte = c.by_columns() ? index * c.columns() * 128 : 0;
#pragma unroll
    for (auto& of : accumulators) {
#pragma unroll
      for (float& sum : of) sum = 0;
    }
    Ring<c.stages, step_units> ring(first);
    Ring<c.token_stages, step_units> token_ring(first);
#pragma unroll 1
    for (int unit = first; unit < units; unit += step_units) {
      wait(memory.full(ring.stage()), ring.parity());
      const TileDescriptor tokens = describe_tile(address(memory.tokens(token_ring.stage())), 0);
      const TileDescriptor weights = describe_tile(address(memory.weights(ring.stage())) + first_byte, 0);
#pragma unroll
      for (auto& of : accumulators) pin(of);
      fence_products();
#pragma unroll
      for (int panel = 0; panel < c.panels; ++panel) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
          for (int matrix = 0; matrix < matrices; ++matrix) {
            WarpgroupProduct<T, c.columns()>::from_shared(
                accumulators[matrix], tokens + panel * (c.token_panel_bytes() / 16) + step * 2,
                weights + (matrix * c.panels + panel) * (c.weight_panel_bytes() / 16) + step * 2, true);
          }
        }
      }
      commit_products();
      wait_products<0>();
#pragma unroll
      for (auto& of : accumulators) pin(of);
      if (thread % 32 == 0) arrive(memory.empty(ring.stage()));
      ring.advance();
      token_ring.advance();
    }
  }

  /// Calls `body` with each group that consumer `which` finishes. Only reductions between consumers or CTAs
  /// use it, and these happen only without a gate.
  template <int which, typename Body>
  __device__ __forceinline__ static void for_groups(const Body& body) {
#pragma unroll
    for (int group = first_group(which); group < end_group(which); ++group) body(group);
  }

  /// Where the consumers split K: adds the other consumer's accumulators to those of the columns that this
  /// one finishes.
  template <int which>
  __device__ __forceinline__ void reduce_consumers() {
    float* exchanged = memory.exchanged() + thread;
    sync_some<3, 256>();  // both consumers have read all stages, which `exchanged` overwrites
    if (active()) {
      for_groups<1 - which>([&](int group) {
#pragma unroll
        for (int n = 4 * group; n < 4 * group + 4; ++n) exchanged[n * active_threads] = accumulators[0][n];
      });
    }
    sync_some<3, 256>();  // both have stored their accumulators
    if (active()) {
      for_groups<which>([&](int group) {
#pragma unroll
        for (int n = 4 * group; n < 4 * group + 4; ++n) accumulators[0][n] += exchanged[n * active_threads];
      });
    }
  }

  /// The number of the CTA that has this split of the tile.
  __device__ __forceinline__ int block_of(int split) const {
    return split * arguments.tiles.tiles + static_cast<int>(blockIdx.x);
  }
  /// Where this thread's four partial sums of a group are in the workspace of CTA `block`.
  __device__ __forceinline__ float4* partial(int block, int group) const {
    float* first = arguments.partials + static_cast<std::int64_t>(block) * c.partial_floats();
    return reinterpret_cast<float4*>(first) + group * active_threads + thread;
  }
  __device__ __forceinline__ std::uint32_t* flag(int block) const {
    return arguments.flags + block * c.consumers + index;
  }

  /// Stores partial sums for the CTA that has the tile's last split, which finishes the tile.
  template <int which>
  __device__ __forceinline__ void store_partials() const {
    const int block = block_of(static_cast<int>(blockIdx.y));
    if (active()) {
      for_groups<which>([&](int group) {
        const float* from = accumulators[0] + 4 * group;
        *partial(block, group) = {from[0], from[1], from[2], from[3]};
      });
    }
    sync();  // all threads have stored theirs before the flag is raised
    if (thread == 0) raise_flag(flag(block), arguments.owner);
  }

  /// Adds the partial sums of the tile's other CTAs, all of which started before this one, and clears their
  /// flags: a CUDA graph launches the kernel again with the same word in `owner`.
  template <int which>
  __device__ __forceinline__ void add_partials() {
    constexpr int others = c.splits - 1;
    if (thread < others) {
      await_flag(flag(block_of(thread)), arguments.owner);
      *flag(block_of(thread)) = 0;
    }
    sync();  // all flags were seen, so all partial sums can be read
    if (!active()) return;
#pragma unroll 1
    for (int split = others - 1; split >= 0; --split) {
      for_groups<which>([&](int group) {
        const float4 more = __ldcg(partial(block_of(split), group));
        float* to = accumulators[0] + 4 * group;
        to[0] += more.x;
        to[1] += more.y;
        to[2] += more.z;
        to[3] += more.w;
      });
    }
  }

  /// Writes two columns of a token, as far as they are before `end`, the end of the tile.
  __device__ __forceinline__ void write_two(int token, int column, int end, float x, float y) const {
    const Matrix& residual = arguments.epilogue.residual;
    const Matrix& out = arguments.epilogue.out;
    if (token >= arguments.m || column >= end) return;
    const bool both = column + 1 < end;
    if (residual.data != nullptr) {
      const T* more = reinterpret_cast<const T*>(residual.data) + token * residual.stride_row + column;
      x += widen(more[0]);
      if (both) y += widen(more[1]);
    }
    T* to = reinterpret_cast<T*>(out.data) + token * out.stride_row + column;
    alignas(4) const T two[2] = {narrow<T>(x), narrow<T>(y)};
    if (both) {
      *reinterpret_cast<std::uint32_t*>(to) = *reinterpret_cast<const std::uint32_t*>(two);
    } else {
      to[0] = two[0];
    }
  }

  __device__ __forceinline__ float bias_of(const Vector& bias, int column, int end) const {
    return bias.data != nullptr && column < end ? bias_at<T>(bias, column) : 0.0f;
  }
  template <int which>
  __device__ __forceinline__ void add_bias(const Vector& bias, int matrix, int column, int end) {
    if (bias.data == nullptr) return;
#pragma unroll
    for (int group = first_group(which); group < end_group(which); ++group) {
      const float left = bias_of(bias, column + 8 * group, end);
      const float right = bias_of(bias, column + 8 * group + 1, end);
#pragma unroll
      for (int e = 0; e < 4; ++e) accumulators[matrix][4 * group + e] += e % 2 == 0 ? left : right;
    }
  }

  /// Bias, activation, gate and residual of the columns that consumer `which` finishes, and the stores.
  template <int which>
  __device__ __forceinline__ void finish() {
    constexpr int first = first_group(which), count = end_group(which) - first;
    const Epilogue& epilogue = arguments.epilogue;
    const int row = static_cast<int>(blockIdx.x) * arguments.tiles.rows;
    const int end = min(arguments.n, row + arguments.tiles.rows);
    const int token = thread / 32 * 16 + thread % 32 / 4;
    const int column = row + (c.by_columns() ? index * c.columns() : 0) + thread % 4 * 2;
    add_bias<which>(epilogue.bias, matrices - 1, column, end);
    if constexpr (c.gated) add_bias<which>(epilogue.gate_bias, 0, column, end);
    float x[4 * count];
#pragma unroll
    for (int n = 0; n < 4 * count; ++n) x[n] = accumulators[0][4 * first + n];
    activate_all<true>(x, epilogue.activation);
    if constexpr (c.gated) {
#pragma unroll
      for (int n = 0; n < 4 * count; ++n) x[n] *= accumulators[1][4 * first + n];
    }
#pragma unroll
    for (int n = 0; n < count; ++n) {
      write_two(token, column + 8 * (first + n), end, x[4 * n], x[4 * n + 1]);
      write_two(token + 8, column + 8 * (first + n), end, x[4 * n + 2], x[4 * n + 3]);
    }
  }

  template <int which>
  __device__ __forceinline__ void reduce_and_finish() {
    if constexpr (!c.by_columns()) reduce_consumers<which>();
    if constexpr (c.splits > 1) {
      if (static_cast<int>(blockIdx.y) + 1 < c.splits) return store_partials<which>();
      add_partials<which>();
    }
    if (active()) finish<which>();
  }

  __device__ __forceinline__ void run() {
    multiply(arguments.tiles.count(static_cast<int>(blockIdx.y)));
    wait_for_previous_kernel();  // it may still read what this kernel writes
    if constexpr (c.by_columns()) {
      reduce_and_finish<0>();
    } else {
      index == 0 ? reduce_and_finish<0>() : reduce_and_finish<1>();
    }
  }
};

/// The next kernel is allowed to start (PDL) only when the last loads have been requested. Its CTAs' first
/// loads then fill the time until this kernel has ended.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(FewTileConfig::threads, Table::rows[row].leaves_room() ? 2 : 1)
    few_tile_kernel(const __grid_constant__ FewMaps maps,
                    const __grid_constant__ FewTileArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr FewTileConfig c = Table::rows[row];
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const FewTileMemory<c> memory{first_smem};
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const bool loads = warp == 4 * c.consumers && elected();
  if (loads) FewTileLoader<c>(maps, arguments, memory).prologue();
  __syncthreads();  // the mbarriers are initialised
  if (warp == 4 * c.consumers) {
    if (loads) {
      FewTileLoader<c>(maps, arguments, memory).mainloop();
      let_next_kernel_start();
    }
  } else {
    FewTileConsumer<T, c> consumer{arguments, memory, warp / 4, static_cast<int>(threadIdx.x) % 128};
    consumer.run();
  }
#endif
}

}  // namespace tilewise::cuda::gemm
