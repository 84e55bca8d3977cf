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

/// A tile of queries that a block meets.
struct QueriesAt {
  std::int64_t hq;
  std::int64_t split;  ///< among the tiles that were split
  std::int64_t row;    ///< the first query's, among [Hq, rows_q]
  int first;           ///< query
};

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
  float* values_smem;      ///< 2 x (3 x [queries], exponents of q and d_o, d_o's norm)
  float* sums_smem;        ///< warps x 2 x [queries]: of weights and of score gradients that are no peaks
  float* factors_smem;     ///< own_tiles: what products with a tile's keys are to be multiplied by
  ScaledSum<c> dk, dv;
  float v_norm = 0;
  int least_k_exponent = 126;
  int k_exponent = 0, v_exponent = 0;  ///< of the warp's own tile
  int whole_first, whole_last;         ///< queries that see all the block's keys

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
        sums_smem(values_smem + 2 * c.stage_values),
        factors_smem(sums_smem + c.warps * 2 * c.keys) {
    const auto within = [](std::int64_t i) {
      return static_cast<int>(max(std::int64_t{-1}, min(i, std::int64_t{0x7fffffff})));
    };
    const std::int64_t last_key = first_key + c.own() - 1;
    whole_first = last_key < sequence.length_k
                      ? within(max(last_key - call.band.right - sequence.band_offset, std::int64_t{0}))
                      : 0x7fffffff;
    whole_last = within(first_key + call.band.left - sequence.band_offset);
  }

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  __device__ std::byte* q_stage(int stage) const { return stages_smem + 2 * stage * c.tile_bytes(); }
  __device__ std::byte* d_o_stage(int stage) const { return q_stage(stage) + c.tile_bytes(); }
  __device__ float* values_stage(int stage) const { return values_smem + stage * c.stage_values; }

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
    const auto exponent_at = [&](const SplitRows& rows, int tile) {
      const std::int64_t last = (sequence.length_k - 1) / c.keys - first_key / c.keys;
      return rows.exponents[first + min(std::int64_t{tile}, last)];
    };
    k_exponent = exponent_at(space.k, warp / 2);
    v_exponent = exponent_at(space.v, warp / 2);
    if (threadIdx.x < c.own_tiles()) {
      const int exponent = exponent_at(space.k, static_cast<int>(threadIdx.x));
      factors_smem[threadIdx.x] = power_of_two(max(least_k_exponent - exponent, -126));
    }
  }

  __device__ void load_queries(const QueriesAt& at, int stage) const {
    copy_tile(q_stage(stage), space.q.data + at.split * c.tile_bytes(), true);
    copy_tile(d_o_stage(stage), space.d_o.data + at.split * c.tile_bytes(), true);
    float* to = values_stage(stage) + warp * c.keys + lane;
    if (warp < 3) {
      const RowValues& rows = space.rows;
      const float* from = warp == 0 ? rows.top : warp == 1 ? rows.factor : rows.shift;
      if (at.first + lane < sequence.length_q) {
        copy_async_4(to, from + at.row + lane);
      } else {
        *to = warp == 0 ? __int_as_float(0x7f800000) : 0.0f;
      }
    } else if (warp == 3 && lane < 3) {
      const void* from = lane == 0   ? static_cast<const void*>(space.q.exponents + at.split)
                         : lane == 1 ? static_cast<const void*>(space.d_o.exponents + at.split)
                                     : space.d_o.norms + at.split;
      copy_async_4(to, static_cast<const float*>(from));
    }
  }

  /// What a warp's rows of a split tile of its own are: 16 of them.
  __device__ std::uint32_t own_rows(const std::byte* smem) const {
    return address(smem + warp / 2 * c.tile_bytes() + warp % 2 * 16 * c.row_bytes());
  }

  /// Two numbers of the lane's queries, eight queries n.
  __device__ float2 two_of(const float* values, int n) const {
    return *reinterpret_cast<const float2*>(values + 8 * n + 2 * (lane % 4));
  }

  /// Weights of the pairs, times 2^weight_bits, from products k·q.
  __device__ void weigh(float (&s)[1][c.keys / 8][4], float unit, const float* values) const {
#pragma unroll
    for (int n = 0; n < c.keys / 8; ++n) {
      const float2 top = two_of(values, n);
      const float2 factor = two_of(values + c.keys, n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& one = s[0][n][e];
        one = exp2_approx(fmaf(one, unit, e % 2 == 0 ? -top.x : -top.y)) * (e % 2 == 0 ? factor.x : factor.y);
      }
    }
  }
  /// Makes those that are hidden 0.
  __device__ void hide(float (&s)[1][c.keys / 8][4], int first_query) const {
    const int key = warp * 16 + lane / 4;  // the first of two, of the block's
#pragma unroll
    for (int n = 0; n < c.keys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const KeyRange range = call.keys_of(sequence, first_query + 8 * n + 2 * (lane % 4) + e);
        const auto first = static_cast<int>(max(range.first - first_key, std::int64_t{0}));
        const auto last = static_cast<int>(min(range.last - first_key, std::int64_t{c.own()}));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (key + 8 * half < first || key + 8 * half >= last) s[0][n][2 * half + e] = 0;
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
      const float2 shift = two_of(values + 2 * c.keys, n);
      const float scaled[2] = {shift.x * power, shift.y * power};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dp[0][n][e] = weights[0][n][e] * fmaf(dp[0][n][e], unit, scaled[e % 2]);
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

  /// Of 2 · count numbers adds up one half with those of the lane 2 · count away, which takes the other half;
  /// gives the first of them.
  template <int count>
  __device__ int exchange(float (&each)[16]) const {
    const bool upper = (lane & 2 * count) != 0;
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const float other = __shfl_xor_sync(~0u, upper ? each[n] : each[n + count], 2 * count);
      each[n] = (upper ? each[n + count] : each[n]) + other;
    }
    return upper ? count : 0;
  }
  /// Sums of weights and of score gradients over the warp's keys that are no peaks, a query each. Of 16
  /// numbers each lane has, eight lanes share the adding: half of them are exchanged in every step.
  __device__ void find_sums(const float (&dscores)[1][c.keys / 8][4],
                            const float (&weights)[1][c.keys / 8][4], bool peaks) const {
    float each[16];  // by what it is, queries n and e
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        each[2 * n + e] = weights[0][n][e] + weights[0][n][2 + e];
        each[8 + 2 * n + e] = dscores[0][n][e] + dscores[0][n][2 + e];
      }
    }
    if (peaks) {
      const auto low = [](float x) { return x * power_of_two(-weight_bits) > simt::peak_weight ? 0.0f : x; };
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) each[2 * n + e] = low(weights[0][n][e]) + low(weights[0][n][2 + e]);
      }
    }
    const int first = exchange<8>(each) + exchange<4>(each) + exchange<2>(each);  // of those left to the lane
    // The two that are left are of neighbouring queries.
    float* to = sums_smem + (2 * warp + first / 8) * c.keys + first % 8 / 2 * 8 + 2 * (lane % 4);
    *reinterpret_cast<float2*>(to) = {each[0], each[1]};
  }
  /// Adds up what all warps found, when it is there, for everyone's queries.
  __device__ void add_sums(const QueriesAt& at, int exponent) const {
    if (warp >= 2 || at.first + lane >= sequence.length_q) return;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < c.warps; ++n) sum += sums_smem[(2 * n + warp) * c.keys + lane];
    float* to = (warp == 0 ? space.peaks.rest_weight : space.peaks.rest_gradient) + at.row + lane;
    const int bits = warp == 0 ? weight_bits : exponent;
    atomicAdd(to, sum * power_of_two(-bits / 2) * power_of_two(bits / 2 - bits));
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
  /// 2^exponent. Head dims are multiples of 4.
  __device__ void add_dq(const QueriesAt& at, int exponent) const {
    constexpr int dim_warps = c.warps / 2;
    constexpr int count = c.dim / dim_warps / 16;
    const int half = warp % 2;
    const int first_step = warp / 2 * count;  // of 16 dims
    float sum[count][2][4] = {};
    const auto pairs = MatrixPointer<c.keys>::by_columns(address(pairs_smem));
#pragma unroll 1
    for (int tile = 0; tile < c.own_tiles(); ++tile) {
      if (first_key + tile * c.keys >= sequence.length_k) break;
      const auto k = MatrixPointer<c.dim>::by_rows(address(k_smem + tile * c.tile_bytes()));
      const float factor = factors_smem[tile];
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
    const int first_row = at.first + 16 * half + lane / 4;
    auto* to = reinterpret_cast<float*>(call.dq.at(b, at.hq, sequence.first_q + first_row));
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
        const int dim = 16 * (first_step + n) + (even ? 0 : 8) + lane % 4 / 2 * 4;
        if (first_row + 8 * row >= sequence.length_q || dim >= dims) continue;
        const auto scaled_back = [&](int e) { return four[e] * first_factor * second_factor; };
        add_4(to + 8 * row * call.dq.stride_s + dim,
              {scaled_back(0), scaled_back(1), scaled_back(2), scaled_back(3)});
      }
    }
  }

  /// All that a tile of queries adds.
  __device__ void add_queries(const QueriesAt& at, int stage) {
    const float* values = values_stage(stage);
    const int q_exponent = __float_as_int(values[3 * c.keys]);
    const int d_o_exponent = __float_as_int(values[3 * c.keys + 1]);
    // Score gradients are at most the weight times |d_o|·|v| + |shift|, which is brought below 2^15.
    const int shift_bits = __reduce_max_sync(~0u, __float_as_int(fabsf(values[2 * c.keys + lane])));
    const float bound = fmaf(values[3 * c.keys + 2], v_norm, __int_as_float(shift_bits));
    const int exponent = exponent_for(bound);

    float s[1][c.keys / 8][4];
    multiply_tile<c, c.part_bytes()>(
        s,
        [&](Parts<c>(&a)[1], int step) {
          load_rows<c, c.part_bytes()>(a, MatrixPointer<c.dim>::by_rows(own_rows(k_smem)), step);
        },
        address(q_stage(stage)));
    const auto unit = static_cast<float>(call.scale * 1.4426950408889634);
    weigh(s, scaled_up_to(unit, -q_exponent - k_exponent), values);
    if (at.first < whole_first || at.first + c.keys - 1 > whole_last) hide(s, at.first);
    float dp[1][c.keys / 8][4];
    multiply_tile<c, c.part_bytes()>(
        dp,
        [&](Parts<c>(&a)[1], int step) {
          load_rows<c, c.part_bytes()>(a, MatrixPointer<c.dim>::by_rows(own_rows(v_smem)), step);
        },
        address(d_o_stage(stage)));
    const int power = exponent - weight_bits;
    differentiate(dp, s, scaled_up_to(1.0f, power - d_o_exponent - v_exponent),
                  power_of_two(max(power, -126)), values);
    float highest = 0;
#pragma unroll
    for (int n = 0; n < c.keys / 2; ++n) highest = fmaxf(highest, s[0][n / 4][n % 4]);
    const bool peaks = __any_sync(~0u, highest > simt::peak_weight * power_of_two(weight_bits));
    if (peaks) take_peaks(dp, s, at.row, power_of_two(max(power, -126)));
    find_sums(dp, s, peaks);
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
    add_sums(at, exponent);
    add_dq(at, exponent);
  }

  /// The block's share of the queries, one tile after another.
  __device__ void walk(int share, int shares) {
    const QueryRange range =
        queries_of(call, sequence, first_key, min(first_key + c.own(), sequence.length_k));
    const auto first = static_cast<int>(range.first / c.keys);
    const auto tiles = static_cast<int>(range.first < range.last ? (range.last + c.keys - 1) / c.keys - first
                                                                 : std::int64_t{0});
    const auto group = static_cast<int>(call.group());
    const auto begin = static_cast<int>(std::int64_t{tiles} * group * share / shares);
    const auto end = static_cast<int>(std::int64_t{tiles} * group * (share + 1) / shares);
    // Tile `tile` of those of query head `head` of the group.
    const auto place = [&](int head, int tile) -> QueriesAt {
      const std::int64_t hq = h * group + head;
      return {hq, space.q.first(call, b, hq) + tile,
              hq * call.rows_q() + call.first_row_q(b) + std::int64_t{tile} * c.keys, tile * c.keys};
    };
    load_own();
    QueriesAt at{};
    if (begin < end) {
      at = place(begin / tiles, first + begin % tiles);
      load_queries(at, begin % 2);
    }
    commit_copies();
#pragma unroll 1
    for (int item = begin; item < end; ++item) {
      wait_copies<0>();
      __syncthreads();  // the tile is there, and everyone is done with the last one
      QueriesAt next{at.hq, at.split + 1, at.row + c.keys, at.first + c.keys};
      if (item + 1 < end) {
        if (next.first >= range.last) next = place(static_cast<int>(at.hq + 1 - h * group), first);
        load_queries(next, (item + 1) % 2);
      }
      commit_copies();
      add_queries(at, item % 2);
      at = next;
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
