#include "cuda/attention/sm90/wide/batched.h"

#include "core/arena.h"
#include "cuda/attention/wide/rows.cuh"
#include "cuda/gemm/sm90/split/split.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/device.h"
#include "gemm/compose.h"

namespace tilewise::cuda::wide {
namespace {

// Matrices of a batch have the rows of its heads below each other, each padded to whole tiles of the GEMM.
// The query heads of a group go one after another, because they add to the same dK and dV. Tiles of 128 x 128
// pairs without a visible one are in no product: their S, P, dP and dS are neither written nor read.

/// Bytes that the matrices of a batch may take, further slices of sums aside.
#ifdef TILEWISE_EMULATOR  // small problems have several batches, chunks and slices, too
constexpr std::int64_t batch_bytes = std::int64_t{1} << 20, most_banded_rows = 192;
constexpr std::int64_t most_slices(std::int64_t, std::int64_t) { return 3; }
#else
constexpr std::int64_t batch_bytes = chunk_bytes, most_banded_rows = batch_bytes;
/// Of a sum over `length`. With more slices, their sums would be half as large as P.
constexpr std::int64_t most_slices(std::int64_t length, std::int64_t dim) {
  return std::clamp<std::int64_t>(length / (2 * dim), 1, 8);
}
#endif
constexpr std::int64_t tile_rows = gemm::item_tile;

constexpr std::int64_t whole_tiles(std::int64_t x) { return (x + tile_rows - 1) / tile_rows * tile_rows; }

/// Some heads of K and V, each with one query head of its group. Heads are numbered over all entries.
struct Batch {
  std::int64_t first, count;
  std::int64_t query;  ///< number in the group

  std::int64_t first_query(const AttentionCall& call) const { return first * call.group() + query; }
};

/// The elements from a head of K or V to the next one. In tensors of queries, `group` heads later.
std::int64_t head_stride(const AttentionCall& call, const Rows& rows, std::int64_t group) {
  return call.problem.heads_kv > 1 ? group * rows.stride_h : rows.stride_b;
}

/// How many neighbouring heads one stride leads through: those of all entries, or of one.
std::int64_t heads_in_line(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  const auto crosses = [&](const Rows& rows, std::int64_t group) {
    return rows.stride_b == problem.heads_kv * group * rows.stride_h;
  };
  const std::int64_t group = call.group();
  const bool all = problem.batch == 1 || problem.heads_kv == 1 ||
                   (crosses(call.q, group) && crosses(call.k, 1) && crosses(call.v, 1) &&
                    (problem.pass == Pass::forward || crosses(call.d_o, group)));
  return all ? problem.batch * problem.heads_kv : problem.heads_kv;
}

/// The pairs of a chunk that causal and window leave.
gemm::VisibleBand visible_pairs(const AttentionCall& call, const Chunk& chunk) {
  constexpr std::int64_t unbounded = gemm::VisibleBand::unbounded;
  const std::int64_t diagonal = chunk.first + call.sequence(chunk.b).band_offset - chunk.keys.first;
  const auto bounded = [&](std::int64_t x) { return static_cast<int>(std::clamp(x, -unbounded, unbounded)); };
  return {.rows = static_cast<int>(chunk.count),
          .columns = static_cast<int>(chunk.width()),
          .low = bounded(diagonal - call.band.left),
          .high = bounded(diagonal + call.band.right + 1)};
}

/// A block mask, for the rows of a chunk and the heads of a batch.
struct BlockTable {
  std::int32_t* states = nullptr;  ///< [heads, query blocks, key blocks]; null if there is no block mask
  std::uint8_t* tiles = nullptr;   ///< [heads, row tiles, key tiles]: 0 where no block is listed
  std::int64_t first_block = 0, query_blocks = 0, key_blocks = 0;
  int row_tiles = 0, key_tiles = 0;

  std::int64_t tiles_each() const { return std::int64_t{row_tiles} * key_tiles; }
  gemm::ShownTiles shown() const { return {tiles, static_cast<int>(tiles_each()), key_tiles, 1}; }
  __device__ std::int32_t* states_of(std::int64_t head, std::int64_t block) const {
    return states + (head * query_blocks + block - first_block) * key_blocks;
  }
};

/// Neighbouring rows of each head of a batch.
struct BatchRows {
  std::int64_t first_head, heads, group;  ///< query heads, numbered over all entries
  std::int64_t first, count;              ///< rows of each head
  std::int64_t stacked;                   ///< rows of the matrices from one head to the next
  KeyRange keys;
  gemm::VisibleBand visible;
  BlockTable blocks;

  __host__ __device__ std::int64_t rows() const { return heads * count; }
  __device__ std::int64_t index(const AttentionCall& call, std::int64_t own) const {
    return (first_head + own / count * group) * call.problem.length_q + first + own % count;
  }
  __device__ simt::QueryRow query(const AttentionCall& call, std::int64_t own) const {
    return {call, index(call, own)};
  }
  __device__ std::int64_t line(std::int64_t own) const { return own / count * stacked + own % count; }
  /// The keys of the tiles that have any pair of the row's tile.
  __device__ KeyRange keys_of(std::int64_t own) const {
    const auto tile = static_cast<int>(own % count / tile_rows * tile_rows);
    const gemm::Span columns = visible.of_rows(tile, tile_rows).whole_units(tile_rows, visible.columns);
    return {keys.first + columns.first, keys.first + columns.last};
  }
  __device__ bool has(std::int64_t, std::int64_t) const { return true; }
  __device__ bool shows(const AttentionCall&, std::int64_t, std::int64_t) const { return true; }
};

/// The same with a block mask.
struct BlockRows : BatchRows {
  __device__ bool has(std::int64_t own, std::int64_t j) const {
    const std::int64_t tile = own / count * blocks.row_tiles + own % count / tile_rows;
    return blocks.tiles[tile * blocks.key_tiles + (j - keys.first) / tile_rows] != 0;
  }
  __device__ bool shows(const AttentionCall& call, std::int64_t own, std::int64_t j) const {
    const BlockView& view = call.blocks;
    const auto i = static_cast<std::uint32_t>(first + own % count), key = static_cast<std::uint32_t>(j);
    const auto block_q = static_cast<std::uint32_t>(view.block_q);  // 32 bits divide faster
    const auto block_k = static_cast<std::uint32_t>(view.block_k);
    const std::int32_t state = blocks.states_of(own / count, i / block_q)[key / block_k];
    if (state < 0) return state == block_full;
    return view.tile_shows(state, i % block_q, key % block_k);
  }
};

/// Calls body(rows) with the rows as BlockRows if there is a block mask.
template <typename Body>
void with_blocks(const BatchRows& rows, const Body& body) {
  rows.blocks.states != nullptr ? body(BlockRows{rows}) : body(rows);
}

/// simt::PairRows of a batch.
template <typename Some>
struct BatchPairRows : simt::PairRows<float> {
  /// With a block mask, 64 registers per thread are too few.
  static constexpr int least_ctas = std::is_same_v<Some, BatchRows> ? 4 : 1;
  Some batch;
  std::int64_t length_q;

  __device__ std::int64_t index(std::int64_t own) const {
    return (batch.first_head + own / batch.count * batch.group) * length_q + batch.first + own % batch.count;
  }
  __device__ std::int64_t line(std::int64_t own) const { return batch.line(own); }
  __device__ KeyRange keys_of(std::int64_t own) const { return batch.keys_of(own); }
  __device__ bool has(std::int64_t own, std::int64_t j) const { return batch.has(own, j); }
  __device__ bool shows(const AttentionCall& call, std::int64_t own, std::int64_t j) const {
    return batch.shows(call, own, j);
  }
};

/// Fills the states of a row of query blocks. One warp per row.
template <typename Unused = void>
__global__ void __launch_bounds__(threads)
    list_blocks(const __grid_constant__ AttentionCall call, const __grid_constant__ BatchRows rows) {
  const BlockTable& table = rows.blocks;
  const std::int64_t index = simt::thread_index() / warp;
  const std::int64_t n = index / table.query_blocks, block = table.first_block + index % table.query_blocks;
  if (n >= rows.heads) return;  // the same for all lanes
  const int lane = threadIdx.x % warp;
  const std::int64_t head = rows.first_head + n * rows.group;
  const std::int64_t b = head / call.problem.heads_q, h = head % call.problem.heads_q;
  std::int32_t* states = table.states_of(n, block);
  for (std::int64_t k = lane; k < table.key_blocks; k += warp) states[k] = block_hidden;
  __syncwarp();  // all states are hidden
  const BlockView& view = call.blocks;
  const auto list = [&](std::int32_t key_block, std::int32_t state) {
    if (key_block >= 0 && key_block < table.key_blocks) states[key_block] = state;
  };
  const std::int32_t partial = view.count(b, h, block);
  for (std::int32_t slot = lane; slot < partial; slot += warp) {
    list(view.indices.at(b, h, block, slot), view.tile(b, h, block, slot));
  }
  __syncwarp();  // a block that is listed twice is full
  if (view.full_counts.data == nullptr) return;
  const std::int32_t full = view.full_count(b, h, block);
  for (std::int32_t slot = lane; slot < full; slot += warp) {
    list(view.full_indices.at(b, h, block, slot), block_full);
  }
}

/// Finds the tiles in which a block is listed. One warp per tile.
template <typename Unused = void>
__global__ void __launch_bounds__(threads)
    mark_tiles(const __grid_constant__ AttentionCall call, const __grid_constant__ BatchRows rows) {
  const BlockTable& table = rows.blocks;
  const std::int64_t index = simt::thread_index() / warp;
  const std::int64_t key_tile = index % table.key_tiles, tile = index / table.key_tiles;
  const std::int64_t row_tile = tile % table.row_tiles, n = tile / table.row_tiles;
  if (n >= rows.heads) return;  // the same for all lanes
  const int lane = threadIdx.x % warp;
  const BlockView& view = call.blocks;
  const std::int64_t row = rows.first + row_tile * tile_rows, key = rows.keys.first + key_tile * tile_rows;
  const std::int64_t last_row = min(row + tile_rows, rows.first + rows.count) - 1;
  const std::int64_t last_key = min(key + tile_rows, rows.keys.last) - 1;
  const std::int64_t first_q = row / view.block_q, first_k = key / view.block_k;
  const std::int64_t across = last_key / view.block_k - first_k + 1;
  const std::int64_t count = (last_row / view.block_q - first_q + 1) * across;
  bool listed = false;
  for (std::int64_t at = lane; at < count; at += warp) {
    listed |= table.states_of(n, first_q + at / across)[first_k + at % across] != block_hidden;
  }
  listed = __any_sync(~0u, listed);
  if (lane == 0) table.tiles[index] = listed ? 1 : 0;
}

/// The layout of the matrices: [heads, stacked rows, pitch].
struct Space {
  std::int64_t heads;  ///< of a batch, at most
  std::int64_t rows;   ///< of a chunk
  std::int64_t pitch, pitch_qk, pitch_v;
  std::int64_t key_rows;               ///< from a head's dK and dV to the next ones
  float *s, *dp = nullptr;             ///< P and the gradient of S overwrite them
  int slices_q = 1, slices_k = 1;      ///< at most, of sums over keys and over queries
  float* sums;                         ///< [slices, ...]: O or dQ
  float *dk = nullptr, *dv = nullptr;  ///< [slices, ...], before the multiplication by the scale
  float *sink_terms = nullptr, *row_sums = nullptr;
  BlockTable blocks;  ///< room for any chunk
  std::size_t used;

  Space(const AttentionCall& call, void* base)
      : pitch(rounded_up(call.problem.length_k)),
        pitch_qk(rounded_up(call.problem.dim_qk)),
        pitch_v(rounded_up(call.problem.dim_v)),
        key_rows(whole_tiles(call.problem.length_k)) {
    const AttentionProblem& problem = call.problem;
    const bool backward = problem.pass == Pass::backward;
    const std::int64_t in_line = heads_in_line(call);
    rows = rows_per_chunk(call, backward ? 8 : 4, most_banded_rows, batch_bytes);
    const std::int64_t head_bytes =
        4 * whole_tiles(rows) * (pitch * (backward ? 2 : 1) + (backward ? pitch_qk : pitch_v)) +
        (backward ? 4 * key_rows * (pitch_qk + pitch_v) : 0);
    heads = std::clamp<std::int64_t>(batch_bytes / head_bytes, 1, in_line);
    choose_slices(call);
    Arena arena(base);
    const std::int64_t lines = heads * whole_tiles(rows);
    s = arena.take<float>(lines, pitch);
    sums = arena.take<float>(slices_q, lines, backward ? pitch_qk : pitch_v);
    if (backward) {
      dp = arena.take<float>(lines, pitch);
      dk = arena.take<float>(slices_k, heads * key_rows, pitch_qk);
      dv = arena.take<float>(slices_k, heads * key_rows, pitch_v);
      sink_terms = arena.take<float>(problem.heads_q * call.rows_q());
      row_sums = arena.take<float>(problem.heads_q * call.rows_q());
    }
    if (problem.features.block_mask) {
      blocks.key_blocks = call.key_blocks();
      blocks.states = arena.take<std::int32_t>(heads, rows / call.blocks.block_q + 2, blocks.key_blocks);
      blocks.tiles = arena.take<std::uint8_t>(lines / tile_rows, whole_tiles(pitch) / tile_rows);
    }
    used = arena.rounded();
  }

  /// The block mask of a chunk, to be filled.
  BlockTable blocks_of(const AttentionCall& call, const Chunk& chunk) const {
    BlockTable table = blocks;
    if (table.states == nullptr) return table;
    const std::int64_t block_q = call.blocks.block_q;
    table.first_block = chunk.first / block_q;
    table.query_blocks = (chunk.first + chunk.count - 1) / block_q - table.first_block + 1;
    table.row_tiles = static_cast<int>(whole_tiles(chunk.count) / tile_rows);
    table.key_tiles = static_cast<int>(whole_tiles(chunk.width()) / tile_rows);
    return table;
  }

 private:
  /// By the last chunk, which with causal sees most keys.
  void choose_slices(const AttentionCall& call) {
    const AttentionProblem& problem = call.problem;
    const gemm::VisibleBand visible =
        visible_pairs(call, chunk_at(call, 0, 0, std::max<std::int64_t>(problem.length_q - rows, 0), rows));
    const int multiprocessors = device_properties(problem.device.index).multiprocessors;
    const auto choose = [&](const gemm::VisibleBand& of, std::int64_t dim) {
      return gemm::choose_slices(of, heads, dim, static_cast<int>(most_slices(of.columns, dim)),
                                 multiprocessors);
    };
    const bool backward = problem.pass == Pass::backward;
    slices_q = choose(visible, backward ? problem.dim_qk : problem.dim_v);
    if (backward) slices_k = choose(visible.transposed(), std::max(problem.dim_qk, problem.dim_v));
  }
};

/// A product of all heads of a batch.
struct Product {
  GemmCall call;
  gemm::Items items;
};

/// The products of a batch and a chunk of its rows.
class Products {
 public:
  Products(const AttentionCall& call, const Space& space, const Batch& batch, const Chunk& chunk)
      : call_(call),
        space_(space),
        batch_(batch),
        chunk_(chunk),
        stacked_(whole_tiles(chunk.count)),
        visible_(visible_pairs(call, chunk)),
        blocks_(space.blocks_of(call, chunk)) {}

  BatchRows rows() const {
    return {.first_head = batch_.first_query(call_),
            .heads = batch_.count,
            .group = call_.group(),
            .first = chunk_.first,
            .count = chunk_.count,
            .stacked = stacked_,
            .keys = chunk_.keys,
            .visible = visible_,
            .blocks = blocks_};
  }
  std::int64_t stacked() const { return stacked_; }
  /// Of the sums over keys.
  int longest_slice() const { return gemm::longest_slice(visible_, space_.slices_q); }

  /// S = Q·Kᵀ, or dP = dO·Vᵀ.
  Product scores(const Rows& queries, const Rows& keys, std::int64_t dim, float* to) const {
    return product(of_queries(queries, dim), of_keys(keys, dim),
                   plain_matrix(to, DType::f32, chunk_.count, chunk_.width(), space_.pitch),
                   {.out_rows = stacked_, .visible = visible_, .shown = blocks_.shown()});
  }
  /// O = P·V, or dQ = dS·K.
  Product of_rows(float* pairs, const Rows& keys, std::int64_t dim) const {
    return product(of_pairs(pairs), of_keys(keys, dim).transposed(),
                   plain_matrix(space_.sums, DType::f32, chunk_.count, dim, rounded_up(dim)),
                   {.out_rows = stacked_,
                    .visible = visible_,
                    .shown = blocks_.shown(),
                    .over_k = true,
                    .longest_slice = longest_slice(),
                    .slices = space_.slices_q,
                    .slice_rows = batch_.count * stacked_});
  }
  /// dK += dSᵀ·Q, or dV += Pᵀ·dO.
  Product of_columns(float* pairs, const Rows& queries, std::int64_t dim, float* to) const {
    const std::int64_t pitch = rounded_up(dim);
    return product(of_pairs(pairs).transposed(), of_queries(queries, dim).transposed(),
                   plain_matrix(to + chunk_.keys.first * pitch, DType::f32, chunk_.width(), dim, pitch),
                   {.out_rows = space_.key_rows,
                    .visible = visible_.transposed(),
                    .shown = blocks_.shown().transposed(),
                    .over_k = true,
                    .longest_slice = gemm::longest_slice(visible_.transposed(), space_.slices_k),
                    .slices = space_.slices_k,
                    .slice_rows = batch_.count * space_.key_rows},
                   true);
  }

 private:
  /// The matrix of the first head, and the elements to that of the next.
  struct Operand {
    Matrix matrix;
    std::int64_t stride;
    Operand transposed() const { return {matrix.transposed(), stride}; }
  };
  Operand of_queries(const Rows& rows, std::int64_t dim) const {
    const std::int64_t head = batch_.first_query(call_), heads = call_.problem.heads_q;
    return {matrix_at(rows, head / heads, head % heads, chunk_.first, chunk_.count, dim),
            head_stride(call_, rows, call_.group())};
  }
  Operand of_keys(const Rows& rows, std::int64_t dim) const {
    const std::int64_t heads = call_.problem.heads_kv;
    return {
        matrix_at(rows, batch_.first / heads, batch_.first % heads, chunk_.keys.first, chunk_.width(), dim),
        head_stride(call_, rows, 1)};
  }
  Operand of_pairs(float* pairs) const {
    return {plain_matrix(pairs, DType::f32, chunk_.count, chunk_.width(), space_.pitch),
            stacked_ * space_.pitch};
  }
  Product product(const Operand& a, const Operand& b, const Matrix& out, gemm::Items items,
                  bool accumulate = false) const {
    items.count = batch_.count;
    items.a = a.stride;
    items.b = b.stride;
    return {gemm_call(call_.problem.device, a.matrix, b.matrix, out, {.accumulate = accumulate}), items};
  }

  const AttentionCall& call_;
  const Space& space_;
  const Batch& batch_;
  const Chunk& chunk_;
  const std::int64_t stacked_;
  const gemm::VisibleBand visible_;
  const BlockTable blocks_;
};

/// Calls visit(Product) for each product that the wanted gradients need, once P and dS are known.
template <typename Visit>
void for_each_gradient(const AttentionCall& call, const Space& space, const Products& products,
                       const Visit& visit) {
  const AttentionProblem& problem = call.problem;
  if (call.dq.wanted) visit(products.of_rows(space.dp, call.k, problem.dim_qk));
  if (call.dk.wanted) visit(products.of_columns(space.dp, call.q, problem.dim_qk, space.dk));
  if (call.dv.wanted) visit(products.of_columns(space.s, call.d_o, problem.dim_v, space.dv));
}

/// Calls body(batch) for the query heads of each batch of heads of K and V, and then after(batch).
template <typename Body, typename After>
void for_each_batch(const AttentionCall& call, const Space& space, const Body& body, const After& after) {
  const std::int64_t in_line = heads_in_line(call);
  const std::int64_t heads = call.problem.batch * call.problem.heads_kv;
  for (std::int64_t line = 0; line < heads; line += in_line) {
    for (std::int64_t first = line; first < line + in_line; first += space.heads) {
      Batch batch{first, std::min(space.heads, line + in_line - first), 0};
      for (; batch.query < call.group(); ++batch.query) body(batch);
      after(batch);
    }
  }
}

template <typename Body>
void for_each_chunk(const AttentionCall& call, const Space& space, const Body& body) {
  for (std::int64_t first = 0; first < call.problem.length_q; first += space.rows) {
    body(chunk_at(call, 0, 0, first, space.rows));  // all heads have the same keys: there are no key lengths
  }
}

/// Rows of heads of a tensor, and their sums in f32.
struct HeadSums {
  const float* sums;  ///< [slices, heads, stacked, pitch]
  std::int64_t stacked, pitch;
  int slices;                 ///< of all rows; if 0, by the next two
  gemm::VisibleBand visible;  ///< pairs that were summed
  int longest_slice;
  Rows to;
  std::int64_t first_head, step, heads_of_entry;  ///< of the tensor
  std::int64_t heads, first, count, dims;
  float factor;
};

/// Adds the slices of the sums, multiplies them by a factor and stores them.
template <typename Unused = void>
__global__ void __launch_bounds__(threads) finish_heads(const __grid_constant__ HeadSums of) {
  const std::int64_t index = simt::thread_index();
  const std::int64_t d = index % of.dims, row = index / of.dims % of.count, n = index / of.dims / of.count;
  if (n >= of.heads) return;
  const std::int64_t head = of.first_head + n * of.step;
  auto* to =
      reinterpret_cast<float*>(of.to.at(head / of.heads_of_entry, head % of.heads_of_entry, of.first + row));
  int slices = of.slices;
  if (slices == 0) {
    const auto tile = static_cast<int>(row / tile_rows * tile_rows);
    slices = gemm::slices_of(gemm::visible_stages(of.visible, tile), of.longest_slice);
  }
  float sum = 0;
  for (int slice = 0; slice < slices; ++slice) {
    sum += of.sums[((slice * of.heads + n) * of.stacked + row) * of.pitch + d];
  }
  to[d] = of.factor * sum;
}

void finish(const char* name, const HeadSums& of, const Context& context) {
  if (!of.to.wanted) return;
  launch<finish_heads<>>({.name = name,
                          .blocks = (of.heads * of.count * of.dims + threads - 1) / threads,
                          .threads = threads,
                          .stream = static_cast<cudaStream_t>(context.stream)},
                         of);
}

/// Finishes O or dQ of a chunk.
void finish_queries(const char* name, const AttentionCall& call, const Space& space, const Rows& to,
                    std::int64_t dim, double factor, const Products& products, const Context& context) {
  const BatchRows rows = products.rows();
  finish(name,
         {.sums = space.sums,
          .stacked = rows.stacked,
          .pitch = rounded_up(dim),
          .slices = rows.blocks.states != nullptr && !rows.keys.empty() ? space.slices_q : 0,
          .visible = rows.visible,
          .longest_slice = products.longest_slice(),
          .to = to,
          .first_head = rows.first_head,
          .step = rows.group,
          .heads_of_entry = call.problem.heads_q,
          .heads = rows.heads,
          .first = rows.first,
          .count = rows.count,
          .dims = dim,
          .factor = static_cast<float>(factor)},
         context);
}

/// Finishes dK or dV of a batch.
void finish_keys(const char* name, const AttentionCall& call, const Space& space, const float* sums,
                 const Rows& to, std::int64_t dim, double factor, const Batch& batch,
                 const Context& context) {
  finish(name,
         {.sums = sums,
          .stacked = space.key_rows,
          .pitch = rounded_up(dim),
          .slices = space.slices_k,
          .visible = {},
          .longest_slice = 1,
          .to = to,
          .first_head = batch.first,
          .step = 1,
          .heads_of_entry = call.problem.heads_kv,
          .heads = batch.count,
          .first = 0,
          .count = call.problem.length_k,
          .dims = dim,
          .factor = static_cast<float>(factor)},
         context);
}

void run(const Product& product, const Space& space, const Context& context) {
  Context remaining = context;
  remaining.workspace.data = static_cast<std::byte*>(context.workspace.data) + space.used;
  remaining.workspace.bytes -= space.used;
  gemm::run_split_items(product.call, product.items, remaining);
}

/// Prepares the block mask of a chunk that sees a key.
void prepare_blocks(const AttentionCall& call, const BatchRows& rows, const Context& context) {
  const BlockTable& table = rows.blocks;
  if (table.states == nullptr) return;
  launch<list_blocks<>>(warp_each("tilewise wide blocks", rows.heads * table.query_blocks, context), call,
                        rows);
  launch<mark_tiles<>>(warp_each("tilewise wide tiles", rows.heads * table.tiles_each(), context), call,
                       rows);
}

void clear(float* sums, std::int64_t count, const Context& context) {
  check_cuda(cudaMemsetAsync(sums, 0, static_cast<std::size_t>(count) * sizeof(float),
                             static_cast<cudaStream_t>(context.stream)),
             "tilewise wide: clearing sums");
}

void chunk_forward(const AttentionCall& call, const Space& space, const Batch& batch, const Chunk& chunk,
                   const Context& context) {
  const AttentionProblem& problem = call.problem;
  const Products products(call, space, batch, chunk);
  const BatchRows rows = products.rows();
  const bool any = chunk.width() > 0;  // whether any key is seen
  if (any) {
    prepare_blocks(call, rows, context);
    run(products.scores(call.q, call.k, problem.dim_qk, space.s), space, context);
  }
  with_blocks(rows, [&]<typename Some>(const Some& some) {
    launch<softmax_rows<float, Some>>(warp_each("tilewise wide P", rows.rows(), context), call, some, space.s,
                                      space.s, space.pitch);
  });
  if (any) {
    run(products.of_rows(space.s, call.v, problem.dim_v), space, context);
  } else {
    clear(space.sums, batch.count * products.stacked() * space.pitch_v, context);
  }
  finish_queries("tilewise wide o", call, space, call.o, problem.dim_v, 1, products, context);
}

void chunk_backward(const AttentionCall& call, const Space& space, const Batch& batch, const Chunk& chunk,
                    const Context& context) {
  const AttentionProblem& problem = call.problem;
  const Products products(call, space, batch, chunk);
  const BatchRows rows = products.rows();
  const bool any = chunk.width() > 0;
  if (any) {
    prepare_blocks(call, rows, context);
    run(products.scores(call.q, call.k, problem.dim_qk, space.s), space, context);
    run(products.scores(call.d_o, call.v, problem.dim_v, space.dp), space, context);
  }
  with_blocks(rows, [&]<typename Some>(const Some& some) {
    BatchPairRows<Some> pairs{};
    pairs.count = rows.rows();
    pairs.keys = chunk.keys;
    pairs.pitch = space.pitch;
    pairs.qk = pairs.p = space.s;
    pairs.dp = pairs.dqk = space.dp;
    pairs.sink_terms = space.sink_terms;
    pairs.row_sums = space.row_sums;
    pairs.batch = some;
    pairs.length_q = problem.length_q;
    launch<simt::differentiate_rows<warp, float, BatchPairRows<Some>>>(
        warp_each("tilewise wide dS", rows.rows(), context), call, pairs);
  });
  if (any) {
    for_each_gradient(call, space, products, [&](const Product& product) { run(product, space, context); });
  } else {
    clear(space.sums, batch.count * products.stacked() * space.pitch_qk, context);
  }
  finish_queries("tilewise wide dq", call, space, call.dq, problem.dim_qk, call.scale, products, context);
}

/// The largest workspace of a product of the first batch, which no other batch exceeds.
template <typename Each>
std::size_t workspace_of(const AttentionCall& call, const Each& for_each_product) {
  // A base that is aligned as the real one will be, at an address without memory: nothing reads it here.
  const Space space(call, reinterpret_cast<void*>(std::uintptr_t{1} << 60));
  const Batch batch{0, space.heads, 0};
  std::size_t most = 0;
  for_each_chunk(call, space, [&](const Chunk& chunk) {
    if (chunk.width() == 0) return;
    for_each_product(space, Products(call, space, batch, chunk), [&](const Product& product) {
      most = std::max(most, gemm::split_items_workspace(product.call, product.items));
    });
  });
  return space.used + most;
}

}  // namespace

void batched_forward(const AttentionCall& call, const Context& context) {
  const Space space(call, context.workspace.data);
  for_each_batch(
      call, space,
      [&](const Batch& batch) {
        for_each_chunk(call, space,
                       [&](const Chunk& chunk) { chunk_forward(call, space, batch, chunk, context); });
      },
      [](const Batch&) {});
}

void batched_backward(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const Space space(call, context.workspace.data);
  for_each_batch(
      call, space,
      [&](const Batch& batch) {
        if (batch.query == 0) {
          const std::int64_t lines = space.slices_k * batch.count * space.key_rows;
          if (call.dk.wanted) clear(space.dk, lines * space.pitch_qk, context);
          if (call.dv.wanted) clear(space.dv, lines * space.pitch_v, context);
        }
        for_each_chunk(call, space,
                       [&](const Chunk& chunk) { chunk_backward(call, space, batch, chunk, context); });
      },
      [&](const Batch& batch) {
        finish_keys("tilewise wide dk", call, space, space.dk, call.dk, problem.dim_qk, call.scale, batch,
                    context);
        finish_keys("tilewise wide dv", call, space, space.dv, call.dv, problem.dim_v, 1, batch, context);
      });
  if (call.dsinks != nullptr) {
    launch<simt::sum_sinks<warp>>(warp_each("tilewise wide dsinks", problem.heads_q, context), call,
                                  space.sink_terms);
  }
}

std::size_t batched_forward_workspace(const AttentionCall& call) {
  return workspace_of(call, [&](const Space& space, const Products& products, const auto& visit) {
    visit(products.scores(call.q, call.k, call.problem.dim_qk, space.s));
    visit(products.of_rows(space.s, call.v, call.problem.dim_v));
  });
}

std::size_t batched_backward_workspace(const AttentionCall& call) {
  return workspace_of(call, [&](const Space& space, const Products& products, const auto& visit) {
    visit(products.scores(call.q, call.k, call.problem.dim_qk, space.s));
    visit(products.scores(call.d_o, call.v, call.problem.dim_v, space.dp));
    for_each_gradient(call, space, products, visit);
  });
}

}  // namespace tilewise::cuda::wide
