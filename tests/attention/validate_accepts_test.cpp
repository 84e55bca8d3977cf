#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <ostream>
#include <string>

#include "attention/validate.h"
#include "attention/validate_case.h"

// Sound calls that stand next to the refused ones.
namespace tilewise::test::validate_accepts_test {
namespace {

struct Sound {
  const char* name;
  Scene (*base)();
  void (*change)(Scene&);
};

std::ostream& operator<<(std::ostream& out, const Sound& sound) { return out << sound.name; }

class ValidateAccepts : public testing::TestWithParam<Sound> {};

TEST_P(ValidateAccepts, AndWritesOnlyWhereItMay) {
  Scene scene = GetParam().base();
  GetParam().change(scene);
  ASSERT_NO_THROW(scene.provide_workspace());
  EXPECT_NO_THROW(scene.call());
  EXPECT_TRUE(scene.guards_intact());
}

// All tensors anew, with these extents.
void resize(Scene& s, std::int64_t b, std::int64_t hq, std::int64_t hkv, std::int64_t sq, std::int64_t sk,
            std::int64_t d = 4, std::int64_t dv = 6) {
  s.inputs.q = s.zeros(DType::f32, {b, hq, sq, d});
  s.inputs.k = s.zeros(DType::f32, {b, hkv, sk, d});
  s.inputs.v = s.zeros(DType::f32, {b, hkv, sk, dv});
  s.outputs.o = s.make(DType::f32, {b, hq, sq, dv});
  s.outputs.lse = s.make(DType::f32, {b, hq, sq});
  if (s.pass == Pass::backward) s = backward_of(std::move(s));
}

Scene plain_backward() { return backward_of(dense()); }

const Sound sound[] = {
    {"NothingChanged", dense, [](Scene&) {}},
    {"NoLse", dense, [](Scene& s) { s.outputs.lse = {}; }},
    {"BatchZeroWithNullData", dense, [](Scene& s) { resize(s, 0, 4, 2, 3, 5); }},
    {"QueriesZeroWithNullData", dense, [](Scene& s) { resize(s, 2, 4, 2, 0, 5); }},
    {"KeysZeroWithNullData", dense, [](Scene& s) { resize(s, 2, 4, 2, 3, 0); }},
    {"NoHeadsAtAll", dense, [](Scene& s) { resize(s, 2, 0, 0, 3, 5); }},
    {"NoQueryHeads", dense, [](Scene& s) { resize(s, 2, 0, 2, 3, 5); }},
    {"BackwardBatchZero", plain_backward, [](Scene& s) { resize(s, 0, 4, 2, 3, 5); }},
    {"BackwardQueriesZero", plain_backward, [](Scene& s) { resize(s, 2, 4, 2, 0, 5); }},
    {"BackwardKeysZero", plain_backward, [](Scene& s) { resize(s, 2, 4, 2, 3, 0); }},
    {"BackwardNoHeads", plain_backward, [](Scene& s) { resize(s, 2, 0, 0, 3, 5); }},
    {"MultiQuery", dense, [](Scene& s) { resize(s, 2, 4, 1, 3, 5); }},
    {"LargestHeadDims", dense, [](Scene& s) { resize(s, 1, 1, 1, 2, 3, 4096, 4096); }},
    {"HeadDimOneWithAnyLastStride", dense,
     [](Scene& s) {
       resize(s, 2, 4, 2, 3, 5, 1, 1);
       s.inputs.q.strides[3] = 17;
       s.inputs.k.strides[3] = 0;
       s.outputs.o.strides[3] = -4;
     }},
    {"ScaleZero", dense, [](Scene& s) { s.options.scale = 0.0f; }},
    {"ScaleNegative", dense, [](Scene& s) { s.options.scale = -3.0f; }},
    {"SoftcapSmallest", dense, [](Scene& s) { s.options.softcap = std::numeric_limits<float>::min(); }},
    {"DropoutJustUnderOne", dense,
     [](Scene& s) { s.options.dropout.probability = std::nextafter(1.0f, 0.0f); }},
    {"WindowZero", dense, [](Scene& s) { s.options.window = {.left = 0, .right = 0}; }},
    {"WindowLargest", dense,
     [](Scene& s) {
       constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
       s.options.window = {.left = most, .right = most};
       s.options.alignment = Alignment::bottom_right;
     }},
    {"KernelByName", dense, [](Scene& s) { s.options.kernel = "reference"; }},
    {"MaskScalarLike", dense, [](Scene& s) { s.inputs.mask = s.zeros(DType::f32, {1}); }},
    {"MaskPerKey", dense, [](Scene& s) { s.inputs.mask = s.zeros(DType::boolean, {5}); }},
    {"MaskPerHead", dense, [](Scene& s) { s.inputs.mask = s.zeros(DType::f32, {4, 1, 1}); }},
    {"MaskExpanded", dense,
     [](Scene& s) { s.inputs.mask = s.make(DType::boolean, {2, 4, 3, 5}, {.expanded = {0, 1}}); }},
    {"MaskTransposed", dense,
     [](Scene& s) { s.inputs.mask = s.make(DType::boolean, {3, 5}, {.order = {1, 0}}); }},
    {"MaskF32WithHalf", dense,
     [](Scene& s) {
       s.inputs.q = s.zeros(DType::f16, {2, 4, 3, 4});
       s.inputs.k = s.zeros(DType::f16, {2, 2, 5, 4});
       s.inputs.v = s.zeros(DType::f16, {2, 2, 5, 6});
       s.outputs.o = s.make(DType::f16, {2, 4, 3, 6});
       s.inputs.mask = s.zeros(DType::f32, {3, 5});
     }},
    {"SlopesPerEntry", dense, [](Scene& s) { s.inputs.alibi_slopes = s.zeros(DType::f32, {2, 4}); }},
    {"LengthsAtBothEnds", dense, [](Scene& s) { s.inputs.key_lengths = s.indices({2}, {0, 5}); }},
    {"InputsThatOverlap", dense,
     [](Scene& s) {
       s.inputs.k = s.inputs.q;
       s.inputs.v = s.inputs.q;
       s.outputs.o = s.make(DType::f32, {2, 4, 3, 4});
     }},
    {"InputsExpanded", dense,
     [](Scene& s) { s.inputs.k = s.make(DType::f32, {2, 2, 5, 4}, {.expanded = {0, 1}}); }},
    {"OutputsStrided", dense,
     [](Scene& s) {
       s.outputs.o = s.make(DType::f32, {2, 4, 3, 6}, {.order = {0, 2, 1, 3}, .padding = {0, 1, 0, 5}});
       s.outputs.lse = s.make(DType::f32, {2, 4, 3}, {.order = {2, 0, 1}});
     }},
    {"OutputBesideTheInputs", dense,
     [](Scene& s) {
       const Shape shapes[] = {{2, 4, 3, 4}, {2, 4, 3, 4}, {2, 4, 3, 4}, {2, 4, 3, 4}};
       auto parts = Buffer::side_by_side(DType::f32, shapes);
       for (std::size_t n = 0; n < 3; ++n) parts[n].fill(0);
       s.inputs.q = parts[0].view();
       s.inputs.k = parts[1].view();
       s.inputs.v = parts[2].view();
       s.outputs.o = parts[3].view();
       s.buffers.insert(s.buffers.end(), parts.begin(), parts.end());
     }},
    {"GradientsSideBySide", plain_backward,
     [](Scene& s) {
       const Shape shapes[] = {{2, 4, 5, 4}, {2, 2, 5, 4}, {2, 2, 5, 4}};
       resize(s, 2, 4, 2, 5, 5, 4, 4);
       const auto parts = Buffer::side_by_side(DType::f32, shapes);
       s.gradients.dq = parts[0].view();
       s.gradients.dk = parts[1].view();
       s.gradients.dv = parts[2].view();
       s.buffers.insert(s.buffers.end(), parts.begin(), parts.end());
     }},
    {"NoGradientAsked", backward,
     [](Scene& s) {
       for (Tensor* output : {&s.gradients.dq, &s.gradients.dk, &s.gradients.dv, &s.gradients.dmask,
                              &s.gradients.dsinks, &s.gradients.dlogit_scale, &s.gradients.d_lse}) {
         *output = {};
       }
     }},
    {"DmaskInF32", plain_backward,
     [](Scene& s) {
       for (Tensor* tensor : {&s.inputs.q, &s.inputs.k, &s.inputs.v, &s.outputs.o}) {
         *tensor = s.zeros(DType::bf16, Shape(tensor->shape.begin(), tensor->shape.begin() + 4));
       }
       s = backward_of(std::move(s));
       s.inputs.mask = s.zeros(DType::bf16, {3, 1});
       s.gradients.dmask = s.make(DType::f32, {3, 1});
     }},
    {"PackedWithoutSequences", packed,
     [](Scene& s) {
       s.inputs.packed.cumulative_q = s.indices({1}, {0});
       s.inputs.packed.cumulative_k = s.indices({1}, {0});
     }},
    {"PackedEmptySequences", packed,
     [](Scene& s) { s.inputs.packed.cumulative_k = s.indices({3}, {0, 0, 4}); }},
    {"PackedLooseMaximum", packed, [](Scene& s) { s.inputs.packed.max_length_k = 1000; }},
    {"PackedEmpty", packed,
     [](Scene& s) {
       s.inputs.q = s.make(DType::f32, {0, 4, 4});
       s.inputs.k = s.make(DType::f32, {0, 2, 4});
       s.inputs.v = s.make(DType::f32, {0, 2, 6});
       s.inputs.packed = {.cumulative_q = s.indices({2}, {0, 0}), .cumulative_k = s.indices({2}, {0, 0})};
       s.outputs.o = s.make(DType::f32, {0, 4, 6});
       s.outputs.lse = s.make(DType::f32, {4, 0});
     }},
    {"PagedEmptyEntries", paged, [](Scene& s) { s.inputs.key_lengths = s.indices({2}, {0, 0}); }},
    {"PagedWithoutPages", paged,
     [](Scene& s) {
       s.inputs.page_table = s.make(DType::i32, {2, 0});
       s.inputs.key_lengths = s.indices({2}, {0, 0});
     }},
    {"PagedWithMask", paged, [](Scene& s) { s.inputs.mask = s.zeros(DType::f32, {2, 1, 1, 6}); }},
    {"BlocksPerEntryAndHead", dense,
     [](Scene& s) {
       s.inputs.blocks.block_q = 4;
       s.inputs.blocks.block_k = 8;
       s.inputs.blocks.counts = s.zeros(DType::i32, {2, 4, 1});
       s.inputs.blocks.indices = s.make(DType::i32, {2, 4, 1, 1});
     }},
    {"BlocksInAnyOrderAndAgainInAnotherRow", dense,
     [](Scene& s) {
       s.inputs.blocks = {.block_q = 2,
                          .block_k = 1,
                          .counts = s.indices({1, 1, 2}, {3, 3}),
                          .indices = s.indices({1, 1, 2, 4}, {4, 0, 2, 2, 2, 4, 0, 0}),
                          .full_counts = s.indices({2, 1, 2}, {1, 2, 0, 1}),
                          .full_indices = s.indices({2, 1, 2, 2}, {3, 3, 3, 1, 0, 0, 1, 1})};
     }},
    {"BlocksWithoutSlots", dense,
     [](Scene& s) {
       s.inputs.blocks.counts = s.zeros(DType::i32, {1, 1, 1});
       s.inputs.blocks.indices = s.make(DType::i32, {1, 1, 1, 0});
     }},
};

INSTANTIATE_TEST_SUITE_P(Calls, ValidateAccepts, testing::ValuesIn(sound),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST(ValidateDevice, CudaMemoryAndACpuKernelAreUnsupported) {
  Scene scene = dense();
  scene.provide_workspace();
  scene.options.kernel = "reference";
  const Device cuda{Device::Type::cuda, 0};
  scene.context.device = cuda;
  for (Tensor* tensor :
       {&scene.inputs.q, &scene.inputs.k, &scene.inputs.v, &scene.outputs.o, &scene.outputs.lse}) {
    tensor->device = cuda;
  }
  const std::vector<std::byte> before = scene.memory();
  const std::string message = message_of<Unsupported>([&] { scene.call(); });
  EXPECT_TRUE(scene.memory() == before) << "something was written";
  EXPECT_NE(message.find("on cuda:0"), std::string::npos) << message;
  EXPECT_NE(message.find("reference: runs on the CPU only"), std::string::npos) << message;
}

TEST(ValidateForward, SaysWhetherAMaskCanBeCopiedInBoxes) {
  Scene scene = dense();
  resize(scene, 2, 4, 2, 3, 16);
  const auto aligned = [&](const Tensor& mask) {
    scene.inputs.mask = mask;
    return checked_forward(scene.inputs, scene.options, scene.outputs, scene.context).problem.aligned_mask;
  };
  EXPECT_TRUE(aligned({}));
  EXPECT_TRUE(aligned(scene.make(DType::f32, {3, 16})));
  EXPECT_TRUE(aligned(scene.make(DType::boolean, {2, 1, 1, 16})));
  EXPECT_TRUE(aligned(scene.make(DType::boolean, {3, 16}, {.padding = {0, 16}})));
  EXPECT_FALSE(aligned(scene.make(DType::boolean, {3, 16}, {.padding = {0, 8}})));
  EXPECT_FALSE(aligned(scene.make(DType::boolean, {3, 16}, {.lead = 1})));
  EXPECT_FALSE(aligned(scene.make(DType::f32, {3, 16}, {.order = {1, 0}})));
  EXPECT_FALSE(aligned(scene.make(DType::f32, {4, 3, 1})));
}

TEST(ValidateForward, SaysWhetherAMaskIsReadInRows) {
  Scene scene = dense();
  resize(scene, 2, 4, 2, 3, 16);
  const auto in_rows = [&](const Tensor& mask) {
    scene.inputs.mask = mask;
    return checked_forward(scene.inputs, scene.options, scene.outputs, scene.context).problem.mask_in_rows;
  };
  EXPECT_TRUE(in_rows({}));
  EXPECT_TRUE(in_rows(scene.make(DType::f32, {3, 16})));
  EXPECT_TRUE(in_rows(scene.make(DType::f32, {})));
  EXPECT_TRUE(in_rows(scene.make(DType::f32, {3, 1}, {.step = 2})));
  EXPECT_TRUE(in_rows(scene.make(DType::f32, {3, 16}, {.expanded = {1}})));
  EXPECT_FALSE(in_rows(scene.make(DType::f32, {3, 16}, {.step = 2})));
  EXPECT_FALSE(in_rows(scene.make(DType::f32, {3, 16}, {.order = {1, 0}})));
  EXPECT_FALSE(in_rows(scene.make(DType::f32, {3, 16}, {.flipped = {1}})));
  resize(scene, 2, 4, 2, 3, 1);
  EXPECT_TRUE(in_rows(scene.make(DType::f32, {3, 1}, {.step = 2})));
}

TEST(ValidateForward, SaysWhetherValuesRepeat) {
  Scene scene = dense();
  const auto repeated = [&] {
    return checked_forward(scene.inputs, scene.options, scene.outputs, scene.context).problem.repeated_values;
  };
  EXPECT_FALSE(repeated());
  scene.inputs.v.strides[2] = 0;
  EXPECT_TRUE(repeated());
  resize(scene, 2, 4, 2, 3, 1);
  scene.inputs.v.strides[2] = 0;
  EXPECT_FALSE(repeated());
}

TEST(ValidateForward, SaysWhetherAMaskIsOfF32) {
  Scene scene = dense();
  const auto of_f32 = [&](const Tensor& mask) {
    scene.inputs.mask = mask;
    return checked_forward(scene.inputs, scene.options, scene.outputs, scene.context).problem.f32_mask;
  };
  EXPECT_FALSE(of_f32({}));
  EXPECT_FALSE(of_f32(scene.make(DType::boolean, {3, 5})));
  EXPECT_TRUE(of_f32(scene.make(DType::f32, {3, 5})));
}

TEST(ValidateForward, SaysWhetherRowsMayBeRead16BytesAtATime) {
  Scene scene = dense();
  resize(scene, 2, 4, 2, 3, 5, 8, 4);
  const auto aligned = [&] {
    return checked_forward(scene.inputs, scene.options, scene.outputs, scene.context).problem.aligned;
  };
  EXPECT_TRUE(aligned());
  for (Tensor* tensor : {&scene.inputs.q, &scene.inputs.k, &scene.inputs.v}) {
    const Tensor before = *tensor;
    const Shape shape(before.shape.begin(), before.shape.begin() + before.rank);
    for (const Placement& placement : {Placement{.lead = 1}, Placement{.padding = {0, 0, 0, 2}}}) {
      *tensor = scene.make(DType::f32, shape, placement);
      EXPECT_FALSE(aligned());
    }
    *tensor = before;
  }
  EXPECT_TRUE(aligned());
}

TEST(ValidateBackward, SaysHowRowsLieInMemory) {
  Scene scene = dense();
  resize(scene, 2, 4, 2, 3, 5, 8, 4);
  scene = backward_of(std::move(scene));
  const auto details = [&] {
    return checked_backward(scene.inputs, scene.options, scene.gradients, scene.context).problem.backward;
  };
  EXPECT_TRUE(details().aligned_rows && details().ordered_rows && !details().repeated_keys);
  EXPECT_EQ(details().elements, 2 * 2 * 5 * 4);
  AttentionGradients& gradients = scene.gradients;
  for (Tensor* tensor : {&scene.inputs.q, &scene.inputs.k, &scene.inputs.v, &gradients.o, &gradients.d_o,
                         &gradients.dq, &gradients.dk, &gradients.dv}) {
    const Tensor before = *tensor;
    const Shape shape(before.shape.begin(), before.shape.begin() + before.rank);
    for (const Placement& placement : {Placement{.lead = 1}, Placement{.padding = {0, 0, 0, 2}}}) {
      *tensor = scene.make(DType::f32, shape, placement);
      EXPECT_FALSE(details().aligned_rows);
    }
    *tensor = before;
  }
  const Tensor d_o = gradients.d_o;
  for (const int dimension : {0, 1, 2}) {
    gradients.d_o = scene.make(DType::f32, {2, 4, 3, 4}, {.flipped = {dimension}});
    EXPECT_FALSE(details().ordered_rows);
  }
  gradients.d_o = d_o;
  for (Tensor* tensor : {&scene.inputs.k, &scene.inputs.v}) {
    const Tensor before = *tensor;
    tensor->strides[2] = 0;
    EXPECT_TRUE(details().repeated_keys);
    *tensor = before;
  }
}

TEST(ValidateForward, SaysHowManyKeysAQueryMaySee) {
  const auto most_keys = [](const Scene& scene, const AttentionOptions& options) {
    return checked_forward(scene.inputs, options, scene.outputs, scene.context).problem.most_keys;
  };
  const auto band = [](std::optional<std::int64_t> left, std::optional<std::int64_t> right,
                       Alignment alignment = Alignment::top_left) {
    AttentionOptions options;
    options.window = {.left = left, .right = right};
    options.alignment = alignment;
    return options;
  };
  for (const std::int64_t queries : {1, 3, 40}) {
    for (const std::int64_t keys : {1, 5, 16}) {
      Scene scene = dense();
      resize(scene, 2, 4, 2, queries, keys);
      for (const Alignment alignment : {Alignment::top_left, Alignment::bottom_right}) {
        for (const std::optional<std::int64_t> left : {std::optional<std::int64_t>{}, {0}, {2}, {30}}) {
          for (const std::optional<std::int64_t> right : {std::optional<std::int64_t>{}, {0}, {3}, {30}}) {
            std::int64_t expected = 0;  // counted
            const std::int64_t offset = alignment == Alignment::bottom_right ? keys - queries : 0;
            for (std::int64_t i = 0; i < queries; ++i) {
              std::int64_t seen = 0;
              for (std::int64_t j = 0; j < keys; ++j) {
                const std::int64_t ahead = j - i - offset;
                seen += (!left || ahead >= -*left) && (!right || ahead <= *right) ? 1 : 0;
              }
              expected = std::max(expected, seen);
            }
            EXPECT_EQ(most_keys(scene, band(left, right, alignment)), expected)
                << queries << " queries, " << keys << " keys, left " << left.value_or(-1) << ", right "
                << right.value_or(-1) << (offset != 0 ? ", bottom right" : "");
          }
        }
      }
    }
  }
  // Of sequences of any lengths, the last query may stand anywhere.
  EXPECT_EQ(most_keys(packed(), band(0, {}, Alignment::bottom_right)), 4);
  EXPECT_EQ(most_keys(packed(), band(0, 1, Alignment::bottom_right)), 2);
}

TEST(ValidateBackward, PagedKeysAreUnsupported) {
  Scene scene = backward_of(paged());
  const std::vector<std::byte> before = scene.memory();
  for (const std::string& message : {message_of<Unsupported>([&] { scene.call(); }),
                                     message_of<Unsupported>([&] { scene.workspace_bytes(); })}) {
    EXPECT_NE(message.find("backward f32 paged B2 Hq4 Hkv2 Sq3 Sk6 D4 Dv6"), std::string::npos) << message;
    EXPECT_NE(message.find("reference: paged keys have no backward"), std::string::npos) << message;
    EXPECT_NE(message.find("simd: "), std::string::npos) << message;
  }
  EXPECT_TRUE(scene.memory() == before) << "something was written";
}

}  // namespace
}  // namespace tilewise::test::validate_accepts_test
