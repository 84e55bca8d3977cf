#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "support/batches.h"

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

// Without the option, keys are split and gradients summed in parts where tasks are few. The test above would
// find that.
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
