#pragma once

#include "cuda/attention/common/backward/queries.cuh"
#include "cuda/ptx/local.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

/// A warp's f32 accumulator of a product: m x n tiles of 16 x 16, each of which is two fragments side by
/// side.
template <int m_tiles, int n_tiles>
using Accumulator = float[m_tiles][2 * n_tiles][4];

/// The default of multiply_tiles' callbacks: no extra work.
struct Nothing {
  __device__ void operator()() const {}
  template <int m_tiles>
  __device__ void operator()(const std::uint32_t (&)[m_tiles][4], int) const {}
};

/// sum += A·B over a K dimension of 16 · `steps`. `load_a(to, step)` loads all fragments of A of one step,
/// `load_b(to, step, n)` those of 16 columns of B. Both are called one step ahead, so that loads overlap with
/// products. `per_step(a, step)` runs once per step and may use the fragments of A. `meanwhile` runs while
/// the first fragments are loaded.
template <typename T, int steps, int m_tiles, int n_tiles, typename LoadA, typename LoadB,
          typename PerStep = Nothing, typename Meanwhile = Nothing>
__device__ __forceinline__ void multiply_tiles(Accumulator<m_tiles, n_tiles>& sum, const LoadA& load_a,
                                               const LoadB& load_b, const PerStep& per_step = {},
                                               const Meanwhile& meanwhile = {}) {
  std::uint32_t a[2][m_tiles][4];
  std::uint32_t b[2][4];
  load_a(a[0], 0);
  load_b(b[0], 0, 0);
  meanwhile();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
      const int index = step * n_tiles + n;
      if (index + 1 < steps * n_tiles) {
        load_b(b[(index + 1) % 2], (index + 1) / n_tiles, (index + 1) % n_tiles);
      }
      if (n == n_tiles - 1 && step + 1 < steps) load_a(a[(step + 1) % 2], step + 1);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        multiply_matrices<T>(sum[m][2 * n], a[step % 2][m], b[index % 2][0], b[index % 2][1]);
        multiply_matrices<T>(sum[m][2 * n + 1], a[step % 2][m], b[index % 2][2], b[index % 2][3]);
      }
    }
    per_step(a[step % 2], step);
  }
}

/// Loaders of fragments from a tile in shared memory. `by_rows`: A is stored as [m, k], B as [n, k].
/// `transposed`: A is stored as [k, m], B as [k, n]. The pointer is at the warp's first row and column.
template <int m_tiles, int dim>
__device__ __forceinline__ auto a_by_rows(const MatrixPointer<dim>& at) {
  return [at](std::uint32_t(&to)[m_tiles][4], int step) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) load_matrices(to[m], at.at(16 * m, step));
  };
}
template <int m_tiles, int dim>
__device__ __forceinline__ auto a_transposed(const MatrixPointer<dim>& at) {
  return [at](std::uint32_t(&to)[m_tiles][4], int step) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) load_matrices_transposed(to[m], at.at(16 * step, m));
  };
}
template <int dim>
__device__ __forceinline__ auto b_by_rows(const MatrixPointer<dim>& at) {
  return [at](std::uint32_t(&to)[4], int step, int n) { load_matrices(to, at.at(16 * n, step)); };
}
template <int dim>
__device__ __forceinline__ auto b_transposed(const MatrixPointer<dim>& at) {
  return [at](std::uint32_t(&to)[4], int step, int n) { load_matrices_transposed(to, at.at(16 * step, n)); };
}

/// A warp's position in a product for which `along_n` warps stand side by side along N.
template <int along_n>
struct WarpPlace {
  int m, n;  ///< the warp's position along M and N

  __device__ explicit WarpPlace(int warp) : m(warp / along_n), n(warp % along_n) {}
};

/// The state of a CTA of the backward kernel: its K tile, its shared memory and its accumulators of dK and
/// dV. `general`: the call has features beyond the band, or rows of any alignment.
template <typename T_, BackwardConfig c, bool general_>
struct BackwardCta {
  using T = T_;
  static constexpr bool general = general_;
  static constexpr BackwardConfig config = c;
  using RowTile = SwizzledTile<c.dim>;
  using ScoreTile = SwizzledTile<c.queries>;
  using RowPointer = MatrixPointer<c.dim>;
  using ScorePointer = MatrixPointer<c.queries>;
  using ScoreAccumulator = Accumulator<c.score_key_tiles(), c.score_query_tiles()>;
  using ScoreFragments = std::uint32_t[c.score_query_tiles()][c.score_key_tiles()][4];
  using DkvAccumulator = Accumulator<c.dkv_key_tiles(), c.dkv_dim_tiles()>;

  const AttentionCall& call;
  const BackwardGrid& grid;
  const BackwardSpace& space;
  const int b, h;  ///< h is the key head
  int key_count;
  int first_key;  ///< in the sequence
  const int dim_qk, dim_v;
  const float scale_log2;  ///< turns a product q·k into an exponent of 2; never 0
  const GradientScale scale;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // uniform for the compiler
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::byte* k_smem;        ///< [keys, dim]
  std::byte* v_smem;        ///< [keys, dim]
  std::byte* q_smem;        ///< stages x [queries, dim]
  std::byte* d_o_smem;      ///< stages x [queries, dim]
  std::byte* ds_smem;       ///< score stages x [keys, queries]
  std::byte* p_smem;        ///< score stages x [keys, queries], unless P stays in registers
  float* lse_smem;          ///< stages x [queries], see RowValues
  float* minus_delta_smem;  ///< stages x [queries]
  GroupFacts* facts_smem;
  HeldTile* held_smem;
  // Those of the facts that every tile needs, in uniform registers.
  struct Known {
    const std::byte* q;
    const std::byte* d_o;
    std::int64_t row, tile;
    int length, from, to, clear, clear_end;
  } known;
  DkvAccumulator dk = {}, dv = {};

  static __device__ CtaFacts* facts_of(std::byte* shared) {
    return reinterpret_cast<CtaFacts*>(shared + c.shared_bytes(false) - c.fact_bytes);
  }
  __device__ BackwardCta(const AttentionCall& call_, const BackwardGrid& grid_, const BackwardSpace& space_,
                         std::byte* shared, const Turn& turn)
      : call(call_),
        grid(grid_),
        space(space_),
        b(static_cast<int>(turn.among(call.problem.heads_kv).b)),
        h(static_cast<int>(turn.among(call.problem.heads_kv).h)),
        dim_qk(static_cast<int>(call.problem.dim_qk)),
        dim_v(static_cast<int>(call.problem.dim_v)),
        scale_log2(nonzero_scale_log2(call.scale)),
        scale(gradient_scale<T>(space.largest, keep_scale(), general && call.problem.features.logit_scale)),
        k_smem(shared),
        v_smem(k_smem + c.key_bytes()),
        q_smem(v_smem + c.key_bytes()),
        d_o_smem(q_smem + c.stages * c.query_bytes()),
        ds_smem(d_o_smem + c.stages * c.query_bytes()),
        p_smem(ds_smem + c.ds_stages() * c.score_bytes()),
        lse_smem(reinterpret_cast<float*>(p_smem + c.p_stages() * c.score_bytes())),
        minus_delta_smem(lse_smem + c.stages * c.queries),
        facts_smem(&facts_of(shared)->group),
        held_smem(&facts_of(shared)->held) {
    const KeyTile keys = grid.keys.tile(call, call.sequence(b), turn.tile);
    key_count = keys.count;
    first_key = static_cast<int>(keys.first);
  }

  /// The first Q tile. The facts are in shared memory.
  __device__ QuerySteps begin() {
    const GroupFacts& facts = *facts_smem;
    known = {.q = uniform(facts.q),
             .d_o = uniform(facts.d_o),
             .row = uniform(facts.row),
             .tile = uniform(facts.tile),
             .length = uniform(facts.length),
             .from = uniform(facts.from),
             .to = uniform(facts.to),
             .clear = uniform(facts.clear),
             .clear_end = uniform(facts.clear_end)};
    QuerySteps steps{uniform(facts.at), uniform(facts.head), uniform(facts.count)};
    skip_unseen(steps);
    return steps;
  }
  /// The Q tile after `steps`.
  __device__ QuerySteps after(QuerySteps steps) const {
    steps.step(space.order.kept(), known.from, known.to);
    skip_unseen(steps);
    return steps;
  }

  // What only the general kernel has.
  __device__ float* offset_smem() const {  ///< stages x [queries]
    return reinterpret_cast<float*>(k_smem + c.shared_bytes(false));
  }
  __device__ float* derivatives_smem() const { return offset_smem() + c.stages * c.queries; }
  /// [elements of S per lane, threads]: the derivative of the softcap.
  __device__ float& derivative_smem(int m, int n, int e) const {
    const int index = (n * c.score_key_tiles() + m) * 4 + e;
    return derivatives_smem()[index * c.threads() + static_cast<int>(threadIdx.x)];
  }
  /// The query head of the Q tile.
  __device__ int head_of(const QuerySteps& steps) const {
    return h * static_cast<int>(call.group()) + steps.head;
  }
  /// Whether the tile adds to dK. It does not where its logit scale is 0, see differentiable().
  __device__ bool adds_dk(const QuerySteps& steps) const {
    if constexpr (general) {
      return !call.problem.features.logit_scale || logit_factor<T>(call, head_of(steps)).own;
    }
    return true;
  }
  __device__ float keep_scale() const {
    return general && call.problem.features.dropout ? call.dropout.keep_scale : 1.0f;
  }
  __device__ std::byte* ds_at(int score_stage) const { return ds_smem + score_stage * c.score_bytes(); }
  __device__ std::byte* p_at(int score_stage) const {
    return p_smem + (c.p_stages() > 1 ? score_stage * c.score_bytes() : 0);
  }
  /// The row of the tile's first key in K and V. It is recomputed, as the sequence is, because registers are
  /// scarcer than time here. Cumulative lengths are the copies of ordered_starts.h, which need no clamping.
  __device__ std::int64_t first_key_row() const {
    return std::int64_t{first_key} + (call.packed() ? call.cumulative_k.at(b) : 0);
  }
  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }

  /// A Q tile: its row among the row values, its first query in the sequence and its number of queries. Query
  /// r of the tile sees keys [r + low, r + high) of the K tile, as far as that has so many.
  struct Queries {
    std::int64_t row;
    int first;
    int count;
    int low, high;
  };
  __device__ int first_query(const QuerySteps& steps) const {
    if constexpr (general) {
      const auto per_block = static_cast<int>(grid.queries.tiles_per_block);
      if (per_block > 0) {
        return steps.at / per_block * static_cast<int>(call.blocks.block_q) +
               steps.at % per_block * c.queries;
      }
    }
    return steps.at * c.queries;
  }
  __device__ int query_count(const QuerySteps& steps, int first) const {
    int end = known.length;
    if constexpr (general) {
      const auto per_block = static_cast<int>(grid.queries.tiles_per_block);
      if (per_block > 0) end = min(end, (steps.at / per_block + 1) * static_cast<int>(call.blocks.block_q));
    }
    return min(c.queries, end - first);
  }
  /// The row of query `at` among the row values.
  __device__ std::int64_t row_of(const QuerySteps& steps, int at) const {
    return known.row + steps.head * call.rows_q() + at;
  }
  /// Whether some query of the tile does not see some key of the K tile.
  __device__ bool edge(const QuerySteps& steps) const {
    if constexpr (general) {
      const Queries queries = queries_of(steps);
      return queries.count - 1 + queries.low > 0 || min(queries.high, key_count) < c.keys;
    }
    return steps.at < known.clear || steps.at >= known.clear_end;
  }
  __device__ Queries queries_of(const QuerySteps& steps) const {
    const int at = first_query(steps);
    constexpr std::int64_t far = 1 << 20;  // beyond any tile, and sums of it do not overflow
    return {row_of(steps, at), at, query_count(steps, at),
            static_cast<int>(max(-far, min(far, facts_smem->low + at))),
            static_cast<int>(max(-far, min(far, facts_smem->high + at)))};
  }
  /// The first tile of dQ's accumulator that the Q tile covers.
  __device__ std::int64_t dq_tile(const QuerySteps& steps) const {
    const std::int64_t head = known.tile + steps.head * space.dq.tiles;
    if constexpr (general) {
      const auto per_block = static_cast<int>(grid.queries.tiles_per_block);
      if (per_block > 0) {
        const int block_tiles = (static_cast<int>(call.blocks.block_q) + 15) / 16;
        return head + steps.at / per_block * block_tiles + steps.at % per_block * (c.queries / 16);
      }
    }
    return head + steps.at * (c.queries / 16);
  }
  __device__ QueryTile query_tile(const QuerySteps& steps) const {
    return grid.queries.tile(call, b, h * call.group() + steps.head, steps.at);
  }
  /// How many K tiles before this one, and with it, add to the dQ of a Q tile.
  __device__ OrderWords order_words(const QuerySteps& steps) const {
    if constexpr (general) {
      if (call.problem.features.block_mask) {
        return mma::order_words(call, grid.keys, query_tile(steps), first_key);
      }
    }
    const std::int64_t first_seen = max(std::int64_t{0}, facts_smem->low + first_query(steps) + first_key);
    const auto before =
        static_cast<std::uint32_t>(first_key / c.keys - static_cast<int>(first_seen) / c.keys);
    return {before, before + 1};
  }
  /// With a block mask, advances to the next Q tile that sees some of the keys.
  __device__ void skip_unseen(QuerySteps& steps) const {
    if constexpr (general) {
      if (!call.problem.features.block_mask) return;
      const OwnKeys keys{b, h * static_cast<int>(call.group()), first_key, key_count};
      steps = next_seen(call, grid, space, *facts_smem, keys, c.queries, steps);
    }
  }

  template <int count>
  __device__ void load_rows(std::byte* to_smem, const std::byte* first, const Rows& rows, int valid,
                            int dims) const {
    if constexpr (general) {
      if (!aligned_chunks(rows)) {
        return load_any_rows<count, c.dim, c.threads()>(
            to_smem, [&](int r) { return first + r * rows.stride_s * 2; }, false, valid, dims);
      }
    }
    load_strided_rows<count, c.dim, c.threads()>(to_smem, first, rows.stride_s * 2, valid, dims);
  }
  __device__ void load_keys() const {
    const std::int64_t s = first_key_row();
    load_rows<c.keys>(k_smem, row_of_halves(call.k, b, h, s), call.k, key_count, dim_qk);
    load_rows<c.keys>(v_smem, row_of_halves(call.v, b, h, s), call.v, key_count, dim_v);
  }
  __device__ void load_queries(const QuerySteps& steps, int stage) const {
    const int at = first_query(steps);
    const int count = query_count(steps, at);
    const auto first = [&](const std::byte* group, const Rows& rows) {
      return group + (steps.head * rows.stride_h + at * rows.stride_s) * 2;
    };
    load_rows<c.queries>(q_smem + stage * c.query_bytes(), first(known.q, call.q), call.q, count, dim_qk);
    load_rows<c.queries>(d_o_smem + stage * c.query_bytes(), first(known.d_o, call.d_o), call.d_o, count,
                         dim_v);
    const int r = static_cast<int>(threadIdx.x);
    if (r >= c.queries) return;
    float* lse = lse_smem + stage * c.queries + r;
    float* minus_delta = minus_delta_smem + stage * c.queries + r;
    float* offset = offset_smem() + stage * c.queries + r;
    if (r < count) {
      const std::int64_t row = row_of(steps, at) + r;
      copy_async_4(lse, space.rows.lse + row);
      copy_async_4(minus_delta, space.rows.minus_delta + row);
      if constexpr (general) copy_async_4(offset, space.rows.offset + row);
    } else {  // past the last query: treated as one that sees no key
      *lse = -minus_infinity;
      *minus_delta = 0;
      if constexpr (general) *offset = 0;
    }
  }
};

}  // namespace tilewise::cuda::mma
