#include <gtest/gtest.h>

#include <limits>

#include "attention/validate_case.h"

// Blocks and bounds beyond the lengths mean what the lengths would, and cost no more.
namespace tilewise::test::lengths_test {
namespace {

// One block of those sizes has all queries and keys.
void hide_by_one_block(Scene& s, std::int64_t block_q, std::int64_t block_k) {
  s.inputs.blocks = {.block_q = block_q,
                     .block_k = block_k,
                     .counts = s.indices({1, 1, 1}, {1}),
                     .indices = s.indices({1, 1, 1, 1}, {0})};
}

// Random inputs, the same for all scenes of a pass.
Scene scene(Pass pass, std::string_view kernel) {
  Scene s = dense();
  if (pass == Pass::backward) s = backward_of(std::move(s));
  Random rng(4711);
  for (Buffer& buffer : s.buffers) buffer.fill_random(rng);
  s.options.kernel = kernel;
  return s;
}

std::vector<std::byte> results(Scene s) {
  s.provide_workspace();
  s.buffers.back().poison();
  s.call();
  std::vector<std::byte> all;
  for (const Tensor* tensor :
       {&s.outputs.o, &s.outputs.lse, &s.gradients.dq, &s.gradients.dk, &s.gradients.dv}) {
    if (!tensor->given()) continue;
    const auto* first = static_cast<const std::byte*>(tensor->data);
    all.insert(all.end(), first, first + tensor->size() * static_cast<std::int64_t>(size_of(tensor->dtype)));
  }
  return all;
}

class Lengths : public testing::TestWithParam<std::tuple<Pass, const char*>> {
 protected:
  Scene made() const { return scene(std::get<0>(GetParam()), std::get<1>(GetParam())); }
};

TEST_P(Lengths, a_block_of_any_size_beyond_the_lengths_is_one_of_the_lengths) {
  Scene whole = made();
  hide_by_one_block(whole, 3, 5);
  const std::size_t bytes = whole.workspace_bytes();
  const std::vector<std::byte> expected = results(whole);
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t size :
       {std::int64_t{6}, std::int64_t{1} << 30, (std::int64_t{1} << 31) + 5, most}) {
    Scene s = made();
    hide_by_one_block(s, size, size);
    EXPECT_EQ(s.workspace_bytes(), bytes) << size;
    EXPECT_EQ(results(s), expected) << size;
  }
}

TEST_P(Lengths, tiles_keep_their_extents_and_strides) {
  std::vector<double> values(15);
  for (std::size_t n = 0; n < values.size(); ++n) values[n] = n % 5 <= n / 5 ? 1 : 0;  // causal
  Scene whole = made();
  hide_by_one_block(whole, 3, 5);
  whole.inputs.blocks.tile_ids = whole.indices({1, 1, 1, 1}, {0});
  whole.inputs.blocks.tiles = whole.make(DType::boolean, {1, 3, 5});
  whole.buffers.back().set_values(values);
  const std::vector<std::byte> expected = results(whole);

  Scene s = made();
  hide_by_one_block(s, 40, 1000);
  s.inputs.blocks.tile_ids = s.indices({1, 1, 1, 1}, {0});
  s.inputs.blocks.tiles = s.make(DType::boolean, {1, 40, 1000}, {.padding = {0, 0, 3}});
  for (std::int64_t i = 0; i < 3; ++i) {
    for (std::int64_t j = 0; j < 5; ++j)
      s.buffers.back().set({0, i, j}, values[static_cast<std::size_t>(5 * i + j)]);
  }
  EXPECT_EQ(results(s), expected);
}

INSTANTIATE_TEST_SUITE_P(Kernels, Lengths,
                         testing::Combine(testing::Values(Pass::forward, Pass::backward),
                                          testing::Values("simd", "reference")),
                         [](const auto& tested) {
                           return std::string(std::get<0>(tested.param) == Pass::forward ? "forward_"
                                                                                         : "backward_") +
                                  std::get<1>(tested.param);
                         });

TEST(PackedLengths, bounds_beyond_all_rows_cost_no_more) {
  for (const auto make : {packed, packed_backward}) {
    for (const char* kernel : {"simd", "reference"}) {
      Scene s = make();
      s.options.kernel = kernel;
      s.inputs.packed.max_length_q = 6;
      s.inputs.packed.max_length_k = 9;
      const std::size_t bytes = s.workspace_bytes();
      const std::vector<std::byte> expected = results(s);
      s.inputs.packed.max_length_q = s.inputs.packed.max_length_k = (std::int64_t{1} << 31) - 1;
      EXPECT_EQ(s.workspace_bytes(), bytes);
      EXPECT_EQ(results(s), expected);
    }
  }
}

}  // namespace
}  // namespace tilewise::test::lengths_test
