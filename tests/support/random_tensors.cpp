#include <algorithm>
#include <span>
#include <vector>

#include "support/random_parts.h"
#include "support/random_placement.h"

namespace tilewise::test {
namespace {

using Lengths = std::vector<std::int64_t>;

Buffer make_integers(Random& rng, const Lengths& values, const Shape& shape) {
  Buffer buffer = random_buffer(rng, DType::i32, shape, input_indices);
  buffer.set_values(std::vector<double>(values.begin(), values.end()));
  return buffer;
}

// The dimensions that may have stride 0: all but those of pages, which must not share memory.
unsigned expandable_queries(Layout layout) { return layout == Layout::packed ? 0b11 : 0b111; }
unsigned expandable_keys(Layout layout) {
  if (layout == Layout::packed) return 0b11;
  return layout == Layout::dense ? 0b111 : 0b110;
}

void place(Random& rng, RandomProblem& p, const Shape& q, const Shape& k, const Shape& v) {
  const bool same_tokens = q.size() == 3 ? q[0] == k[0] : q[0] == k[0] && q[2] == k[2];
  if (same_tokens && rng.chance(0.15)) {
    const Shape shapes[] = {q, k, v};
    std::vector<Buffer> slices = Buffer::side_by_side(p.dtype, shapes);
    p.q = slices[0];
    p.k = slices[1];
    p.v = slices[2];
    return;
  }
  const auto rows = p.aligned ? aligned_rows : input_rows;
  p.q = random_buffer(rng, p.dtype, q, rows(expandable_queries(p.layout)));
  if (rng.chance(0.15)) {
    const Shape shapes[] = {k, v};
    std::vector<Buffer> slices = Buffer::side_by_side(p.dtype, shapes);
    p.k = slices[0];
    p.v = slices[1];
    return;
  }
  p.k = random_buffer(rng, p.dtype, k, rows(expandable_keys(p.layout)));
  p.v = random_buffer(rng, p.dtype, v, rows(expandable_keys(p.layout)));
}

Buffer place_beside_o(Random& rng, const RandomProblem& p) {
  const auto rows = p.aligned_results ? aligned_rows : input_rows;
  return random_buffer(rng, p.dtype, p.beside_q(p.dim_v), rows(expandable_queries(p.layout)));
}

// Fills the rows that are used; the others stay poisoned.
void fill_rows(Random& rng, Buffer& buffer, double scale, std::span<const char> used) {
  Shape index(buffer.shape().size());
  for (const char row_used : used) {
    for (index.back() = 0; row_used && index.back() < buffer.shape().back(); ++index.back()) {
      buffer.set(index, scale * rng.normal());
    }
    index.back() = 0;
    for (std::size_t dim = index.size() - 1; dim-- > 0;) {
      if (++index[dim] < buffer.shape()[dim]) break;
      index[dim] = 0;
    }
  }
}

std::size_t row_count(const Buffer& buffer) {
  return static_cast<std::size_t>(buffer.size() / buffer.shape().back());
}

// The used rows of a packed tensor [total, heads]: those up to the end of the last sequence.
std::vector<char> packed_rows(const Buffer& buffer, const Lengths& ends) {
  std::vector<char> used(row_count(buffer));
  std::fill_n(used.begin(), ends.back() * buffer.extent(1), char{1});
  return used;
}

Lengths random_ends(Random& rng, std::int64_t sequences, std::int64_t longest) {
  Lengths ends = {0};
  for (std::int64_t n = 0; n < sequences; ++n) {
    ends.push_back(ends.back() + (rng.chance(0.4) ? longest : rng.between(0, longest)));
  }
  return ends;
}

void make_packed(Random& rng, RandomProblem& p, const Magnitudes& magnitudes) {
  const Lengths ends_q = random_ends(rng, p.batch, p.length_q);
  const bool same = p.length_q == p.length_k && rng.chance(0.5);
  const Lengths ends_k = same ? ends_q : random_ends(rng, p.batch, p.length_k);
  const auto unowned = [&] { return rng.chance(0.3) ? rng.between(1, 5) : 0; };
  const std::int64_t total_q = ends_q.back() + unowned();
  const std::int64_t total_k = same ? total_q : ends_k.back() + unowned();
  p.cumulative_q = make_integers(rng, ends_q, {p.batch + 1});
  p.cumulative_k = make_integers(rng, ends_k, {p.batch + 1});
  if (rng.chance(0.3)) p.length_q += rng.between(1, 9);  // the bounds may be larger than the lengths
  if (rng.chance(0.3)) p.length_k += rng.between(1, 9);
  place(rng, p, {total_q, p.heads_q, p.dim_qk}, {total_k, p.heads_kv, p.dim_qk},
        {total_k, p.heads_kv, p.dim_v});
  p.d_o = place_beside_o(rng, p);
  fill_rows(rng, p.q, magnitudes.qk, packed_rows(p.q, ends_q));
  fill_rows(rng, p.d_o, magnitudes.d_o, packed_rows(p.d_o, ends_q));
  fill_rows(rng, p.k, magnitudes.qk, packed_rows(p.k, ends_k));
  fill_rows(rng, p.v, magnitudes.v, packed_rows(p.v, ends_k));
}

void fill_dense_queries(Random& rng, RandomProblem& p, const Magnitudes& magnitudes) {
  p.d_o = place_beside_o(rng, p);
  p.q.fill_random(rng, magnitudes.qk);
  p.d_o.fill_random(rng, magnitudes.d_o);
}

void make_dense(Random& rng, RandomProblem& p, const Magnitudes& magnitudes) {
  place(rng, p, {p.batch, p.heads_q, p.length_q, p.dim_qk}, {p.batch, p.heads_kv, p.length_k, p.dim_qk},
        {p.batch, p.heads_kv, p.length_k, p.dim_v});
  Lengths lengths(static_cast<std::size_t>(p.batch), p.length_k);
  if (rng.chance(0.25)) {
    for (std::int64_t& length : lengths) length = rng.between(0, p.length_k);
    p.key_lengths = make_integers(rng, lengths, {p.batch});
  }
  std::vector<char> used;
  for (const std::int64_t length : lengths) {
    for (std::int64_t row = 0; row < p.heads_kv * p.length_k; ++row)
      used.push_back(row % p.length_k < length);
  }
  fill_dense_queries(rng, p, magnitudes);
  fill_rows(rng, p.k, magnitudes.qk, used);
  fill_rows(rng, p.v, magnitudes.v, used);
}

// Pages are in any order; some are shared by two entries, some are unused. Ids past an entry's last page are
// invalid.
void make_paged(Random& rng, RandomProblem& p, const Magnitudes& magnitudes) {
  const std::int64_t page = rng.between(1, 33);
  const std::int64_t max_pages = (p.length_k + page - 1) / page + rng.pick<std::int64_t>({0, 0, 1, 3});
  p.length_k = max_pages * page;
  Lengths lengths;
  Lengths ids;  // pages that are not used yet
  for (std::int64_t b = 0; b < p.batch; ++b) {
    lengths.push_back(rng.chance(0.2) ? p.length_k : rng.between(0, p.length_k));
    ids.resize(ids.size() + static_cast<std::size_t>((lengths.back() + page - 1) / page));
  }
  ids.resize(ids.size() + static_cast<std::size_t>(rng.between(0, 4)));
  for (std::size_t n = 0; n < ids.size(); ++n) ids[n] = static_cast<std::int64_t>(n);
  const auto pages = static_cast<std::int64_t>(ids.size());
  rng.shuffle(ids);

  Lengths table;
  std::vector<char> used(static_cast<std::size_t>(pages * p.heads_kv * page));
  for (const std::int64_t length : lengths) {
    for (std::int64_t slot = 0; slot < max_pages; ++slot) {
      const std::int64_t keys = std::clamp<std::int64_t>(length - slot * page, 0, page);
      if (keys == 0) {
        table.push_back(rng.pick<std::int64_t>({-1, std::int64_t{1} << 30}));
        continue;
      }
      const bool shared =
          table.size() >= static_cast<std::size_t>(max_pages) && lengths[0] > 0 && rng.chance(0.1);
      table.push_back(shared ? table[0] : ids.back());
      if (!shared) ids.pop_back();
      for (std::int64_t h = 0; h < p.heads_kv; ++h) {
        std::fill_n(used.begin() + (table.back() * p.heads_kv + h) * page, keys, char{1});
      }
    }
  }
  p.key_lengths = make_integers(rng, lengths, {p.batch});
  p.page_table = make_integers(rng, table, {p.batch, max_pages});
  place(rng, p, {p.batch, p.heads_q, p.length_q, p.dim_qk}, {pages, p.heads_kv, page, p.dim_qk},
        {pages, p.heads_kv, page, p.dim_v});
  fill_dense_queries(rng, p, magnitudes);
  fill_rows(rng, p.k, magnitudes.qk, used);
  fill_rows(rng, p.v, magnitudes.v, used);
}

}  // namespace

void make_tensors(Random& rng, RandomProblem& p, const Magnitudes& magnitudes) {
  switch (p.layout) {
    case Layout::dense: make_dense(rng, p, magnitudes); break;
    case Layout::packed: make_packed(rng, p, magnitudes); break;
    case Layout::paged: make_paged(rng, p, magnitudes); break;
  }
  if (rng.chance(0.3)) {
    PlacementRules rules = input_values;
    rules.expandable = expandable_queries(p.layout);
    p.d_lse = random_buffer(rng, DType::f32, p.statistics_shape(), rules);
    p.d_lse.fill_random(rng, magnitudes.d_o);
  }
}

}  // namespace tilewise::test
