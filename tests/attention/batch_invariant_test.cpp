#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "support/batches.h"
#include "support/random.h"

// What `batch_invariant` promises, on the CPU: the bits of a sequence are the same in every batch.
namespace tilewise::test::batch_invariant_test {
namespace {

Place cpu(int threads, std::string_view level = {}) {
  const Context context{.parallel_for = openmp_parallel_for(threads), .simd_level = level};
  return {[context](const auto& inputs, const auto& options, const auto& outputs) {
            run_forward(inputs, options, outputs, context);
          },
          [context](const auto& inputs, const auto& options, const auto& gradients) {
            run_backward(inputs, options, gradients, context);
          }};
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

// `one` among random others: of any length where the form allows it.
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

void expect_same_alone_and_among_others(std::uint64_t seed, const std::string& kernel) {
  SCOPED_TRACE("seed " + std::to_string(seed) + ", " + kernel);
  Random rng(seed);
  Kind kind = random_kind(rng);
  kind.options.kernel = kernel;
  if (kernel == "reference" && rng.chance(0.3)) kind.dtype = DType::f64;
  const std::string_view level =
      rng.chance(0.5) || kernel != "simd" ? std::string_view() : simd_levels().back();
  const SequenceOf one{.seed = seed, .length_q = random_length(rng), .length_k = random_length(rng)};
  const Form form = rng.pick({Form::dense, Form::cache, Form::paged, Form::packed});
  SCOPED_TRACE(to_string(form));
  if (form == Form::dense) kind.mask = rng.chance(0.3);
  const SequenceBits alone =
      run_batch({.form = form, .sequences = {one}, .page = 16}, kind, cpu(1, level))[0];
  for (const int threads : {1, 3}) {
    std::size_t place;
    const Batch batch = among_others(rng, form, one, place);
    EXPECT_EQ(run_batch(batch, kind, cpu(threads, level))[place].difference(alone), "")
        << batch.sequences.size() << " sequences, at " << place;
  }
  if (form == Form::packed) {
    const SequenceBits dense = run_batch({.form = Form::dense, .sequences = {one}}, kind, cpu(2, level))[0];
    EXPECT_EQ(dense.difference(alone), "") << "dense";
  }
}

TEST(BatchInvariant, ASequenceHasTheSameBitsAloneAndAmongOthers) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) expect_same_alone_and_among_others(seed, "simd");
  for (std::uint64_t seed = 1; seed <= 4; ++seed) expect_same_alone_and_among_others(seed, "reference");
}

// Keys are split where tasks are few, and so do gradients, unless the option is set. This shows that the test
// above would find it.
TEST(BatchInvariant, WithoutItBitsDependOnTheBatch) {
  Kind kind{.heads_q = 1, .heads_kv = 1, .dim_qk = 16, .dim_v = 16};
  const SequenceOf one{.seed = 1, .length_q = 3, .length_k = 2100};
  const std::vector<SequenceOf> many(40, one);
  const auto difference = [&] {
    const SequenceBits alone = run_batch({.sequences = {one}}, kind, cpu(1))[0];
    return run_batch({.sequences = many}, kind, cpu(1))[7].difference(alone);
  };
  EXPECT_EQ(difference(), "o");
  kind.options.batch_invariant = true;
  EXPECT_EQ(difference(), "");
}

TEST(BatchInvariant, GradientsAreThoseOfADeterministicCall) {
  const Kind kind{.options = {.causal = true, .batch_invariant = true}};
  const Batch batch{.form = Form::packed, .sequences = {{1, 70, 90}, {2, 5, 300}, {3, 130, 130}}};
  const std::vector<SequenceBits> once = run_batch(batch, kind, cpu(1));
  const std::vector<SequenceBits> again = run_batch(batch, kind, cpu(2));
  for (std::size_t n = 0; n < once.size(); ++n) EXPECT_EQ(once[n].difference(again[n]), "");
}

TEST(BatchInvariant, IsNotForPieces) {
  const Kind kind{
      .backward = false,
      .options = {.batch_invariant = true, .piece = Piece{.length_q = 5, .length_k = 5, .heads_q = 4}}};
  try {
    run_batch({.sequences = {{1, 5, 5}}}, kind, cpu(1));
    FAIL() << "it was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(std::string(error.what()), "batch_invariant: expected false with a piece, got true");
  }
}

}  // namespace
}  // namespace tilewise::test::batch_invariant_test
