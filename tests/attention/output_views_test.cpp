#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/validate_case.h"
#include "support/random.h"

// Outputs and gradients in odd places: backwards in memory, or as slices of one buffer. They hold what they
// hold elsewhere, and nothing around them is touched.
namespace tilewise::test::output_views_test {
namespace {

// Everything a backward call reads made random, so that no two results are alike.
Scene filled(Scene scene) {
  Random random(51);
  for (Buffer& buffer : scene.buffers) {
    if (buffer.dtype() == DType::f32) buffer.fill_random(random);
  }
  return scene;
}

std::vector<float> values_of(const Tensor& tensor) {
  std::vector<float> values;
  for (std::int64_t n = 0; n < tensor.size(); ++n) {
    std::int64_t rest = n, offset = 0;
    for (int dim = tensor.rank; dim-- > 0;) {
      offset += rest % tensor.extent(dim) * tensor.stride(dim);
      rest /= tensor.extent(dim);
    }
    values.push_back(static_cast<const float*>(tensor.data)[offset]);
  }
  return values;
}

std::vector<Tensor*> written(Scene& s) {
  if (s.pass == Pass::forward) return {&s.outputs.o, &s.outputs.lse};
  return {&s.gradients.dq,    &s.gradients.dk,     &s.gradients.dv,
          &s.gradients.dmask, &s.gradients.dsinks, &s.gradients.dlogit_scale};
}

void expect_the_same(Scene (*base)(), void (*move)(Scene&)) {
  for (const char* kernel : {"reference", "simd"}) {
    SCOPED_TRACE(kernel);
    std::vector<std::vector<float>> results[2];
    for (const bool moved : {false, true}) {
      Scene scene = filled(base());
      scene.options.kernel = kernel;
      if (moved) move(scene);
      ASSERT_NO_THROW(scene.provide_workspace());
      ASSERT_NO_THROW(scene.call());
      EXPECT_TRUE(scene.guards_intact());
      for (const Tensor* tensor : written(scene)) {
        if (tensor->given()) results[moved].push_back(values_of(*tensor));
      }
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

Shape shape_of(const Tensor& tensor) {
  return Shape(tensor.shape.begin(), tensor.shape.begin() + tensor.rank);
}

// Every dimension but the last of tensors whose rows must be contiguous, backwards.
void flip_all(Scene& s) {
  for (Tensor* tensor : written(s)) {
    if (!tensor->given()) continue;
    const bool rows = tensor != &s.outputs.lse && tensor != &s.gradients.dmask && tensor->rank > 1;
    Placement placement;
    for (int dim = 0; dim < tensor->rank - (rows ? 1 : 0); ++dim) placement.flipped.push_back(dim);
    *tensor = s.make(tensor->dtype, shape_of(*tensor), placement);
    EXPECT_LT(tensor->stride(0), 0);
  }
}

TEST(OutputViews, NegativeStridesInForward) {
  expect_the_same(dense_with_everything, flip_all);
  expect_the_same(packed, flip_all);
  expect_the_same(paged, flip_all);
}

TEST(OutputViews, NegativeStridesInBackward) {
  expect_the_same(backward, flip_all);
  expect_the_same(packed_backward, flip_all);
}

// The tensor as columns of `whole` from `first` on, the rows of that from the last to the first if so asked.
void put(Tensor& tensor, const Tensor& whole, std::int64_t first, bool backwards = false) {
  tensor.data = static_cast<float*>(whole.data) + first;
  for (std::size_t dim = 0; dim < static_cast<std::size_t>(tensor.rank); ++dim) {
    tensor.strides[dim] = whole.strides[dim];
  }
  if (!backwards) return;
  const int row = tensor.rank - 2;
  tensor.data = static_cast<float*>(tensor.data) + (tensor.extent(row) - 1) * tensor.stride(row);
  tensor.strides[static_cast<std::size_t>(row)] *= -1;
}

TEST(OutputViews, KeyAndValueGradientsAsColumnsOfOneBuffer) {
  expect_the_same(backward, [](Scene& s) {
    const Tensor whole = s.make(DType::f32, {2, 2, 5, 4 + 6});
    put(s.gradients.dk, whole, 0);
    put(s.gradients.dv, whole, 4);
  });
  expect_the_same(backward, [](Scene& s) {
    const Tensor whole = s.make(DType::f32, {2, 2, 5, 4 + 6});
    put(s.gradients.dk, whole, 6);
    put(s.gradients.dv, whole, 0, true);
  });
  expect_the_same(packed_backward, [](Scene& s) {
    const Tensor whole = s.make(DType::f32, {9, 2, 4 + 6});
    put(s.gradients.dk, whole, 0);
    put(s.gradients.dv, whole, 4);
  });
}

// [B, S, H * D + H * Dv]: the heads of k, then those of v.
TEST(OutputViews, KeyAndValueGradientsSideBySideInARow) {
  expect_the_same(backward, [](Scene& s) {
    const Tensor whole = s.make(DType::f32, {2, 5, 2 * 4 + 2 * 6});
    s.gradients.dk.data = whole.data;
    s.gradients.dk.strides = {100, 4, 20, 1};
    s.gradients.dv.data = static_cast<float*>(whole.data) + 8;
    s.gradients.dv.strides = {100, 6, 20, 1};
  });
}

TEST(OutputViews, OutputBesideItsQueryAndLseInThePadding) {
  expect_the_same(dense, [](Scene& s) {
    const Tensor whole = s.make(DType::f32, {2, 4, 3, 4 + 6 + 1});
    const std::vector<float> q = values_of(s.inputs.q);
    for (std::size_t row = 0; row < 24; ++row) {
      for (std::size_t column = 0; column < 4; ++column) {
        static_cast<float*>(whole.data)[row * 11 + column] = q[row * 4 + column];
      }
    }
    put(s.inputs.q, whole, 0);
    put(s.outputs.o, whole, 4);
    s.outputs.lse.data = static_cast<float*>(whole.data) + 10;
    s.outputs.lse.strides = {4 * 3 * 11, 3 * 11, 11};
  });
}

}  // namespace
}  // namespace tilewise::test::output_views_test
