#include "support/open_problem.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "attention/dropout.h"

namespace tilewise::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

std::int64_t integer(const Buffer& buffer, std::int64_t index) {
  return static_cast<std::int64_t>(buffer.at(index));
}

template <typename... Index>
std::int64_t integer_at(const Buffer& buffer, Index... index) {
  return static_cast<std::int64_t>(buffer.at(index...));
}

std::vector<double> values_of(const Buffer& buffer) {
  return buffer.given() ? buffer.values() : std::vector<double>{};
}

// Rounds stochastically: returns one of the two neighbouring values of the type, the nearer one more often.
double stochastically_rounded(double value, DType dtype, Random& rng) {
  if (value == 0) return value;
  const int digits = dtype == DType::f16 ? 11 : dtype == DType::bf16 ? 8 : 24;
  const int smallest = dtype == DType::f16 ? -24 : -149;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(value) + 1 - digits, smallest));
  return std::floor(value / unit + rng.unit()) * unit;
}

// The numbers 0 to n − 1, shuffled unless the seed is 0.
std::vector<std::int64_t> index_order(std::int64_t n, std::uint64_t seed) {
  std::vector<std::int64_t> indices(to_size(n));
  std::iota(indices.begin(), indices.end(), 0);
  Random rng(seed);
  if (seed != 0) rng.shuffle(indices);
  return indices;
}

// Reorders the elements of every row.
void reorder(std::vector<double>& rows, const std::vector<std::int64_t>& order) {
  std::vector<double> before(order.size());
  for (std::size_t first = 0; first < rows.size(); first += order.size()) {
    std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(first), order.size(), before.begin());
    for (std::size_t d = 0; d < order.size(); ++d) rows[first + d] = before[to_size(order[d])];
  }
}

}  // namespace

Results::Results(const RandomProblem& p)
    : o(to_size(p.d_o.size())),
      lse(to_size(p.q.size() / p.dim_qk), -infinity),
      dq(to_size(p.q.size())),
      dk(to_size(p.k.size())),
      dv(to_size(p.v.size())),
      dmask(to_size(p.mask.given() ? p.mask.size() : 0)),
      dsinks(to_size(p.sinks.given() ? p.sinks.size() : 0)),
      dlogit_scale(to_size(p.logit_scale.given() ? p.logit_scale.size() : 0)) {}

OpenProblem::OpenProblem(const RandomProblem& p)
    : problem(p),
      scale(p.options.scale ? static_cast<double>(*p.options.scale)
                            : 1 / std::sqrt(static_cast<double>(p.dim_qk))),
      dim_qk(to_size(p.dim_qk)),
      dim_v(to_size(p.dim_v)),
      q_(values_of(p.q)),
      k_(values_of(p.k)),
      v_(values_of(p.v)),
      d_o_(values_of(p.d_o)),
      d_lse_(values_of(p.d_lse)),
      mask_(values_of(p.mask)),
      alibi_(values_of(p.alibi_slopes)),
      sinks_(values_of(p.sinks)),
      logit_scale_(values_of(p.logit_scale)) {}

OpenProblem OpenProblem::neighbour(std::uint64_t seed) const {
  OpenProblem moved = *this;
  const auto move = [&](std::vector<double>& values, const Buffer& like) {
    if (!like.given() || like.dtype() == DType::boolean) return;
    for (double& value : values) {
      if (!std::isfinite(value)) continue;
      Random rng(seed ^ std::bit_cast<std::uint64_t>(value));
      value = stochastically_rounded(value * (1 + rng.uniform(-0x1p-10, 0x1p-10)), like.dtype(), rng);
    }
  };
  move(moved.q_, problem.q);
  move(moved.k_, problem.k);
  move(moved.v_, problem.v);
  move(moved.d_o_, problem.d_o);
  move(moved.d_lse_, problem.d_lse);
  move(moved.mask_, problem.mask);
  move(moved.alibi_, problem.alibi_slopes);
  move(moved.sinks_, problem.sinks);
  move(moved.logit_scale_, problem.logit_scale);
  const std::vector<std::int64_t> order_qk = index_order(problem.dim_qk, seed);
  const std::vector<std::int64_t> order_v = index_order(problem.dim_v, seed);
  reorder(moved.q_, order_qk);
  reorder(moved.k_, order_qk);
  reorder(moved.v_, order_v);
  reorder(moved.d_o_, order_v);
  moved.order_ = seed;
  return moved;
}

struct OpenProblem::Entry {
  std::int64_t first_q = 0;
  std::int64_t first_k = 0;
  std::int64_t queries = 0;
  std::int64_t keys = 0;
};

OpenProblem::Entry OpenProblem::entry(std::int64_t b) const {
  const RandomProblem& p = problem;
  if (p.layout == Layout::packed) {
    const std::int64_t first_q = integer(p.cumulative_q, b);
    const std::int64_t first_k = integer(p.cumulative_k, b);
    return {first_q, first_k, integer(p.cumulative_q, b + 1) - first_q,
            integer(p.cumulative_k, b + 1) - first_k};
  }
  return {0, 0, p.length_q, p.key_lengths.given() ? integer(p.key_lengths, b) : p.length_k};
}

bool OpenProblem::band_shows(const Entry& entry, std::int64_t i, std::int64_t j) const {
  const AttentionOptions& options = problem.options;
  const bool bottom_right = options.alignment == Alignment::bottom_right;
  const std::int64_t position = bottom_right ? i + entry.keys - entry.queries : i;
  if (options.causal && j > position) return false;
  if (options.window.left && position - j > *options.window.left) return false;
  return !options.window.right || j - position <= *options.window.right;
}

struct OpenProblem::BlockTable {
  static constexpr std::int64_t hidden = -1;
  static constexpr std::int64_t full = -2;
  std::int64_t columns = 0;
  std::vector<std::int64_t> states;  // [query blocks, key blocks]: hidden, full, or the id of a tile

  std::int64_t& at(std::int64_t qb, std::int64_t kb) { return states[to_size(qb * columns + kb)]; }
};

// A table, so that each list is read once: there are many pairs in the same blocks.
OpenProblem::BlockTable OpenProblem::block_table(std::int64_t b, std::int64_t h) const {
  const RandomBlocks& blocks = problem.blocks;
  BlockTable table;
  if (!blocks.counts.given()) return table;
  const std::int64_t rows = blocks.counts.extent(2);
  table.columns = (problem.length_k + blocks.block_k - 1) / blocks.block_k;
  table.states.assign(to_size(rows * table.columns), BlockTable::hidden);
  const auto fill = [&](const Buffer& counts, const Buffer& indices, bool partial) {
    const std::int64_t entry = counts.extent(0) == 1 ? 0 : b;
    const std::int64_t head = counts.extent(1) == 1 ? 0 : h;
    for (std::int64_t qb = 0; qb < rows; ++qb) {
      for (auto slot = integer_at(counts, entry, head, qb); slot-- > 0;) {
        const std::int64_t kb = integer_at(indices, entry, head, qb, slot);
        if (kb >= table.columns) continue;
        table.at(qb, kb) = BlockTable::full;
        if (!partial || !blocks.tiles.given()) continue;
        table.at(qb, kb) = integer_at(blocks.tile_ids, blocks.tile_ids.extent(0) == 1 ? 0 : b,
                                      blocks.tile_ids.extent(1) == 1 ? 0 : h, qb, slot);
      }
    }
  };
  fill(blocks.counts, blocks.indices, true);
  if (blocks.full_counts.given()) fill(blocks.full_counts, blocks.full_indices, false);
  return table;
}

bool OpenProblem::block_shows(BlockTable& table, std::int64_t i, std::int64_t j) const {
  const RandomBlocks& blocks = problem.blocks;
  const std::int64_t state = table.at(i / blocks.block_q, j / blocks.block_k);
  if (state < 0) return state == BlockTable::full;
  return blocks.tiles.at(state, i % blocks.block_q, j % blocks.block_k) != 0;
}

std::size_t OpenProblem::mask_index(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
  const std::int64_t whole[] = {b, h, i, j};
  const Shape& shape = problem.mask.shape();
  std::int64_t index = 0;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    index = index * shape[dim] + (shape[dim] == 1 ? 0 : whole[dim + 4 - shape.size()]);
  }
  return to_size(index);
}

Head OpenProblem::head(std::int64_t b, std::int64_t h) const {
  const RandomProblem& p = problem;
  const Entry entry = this->entry(b);
  const std::int64_t h_kv = h / (p.heads_q / p.heads_kv);
  const bool packed = p.layout == Layout::packed;
  const bool boolean = p.mask.given() && p.mask.dtype() == DType::boolean;
  const bool additive = p.mask.given() && !boolean;
  const bool dropout = p.options.dropout.probability > 0;
  const DropoutMask dropout_mask(p.options.dropout);
  double slope = 0;
  if (p.alibi_slopes.given())
    slope = alibi_[to_size(p.alibi_slopes.shape().size() == 1 ? h : b * p.heads_q + h)];

  BlockTable blocks = block_table(b, h);
  Head head;
  head.queries = to_size(entry.queries);
  head.keys = to_size(entry.keys);
  head.head = to_size(h);
  head.sink = p.sinks.given() ? sinks_[to_size(h)] : -infinity;
  head.logit_scale = p.logit_scale.given() ? logit_scale_[to_size(h)] : 1;
  const std::vector<std::int64_t> queries = index_order(entry.queries, order_);
  const std::vector<std::int64_t> keys = index_order(entry.keys, order_);
  for (const std::int64_t i : queries) {
    const std::int64_t row =
        packed ? (entry.first_q + i) * p.heads_q + h : (b * p.heads_q + h) * p.length_q + i;
    head.query_row.push_back(to_size(row));
    head.statistic.push_back(to_size(packed ? h * p.q.extent(0) + entry.first_q + i : row));
    head.q.push_back(&q_[to_size(row) * dim_qk]);
    head.d_o.push_back(&d_o_[to_size(row) * dim_v]);
    head.d_lse.push_back(d_lse_.empty() ? 0.0 : d_lse_[head.statistic.back()]);
  }
  for (const std::int64_t j : keys) {
    std::int64_t row = (b * p.heads_kv + h_kv) * p.length_k + j;
    if (packed) row = (entry.first_k + j) * p.heads_kv + h_kv;
    if (p.layout == Layout::paged) {
      const std::int64_t page = p.k.extent(2);
      const auto id = static_cast<std::int64_t>(p.page_table.at(b, j / page));
      row = (id * p.heads_kv + h_kv) * page + j % page;
    }
    head.key_row.push_back(to_size(row));
    head.k.push_back(&k_[to_size(row) * dim_qk]);
    head.v.push_back(&v_[to_size(row) * dim_v]);
  }
  const std::size_t pairs = head.queries * head.keys;
  head.visible.reserve(pairs);
  if (p.alibi_slopes.given()) head.alibi.reserve(pairs);
  if (additive) head.mask_index.reserve(pairs);
  if (additive) head.mask.reserve(pairs);
  if (dropout) head.keep.reserve(pairs);
  const auto head_index = static_cast<std::uint32_t>(b * p.heads_q + h);
  for (const std::int64_t i : queries) {
    for (const std::int64_t j : keys) {
      bool visible = band_shows(entry, i, j);
      if (visible && p.blocks.counts.given()) visible = block_shows(blocks, i, j);
      const std::size_t index = p.mask.given() ? mask_index(b, h, i, j) : 0;
      if (boolean) visible = visible && mask_[index] != 0;
      if (additive) visible = visible && mask_[index] != -infinity;
      head.visible.push_back(visible);
      if (p.alibi_slopes.given()) {
        const auto distance = static_cast<double>(std::abs(i + entry.keys - entry.queries - j));
        head.alibi.push_back(-slope * distance);
      }
      if (additive) head.mask_index.push_back(index);
      if (additive) head.mask.push_back(mask_[index]);
      if (dropout) {
        const bool kept =
            dropout_mask.keeps(head_index, static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(j));
        head.keep.push_back(kept ? static_cast<double>(dropout_mask.keep_scale) : 0.0);
      }
    }
  }
  return head;
}

}  // namespace tilewise::test
