#include <gtest/gtest.h>

#include "layer/rope_case.h"
#include "rope/validate.h"
#include "support/garbage.h"

namespace tilewise::test::rope_indices_test {
namespace {

using namespace rope_case;

constexpr Device device{Device::Type::cuda, 0};

// As kernels on a device read them, where nobody has looked at the numbers. Here all is in the host's memory.
TEST(RopeIndices, RowsOfAnglesAndPlacesInTheCacheAreInside) {
  int inside = 0, outside = 0;
  for (std::uint64_t seed = 1; seed <= 600; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const Sizes n{random.between(1, 3), 2, 1, random.between(1, 9), 8, 4, 4};
    Problem p = random_problem(random, n, DType::f32);
    add_cache(p, random, n, random.chance(0.5));
    garble(random, p.positions, table_rows);
    garble(random, p.cache_starts, p.k_cache.extent(2));
    garble(random, p.page_table, p.k_cache.extent(0));
    RopeInputs in = p.inputs();
    RopeOutputs out = p.outputs();
    if (random.chance(0.5)) std::swap(in.cache_starts, in.cache_ends);
    for (Tensor* tensor : {&in.q, &in.k, &in.v, &in.cos, &in.sin, &in.positions, &in.cache_starts,
                           &in.cache_ends, &in.page_table, &out.q, &out.k, &out.k_cache, &out.v_cache}) {
      tensor->device = device;
    }
    const RopeCall call = checked_rope(in, p.options, out, {.device = device});
    for (std::int64_t b = 0; b < n.batch; ++b) {
      for (std::int64_t s = 0; s < n.length; ++s) {
        const std::int64_t row = call.angle_row(b, s);
        ASSERT_TRUE(row >= 0 && row < in.cos.extent(in.cos.rank - 2));
        const CacheSlot slot = call.cache_slot(b, s);
        const bool there =
            slot.b >= 0 && slot.b < p.k_cache.extent(0) && slot.s >= 0 && slot.s < p.k_cache.extent(2);
        ASSERT_TRUE(there || !slot.inside);
        ASSERT_EQ(call.cache_row(call.k_cache, b, 0, s) != nullptr, slot.inside);
        ++(slot.inside ? inside : outside);
      }
    }
  }
  EXPECT_GT(inside, 500);
  EXPECT_GT(outside, 500);
}

TEST(RopeIndices, PlacesInTheCacheBeyondTheTableOfAnglesAreRefused) {
  Random random(2);
  const Sizes n{1, 2, 1, 3, 8, 4, 4};
  Problem p = random_problem(random, n, DType::f32);
  add_cache(p, random, n, false);
  p.cos = random_buffer(random, DType::f32, {table_rows, 2});
  p.sin = random_buffer(random, DType::f32, {table_rows, 2});
  p.k_cache = Buffer(DType::f32, {1, 1, table_rows + 3, 8});
  p.v_cache = Buffer(DType::f32, {1, 1, table_rows + 3, 4});
  RopeInputs in = p.inputs();
  in.positions = {};  // with ends, the place in the cache is the position
  std::swap(in.cache_starts, in.cache_ends);
  const auto call = [&] {
    Context context = serial_context();
    with_workspace(rope_workspace(in, p.options, p.outputs(), context), [&](Workspace workspace) {
      context.workspace = workspace;
      rope(in, p.options, p.outputs(), context);
    });
  };
  p.cache_starts.fill(table_rows);
  EXPECT_NO_THROW(call());
  p.cache_starts.fill(table_rows + 1);
  EXPECT_EQ(thrown<InvalidArgument>(call), "cos: expected a table of at least 51 positions, got f32[50, 2]");
}

// Only then are places in the cache positions.
TEST(RopeIndices, EndsMeanTheSameAsStartsWhereAnglesAreOfTokensOrPositionsAreGiven) {
  const Sizes n{2, 2, 1, 3, 8, 8, 4};
  for (const bool of_tokens : {false, true}) {
    SCOPED_TRACE(of_tokens ? "angles of tokens" : "positions");
    SeededRandom random(11);
    Problem p = random_problem(random, n, DType::f32);
    add_cache(p, random, n, false);
    const Shape shape =
        of_tokens ? Shape{n.batch, n.length, 4} : Shape{4, 4};  // fewer rows than the cache has
    p.cos = random_buffer(random, DType::f32, shape);
    p.sin = random_buffer(random, DType::f32, shape);
    p.positions = {};
    if (!of_tokens) {
      p.positions = Buffer(DType::i32, {n.batch, n.length});
      p.positions.set_values(std::vector<double>{3, 0, 2, 1, 1, 0});
    }
    p.cache_starts.set_values(std::vector<double>{5, 2});
    Problem ends = p;
    for (const auto member : {&Problem::k_cache, &Problem::v_cache, &Problem::out_q}) {
      Buffer& own = ends.*member;
      own = Buffer(own.dtype(), own.shape());
      own.set_values((p.*member).values());
    }
    run(p);
    ends.cache_starts.set_values(std::vector<double>{8, 5});
    RopeInputs in = ends.inputs();
    std::swap(in.cache_starts, in.cache_ends);
    Context context = serial_context();
    with_workspace(rope_workspace(in, ends.options, ends.outputs(), context), [&](Workspace workspace) {
      context.workspace = workspace;
      rope(in, ends.options, ends.outputs(), context);
    });
    EXPECT_EQ(ends.out_q.values(), p.out_q.values());
    EXPECT_EQ(ends.k_cache.values(), p.k_cache.values());
    EXPECT_EQ(ends.v_cache.values(), p.v_cache.values());
  }
}

TEST(RopeIndices, EndsNeedACacheAndNoStarts) {
  Random random(3);
  const Sizes n{1, 2, 1, 3, 8, 4, 4};
  Problem p = random_problem(random, n, DType::f32);
  const Buffer ends(DType::i32, {1});
  RopeInputs in = p.inputs();
  in.cache_ends = ends.view();
  const auto check = [&] { checked_rope(in, p.options, p.outputs(), {}); };
  EXPECT_EQ(thrown<InvalidArgument>(check), "cache_ends: expected none without a cache, got i32[1]");
  add_cache(p, random, n, false);
  in = p.inputs();
  in.cache_ends = ends.view();
  EXPECT_EQ(thrown<InvalidArgument>(check), "cache_ends: expected none with cache_starts, got i32[1]");
}

TEST(RopeIndices, ACacheThatIsTooSmallWithoutStartsIsRefusedOnDevicesToo) {
  Random random(1);
  const Sizes n{1, 2, 1, 6, 8, 4, 4};
  Problem p = random_problem(random, n, DType::f32);
  add_cache(p, random, n, false);
  p.k_cache = Buffer(DType::f32, {1, 1, 5, 8});
  p.v_cache = Buffer(DType::f32, {1, 1, 5, 4});
  RopeInputs in = p.inputs();
  RopeOutputs out = p.outputs();
  in.cache_starts = {};
  const auto message = [&](const Context& context) -> std::string {
    try {
      checked_rope(in, p.options, out, context);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "none";
  };
  const std::string expected =
      "k_cache: expected room for 6 tokens from position 0, got a cache of 5 tokens for batch entry 0";
  EXPECT_EQ(message({}), expected);
  for (Tensor* tensor :
       {&in.q, &in.k, &in.v, &in.cos, &in.sin, &in.positions, &out.q, &out.k, &out.k_cache, &out.v_cache}) {
    tensor->device = device;
  }
  EXPECT_EQ(message({.device = device}), expected);
}

}  // namespace
}  // namespace tilewise::test::rope_indices_test
