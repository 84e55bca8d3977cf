#include <gtest/gtest.h>

#include "core/every_operation.h"

namespace tilewise::test {
namespace {

TEST(UnusedExtents, what_stands_past_the_rank_is_not_looked_at) {
  for (const auto make : every_operation()) {
    const std::size_t count = make().arguments.size();
    for (std::size_t n = 0; n < count; ++n) {
      const Operation made = make();
      Tensor& tensor = *made.arguments[n].tensor;
      for (auto dim = static_cast<std::size_t>(tensor.rank); dim < tensor.shape.size(); ++dim) {
        tensor.shape[dim] = 7;
        tensor.strides[dim] = -3;
      }
      SCOPED_TRACE(made.name + ", " + made.arguments[n].name);
      EXPECT_NO_THROW(made.run({.parallel_for = serial_parallel_for()}));
    }
  }
}

}  // namespace
}  // namespace tilewise::test
