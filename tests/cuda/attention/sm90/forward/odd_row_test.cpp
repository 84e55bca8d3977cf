#include "cuda/attention/sm90/forward/odd_row.h"

#include <gtest/gtest.h>

#include <string>

namespace tilewise::cuda::wgmma::odd_row_test {
namespace {

// Rows of a mask somewhere, with more of the mask before and after them or not.
template <typename Body>
void for_each_row(const Body& body) {
  constexpr std::uintptr_t place = 4096;
  for (std::uintptr_t begin = 0; begin < 16; ++begin) {
    for (int bytes = 1; bytes <= 80; ++bytes) {
      for (std::uintptr_t before = 0; before <= 20; ++before) {
        for (std::uintptr_t behind = 0; behind <= 20; ++behind) {
          const std::uintptr_t address = place + begin;
          const std::uintptr_t end = address + static_cast<std::uintptr_t>(bytes);
          SCOPED_TRACE("at " + std::to_string(begin) + ", " + std::to_string(bytes) + " bytes, " +
                       std::to_string(before) + " before, " + std::to_string(behind) + " behind");
          body(address - before, end + behind, address, bytes);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(WgmmaOddRow, IsCopiedFromInsideTheMask) {
  for_each_row([](std::uintptr_t first, std::uintptr_t last, std::uintptr_t address, int bytes) {
    const OddRow row(first, last, address, bytes);
    ASSERT_EQ(row.place + static_cast<std::uintptr_t>(row.begin), address);
    ASSERT_EQ(row.end - row.begin, bytes);
    ASSERT_LE(row.from, row.to);
    ASSERT_EQ(row.from % 16, 0);
    ASSERT_EQ(row.to % 16, 0);
    if (row.from == row.to) return;
    ASSERT_GE(row.place + static_cast<std::uintptr_t>(row.from), first);
    ASSERT_LE(row.place + static_cast<std::uintptr_t>(row.to), last);
  });
}

TEST(WgmmaOddRow, LeavesLessThanAChunkAtEachEnd) {
  for_each_row([](std::uintptr_t first, std::uintptr_t last, std::uintptr_t address, int bytes) {
    const OddRow row(first, last, address, bytes);
    ASSERT_LE(row.from - row.begin, 16);
    ASSERT_LE(row.end - std::max(row.to, row.begin), 16);
    if (address - first >= 15 && last - address - static_cast<std::uintptr_t>(bytes) >= 15) {
      ASSERT_EQ(row.from, 0);
      ASSERT_GE(row.to, row.end);
    }
  });
}

}  // namespace
}  // namespace tilewise::cuda::wgmma::odd_row_test
