#include "ffn/validate.h"
#include "gemm/validate.h"
#include "layer/ffn_case.h"
#include "layer/gemm_case.h"
#include "layer/norm_case.h"
#include "layer/rope_case.h"
#include "norm/validate.h"
#include "rope/validate.h"

// What kernels on a GPU are told of memory they may read 16 bytes at a time.

namespace tilewise::test::alignment_test {
namespace {

// Each tensor in turn begins one element further on.
template <class Problem>
void expect_each_to_count(const Problem& aligned, const std::vector<Buffer Problem::*>& tensors,
                          bool (*is_aligned)(const Problem&)) {
  EXPECT_TRUE(is_aligned(aligned));
  for (std::size_t n = 0; n < tensors.size(); ++n) {
    SCOPED_TRACE("tensor " + std::to_string(n));
    Problem problem = aligned;
    Buffer& tensor = problem.*tensors[n];
    ASSERT_TRUE(tensor.given());
    tensor = Buffer(tensor.dtype(), tensor.shape(), {.lead = 1});
    EXPECT_FALSE(is_aligned(problem));
  }
}

// Memory of their own for the tensors.
template <class Problem>
void make(Problem& problem, const std::vector<Buffer Problem::*>& tensors, const Shape& shape = {8, 8}) {
  for (Buffer Problem::* tensor : tensors) problem.*tensor = Buffer(DType::f32, shape);
}

TEST(Alignment, OfAProductIsThatOfAllItsMatrices) {
  using gemm_case::Problem;
  Problem p;
  make<Problem>(p, {&Problem::a, &Problem::b, &Problem::gate, &Problem::residual, &Problem::out});
  p.options.activation = Activation::silu;
  expect_each_to_count<Problem>(
      p, {&Problem::a, &Problem::b, &Problem::gate, &Problem::residual, &Problem::out}, [](const Problem& q) {
        return checked_gemm(q.inputs(), q.options, {q.out.view()}, {}).problem.aligned;
      });
}

TEST(Alignment, OfANetworkIsThatOfAllItsMatrices) {
  using ffn_case::Problem;
  Problem p;
  make<Problem>(p, {&Problem::x, &Problem::up, &Problem::gate, &Problem::down, &Problem::residual,
                    &Problem::out, &Problem::up_product, &Problem::gate_product, &Problem::d_out});
  p.options.activation = Activation::silu;
  expect_each_to_count<Problem>(
      p,
      {&Problem::x, &Problem::up, &Problem::gate, &Problem::down, &Problem::residual, &Problem::out,
       &Problem::up_product, &Problem::gate_product},
      [](const Problem& q) {
        return checked_ffn_forward(q.inputs(), q.options, q.outputs(), {}).problem.aligned;
      });
  p.residual = {};
  p.make_gradients();
  expect_each_to_count<Problem>(
      p,
      {&Problem::x, &Problem::up, &Problem::gate, &Problem::down, &Problem::d_out, &Problem::dx,
       &Problem::d_up, &Problem::d_gate, &Problem::d_down, &Problem::up_product, &Problem::gate_product},
      [](const Problem& q) {
        return checked_ffn_backward(q.inputs(), q.options, q.gradients(), {}).problem.aligned;
      });
}

TEST(Alignment, OfANormIsThatOfAllItsRows) {
  using norm_case::Problem;
  Problem p;
  make<Problem>(p, {&Problem::x, &Problem::residual, &Problem::y, &Problem::sum, &Problem::dy,
                    &Problem::d_sum, &Problem::dx});
  p.rstd = Buffer(DType::f32, {8});
  expect_each_to_count<Problem>(
      p, {&Problem::x, &Problem::residual, &Problem::y, &Problem::sum}, [](const Problem& q) {
        return checked_norm_forward(q.inputs(), q.options, q.outputs(), {}).problem.aligned;
      });
  expect_each_to_count<Problem>(
      p, {&Problem::sum, &Problem::dy, &Problem::d_sum, &Problem::dx}, [](const Problem& q) {
        return checked_norm_backward(q.backward_inputs(), q.options, q.gradients(), {}).problem.aligned;
      });
}

TEST(Alignment, OfARotationIsThatOfAllItsTensors) {
  using rope_case::Problem;
  Problem p;
  make<Problem>(p,
                {&Problem::q, &Problem::k, &Problem::v, &Problem::out_q, &Problem::out_k, &Problem::k_cache,
                 &Problem::v_cache},
                {1, 2, 4, 8});
  make<Problem>(p, {&Problem::cos, &Problem::sin}, {4, 4});
  expect_each_to_count<Problem>(
      p,
      {&Problem::q, &Problem::k, &Problem::v, &Problem::out_q, &Problem::out_k, &Problem::k_cache,
       &Problem::v_cache, &Problem::cos, &Problem::sin},
      [](const Problem& q) { return checked_rope(q.inputs(), q.options, q.outputs(), {}).problem.aligned; });
}

TEST(Alignment, RowsCountAsWellAsTheFirstElement) {
  using norm_case::Problem;
  Problem p;
  make<Problem>(p, {&Problem::x, &Problem::y});
  const auto is_aligned = [&] {
    return checked_norm_forward(p.inputs(), p.options, p.outputs(), {}).problem.aligned;
  };
  EXPECT_TRUE(is_aligned());
  p.x = Buffer(DType::f32, {8, 8}, {.padding = {0, 4}});
  EXPECT_TRUE(is_aligned());
  p.x = Buffer(DType::f32, {8, 8}, {.padding = {0, 2}});
  EXPECT_FALSE(is_aligned());
}

}  // namespace
}  // namespace tilewise::test::alignment_test
