#pragma once

#include "cuda/mma_f32/backward_space.h"
#include "cuda/mma_f32/backward_tuning.h"
#include "cuda/mma_f32/products.cuh"
#include "cuda/mma_f32/split_rows.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/tile/key_tiles.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda::mma_f32 {

// Backward for f32 on tensor cores. A block keeps some keys and their values and walks over the queries that
// see them, those of all query heads of a group: five products a pair of tiles. A warp has 16 keys for
// itself. Pairs are held turned, a row a key, so that they come out of k·qᵀ and v·d_oᵀ in the form in which
// they go into dv and dk, which stay in registers. Score gradients pass through shared memory to dq, which is
// added up in global memory. Where there are too few blocks of keys to keep all multiprocessors busy, several
// blocks share the queries of the same keys and add up dk and dv there, too.

/// Queries [first, last) of which some see a block's keys.
struct QueryRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};
__device__ __forceinline__ QueryRange queries_of(const AttentionCall& call, const Sequence& s,
                                                 std::int64_t first_key, std::int64_t last_key) {
  const std::int64_t first = max(std::int64_t{0}, first_key - call.band.right - s.band_offset);
  const std::int64_t last = min(s.length_q, last_key + call.band.left - s.band_offset);
  return {first, max(first, last)};
}

template <auto c>
struct BackwardBlock {
  using PairTile = SwizzledTile<c.keys>;

  const AttentionCall& call;
  const BackwardSpace& space;
  const Sequence sequence;
  const std::int64_t b, h;  ///< of the keys
  const std::int64_t first_key;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::byte* k_smem;  ///< own_tiles x parts x [keys, dim]
  std::byte* v_smem;
  std::byte* stages_smem;  ///< 2 x (q, d_o), each parts x [queries, dim]
  std::byte* pairs_smem;   ///< parts x [own, queries]: score gradients
  float* values_smem;      ///< 2 x 3 x [queries]
  float* sums_smem;        ///< 2 x 2 x [queries]: of weights and of score gradients that are no peaks
  ScaledSum<c> dk, dv;
  float v_norm = 0;
  int least_k_exponent = 126;

  __device__ BackwardBlock(const AttentionCall& call_, const BackwardSpace& space_, std::int64_t b_,
                           std::int64_t h_, std::int64_t first_key_, std::byte* shared)
      : call(call_),
        space(space_),
        sequence(call.sequence(b_)),
        b(b_),
        h(h_),
        first_key(first_key_),
        k_smem(shared),
        v_smem(k_smem + c.own_tiles() * c.tile_bytes()),
        stages_smem(v_smem + c.own_tiles() * c.tile_bytes()),
        pairs_smem(stages_smem + 4 * c.tile_bytes()),
        values_smem(reinterpret_cast<float*>(pairs_smem + c.parts * c.pair_part_bytes())),
        sums_smem(values_smem + 2 * 3 * c.keys) {
    if (threadIdx.x < 4 * c.keys) sums_smem[threadIdx.x] = 0;
  }

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  __device__ std::byte* q_stage(int stage) const { return stages_smem + 2 * stage * c.tile_bytes(); }
  __device__ std::byte* d_o_stage(int stage) const { return q_stage(stage) + c.tile_bytes(); }
  __device__ float* values_stage(int stage) const { return values_smem + stage * 3 * c.keys; }

  static __device__ void copy_tile(std::byte* to_smem, const std::byte* from, bool present) {
#pragma unroll
    for (int n = 0; n < c.tile_bytes() / 16; n += c.threads()) {
      const int chunk = (n + static_cast<int>(threadIdx.x)) * 16;
      copy_async_16(to_smem + chunk, present ? from + chunk : from, present);
    }
  }

  /// Keys and values of the block, and what is known of them.
  __device__ void load_own() {
    const std::int64_t first = space.k.first(call, b, h) + first_key / c.keys;
    for (int tile = 0; tile < c.own_tiles(); ++tile) {
      const bool present = first_key + tile * c.keys < sequence.length_k;
      const std::int64_t at = first + (present ? tile : 0);
      copy_tile(k_smem + tile * c.tile_bytes(), space.k.data + at * c.tile_bytes(), present);
      copy_tile(v_smem + tile * c.tile_bytes(), space.v.data + at * c.tile_bytes(), present);
      v_norm = fmaxf(v_norm, space.v.norms[at]);
      least_k_exponent = min(least_k_exponent, space.k.exponents[at]);
    }
  }

  /// A tile of queries of head hq.
  __device__ void load_queries(std::int64_t hq, std::int64_t tile, int stage) const {
    const std::int64_t at = space.q.first(call, b, hq) + tile;
    copy_tile(q_stage(stage), space.q.data + at * c.tile_bytes(), true);
    copy_tile(d_o_stage(stage), space.d_o.data + at * c.tile_bytes(), true);
    const std::int64_t i = tile * c.keys + lane;
    const std::int64_t row = hq * call.rows_q() + call.first_row_q(b) + i;
    if (warp >= 3) return;
    const RowValues& rows = space.rows;
    const float* from = warp == 0 ? rows.top : warp == 1 ? rows.factor : rows.shift;
    float* to = values_stage(stage) + warp * c.keys + lane;
    if (i < sequence.length_q) {
      copy_async_4(to, from + row);
    } else {
      *to = warp == 0 ? __int_as_float(0x7f800000) : 0.0f;
    }
  }

  /// What a warp's rows of a split tile of its own are: 16 of them.
  __device__ std::uint32_t own_rows(const std::byte* smem) const {
    return address(smem + warp / 2 * c.tile_bytes() + warp % 2 * 16 * c.row_bytes());
  }

  /// Weights of the pairs, times 2^weight_bits, from products k·q.
  __device__ void weigh(float (&s)[1][c.keys / 8][4], std::int64_t first_query, float unit, bool edge,
                        const float* values) const {
    const int column = 2 * (lane % 4);
    const int key = warp * 16 + lane / 4;  // the first of two, of the block's
#pragma unroll
    for (int n = 0; n < c.keys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int query = 8 * n + column + e;
        const float top = values[query];
        const float factor = values[c.keys + query];
        int first = 0;
        int last = c.own();
        if (edge) {
          const KeyRange range = call.keys_of(sequence, first_query + query);
          first = static_cast<int>(max(range.first - first_key, std::int64_t{0}));
          last = static_cast<int>(min(range.last - first_key, std::int64_t{c.own()}));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& one = s[0][n][2 * half + e];
          const float weight = exp2_approx(fmaf(one, unit, -top)) * factor;
          one = key + 8 * half < first || key + 8 * half >= last ? 0.0f : weight;
        }
      }
    }
  }

  /// Gradients of scores from weights and products v·d_o: weight·(unit·product + shift), `unit` and `power`
  /// having the scale of the result.
  __device__ void differentiate(float (&dp)[1][c.keys / 8][4], const float (&weights)[1][c.keys / 8][4],
                                float unit, float power, const float* values) const {
#pragma unroll
    for (int n = 0; n < c.keys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float shift = values[2 * c.keys + 8 * n + 2 * (lane % 4) + e] * power;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& one = dp[0][n][2 * half + e];
          one = weights[0][n][2 * half + e] * fmaf(one, unit, shift);
        }
      }
    }
  }

  /// Puts the peaks among the warp's pairs aside: they take no part in dq and dk. `power` is the scale of
  /// score gradients over that of weights.
  __device__ void take_peaks(float (&dscores)[1][c.keys / 8][4], float (&weights)[1][c.keys / 8][4],
                             std::int64_t first_row, float power) const {
#pragma unroll
    for (int n = 0; n < c.keys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = weights[0][n][e] * power_of_two(-weight_bits);
        if (!(weight > simt::peak_weight)) continue;
        const std::int64_t row = first_row + 8 * n + 2 * (lane % 4) + e % 2;
        const int count = atomicAdd(space.peaks.count + row, 1);
        if (count >= simt::most_peaks) continue;
        simt::Peak& peak = space.peaks.first[row * simt::most_peaks + count];
        peak.key = first_key + warp * 16 + e / 2 * 8 + lane / 4;
        peak.weight = weight;
        peak.gradient = dscores[0][n][e] / weights[0][n][e] / power;
        dscores[0][n][e] = 0;
      }
    }
  }

  /// Adds weights and score gradients of the warp's keys that are no peaks to the sums of their queries. Of
  /// 16 numbers each lane has, eight lanes share the adding: half of them are exchanged in every step.
  __device__ void add_sums(const float (&dscores)[1][c.keys / 8][4], const float (&weights)[1][c.keys / 8][4],
                           float* sums) const {
    float each[16];  // by what it is, queries n and e
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const auto low = [](float x) {
          return x * power_of_two(-weight_bits) > simt::peak_weight ? 0.0f : x;
        };
        each[2 * n + e] = low(weights[0][n][e]) + low(weights[0][n][2 + e]);
        each[8 + 2 * n + e] = dscores[0][n][e] + dscores[0][n][2 + e];
      }
    }
    int first = 0;  // of those that are left to the lane
#pragma unroll
    for (int step = 0; step < 3; ++step) {
      const int count = 8 >> step;
      const bool upper = (lane >> (4 - step) & 1) != 0;
#pragma unroll
      for (int m = 0; m < count; ++m) {
        const float other = __shfl_xor_sync(~0u, upper ? each[m] : each[m + count], 16 >> step);
        each[m] = (upper ? each[m + count] : each[m]) + other;
      }
      if (upper) first += count;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int index = first + m;
      atomicAdd(sums + index / 8 * c.keys + index % 8 / 2 * 8 + 2 * (lane % 4) + index % 2, each[m]);
    }
  }

  static __device__ void split_pairs(Weights<c>& to, const float (&from)[1][c.keys / 8][4]) {
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {  // eight queries n / 2 of the step, half n % 2 of the keys
        const float(&four)[4] = from[0][2 * step + n / 2];
        const Pair two = split_two(four[2 * (n % 2)], four[2 * (n % 2) + 1]);
        to[step][0][0][n] = two.high;
        to[step][0][1][n] = two.low;
      }
    }
  }

  /// Puts the warp's score gradients where all can read them.
  __device__ void store_pairs(const Weights<c>& pairs) const {
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
      for (int part = 0; part < c.parts; ++part) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int row = warp * 16 + n % 2 * 8 + lane / 4;
          *reinterpret_cast<std::uint32_t*>(pairs_smem + part * c.pair_part_bytes() +
                                            PairTile::offset(row, 2 * step + n / 2) + 4 * (lane % 4)) =
              pairs[step][0][part][n];
        }
      }
    }
  }

  /// The warp's part of dq += dscores · k, which is 16 queries and some dims. Score gradients are times
  /// 2^exponent.
  __device__ void add_dq(std::int64_t hq, std::int64_t first_query, int exponent) const {
    constexpr int dim_warps = c.warps / 2;
    constexpr int count = c.dim / dim_warps / 16;
    const int half = warp % 2;
    const int first_step = warp / 2 * count;  // of 16 dims
    float sum[count][2][4] = {};
    const std::int64_t first_tile = space.k.first(call, b, h) + first_key / c.keys;
    const auto pairs = MatrixPointer<c.keys>::by_columns(address(pairs_smem));
#pragma unroll 1
    for (int tile = 0; tile < c.own_tiles(); ++tile) {
      if (first_key + tile * c.keys >= sequence.length_k) break;
      const auto k = MatrixPointer<c.dim>::by_rows(address(k_smem + tile * c.tile_bytes()));
      const float factor = power_of_two(max(least_k_exponent - space.k.exponents[first_tile + tile], -126));
      float part[count][1][2][4];
#pragma unroll
      for (int step = 0; step < c.keys / 16; ++step) {
        Parts<c> a[1];
        Parts<c> from[count];
#pragma unroll
        for (int p = 0; p < c.parts; ++p) {
          load_matrices_turned(a[0][p], pairs.at(tile * c.keys + 16 * step, half) + p * c.pair_part_bytes());
#pragma unroll
          for (int n = 0; n < count; ++n) {
            load_matrices_turned(from[n][p], k.at(16 * step, first_step + n) + p * c.part_bytes());
          }
        }
        add_products(part, a, from, step == 0);
      }
#pragma unroll
      for (int n = 0; n < count * 8; ++n) {
        float& to = sum[n / 8][n / 4 % 2][n % 4];
        to = fmaf(part[n / 8][0][n / 4 % 2][n % 4], factor, to);
      }
    }
    // In two steps, since one factor might be too large or too small.
    const int scaled = exponent + least_k_exponent;
    const float first_factor = power_of_two(-scaled / 2) * static_cast<float>(call.scale);
    const float second_factor = power_of_two(scaled / 2 - scaled);
    const auto dims = static_cast<int>(call.problem.dim_qk);
    const bool even = lane % 2 == 0;
#pragma unroll
    for (int n = 0; n < count; ++n) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        // Of two neighbours each takes four consecutive dims: the first those of the first fragment.
        const float* low = sum[n][0] + 2 * row;
        const float* high = sum[n][1] + 2 * row;
        const float other_first = __shfl_xor_sync(~0u, even ? high[0] : low[0], 1);
        const float other_second = __shfl_xor_sync(~0u, even ? high[1] : low[1], 1);
        const float four[4] = {even ? low[0] : other_first, even ? low[1] : other_second,
                               even ? other_first : high[0], even ? other_second : high[1]};
        const std::int64_t i = first_query + 16 * half + 8 * row + lane / 4;
        const int dim = 16 * (first_step + n) + (even ? 0 : 8) + lane % 4 / 2 * 4;
        if (i >= sequence.length_q || dim >= dims) continue;
        float* to = reinterpret_cast<float*>(call.dq.at(b, hq, sequence.first_q + i)) + dim;
        const auto scaled_back = [&](int e) { return four[e] * first_factor * second_factor; };
        if (dim + 4 <= dims) {
          add_4(to, {scaled_back(0), scaled_back(1), scaled_back(2), scaled_back(3)});
        } else {
          for (int e = 0; dim + e < dims; ++e) atomicAdd(to + e, scaled_back(e));
        }
      }
    }
  }

  /// All that a tile of queries adds.
  __device__ void add_queries(std::int64_t hq, std::int64_t tile, int stage) {
    const std::int64_t first_query = tile * c.keys;
    const std::int64_t q_tile = space.q.first(call, b, hq) + tile;
    const std::int64_t own_tile =
        space.k.first(call, b, h) + min(first_key + warp / 2 * c.keys, sequence.length_k - 1) / c.keys;
    const int q_exponent = space.q.exponents[q_tile];
    const int d_o_exponent = space.d_o.exponents[q_tile];
    const float* values = values_stage(stage);
    // Score gradients are at most the weight times |d_o|·|v| + |shift|, which is brought below 2^15.
    const int shift_bits = __reduce_max_sync(~0u, __float_as_int(fabsf(values[2 * c.keys + lane])));
    const float bound = fmaf(space.d_o.norms[q_tile], v_norm, __int_as_float(shift_bits));
    const int exponent = exponent_for(bound);

    const KeyRange first_range = call.keys_of(sequence, first_query);
    const KeyRange last_range = call.keys_of(sequence, first_query + c.keys - 1);
    const bool edge = last_range.first > first_key || first_range.last < first_key + c.own();
    float s[1][c.keys / 8][4];
    multiply_tile<c, c.part_bytes()>(
        s,
        [&](Parts<c>(&a)[1], int step) {
          load_rows<c, c.part_bytes()>(a, MatrixPointer<c.dim>::by_rows(own_rows(k_smem)), step);
        },
        address(q_stage(stage)));
    const auto unit = static_cast<float>(call.scale * 1.4426950408889634);
    weigh(s, first_query, scaled_up_to(unit, -q_exponent - space.k.exponents[own_tile]), edge, values);
    float dp[1][c.keys / 8][4];
    multiply_tile<c, c.part_bytes()>(
        dp,
        [&](Parts<c>(&a)[1], int step) {
          load_rows<c, c.part_bytes()>(a, MatrixPointer<c.dim>::by_rows(own_rows(v_smem)), step);
        },
        address(d_o_stage(stage)));
    const int power = exponent - weight_bits;
    differentiate(dp, s, scaled_up_to(1.0f, power - d_o_exponent - space.v.exponents[own_tile]),
                  power_of_two(max(power, -126)), values);
    const std::int64_t first_row = hq * call.rows_q() + call.first_row_q(b) + first_query;
    float highest = 0;
#pragma unroll
    for (int n = 0; n < c.keys / 2; ++n) highest = fmaxf(highest, s[0][n / 4][n % 4]);
    if (__any_sync(~0u, highest > simt::peak_weight * power_of_two(weight_bits))) {
      take_peaks(dp, s, first_row, power_of_two(max(power, -126)));
    }
    float* sums = sums_smem + stage * 2 * c.keys;
    add_sums(dp, s, sums);
    Weights<c> pairs;
    split_pairs(pairs, dp);
    store_pairs(pairs);
    {
      Weights<c> weights;
      split_pairs(weights, s);
      add_tile<c, c.part_bytes()>(dv.sum, weights, address(d_o_stage(stage)), dv.follow(d_o_exponent));
    }
    add_tile<c, c.part_bytes()>(dk.sum, pairs, address(q_stage(stage)), dk.follow(q_exponent + exponent));
    __syncthreads();  // everyone's score gradients and sums are there
    if (warp < 2) {
      const float sum = sums[warp * c.keys + lane];
      sums[warp * c.keys + lane] = 0;
      if (first_query + lane < sequence.length_q) {
        float* to = (warp == 0 ? space.peaks.rest_weight : space.peaks.rest_gradient) + first_row + lane;
        const int bits = warp == 0 ? weight_bits : exponent;
        atomicAdd(to, sum * power_of_two(-bits / 2) * power_of_two(bits / 2 - bits));
      }
    }
    add_dq(hq, first_query, exponent);
  }

  /// The block's share of the queries, one tile after another.
  __device__ void walk(int share, int shares) {
    const QueryRange range =
        queries_of(call, sequence, first_key, min(first_key + c.own(), sequence.length_k));
    const std::int64_t first = range.first / c.keys;
    const auto tiles = static_cast<int>(range.first < range.last ? (range.last + c.keys - 1) / c.keys - first
                                                                 : std::int64_t{0});
    const auto group = static_cast<int>(call.group());
    const auto begin = static_cast<int>(std::int64_t{tiles} * group * share / shares);
    const auto end = static_cast<int>(std::int64_t{tiles} * group * (share + 1) / shares);
    const auto load = [&](int item) {
      if (item < end) load_queries(h * group + item / tiles, first + item % tiles, item % 2);
      commit_copies();
    };
    load_own();
    load(begin);
#pragma unroll 1
    for (int item = begin; item < end; ++item) {
      wait_copies<0>();
      __syncthreads();  // the tile is there, and everyone is done with the last one
      load(item + 1);
      add_queries(h * group + item / tiles, first + item % tiles, item % 2);
    }
  }

  /// Writes the warp's rows of dk or dv.
  __device__ void store(const Rows& rows, const ScaledSum<c>& from, int dims, float factor) const {
    if (!rows.wanted) return;
    const bool pairs = aligned_fours(rows);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t j = first_key + warp * 16 + 8 * half + lane / 4;
      if (j >= sequence.length_k) continue;
      auto* to = reinterpret_cast<float*>(rows.at(b, h, sequence.first_k + j));
#pragma unroll
      for (int n = 0; n < c.dim / 8; ++n) {
        const int dim = 8 * n + 2 * (lane % 4);
        if (dim >= dims) continue;
        const float first = from.scaled_back(from.sum[0][n][2 * half] * factor);
        const float second = from.scaled_back(from.sum[0][n][2 * half + 1] * factor);
        if (pairs && dim + 2 <= dims) {
          *reinterpret_cast<float2*>(to + dim) = {first, second};
        } else {
          to[dim] = first;
          if (dim + 1 < dims) to[dim + 1] = second;
        }
      }
    }
  }

  /// Adds them to what other blocks add. Head dims are multiples of 4.
  __device__ void add(const Rows& rows, const ScaledSum<c>& from, int dims, float factor) const {
    if (!rows.wanted) return;
    // Two neighbours have two dims each of the same two rows: each takes all four of one.
    const bool even = lane % 2 == 0;
    const std::int64_t j = first_key + warp * 16 + (even ? 0 : 8) + lane / 4;
    const bool present = j < sequence.length_k;
    auto* to = reinterpret_cast<float*>(rows.at(b, h, sequence.first_k + (present ? j : first_key)));
#pragma unroll
    for (int n = 0; n < c.dim / 8; ++n) {
      const float(&own)[4] = from.sum[0][n];
      const float first = __shfl_xor_sync(~0u, even ? own[2] : own[0], 1);
      const float second = __shfl_xor_sync(~0u, even ? own[3] : own[1], 1);
      const int dim = 8 * n + lane % 4 / 2 * 4;
      if (!present || dim >= dims) continue;
      const auto scaled_back = [&](float x) { return from.scaled_back(x * factor); };
      add_4_of_any_size(to + dim, {scaled_back(even ? own[0] : first), scaled_back(even ? own[1] : second),
                                   scaled_back(even ? first : own[2]), scaled_back(even ? second : own[3])});
    }
  }

  __device__ void finish(const Rows& rows, const ScaledSum<c>& sum, std::int64_t dims, float factor,
                         bool alone) const {
    alone ? store(rows, sum, static_cast<int>(dims), factor) : add(rows, sum, static_cast<int>(dims), factor);
  }
};

template <typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    backward_kernel(const __grid_constant__ AttentionCall call, std::int64_t head_blocks, int shares,
                    const __grid_constant__ BackwardSpace space, const simt::SomeHeads unfit) {
#if __CUDA_ARCH__ >= 800
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  constexpr BackwardConfig c = Table::rows[row];
  extern __shared__ __align__(128) std::byte shared[];
  const auto share = static_cast<int>(blockIdx.x % static_cast<unsigned>(shares));
  const Turn turn = Turns::of(call, call.problem.batch * call.problem.heads_kv, head_blocks)
                        .turn(blockIdx.x / static_cast<unsigned>(shares));
  const auto [b, h] = turn.among(call.problem.heads_kv);
  const std::int64_t first_key = std::int64_t{turn.tile} * c.own();
  if (first_key >= call.sequence(b).length_k || unfit.has_group(call, b, h)) return;
  BackwardBlock<c> block(call, space, b, h, first_key, shared);
  block.walk(share, shares);
  block.finish(call.dv, block.dv, call.problem.dim_v, power_of_two(-weight_bits), shares == 1);
  block.finish(call.dk, block.dk, call.problem.dim_qk, static_cast<float>(call.scale), shares == 1);
#endif
}

}  // namespace tilewise::cuda::mma_f32
