#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "cuda/runtime/device.h"
#include "support/buffer.h"
#include "support/device.h"
#include "tilewise/attention.h"

// Pieces of a whole: which kernel takes them, what the others say, and positions. That joined results are
// right is for tilewise_property --cuda --pieces.
namespace tilewise::test::cuda_pieces_test {
namespace {

constexpr Device device{Device::Type::cuda, 0};
constexpr std::int64_t length = 512;

// The second half of a whole's queries with the first half of its keys: none is hidden by causal.
struct Scene {
  Buffer rows{DType::bf16, {1, 2, length, 64}};
  Buffer o{DType::f32, {1, 2, length, 64}}, dk{DType::f32, {1, 2, length, 64}},
      dv{DType::f32, {1, 2, length, 64}};
  Buffer statistics{DType::f32, {1, 2, length}};
  Buffer wide_statistics{DType::f64, {1, 2, length}};
  Buffer slopes{DType::f32, {2}};
  AttentionInputs inputs{.q = rows.view(), .k = rows.view(), .v = rows.view()};
  AttentionOptions options{
      .causal = true,
      .piece = Piece{
          .q_offset = length, .k_offset = 0, .length_q = 2 * length, .length_k = 2 * length, .heads_q = 2}};

  Explanation forward(const Buffer& lse) const {
    return explain_attention_forward(on_device(inputs, device), options,
                                     on_device(AttentionOutputs{o.view(), lse.view()}, device),
                                     {.device = device});
  }
  Explanation backward() const {
    const AttentionGradients gradients{.lse = statistics.view(),
                                       .d_o = rows.view(),
                                       .delta = statistics.view(),
                                       .dq = o.view(),
                                       .dk = dk.view(),
                                       .dv = dv.view()};
    return explain_attention_backward(on_device(inputs, device), options, on_device(gradients, device),
                                      {.device = device});
  }
};

std::string chosen(const Explanation& explanation) {
  for (const Explanation::Entry& entry : explanation.entries) {
    if (entry.verdict == Explanation::Verdict::chosen) return entry.kernel;
  }
  return "none";
}
std::string reason(const Explanation& explanation, const std::string& kernel) {
  for (const Explanation::Entry& entry : explanation.entries) {
    if (entry.kernel == kernel) return entry.reason;
  }
  return "no such kernel";
}

class CudaPieces : public testing::Test {
 protected:
  void SetUp() override {
    if (const CudaPresence cuda = cuda_presence(); !cuda.present) GTEST_SKIP() << cuda.reason;
  }
};

TEST_F(CudaPieces, TensorCoresTakeCausalPiecesOf16Bits) {
  if (cuda::device_properties(0).compute_capability < 80) GTEST_SKIP() << "needs compute capability 8.0";
  const Scene scene;
  for (const std::string& kernel : {chosen(scene.forward(scene.statistics)), chosen(scene.backward())}) {
    EXPECT_TRUE(kernel == "mma" || kernel == "wgmma") << kernel;
  }
}

TEST_F(CudaPieces, FusedTakesWhatTensorCoresSayTheyLack) {
  Scene scene;
  const Explanation wide = scene.forward(scene.wide_statistics);
  EXPECT_EQ(chosen(wide), "fused");
  EXPECT_EQ(reason(wide, "mma"), "needs lse in f32, got f64");
  scene.inputs.alibi_slopes = scene.slopes.view();
  const Explanation placed = scene.forward(scene.statistics);
  EXPECT_EQ(chosen(placed), "fused");
  EXPECT_NE(reason(placed, "wgmma").find("does not support ALiBi"), std::string::npos);
  scene.options.piece->q_offset = 0;  // its own distances, but lse and delta of more keys than it has
  scene.options.piece->length_q = scene.options.piece->length_k;
  const Explanation share = scene.backward();
  EXPECT_EQ(chosen(share), "fused");
  EXPECT_NE(reason(share, "mma").find("ALiBi or an additive mask"), std::string::npos);
}

// Entry 1 of 2, heads 2 and 3 of 4, some queries and keys in steps: with ALiBi and dropout every number of
// the place counts, and another dropout mask is off by the size of the values.
struct Placed {
  explicit Placed(std::int64_t step) {
    options.causal = true;
    options.dropout = {.probability = 0.4f, .seed = 3, .offset = 5};
    options.piece = Piece{.q_offset = 9,
                          .k_offset = 6,
                          .step = step,
                          .length_q = 9 + 40 * step,
                          .length_k = 6 + 70 * step,
                          .batch_offset = 1,
                          .head_offset = 2,
                          .heads_q = 4};
    Random rng(static_cast<std::uint64_t>(step));
    for (Buffer* buffer : {&q, &k, &v, &d_o, &slopes, &delta}) buffer->fill_random(rng);
    inputs = {.q = q.view(), .k = k.view(), .v = v.view(), .alibi_slopes = slopes.view()};
  }

  // o, lse and all gradients, the last ones with the lse that the forward gave.
  std::vector<Buffer> run(std::string_view kernel) {
    options.kernel = kernel;
    const bool on_cuda = kernel != "reference";
    std::vector<Buffer> found = {Buffer(DType::f32, q.shape()), Buffer(DType::f64, {1, 2, 40}),
                                 Buffer(DType::f32, q.shape()), Buffer(DType::f32, k.shape()),
                                 Buffer(DType::f32, v.shape())};
    (on_cuda ? run_forward_on_cuda : run_forward)(inputs, options, {found[0].view(), found[1].view()}, {});
    (on_cuda ? run_backward_on_cuda : run_backward)(inputs, options,
                                                    {.lse = found[1].view(),
                                                     .d_o = d_o.view(),
                                                     .delta = delta.view(),
                                                     .dq = found[2].view(),
                                                     .dk = found[3].view(),
                                                     .dv = found[4].view()},
                                                    {});
    return found;
  }

  Buffer q{DType::f32, {1, 2, 40, 16}}, k{DType::f32, {1, 1, 70, 16}}, v{DType::f32, {1, 1, 70, 16}};
  Buffer d_o{DType::f32, {1, 2, 40, 16}}, slopes{DType::f32, {2}}, delta{DType::f64, {1, 2, 40}};
  AttentionInputs inputs;
  AttentionOptions options;
};

TEST_F(CudaPieces, PositionsAreThoseOfTheWhole) {
  for (const std::int64_t step : {1, 3}) {
    Placed placed(step);
    const std::vector<Buffer> expected = placed.run("reference"), found = placed.run("fused");
    for (std::size_t n = 0; n < found.size(); ++n) {
      const std::vector<double> truth = expected[n].values(), got = found[n].values();
      for (std::size_t at = 0; at < got.size(); ++at) {
        ASSERT_NEAR(got[at], truth[at], 1e-4) << "step " << step << ", result " << n << ", element " << at;
      }
    }
  }
}

}  // namespace
}  // namespace tilewise::test::cuda_pieces_test
