#include "cuda/attention/sm90/forward/halves.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/reasons.h"
#include "cuda/attention/sm90/forward/choice.h"
#include "cuda/attention/sm90/forward/output.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/local.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/tensor_map.h"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::wgmma_halves {

// Forward for head dims beyond 256, where a row of O does not fit into the registers of one warpgroup. Two
// consumer warpgroups share 64 query rows (the split of FlashMLA):
//
//              S, P: 64 x 128 keys                        O: 64 x dim_v
//   consumer 0 │ keys 0..63   │ ── P ─► shared memory ─►  │ columns 0..dim_v/2 − 1 │
//   consumer 1 │ keys 64..127 │ ── P ─► shared memory ─►  │ columns dim_v/2..      │
//
// Each computes S, row maxima and P of its half of the keys. They exchange maxima and P, and each multiplies
// all of P with its half of V's columns. S of the next K tile is issued before P·V of this one, so that the
// softmax runs beside P·V:
//
//   S[n] = Q·Kᵀ      wait for S[n] ─ maxima ─ exponentials ─ wait for O ─ rescale O ─ store P[n]
//   O += P·V[n + 1]  ─────────── under way ────────────────┘
//
// Q stays in shared memory. K and V arrive as panels of 128 keys x 64 dims, 16 KB each, in a ring: all of
// K[n], then all of V[n + 1], from the last K tile to the first. A panel of K is read by both consumers, a
// panel of V by one of them; both release every panel.
//
// Bound, at dims 512 and 512, per K tile: 4096 clocks of tensor cores; 6144 of shared memory (Q and K 256 KB,
// P and V 256 KB, copies 256 KB, at 128 bytes per clock); 6550 of L2, from which each SM gets about 40 bytes
// per clock. More query rows per CTA would need more registers than there are.

namespace {

using wgmma::BandOfKeys;
using wgmma::ForwardConfig;
using wgmma::Schedule;
using wgmma::TileSpan;

struct Config {
  int dim = 0;    ///< of Q and K, which are padded to it
  int dim_v = 0;  ///< of V and O, the same

  static constexpr int rows = 64;   ///< of Q per CTA
  static constexpr int keys = 128;  ///< of a K tile; a consumer has half of them
  static constexpr int threads = 3 * 128;
  static constexpr int producer_registers = 24;
  static constexpr int consumer_registers = 240;
  static constexpr int query_panel_bytes = rows * 128;
  static constexpr int panel_bytes = keys * 128;  ///< of K or V
  static constexpr int p_buffers =
      2;  ///< one is written while the other consumer may still read the other one
  static constexpr int p_bytes = rows * keys * 2;
  static constexpr std::size_t most_shared_bytes = 232448;
  /// Row maxima and sums of both consumers, and mbarriers.
  static constexpr int exchange_bytes = 2 * rows * 4;
  static constexpr int barrier_bytes = 512;

  constexpr int panels() const { return dim / 64; }
  constexpr int panels_v() const { return dim_v / 64; }
  constexpr int own_panels() const { return panels_v() / 2; }  ///< of V and O, per consumer
  constexpr int fixed_bytes() const {
    return panels() * query_panel_bytes + p_buffers * p_bytes + exchange_bytes + barrier_bytes;
  }
  /// Panels of K and V in shared memory.
  constexpr int stages() const { return (static_cast<int>(most_shared_bytes) - fixed_bytes()) / panel_bytes; }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(fixed_bytes() + stages() * panel_bytes);
  }
  /// What the shared pieces of the forward pass see of a consumer: S of 64 keys.
  constexpr ForwardConfig own_scores() const { return {.dim = dim, .dim_v = dim_v / 2, .keys = keys / 2}; }
};

struct Configs {
  static constexpr Config rows[] = {{.dim = 384, .dim_v = 384}, {.dim = 512, .dim_v = 512}};
};

struct Maps {
  CUtensorMap q, k, v;
};

struct Params {
  Schedule schedule;
  BandOfKeys band;
  int heads = 0;  ///< of Q, per batch entry
  int group = 1;  ///< of them for each KV head
  int dim_v = 0;
  bool aligned_o = false;  ///< O can be stored 8 bytes at a time
  float scale_log2 = 1;    ///< scale · log2 e
  wgmma::LseScale scale_lse;
  Rows o, lse;
};

/// The Q tile of a CTA.
struct Work {
  int b, h, first;  ///< batch entry, query head, first query
  TileSpan tiles;   ///< K tiles that some of its queries see a key of
  TileSpan whole;   ///< K tiles of which all of them see all keys
};

template <Config c>
__device__ __forceinline__ Work work_of(const Params& params, int index) {
  const wgmma::WorkTile tile = params.schedule.work_tile(index);
  const int b = wgmma::quotient(tile.head, params.heads);
  const int first = tile.tile * c.rows, end = min(first + c.rows, params.band.length_q);
  return {.b = b,
          .h = tile.head - b * params.heads,
          .first = first,
          .tiles = params.band.tiles(first, end, c.keys),
          .whole = params.band.whole_tiles(first, end, c.keys)};
}

template <Config c>
struct Barriers {
  Mbarrier q_full;
  Mbarrier full[c.stages()], empty[c.stages()];

  /// By one thread, before a barrier of the CTA.
  __device__ void init() {
    constexpr int consumer_warps = 8;
    init_barrier(&q_full, 1);
    for (int stage = 0; stage < c.stages(); ++stage) {
      init_barrier(&full[stage], 1);
      init_barrier(&empty[stage], consumer_warps);
    }
    fence_barrier_inits();
  }
};

template <Config c>
struct Shared {
  static_assert(c.dim % 64 == 0 && c.dim_v % 128 == 0);
  // A consumer holds its panels of a V tile until all of its products with them are issued.
  static_assert(c.stages() >= c.panels_v());
  static_assert(sizeof(Barriers<c>) <= c.barrier_bytes && c.shared_bytes() <= c.most_shared_bytes);

  std::byte* first;

  __device__ std::byte* q(int panel) const { return first + panel * c.query_panel_bytes; }
  /// P of one consumer's keys: a panel of 64 rows and 64 keys.
  __device__ std::byte* p(int buffer, int consumer) const {
    return q(c.panels()) + (2 * buffer + consumer) * (c.rows * 128);
  }
  __device__ std::byte* stage(int number) const { return p(c.p_buffers, 0) + number * c.panel_bytes; }
  /// A value of each row from either consumer.
  __device__ float* exchange(int consumer) const {
    return reinterpret_cast<float*>(stage(c.stages())) + consumer * c.rows;
  }
  __device__ Barriers<c>& barriers() const { return *reinterpret_cast<Barriers<c>*>(exchange(2)); }
};

/// Named barriers of both consumers; number 0 is that of __syncthreads.
enum NamedBarrier : int { exchanged = 1, p_stored = 2 };

/// The producer: one thread loads Q, and then all panels of K and V in the order in which they are read.
template <Config c>
__device__ __forceinline__ void load(const Maps& maps, const Params& params, const Shared<c>& shared,
                                     const Work& work) {
  Barriers<c>& barriers = shared.barriers();
  const int head_kv = wgmma::quotient(work.h, params.group);
  arrive_expecting(&barriers.q_full, c.panels() * c.query_panel_bytes);
  for (int panel = 0; panel < c.panels(); ++panel) {
    copy_box(shared.q(panel), maps.q, &barriers.q_full, 64 * panel, work.first, work.h, work.b);
  }
  Ring<c.stages()> ring;
  const auto load_panel = [&](const CUtensorMap& map, int panel, int tile) {
    wait(&barriers.empty[ring.stage()], ring.parity() ^ 1);
    arrive_expecting(&barriers.full[ring.stage()], c.panel_bytes);
    copy_box(shared.stage(ring.stage()), map, &barriers.full[ring.stage()], 64 * panel, tile * c.keys,
             head_kv, work.b);
    ring.advance();
  };
  const auto load_keys = [&](int tile) {
#pragma unroll 1
    for (int panel = 0; panel < c.panels(); ++panel) load_panel(maps.k, panel, tile);
  };
  // Panels of consumer 0 and of consumer 1 alternate.
  const auto load_values = [&](int tile) {
#pragma unroll 1
    for (int panel = 0; panel < c.panels_v(); ++panel) {
      load_panel(maps.v, panel / 2 + panel % 2 * c.own_panels(), tile);
    }
  };
  load_keys(work.tiles.last - 1);
#pragma unroll 1
  for (int tile = work.tiles.last - 2; tile >= work.tiles.first; --tile) {
    load_keys(tile);
    load_values(tile + 1);
  }
  load_values(work.tiles.first);
}

template <typename T, Config c>
struct Consumer {
  static constexpr ForwardConfig scores = c.own_scores();
  static constexpr int own_panels = c.own_panels();
  using View = WgmmaView<scores.keys>;

  const Params& params;
  const Shared<c>& shared;
  const Work& work;
  const int index;      ///< of this consumer
  const int first_row;  ///< of this warp among the 64
  const TileDescriptor q_tile, p_tile, stage_tile;
  Ring<c.stages()> ring;
  int own_stages[own_panels];  ///< of the V panels that are being multiplied
  wgmma::Scores<scores> s;
  float o[own_panels][32];
  wgmma::Softmax<scores> softmax;

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  __device__ __forceinline__ Consumer(const Params& params_, const Shared<c>& shared_, const Work& work_,
                                      int index_, int warp)
      : params(params_),
        shared(shared_),
        work(work_),
        index(index_),
        first_row(16 * warp),
        q_tile(describe_tile(address(shared_.q(0)), 0)),
        p_tile(describe_tile(address(shared_.p(0, 0)), 0)),
        stage_tile(describe_tile(address(shared_.stage(0)), 0)),
        softmax(params_.scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.maximum[half] = lowest;
      softmax.sum[half] = 0;
    }
#pragma unroll
    for (float& element : s) element = 0;
#pragma unroll
    for (int panel = 0; panel < own_panels; ++panel) {
#pragma unroll
      for (float& element : o[panel]) element = 0;
    }
  }

  __device__ __forceinline__ void wait_for(const Ring<c.stages()>& at) const {
    wait(&shared.barriers().full[at.stage()], at.parity());
  }
  /// One lane arrives for its warp.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) arrive(&shared.barriers().empty[stage]);
  }

  /// Issues S = Q·Kᵀ of the next K tile and this consumer's keys, a group of products per panel. Returns the
  /// stage of the last panel, which is to be released when S is complete.
  __device__ __forceinline__ int start_scores() {
    int before = 0;
    const auto q = static_cast<TileDescriptor>(opaque(static_cast<std::int64_t>(q_tile)));
    pin(s);
    fence_products();
#pragma unroll
    for (int panel = 0; panel < c.panels(); ++panel) {
      wait_for(ring);
      const TileDescriptor k = stage_tile + ring.stage() * (c.panel_bytes / 16) + index * (64 * 128 / 16);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        WarpgroupProduct<T, 64>::from_shared(s, q + panel * (c.query_panel_bytes / 16) + 2 * step,
                                             k + 2 * step, panel > 0 || step > 0);
      }
      commit_products();
      if (panel > 0) {
        wait_products<1>();  // the panel before has been read
        release(before);
      }
      before = ring.stage();
      ring.advance();
    }
    return before;
  }

  /// Issues O += P·V, or O = P·V where not `add`, with the next V tile, a group of products per panel.
  ///
  /// `k_stage` holds the last panel of K, which products of S before these read; −1 if there are none. It is
  /// released behind the first group, because the last panels of V may be waiting for this stage.
  __device__ __forceinline__ void start_output(int buffer, bool add, int k_stage) {
#pragma unroll
    for (int panel = 0; panel < own_panels; ++panel) pin(o[panel]);
    fence_products();
#pragma unroll
    for (int panel = 0; panel < own_panels; ++panel) {
      const int stage_0 = ring.stage();
      wait_for(ring);
      ring.advance();
      const int stage_1 = ring.stage();
      wait_for(ring);
      ring.advance();
      own_stages[panel] = index == 0 ? stage_0 : stage_1;
      release(index == 0 ? stage_1 : stage_0);  // the other consumer's
      const TileDescriptor v = stage_tile + own_stages[panel] * (c.panel_bytes / 16);
#pragma unroll
      for (int step = 0; step < c.keys / 16; ++step) {
        const TileDescriptor p =
            p_tile + (2 * buffer + step / 4) * (c.rows * 128 / 16) + step % 4 * 2;  // 16 keys are two chunks
        WarpgroupProduct<T, 64>::template from_shared<0, 1>(o[panel], p, v + step * (16 * 128 / 16),
                                                            step > 0 || add);
      }
      commit_products();
      if (panel == 0) {
        wait_products<1>();  // S is complete
        if (k_stage >= 0) release(k_stage);
      }
    }
  }
  /// Waits for O, and releases its panels of V one after another.
  template <int panel = 0>
  __device__ __forceinline__ void finish_output() {
    wait_products<own_panels - 1 - panel>();
    release(own_stages[panel]);
    if constexpr (panel + 1 < own_panels) {
      finish_output<panel + 1>();
    } else {
#pragma unroll
      for (int n = 0; n < own_panels; ++n) pin(o[n]);
    }
  }

  /// Gives the other consumer a value of each row, and gets its values.
  __device__ __forceinline__ void exchange(const float (&own)[2], float (&others)[2]) const {
    const int lane = lane_now();
    const int row = first_row + lane / 4;
    if (lane % 4 == 0) {
      shared.exchange(index)[row] = own[0];
      shared.exchange(index)[row + 8] = own[1];
    }
    sync_some<exchanged, 256>();  // both consumers' values are there
    others[0] = shared.exchange(1 - index)[row];
    others[1] = shared.exchange(1 - index)[row + 8];
  }

  /// Masks what the band hides in K tile n.
  __device__ __forceinline__ void hide(int n) {
    if (n >= work.whole.first && n < work.whole.last) return;
    const int lane = lane_now();
    const int row = work.first + first_row + lane / 4;
    const int key = n * c.keys + index * scores.keys + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      hide_outside<View>(s, half, params.band.first(row + 8 * half) - key,
                         params.band.last(row + 8 * half) - key);
    }
  }

  /// Turns S of K tile n into P, relative to the maxima over both consumers' keys. Returns, in all lanes of a
  /// warp, whether O has to be rescaled.
  __device__ __forceinline__ bool exponentiate(int n) {
    hide(n);
    float highest[2], others[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) highest[half] = softmax.largest(s, half, softmax.maximum[half]);
    exchange(highest, others);
    bool raised = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = softmax.reference(half);
      const float maximum = fmaxf(highest[half], others[half]);
      raised |= maximum > softmax.maximum[half];
      softmax.maximum[half] = maximum;
      softmax.factor[half] = exp2_approx(before - softmax.reference(half));
      softmax.sum[half] *= softmax.factor[half];
    }
    softmax.exponentiate(s);
    return __any_sync(~0u, raised);
  }

  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int panel = 0; panel < own_panels; ++panel) {
#pragma unroll
      for (int n = 0; n < 32; ++n) o[panel][n] *= softmax.factor[n / 2 % 2];
    }
  }

  /// Rounds P and stores it where both consumers read it.
  __device__ __forceinline__ void store_p(int buffer) {
    const int lane = lane_now();
    const std::uint32_t row_smem = address(shared.p(buffer, index)) + (first_row + lane % 16) * 128;
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // 16 keys each
      const std::uint32_t four[4] = {pack<T>(s[8 * n], s[8 * n + 1]), pack<T>(s[8 * n + 2], s[8 * n + 3]),
                                     pack<T>(s[8 * n + 4], s[8 * n + 5]),
                                     pack<T>(s[8 * n + 6], s[8 * n + 7])};
      store_matrices(row_smem + ((2 * n + lane / 16) ^ (lane % 8)) * 16, four);
    }
    fence_async_proxy();         // products will read what this thread wrote
    sync_some<p_stored, 256>();  // both consumers' P is there
  }

  __device__ __forceinline__ void write() {
    const int lane = lane_now();
    float sums[2] = {softmax.row_sum(0), softmax.row_sum(1)}, others[2];
    exchange(sums, others);
    float inverse[2];
    std::byte* row_gmem[2];
    bool there[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = work.first + first_row + lane / 4 + 8 * half;
      const float sum = sums[half] + others[half];
      there[half] = query < params.band.length_q;
      inverse[half] = sum == 0 ? 0.0f : __fdividef(1.0f, sum);
      row_gmem[half] = row_of_halves(params.o, work.b, work.h, query);
      if (index == 0 && lane % 4 == 0 && there[half] && params.lse.wanted) {
        *reinterpret_cast<float*>(params.lse.at(work.b, work.h, query)) =
            softmax.lse(softmax.maximum[half], sum, params.scale_lse);
      }
    }
#pragma unroll
    for (int panel = 0; panel < own_panels; ++panel) {
      const int first = 64 * (index * own_panels + panel);
      write_panel(o[panel], first, inverse, row_gmem, there);
    }
  }
  __device__ __forceinline__ void write_panel(const float (&panel)[32], int first, const float (&inverse)[2],
                                              std::byte* const (&row_gmem)[2], const bool (&there)[2]) {
    const int lane = lane_now();
    if (params.aligned_o) {
      const int column = first + lane % 2 * 8 + lane % 4 / 2 * 4;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* four = &panel[8 * n + 2 * half];
          wgmma::store_sixteen<T>(row_gmem[half] + (n * 16 + column) * 2,
                                  there[half] && n * 16 + column < params.dim_v, lane % 2 != 0,
                                  pack<T>(four[0] * inverse[half], four[1] * inverse[half]),
                                  pack<T>(four[4] * inverse[half], four[5] * inverse[half]));
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < 32; ++n) {
        const int half = n / 2 % 2;
        const int column = first + n / 4 * 8 + lane % 4 * 2 + n % 2;
        if (there[half] && column < params.dim_v) {
          reinterpret_cast<T*>(row_gmem[half])[column] = narrow<T>(panel[n] * inverse[half]);
        }
      }
    }
  }

  __device__ __forceinline__ void compute() {
    if (work.tiles.count() > 0) {
      wait(&shared.barriers().q_full, 0);
      int last_stage = start_scores();
      wait_products<0>();
      pin(s);
      release(last_stage);
      exponentiate(work.tiles.last - 1);
      int buffer = 0;
      store_p(buffer);
#pragma unroll 1
      for (int n = work.tiles.last - 2; n >= work.tiles.first; --n) {
        last_stage = start_scores();
        start_output(buffer, n < work.tiles.last - 2, last_stage);
        pin(s);  // complete
        const bool raised = exponentiate(n);
        finish_output();
        if (raised) rescale();
        // The other consumer may still read the other buffer; it has read this one before it stored P the
        // last time.
        buffer ^= 1;
        store_p(buffer);
      }
      start_output(buffer, work.tiles.count() > 1, -1);
      finish_output();
    }
    write();
  }
};

template <typename T, int row>
__global__ void __launch_bounds__(Configs::rows[row].threads, 1)
    forward_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr Config c = Configs::rows[row];
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const Shared<c> shared{first_smem};
  const Work work = work_of<c>(params, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) shared.barriers().init();
  __syncthreads();  // the mbarriers are initialised
  // The same in all lanes, which the compiler cannot see in threadIdx.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= 4) {
    take_registers<c.consumer_registers>();
    Consumer<T, c>(params, shared, work, warp / 4 - 1, warp % 4).compute();
  } else {
    keep_registers<c.producer_registers>();
    if (warp == 0 && work.tiles.count() > 0 && elected()) load<c>(maps, params, shared, work);
  }
#endif
}

template <typename T, int row>
void run(const AttentionCall& call, const Context& context) {
  constexpr Config c = Configs::rows[row];
  const AttentionProblem& problem = call.problem;
  const auto map = [&](const Rows& rows, std::int64_t heads, std::int64_t length, std::int64_t dim, int box) {
    return map_of(rows, problem.batch, heads, length, dim, box);
  };
  const Maps maps{.q = map(call.q, problem.heads_q, problem.length_q, problem.dim_qk, c.rows),
                  .k = map(call.k, problem.heads_kv, problem.length_k, problem.dim_qk, c.keys),
                  .v = map(call.v, problem.heads_kv, problem.length_k, problem.dim_v, c.keys)};
  // A CTA per Q tile, which the forward pass's schedule puts in order: longest first, heads in sections of
  // the L2.
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  constexpr ForwardConfig tile{
      .dim = c.dim, .dim_v = c.dim_v, .consumers = 1, .keys = c.keys, .general = true};
  constexpr double log2_e = 1.4426950408889634;
  const Params params{.schedule = wgmma::schedule_of(call, tile, multiprocessors),
                      .band = BandOfKeys::of(call),
                      .heads = static_cast<int>(problem.heads_q),
                      .group = static_cast<int>(call.group()),
                      .dim_v = static_cast<int>(problem.dim_v),
                      .aligned_o = aligned_chunks(call.o) && problem.dim_v % 4 == 0,
                      .scale_log2 = static_cast<float>(call.scale * log2_e),
                      .scale_lse = wgmma::LseScale::of(call, false),
                      .o = call.o,
                      .lse = call.lse};
  launch<forward_kernel<T, row>>({.name = "tilewise wgmma_halves forward",
                                  .blocks = params.schedule.total(),
                                  .threads = c.threads,
                                  .shared_bytes = c.shared_bytes(),
                                  .stream = static_cast<cudaStream_t>(context.stream)},
                                 maps, params);
}

}  // namespace

std::string unsuited(const AttentionProblem& problem) {
  if (problem.pass == Pass::backward) return "does not support backward";
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return needs("f16 or bf16", to_string(problem.dtype));
  }
  if (problem.strict) return "does not support strict precision";
  if (problem.layout != Layout::dense) return "supports dense tensors only, not packed or paged ones";
  const AttentionFeatures& features = problem.features;
  if (features.needs_more_than_band() || features.sinks || features.key_lengths || problem.piece.wide_rows) {
    return "supports causal and windows, and no other feature";
  }
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (dim <= wgmma::most_dim) return needs("a head dim above " + std::to_string(wgmma::most_dim), dim);
  if (dim > most_dim) return supports_up_to("head dims", most_dim, dim);
  if (problem.length_q == 0) return "needs at least one query";
  if (problem.length_k == 0) return "needs at least one key";
  const std::int64_t longest = std::max(problem.length_q, problem.length_k);
  if (longest >= BandOfKeys::most) return supports_up_to("sequence lengths", BandOfKeys::most - 1, longest);
  if (problem.heads_q * problem.batch * ((problem.length_q + 63) / 64) > 0x7fffffff) {
    return "needs fewer than 2^31 tiles of 64 queries";
  }
  if (!problem.aligned) {
    return "needs rows of q, k and v that start at multiples of 16 bytes, without negative strides";
  }
  if (!problem.usual_scale) return "needs a scale of at least 1e-20";
  return {};
}

void forward(const AttentionCall& call, const Context& context) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  const int row = first_row<Configs>([&](const Config& c) { return c.dim >= dim; });
  with_row<Configs>(row, [&](auto chosen) {
    call.problem.dtype == DType::f16 ? run<__half, chosen>(call, context)
                                     : run<__nv_bfloat16, chosen>(call, context);
  });
}

}  // namespace tilewise::cuda::wgmma_halves
