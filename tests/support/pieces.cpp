#include "support/pieces.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/load.h"
#include "support/buffer.h"
#include "support/device.h"
#include "support/open_problem.h"
#include "support/random.h"

namespace tilewise::test {
namespace {

// The indices first, first + step, first + 2·step, …, `count` of them.
struct IndexRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t step = 1;
};

// The range of one dimension of a tensor. A broadcast dimension stays as it is.
Tensor cut_dim(Tensor tensor, int dim, const IndexRange& range) {
  if (!tensor.given() || tensor.extent(dim) == 1) return tensor;
  const auto n = static_cast<std::size_t>(dim);
  auto* bytes = static_cast<std::byte*>(tensor.data);
  const std::int64_t offset =
      range.first * tensor.stride(dim) * static_cast<std::int64_t>(size_of(tensor.dtype));
  tensor.data = bytes + offset;
  tensor.shape[n] = range.count;
  tensor.strides[n] *= range.step;
  return tensor;
}

// The same for dimensions that are not broadcast: one of extent 1 becomes empty if the range is.
Tensor cut_rows(Tensor tensor, int dim, const IndexRange& range) {
  if (tensor.given() && tensor.extent(dim) == 1 && range.count == 0) {
    tensor.shape[static_cast<std::size_t>(dim)] = 0;
    return tensor;
  }
  return cut_dim(tensor, dim, range);
}

std::vector<IndexRange> random_ranges(Random& rng, std::int64_t length, std::int64_t most) {
  std::vector<std::int64_t> cuts = {0, length};
  for (std::int64_t n = rng.between(1, most); n > 1; --n) cuts.push_back(rng.between(0, length));
  std::sort(cuts.begin(), cuts.end());
  std::vector<IndexRange> ranges;
  for (std::size_t n = 0; n + 1 < cuts.size(); ++n) ranges.push_back({cuts[n], cuts[n + 1] - cuts[n], 1});
  return ranges;
}

std::vector<IndexRange> stripes(std::int64_t length, std::int64_t step) {
  std::vector<IndexRange> ranges;
  for (std::int64_t first = 0; first < step; ++first) {
    ranges.push_back(
        {std::min(first, length), std::max<std::int64_t>(0, (length - first + step - 1) / step), step});
  }
  return ranges;
}

struct Cuts {
  std::vector<IndexRange> entries, key_heads, queries, keys;
};

Cuts draw_cuts(std::uint64_t seed, const AttentionInputs& inputs) {
  Random rng(seed + 11);
  const std::int64_t step = rng.pick<std::int64_t>({1, 1, 2, 3, 5});
  const std::int64_t queries = inputs.q.extent(2);
  const std::int64_t keys = inputs.k.extent(2);
  return {.entries = random_ranges(rng, inputs.q.extent(0), 2),
          .key_heads = random_ranges(rng, inputs.k.extent(1), 2),
          .queries = step == 1 ? random_ranges(rng, queries, 3) : stripes(queries, step),
          .keys = step == 1 ? random_ranges(rng, keys, 3) : stripes(keys, step)};
}

// One piece: its ranges of the whole, and its call.
struct CutPiece {
  IndexRange entries, heads, key_heads, queries, keys;
  AttentionInputs inputs;
  AttentionOptions options;
  bool first_keys = false;  // whether it has the first range of keys
  // Whether the piece has all keys of its queries, or all queries of its keys. Sums over them are then
  // complete and may be rounded to the type of the inputs.
  bool all_keys = false, all_queries = false;
};

CutPiece cut(const AttentionInputs& whole, const AttentionOptions& options, const IndexRange& entries,
             const IndexRange& key_heads, const IndexRange& queries, const IndexRange& keys) {
  const std::int64_t group = whole.k.extent(1) == 0 ? 1 : whole.q.extent(1) / whole.k.extent(1);
  CutPiece piece{.entries = entries,
                 .heads = {key_heads.first * group, key_heads.count * group, 1},
                 .key_heads = key_heads,
                 .queries = queries,
                 .keys = keys,
                 .inputs = {},
                 .options = options,
                 .first_keys = false,
                 .all_keys = false,
                 .all_queries = false};
  const auto rows = [&](const Tensor& tensor, const IndexRange& heads, const IndexRange& positions) {
    return cut_rows(cut_rows(cut_rows(tensor, 0, entries), 1, heads), 2, positions);
  };
  AttentionInputs& inputs = piece.inputs;
  inputs.q = rows(whole.q, piece.heads, queries);
  inputs.k = rows(whole.k, key_heads, keys);
  inputs.v = rows(whole.v, key_heads, keys);
  inputs.mask = whole.mask;
  const IndexRange ranges[] = {entries, piece.heads, queries, keys};
  for (int dim = 0; dim < whole.mask.rank; ++dim) {
    inputs.mask = cut_dim(inputs.mask, dim, ranges[dim + 4 - whole.mask.rank]);
  }
  inputs.alibi_slopes = whole.alibi_slopes;
  if (whole.alibi_slopes.rank == 2) inputs.alibi_slopes = cut_rows(inputs.alibi_slopes, 0, entries);
  if (whole.alibi_slopes.given()) {
    inputs.alibi_slopes = cut_rows(inputs.alibi_slopes, whole.alibi_slopes.rank - 1, piece.heads);
  }
  if (whole.sinks.given()) inputs.sinks = cut_rows(whole.sinks, 0, piece.heads);
  if (whole.logit_scale.given()) inputs.logit_scale = cut_rows(whole.logit_scale, 0, piece.heads);
  inputs.dropout_seed = whole.dropout_seed;
  piece.options.piece = {.q_offset = queries.first,
                         .k_offset = keys.first,
                         .step = queries.step,
                         .length_q = whole.q.extent(2),
                         .length_k = whole.k.extent(2),
                         .batch_offset = entries.first,
                         .head_offset = piece.heads.first,
                         .heads_q = whole.q.extent(1)};
  return piece;
}

template <typename Body>
void for_each_piece(std::uint64_t seed, const AttentionInputs& inputs, const AttentionOptions& options,
                    const Body& body) {
  const Cuts cuts = draw_cuts(seed, inputs);
  for (const IndexRange& entries : cuts.entries) {
    for (const IndexRange& heads : cuts.key_heads) {
      for (const IndexRange& queries : cuts.queries) {
        for (const IndexRange& keys : cuts.keys) {
          CutPiece piece = cut(inputs, options, entries, heads, queries, keys);
          piece.first_keys = &keys == cuts.keys.data();
          piece.all_keys = cuts.keys.size() == 1;
          piece.all_queries = cuts.queries.size() == 1;
          body(piece);
        }
      }
    }
  }
}

// A tensor [B, H, S, last] of the whole in f64, to which pieces are added.
struct Sums {
  std::int64_t extent[4];
  std::vector<double> values;

  Sums(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t last, double start)
      : extent{b, h, s, last}, values(static_cast<std::size_t>(b * h * s * last), start) {}
  double& at(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d = 0) {
    return values[static_cast<std::size_t>(((b * extent[1] + h) * extent[2] + s) * extent[3] + d)];
  }
};

double element(const Tensor& tensor, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) {
  const std::int64_t index[] = {b, h, s, d};
  std::int64_t offset = 0;
  for (int dim = 0; dim < tensor.rank; ++dim) {
    const std::int64_t n = index[dim + (tensor.rank == 3 ? 0 : 4 - tensor.rank)];
    if (tensor.extent(dim) != 1) offset += n * tensor.stride(dim);
  }
  return load_element(static_cast<const std::byte*>(tensor.data), tensor.dtype, offset);
}

void write(const Tensor& tensor, const Sums& sums) {
  const std::int64_t extents[] = {tensor.extent(0), tensor.extent(1), tensor.extent(2),
                                  tensor.rank == 4 ? tensor.extent(3) : 1};
  std::size_t next = 0;
  for (std::int64_t b = 0; b < extents[0]; ++b) {
    for (std::int64_t h = 0; h < extents[1]; ++h) {
      for (std::int64_t s = 0; s < extents[2]; ++s) {
        for (std::int64_t d = 0; d < extents[3]; ++d) {
          const std::int64_t offset = b * tensor.stride(0) + h * tensor.stride(1) + s * tensor.stride(2) +
                                      (tensor.rank == 4 ? d * tensor.stride(3) : 0);
          store_element(static_cast<std::byte*>(tensor.data), tensor.dtype, offset, sums.values[next++]);
        }
      }
    }
  }
}

DType wide(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }
constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

struct Joined {
  Sums o, lse;
};

// Adds a piece's O and LSE of one row to those of the pieces before.
void join_row(Joined& joined, const std::int64_t (&row)[3], const Buffer& o, double lse,
              const std::int64_t (&at)[3]) {
  double& known = joined.lse.at(row[0], row[1], row[2]);
  if (lse == minus_infinity) return;
  const double highest = std::max(known, lse);
  const double total = highest + std::log(std::exp(known - highest) + std::exp(lse - highest));
  for (std::int64_t d = 0; d < joined.o.extent[3]; ++d) {
    double& element = joined.o.at(row[0], row[1], row[2], d);
    element = element * std::exp(known - total) + o.at(at[0], at[1], at[2], d) * std::exp(lse - total);
  }
  known = total;
}

// Computes and joins O and LSE of all pieces. With `rounds`, O of pieces with all keys has the type of the
// inputs, except where delta is computed from it.
Joined join(std::uint64_t seed, const AttentionInputs& inputs, const AttentionOptions& options,
            const Context& context, PieceRunner& runner, bool rounds) {
  const Tensor& q = inputs.q;
  Joined joined{Sums(q.extent(0), q.extent(1), q.extent(2), inputs.v.extent(3), 0),
                Sums(q.extent(0), q.extent(1), q.extent(2), 1, minus_infinity)};
  for_each_piece(seed, inputs, options, [&](CutPiece piece) {
    if (!piece.first_keys) piece.inputs.sinks = {};  // a sink must be added once
    const Shape rows = {piece.entries.count, piece.heads.count, piece.queries.count};
    const Buffer o(rounds && piece.all_keys ? q.dtype : wide(q.dtype),
                   {rows[0], rows[1], rows[2], inputs.v.extent(3)});
    const Buffer lse(q.dtype == DType::f64 ? DType::f64 : runner.statistics, rows);
    runner.forward(piece.inputs, piece.options, {o.view(), lse.view()}, context);
    for (std::int64_t b = 0; b < rows[0]; ++b) {
      for (std::int64_t h = 0; h < rows[1]; ++h) {
        for (std::int64_t i = 0; i < rows[2]; ++i) {
          join_row(
              joined,
              {piece.entries.first + b, piece.heads.first + h, piece.queries.first + i * piece.queries.step},
              o, lse.at(b, h, i), {b, h, i});
        }
      }
    }
  });
  return joined;
}

// Adds the gradients of a piece's rows to those of the whole.
void add_rows(Sums& sums, const Buffer& gradient, const IndexRange& entries, const IndexRange& heads,
              const IndexRange& rows) {
  for (std::int64_t b = 0; b < entries.count; ++b) {
    for (std::int64_t h = 0; h < heads.count; ++h) {
      for (std::int64_t s = 0; s < rows.count; ++s) {
        for (std::int64_t d = 0; d < sums.extent[3]; ++d) {
          sums.at(entries.first + b, heads.first + h, rows.first + s * rows.step, d) +=
              gradient.at(b, h, s, d);
        }
      }
    }
  }
}

// The statistics of a piece's rows, from those of the whole.
Buffer rows_of_piece(const CutPiece& piece, DType dtype, Sums& whole) {
  Buffer statistics(dtype, {piece.entries.count, piece.heads.count, piece.queries.count});
  for (std::int64_t b = 0; b < piece.entries.count; ++b) {
    for (std::int64_t h = 0; h < piece.heads.count; ++h) {
      for (std::int64_t i = 0; i < piece.queries.count; ++i) {
        statistics.set({b, h, i}, whole.at(piece.entries.first + b, piece.heads.first + h,
                                           piece.queries.first + i * piece.queries.step));
      }
    }
  }
  return statistics;
}

// dmask of the whole as [B, H, Sq, Sk]; broadcast dimensions have extent 1.
struct MaskSums {
  Sums sums;
  int missing;

  explicit MaskSums(const Tensor& dmask)
      : sums(extent(dmask, 0), extent(dmask, 1), extent(dmask, 2), extent(dmask, 3), 0),
        missing(4 - dmask.rank) {}

  static std::int64_t extent(const Tensor& dmask, int dim) {
    const int n = dim - (4 - dmask.rank);
    return n < 0 ? 1 : dmask.extent(n);
  }

  void add(const CutPiece& piece, const Tensor& gradient) {
    const IndexRange ranges[] = {piece.entries, piece.heads, piece.queries, piece.keys};
    std::int64_t index[4];
    const auto place = [&](int dim) {
      return sums.extent[dim] == 1 ? 0 : ranges[dim].first + index[dim] * ranges[dim].step;
    };
    for (index[0] = 0; index[0] < extent(gradient, 0); ++index[0]) {
      for (index[1] = 0; index[1] < extent(gradient, 1); ++index[1]) {
        for (index[2] = 0; index[2] < extent(gradient, 2); ++index[2]) {
          for (index[3] = 0; index[3] < extent(gradient, 3); ++index[3]) {
            std::int64_t offset = 0;
            for (int dim = 0; dim < gradient.rank; ++dim)
              offset += index[dim + missing] * gradient.stride(dim);
            sums.at(place(0), place(1), place(2), place(3)) +=
                load_element(static_cast<const std::byte*>(gradient.data), gradient.dtype, offset);
          }
        }
      }
    }
  }

  void write(const Tensor& dmask) const {
    const Sums& all = sums;
    std::size_t next = 0;
    for (std::int64_t b = 0; b < all.extent[0]; ++b) {
      for (std::int64_t h = 0; h < all.extent[1]; ++h) {
        for (std::int64_t i = 0; i < all.extent[2]; ++i) {
          for (std::int64_t j = 0; j < all.extent[3]; ++j) {
            const std::int64_t index[] = {b, h, i, j};
            std::int64_t offset = 0;
            for (int dim = 0; dim < dmask.rank; ++dim) offset += index[dim + missing] * dmask.stride(dim);
            store_element(static_cast<std::byte*>(dmask.data), dmask.dtype, offset, all.values[next++]);
          }
        }
      }
    }
  }
};

// delta: Σ dO·O of every row.
Sums delta_of(Joined& joined, const Tensor& d_o) {
  Sums delta(d_o.extent(0), d_o.extent(1), d_o.extent(2), 1, 0);
  for (std::int64_t b = 0; b < d_o.extent(0); ++b) {
    for (std::int64_t h = 0; h < d_o.extent(1); ++h) {
      for (std::int64_t i = 0; i < d_o.extent(2); ++i) {
        for (std::int64_t d = 0; d < d_o.extent(3); ++d) {
          delta.at(b, h, i) += joined.o.at(b, h, i, d) * element(d_o, b, h, i, d);
        }
      }
    }
  }
  return delta;
}

void write_sinks(const AttentionInputs& inputs, const AttentionGradients& gradients, Joined& joined,
                 Sums& delta) {
  for (std::int64_t h = 0; h < inputs.q.extent(1); ++h) {
    const double sink = load_element(static_cast<const std::byte*>(inputs.sinks.data), inputs.sinks.dtype,
                                     h * inputs.sinks.stride(0));
    double sum = 0;
    for (std::int64_t b = 0; b < inputs.q.extent(0); ++b) {
      for (std::int64_t i = 0; i < inputs.q.extent(2); ++i) {
        const double lse = joined.lse.at(b, h, i);
        if (lse == minus_infinity) continue;
        const double d_lse = gradients.d_lse.given() ? element(gradients.d_lse, b, h, i, 0) : 0;
        sum += std::exp(sink - lse) * (d_lse - delta.at(b, h, i));
      }
    }
    store_element(static_cast<std::byte*>(gradients.dsinks.data), gradients.dsinks.dtype,
                  h * gradients.dsinks.stride(0), sum);
  }
}

// Whether P of one key is above 0.9999.
bool has_only_key(const Head& head, const OpenProblem& open, std::size_t i) {
  const double softcap = static_cast<double>(open.problem.options.softcap);
  double highest = head.sink;
  std::vector<double> scores;
  for (std::size_t j = 0; j < head.keys; ++j) {
    const std::size_t pair = head.pair(i, j);
    if (head.visible[pair] == 0) continue;
    double score = 0;
    for (std::size_t d = 0; d < open.dim_qk; ++d) score += head.q[i][d] * head.k[j][d];
    score *= open.scale;
    if (softcap > 0) score = softcap * std::tanh(score / softcap);
    scores.push_back(score + head.alibi_at(pair) + head.mask_at(pair));
    highest = std::max(highest, scores.back());
  }
  if (scores.empty() || highest == minus_infinity) return false;
  double sum = std::exp(head.sink - highest);
  for (const double score : scores) sum += std::exp(score - highest);
  return std::exp(*std::max_element(scores.begin(), scores.end()) - highest) > 0.9999 * sum;
}

bool some_row_has_an_only_key(const OpenProblem& open) {
  bool found = false;
  open.for_each_head([&](const Head& head) {
    for (std::size_t i = 0; i < head.queries; ++i) found = found || has_only_key(head, open, i);
  });
  return found;
}

}  // namespace

bool suits_pieces(const RandomProblem& problem) {
  if (problem.layout != Layout::dense || problem.key_lengths.given() || problem.blocks.counts.given()) {
    return false;
  }
  const bool repeated = problem.k.strides()[2] == 0 || problem.v.strides()[2] == 0;
  if (problem.length_q < 8 || problem.length_k < 8 || repeated) return false;
  const RandomProblem wide = widened(problem);
  const OutputBuffers outputs = make_outputs(wide);
  AttentionOptions options = problem.options;
  options.kernel = "reference";
  run_forward(wide.inputs(), options, outputs.view(), {.parallel_for = openmp_parallel_for(2)});
  for (const double lse : outputs.lse.values()) {
    if (std::isfinite(lse) && std::abs(lse) > 16) return false;
  }
  return !some_row_has_an_only_key(OpenProblem(problem));
}

namespace {

// Whether the kernel can compute the call that the explanation is about.
bool able(const Explanation& explanation, std::string_view kernel) {
  return std::any_of(explanation.entries.begin(), explanation.entries.end(),
                     [&](const Explanation::Entry& entry) {
                       return entry.kernel == kernel && entry.verdict != Explanation::Verdict::unable;
                     });
}

}  // namespace

void PieceRunner::forward(const AttentionInputs& inputs, AttentionOptions options,
                          const AttentionOutputs& outputs, const Context& context) {
  if (device.type == Device::Type::cpu) return run_forward(inputs, options, outputs, context);
  Context where = context;
  where.device = device;
  const bool takes =
      able(explain_attention_forward(on_device(inputs, device), options, on_device(outputs, device), where),
           options.kernel);
  ++(takes ? taken : left);
  if (!takes) options.kernel = "fused";
  run_forward_on_cuda(inputs, options, outputs, context);
}

void PieceRunner::backward(const AttentionInputs& inputs, AttentionOptions options,
                           const AttentionGradients& gradients, const Context& context) {
  if (device.type == Device::Type::cpu) return run_backward(inputs, options, gradients, context);
  Context where = context;
  where.device = device;
  const bool takes = able(
      explain_attention_backward(on_device(inputs, device), options, on_device(gradients, device), where),
      options.kernel);
  ++(takes ? taken : left);
  if (!takes) options.kernel = "fused";
  run_backward_on_cuda(inputs, options, gradients, context);
}

void forward_in_pieces(std::uint64_t seed, const AttentionInputs& inputs, const AttentionOptions& options,
                       const AttentionOutputs& outputs, const Context& context, PieceRunner& runner) {
  const Joined joined = join(seed, inputs, options, context, runner, true);
  write(outputs.o, joined.o);
  if (outputs.lse.given()) write(outputs.lse, joined.lse);
}

void backward_in_pieces(std::uint64_t seed, const AttentionInputs& inputs, const AttentionOptions& options,
                        const AttentionGradients& gradients, const Context& context, PieceRunner& runner) {
  const Tensor &q = inputs.q, &k = inputs.k, &v = inputs.v;
  Joined joined = join(seed, inputs, options, context, runner, false);
  Sums delta = delta_of(joined, gradients.d_o);
  Sums d_lse(q.extent(0), q.extent(1), q.extent(2), 1, 0);
  if (gradients.d_lse.given()) {
    for (std::int64_t b = 0; b < q.extent(0); ++b) {
      for (std::int64_t h = 0; h < q.extent(1); ++h) {
        for (std::int64_t i = 0; i < q.extent(2); ++i)
          d_lse.at(b, h, i) = element(gradients.d_lse, b, h, i, 0);
      }
    }
  }
  Sums dq(q.extent(0), q.extent(1), q.extent(2), q.extent(3), 0);
  Sums dk(k.extent(0), k.extent(1), k.extent(2), k.extent(3), 0);
  Sums dv(v.extent(0), v.extent(1), v.extent(2), v.extent(3), 0);
  MaskSums dmask(gradients.dmask);
  std::vector<double> dlogit_scale(static_cast<std::size_t>(q.extent(1)));
  for_each_piece(seed, inputs, options, [&](CutPiece piece) {
    piece.inputs.sinks = {};
    const auto joined_type = [&](bool whole) { return whole ? q.dtype : wide(q.dtype); };
    const auto shape = [](const Tensor& x) {
      return Shape{x.extent(0), x.extent(1), x.extent(2), x.extent(3)};
    };
    const DType statistics = q.dtype == DType::f64 ? DType::f64 : runner.statistics;
    const Buffer lse = rows_of_piece(piece, statistics, joined.lse);
    const Buffer deltas = rows_of_piece(piece, statistics, delta);
    const Buffer d_lses = rows_of_piece(piece, statistics, d_lse);
    const Buffer piece_dq(joined_type(piece.all_keys), shape(piece.inputs.q));
    const Buffer piece_dk(joined_type(piece.all_queries), shape(piece.inputs.k));
    const Buffer piece_dv(joined_type(piece.all_queries), shape(piece.inputs.v));
    Buffer piece_dmask;
    if (gradients.dmask.given()) {
      Shape mask_shape;
      for (int dim = 0; dim < piece.inputs.mask.rank; ++dim)
        mask_shape.push_back(piece.inputs.mask.extent(dim));
      piece_dmask = Buffer(inputs.mask.dtype == DType::f64 ? DType::f64 : DType::f32, mask_shape);
    }
    Buffer piece_dlogit;
    if (gradients.dlogit_scale.given()) {
      piece_dlogit = Buffer(inputs.logit_scale.dtype, {piece.heads.count});
    }
    const auto piece_d_o =
        cut_rows(cut_rows(cut_rows(gradients.d_o, 0, piece.entries), 1, piece.heads), 2, piece.queries);
    runner.backward(piece.inputs, piece.options,
                    {.lse = lse.view(),
                     .d_o = piece_d_o,
                     .d_lse = d_lses.view(),
                     .delta = deltas.view(),
                     .dq = gradients.dq.given() ? piece_dq.view() : Tensor(),
                     .dk = gradients.dk.given() ? piece_dk.view() : Tensor(),
                     .dv = gradients.dv.given() ? piece_dv.view() : Tensor(),
                     .dmask = piece_dmask.view(),
                     .dlogit_scale = piece_dlogit.view()},
                    context);
    if (gradients.dq.given()) add_rows(dq, piece_dq, piece.entries, piece.heads, piece.queries);
    if (gradients.dk.given()) add_rows(dk, piece_dk, piece.entries, piece.key_heads, piece.keys);
    if (gradients.dv.given()) add_rows(dv, piece_dv, piece.entries, piece.key_heads, piece.keys);
    if (gradients.dmask.given()) dmask.add(piece, piece_dmask.view());
    for (std::int64_t h = 0; gradients.dlogit_scale.given() && h < piece.heads.count; ++h) {
      dlogit_scale[static_cast<std::size_t>(piece.heads.first + h * piece.heads.step)] += piece_dlogit.at(h);
    }
  });
  if (gradients.dq.given()) write(gradients.dq, dq);
  if (gradients.dk.given()) write(gradients.dk, dk);
  if (gradients.dv.given()) write(gradients.dv, dv);
  if (gradients.dmask.given()) dmask.write(gradients.dmask);
  for (std::int64_t h = 0; gradients.dlogit_scale.given() && h < q.extent(1); ++h) {
    store_element(static_cast<std::byte*>(gradients.dlogit_scale.data), gradients.dlogit_scale.dtype,
                  h * gradients.dlogit_scale.stride(0), dlogit_scale[static_cast<std::size_t>(h)]);
  }
  if (gradients.dsinks.given()) write_sinks(inputs, gradients, joined, delta);
}

}  // namespace tilewise::test
