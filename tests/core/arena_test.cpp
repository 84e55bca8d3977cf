#include "core/arena.h"

#include <gtest/gtest.h>

#include <limits>

#include "tilewise/error.h"

namespace tilewise::test::arena_test {
namespace {

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

TEST(Arena, pieces_begin_at_cache_lines_and_a_null_base_only_counts) {
  alignas(64) std::byte memory[512];
  Arena arena(memory), counting(nullptr);
  for (Arena* each : {&arena, &counting}) {
    EXPECT_EQ(each->used(), 0u);
    each->take<char>(1);
    EXPECT_EQ(each->used(), 1u);
    EXPECT_EQ(each->rounded(), 64u);
  }
  EXPECT_EQ(reinterpret_cast<std::byte*>(arena.take<double>(2, 3)), memory + 64);
  EXPECT_EQ(arena.used(), 64 + 48u);
  EXPECT_EQ(counting.take<double>(2, 3), nullptr);
  EXPECT_EQ(counting.used(), 64 + 48u);
}

TEST(Arena, no_elements_take_no_room) {
  Arena arena(nullptr);
  arena.take<float>(0);
  arena.take<float>(0, most);
  EXPECT_EQ(arena.used(), 0u);
}

TEST(Arena, what_does_not_fit_in_63_bits_is_an_error) {
  constexpr std::int64_t half = std::int64_t{1} << 62;
  EXPECT_THROW(Arena(nullptr).take<double>(std::int64_t{1} << 60), InvalidArgument);
  EXPECT_THROW(Arena(nullptr).take<std::byte>(half, 2), InvalidArgument);
  EXPECT_THROW(Arena(nullptr).take<std::byte>(half, 4), InvalidArgument);
  EXPECT_THROW(Arena(nullptr).take<std::byte>(std::int64_t{1} << 32, std::int64_t{1} << 32), InvalidArgument);
  EXPECT_THROW(Arena(nullptr).take<std::byte>(most), InvalidArgument);
  EXPECT_THROW(Arena(nullptr).take<std::byte>(-1), InvalidArgument);
  Arena arena(nullptr);
  arena.take<std::byte>(half);
  EXPECT_THROW(arena.take<std::byte>(half), InvalidArgument);
  EXPECT_EQ(arena.used(), std::size_t{1} << 62);
}

}  // namespace
}  // namespace tilewise::test::arena_test
