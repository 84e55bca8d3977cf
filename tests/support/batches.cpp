#include "support/batches.h"

#include <algorithm>

namespace tilewise::test {
namespace {

enum class Rows { queries, keys };

// The numbers of a tensor of a sequence, [heads, length, dim].
Buffer numbers_of(const SequenceOf& sequence, std::uint64_t tensor, std::int64_t heads, std::int64_t length,
                  std::int64_t dim, DType dtype) {
  Buffer numbers(dtype, {heads, length, dim});
  Random rng(sequence.seed * 16 + tensor);
  numbers.fill_random(rng, sequence.size);
  return numbers;
}

// Where the rows of sequence n are in the tensors of a batch.
class Layouts {
 public:
  Layouts(const Batch& batch, const Kind& kind) : batch_(batch), kind_(kind) {
    for (const SequenceOf& sequence : batch.sequences) {
      first_q_.push_back(first_q_.back() + sequence.length_q);
      first_k_.push_back(first_k_.back() + sequence.length_k);
      longest_q_ = std::max(longest_q_, sequence.length_q);
      longest_k_ = std::max(longest_k_, sequence.length_k);
    }
    capacity_ = std::max(batch.capacity, longest_k_);
    if (batch.form == Form::dense || batch.form == Form::packed) capacity_ = longest_k_;
    if (batch.form == Form::paged) {
      slots_ = (capacity_ + batch.page - 1) / batch.page;
      // Pages of one sequence follow each other backwards, and page 0 is nobody's.
      for (std::int64_t n = 0; n < count(); ++n) {
        for (std::int64_t slot = 0; slot < slots_; ++slot)
          pages_.push_back(1 + (slots_ - 1 - slot) * count() + n);
      }
    }
  }

  std::int64_t count() const { return static_cast<std::int64_t>(batch_.sequences.size()); }
  bool packed() const { return batch_.form == Form::packed; }
  std::int64_t longest_q() const { return longest_q_; }
  std::int64_t longest_k() const { return longest_k_; }
  std::int64_t capacity() const { return capacity_; }

  Shape shape(Rows rows, std::int64_t heads, std::int64_t dim) const {
    const bool queries = rows == Rows::queries;
    if (packed()) return {queries ? first_q_.back() : first_k_.back(), heads, dim};
    if (queries) return {count(), heads, longest_q_, dim};
    if (batch_.form == Form::paged) return {1 + count() * slots_, heads, batch_.page, dim};
    return {count(), heads, capacity_, dim};
  }
  Shape index(Rows rows, std::int64_t n, std::int64_t h, std::int64_t row, std::int64_t d) const {
    const auto at = static_cast<std::size_t>(n);
    if (packed()) return {(rows == Rows::queries ? first_q_ : first_k_)[at] + row, h, d};
    if (rows == Rows::keys && batch_.form == Form::paged) {
      const std::int64_t page = pages_[static_cast<std::size_t>(n * slots_ + row / batch_.page)];
      return {page, h, row % batch_.page, d};
    }
    return {n, h, row, d};
  }
  // Rows past a sequence's keys, and pages that are not in use, keep a Buffer's poison.
  Buffer place(Rows rows, std::uint64_t tensor, std::int64_t heads, std::int64_t dim) const {
    Buffer all(kind_.dtype, shape(rows, heads, dim));
    for (std::int64_t n = 0; n < count(); ++n) {
      const SequenceOf& sequence = batch_.sequences[static_cast<std::size_t>(n)];
      const std::int64_t length = rows == Rows::queries ? sequence.length_q : sequence.length_k;
      const Buffer own = numbers_of(sequence, tensor, heads, length, dim, kind_.dtype);
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t row = 0; row < length; ++row) {
          for (std::int64_t d = 0; d < dim; ++d) all.set(index(rows, n, h, row, d), own.at(h, row, d));
        }
      }
    }
    return all;
  }
  // The results of sequence n, as the bytes of doubles, which hold every number of a narrower type.
  std::vector<std::byte> taken(const Buffer& all, Rows rows, std::int64_t n, std::int64_t heads,
                               std::int64_t dim) const {
    const SequenceOf& sequence = batch_.sequences[static_cast<std::size_t>(n)];
    const std::int64_t length = rows == Rows::queries ? sequence.length_q : sequence.length_k;
    std::vector<double> values;
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t row = 0; row < length; ++row) {
        for (std::int64_t d = 0; d < dim; ++d) {
          const Shape x = index(rows, n, h, row, d);
          values.push_back(x.size() == 3 ? all.at(x[0], x[1], x[2]) : all.at(x[0], x[1], x[2], x[3]));
        }
      }
    }
    return bytes_of(values);
  }
  // The same of a tensor with one number per query.
  std::vector<std::byte> taken_lse(const Buffer& all, std::int64_t n) const {
    const SequenceOf& sequence = batch_.sequences[static_cast<std::size_t>(n)];
    std::vector<double> values;
    for (std::int64_t h = 0; h < kind_.heads_q; ++h) {
      for (std::int64_t row = 0; row < sequence.length_q; ++row) {
        values.push_back(packed() ? all.at(h, first_q_[static_cast<std::size_t>(n)] + row)
                                  : all.at(n, h, row));
      }
    }
    return bytes_of(values);
  }
  Shape lse_shape() const {
    if (packed()) return {kind_.heads_q, first_q_.back()};
    return {count(), kind_.heads_q, longest_q_};
  }
  Buffer lengths() const {
    Buffer lengths(DType::i32, {count()});
    for (std::int64_t n = 0; n < count(); ++n) {
      lengths.set({n}, static_cast<double>(batch_.sequences[static_cast<std::size_t>(n)].length_k));
    }
    return lengths;
  }
  Buffer cumulative(Rows rows) const {
    Buffer cumulative(DType::i32, {count() + 1});
    for (std::int64_t n = 0; n <= count(); ++n) {
      cumulative.set({n}, static_cast<double>(
                              (rows == Rows::queries ? first_q_ : first_k_)[static_cast<std::size_t>(n)]));
    }
    return cumulative;
  }
  Buffer page_table() const {
    Buffer table(DType::i32, {count(), slots_});
    for (std::int64_t n = 0; n < count() * slots_; ++n) {
      table.set({n / slots_, n % slots_}, static_cast<double>(pages_[static_cast<std::size_t>(n)]));
    }
    return table;
  }
  Buffer mask() const {
    Buffer all(kind_.dtype, {count(), 1, longest_q_, capacity_});
    for (std::int64_t n = 0; n < count(); ++n) {
      const SequenceOf& sequence = batch_.sequences[static_cast<std::size_t>(n)];
      const Buffer own = numbers_of(sequence, 4, 1, sequence.length_q, sequence.length_k, kind_.dtype);
      for (std::int64_t i = 0; i < sequence.length_q; ++i) {
        for (std::int64_t j = 0; j < sequence.length_k; ++j) all.set({n, 0, i, j}, own.at(0, i, j));
      }
    }
    return all;
  }

 private:
  static std::vector<std::byte> bytes_of(const std::vector<double>& values) {
    const auto* first = reinterpret_cast<const std::byte*>(values.data());
    return {first, first + values.size() * sizeof(double)};
  }

  const Batch& batch_;
  const Kind& kind_;
  std::vector<std::int64_t> first_q_ = {0}, first_k_ = {0};
  std::int64_t longest_q_ = 0, longest_k_ = 0, capacity_ = 0, slots_ = 0;
  std::vector<std::int64_t> pages_;
};

}  // namespace

const char* to_string(Form form) {
  switch (form) {
    case Form::dense: return "dense";
    case Form::cache: return "cache";
    case Form::paged: return "paged";
    case Form::packed: return "packed";
  }
  return "";
}

std::string SequenceBits::difference(const SequenceBits& other) const {
  if (o != other.o) return "o";
  if (lse != other.lse) return "lse";
  if (dq != other.dq) return "dq";
  if (dk != other.dk) return "dk";
  return dv != other.dv ? "dv" : "";
}

std::vector<SequenceBits> run_batch(const Batch& batch, const Kind& kind, const Place& place) {
  const Layouts layouts(batch, kind);
  const Buffer q = layouts.place(Rows::queries, 0, kind.heads_q, kind.dim_qk);
  const Buffer k = layouts.place(Rows::keys, 1, kind.heads_kv, kind.dim_qk);
  const Buffer v = layouts.place(Rows::keys, 2, kind.heads_kv, kind.dim_v);
  Buffer slopes, sinks, mask, lengths, table, cumulative_q, cumulative_k;
  Random rng(99);
  if (kind.alibi) slopes = Buffer(DType::f32, {kind.heads_q});
  if (kind.sinks) sinks = Buffer(DType::f32, {kind.heads_q});
  for (Buffer* buffer : {&slopes, &sinks}) {
    if (buffer->given()) buffer->fill_random(rng, 0.1);
  }
  if (kind.mask) mask = layouts.mask();
  AttentionInputs inputs{.q = q.view(),
                         .k = k.view(),
                         .v = v.view(),
                         .mask = mask.view(),
                         .alibi_slopes = slopes.view(),
                         .sinks = sinks.view()};
  if (batch.form == Form::cache || batch.form == Form::paged) {
    lengths = layouts.lengths();
    inputs.key_lengths = lengths.view();
  }
  if (batch.form == Form::paged) {
    table = layouts.page_table();
    inputs.page_table = table.view();
  }
  if (batch.form == Form::packed) {
    cumulative_q = layouts.cumulative(Rows::queries);
    cumulative_k = layouts.cumulative(Rows::keys);
    inputs.packed = {.cumulative_q = cumulative_q.view(),
                     .cumulative_k = cumulative_k.view(),
                     .max_length_q = layouts.longest_q(),
                     .max_length_k = layouts.longest_k()};
  }
  const Buffer o(kind.dtype, layouts.shape(Rows::queries, kind.heads_q, kind.dim_v));
  const Buffer lse(kind.dtype == DType::f64 ? DType::f64 : DType::f32, layouts.lse_shape());
  place.forward(inputs, kind.options, {.o = o.view(), .lse = lse.view()});

  Buffer dq, dk, dv;
  const bool backward = kind.backward && batch.form != Form::paged;
  if (backward) {
    const Buffer d_o = layouts.place(Rows::queries, 3, kind.heads_q, kind.dim_v);
    dq = Buffer(kind.dtype, q.shape());
    dk = Buffer(kind.dtype, k.shape());
    dv = Buffer(kind.dtype, v.shape());
    place.backward(inputs, kind.options,
                   {.o = o.view(),
                    .lse = lse.view(),
                    .d_o = d_o.view(),
                    .dq = dq.view(),
                    .dk = dk.view(),
                    .dv = dv.view()});
  }
  std::vector<SequenceBits> bits;
  for (std::int64_t n = 0; n < layouts.count(); ++n) {
    SequenceBits own{.o = layouts.taken(o, Rows::queries, n, kind.heads_q, kind.dim_v),
                     .lse = layouts.taken_lse(lse, n),
                     .dq = {},
                     .dk = {},
                     .dv = {}};
    if (backward) {
      own.dq = layouts.taken(dq, Rows::queries, n, kind.heads_q, kind.dim_qk);
      own.dk = layouts.taken(dk, Rows::keys, n, kind.heads_kv, kind.dim_qk);
      own.dv = layouts.taken(dv, Rows::keys, n, kind.heads_kv, kind.dim_v);
    }
    bits.push_back(std::move(own));
  }
  return bits;
}

Kind random_kind(Random& rng) {
  Kind kind{.dtype = rng.pick({DType::f32, DType::f16, DType::bf16}),
            .heads_kv = rng.between(1, 3),
            .dim_qk = rng.pick<std::int64_t>({5, 16, 64, 130}),
            .dim_v = rng.pick<std::int64_t>({3, 16, 64, 130}),
            .alibi = rng.chance(0.2),
            .sinks = rng.chance(0.3)};
  kind.heads_q = kind.heads_kv * rng.between(1, 4);
  kind.options.causal = rng.chance(0.5);
  kind.options.alignment = rng.pick({Alignment::top_left, Alignment::bottom_right});
  if (rng.chance(0.3)) kind.options.window = {rng.between(0, 90), rng.between(0, 9)};
  if (rng.chance(0.2)) kind.options.softcap = 3;
  kind.options.batch_invariant = true;
  return kind;
}

std::int64_t random_length(Random& rng) {
  return rng.pick<std::int64_t>({1, 2, 7, 48, 50, 129, 300, rng.between(1, 200)});
}

Batch among_others(Random& rng, Form form, const SequenceOf& one, std::size_t& place) {
  Batch batch{.form = form};
  const std::int64_t others = rng.pick<std::int64_t>({1, 2, 5, 9});
  place = static_cast<std::size_t>(rng.between(0, others));
  for (std::int64_t n = 0; n <= others; ++n) {
    const bool own = n == static_cast<std::int64_t>(place);
    const bool any_q = form == Form::packed, any_k = form != Form::dense;
    batch.sequences.push_back(own ? one
                                  : SequenceOf{.seed = rng.noise_bits() % 1000 + 1000,
                                               .length_q = any_q ? random_length(rng) : one.length_q,
                                               .length_k = any_k ? random_length(rng) : one.length_k});
  }
  if (rng.chance(0.5)) batch.capacity = 700;
  batch.page = rng.pick<std::int64_t>({1, 16, 33});
  return batch;
}

}  // namespace tilewise::test
