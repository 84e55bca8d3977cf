#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "support/buffer.h"
#include "tilewise/attention.h"

namespace tilewise::test {

// Batches that are put together from sequences, and the bits of each sequence's results, so that a sequence
// alone can be compared with the same one among others.

/// How sequences are put together. `cache` is dense keys with key lengths.
enum class Form : std::uint8_t { dense, cache, paged, packed };
const char* to_string(Form form);

/// A sequence. Its numbers follow from its seed.
struct SequenceOf {
  std::uint64_t seed = 0;
  std::int64_t length_q = 0;
  std::int64_t length_k = 0;
  double size = 1;  ///< the standard deviation of its numbers
};

/// What all sequences share.
struct Kind {
  DType dtype = DType::f32;
  std::int64_t heads_q = 4;
  std::int64_t heads_kv = 2;
  std::int64_t dim_qk = 40;
  std::int64_t dim_v = 24;
  bool alibi = false;
  bool sinks = false;
  bool mask = false;  ///< an additive one for each sequence, in dense batches
  bool backward = true;
  AttentionOptions options{};
};

struct Batch {
  Form form = Form::dense;
  std::vector<SequenceOf> sequences{};
  std::int64_t capacity = 0;  ///< of caches; at least the longest sequence, which is the default
  std::int64_t page = 16;
};

/// The bits of one sequence's results. Gradients are empty where there is no backward.
struct SequenceBits {
  std::vector<std::byte> o, lse, dq, dk, dv;
  /// The first result that differs, or nothing.
  std::string difference(const SequenceBits& other) const;
};

/// Where batches run: on the CPU with a context, or on a CUDA device.
struct Place {
  std::function<void(const AttentionInputs&, const AttentionOptions&, const AttentionOutputs&)> forward;
  std::function<void(const AttentionInputs&, const AttentionOptions&, const AttentionGradients&)> backward;
};

/// Computes a batch and returns what each of its sequences got.
std::vector<SequenceBits> run_batch(const Batch& batch, const Kind& kind, const Place& place);

/// A random kind that asks for `batch_invariant`, and a length; several are at the limits of tiles.
Kind random_kind(Random& rng);
std::int64_t random_length(Random& rng);

/// `one` at a random place among random others, of any length where the form allows it.
Batch among_others(Random& rng, Form form, const SequenceOf& one, std::size_t& place);

}  // namespace tilewise::test
