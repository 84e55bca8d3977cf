#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "attention/validate_case.h"

// Outputs, gradients, overlaps and the workspace.
namespace tilewise::test::validate_outputs_test {
namespace {

class ValidateOutputs : public testing::TestWithParam<Refusal> {};

TEST_P(ValidateOutputs, RefusesWithTheArgumentTheExpectedAndTheGivenAndWritesNothing) {
  expect_refusal(GetParam());
}

const auto name_of = [](const auto& tested) { return std::string(tested.param.name); };

const Refusal outputs[] = {
    {"OMissing", dense, [](Scene& s) { s.outputs.o = {}; }, "o", "[B, Hq, Sq, Dv] = [2, 4, 3, 6]", ""},
    {"OShape", dense, [](Scene& s) { s.outputs.o = s.make(DType::f32, {2, 4, 3, 4}); }, "o",
     "[B, Hq, Sq, Dv] = [2, 4, 3, 6]", "f32[2, 4, 3, 4]"},
    {"ORank", dense, [](Scene& s) { s.outputs.o = s.make(DType::f32, {8, 3, 6}); }, "o",
     "[B, Hq, Sq, Dv] = [2, 4, 3, 6]", "f32[8, 3, 6]"},
    {"OType", dense, [](Scene& s) { s.outputs.o = s.make(DType::f16, {2, 4, 3, 6}); }, "o", "f32", "f16"},
    {"OLastStride", dense, [](Scene& s) { s.outputs.o.strides = {144, 36, 12, 2}; }, "o",
     "a contiguous last dimension", "stride 2"},
    {"ONull", dense, [](Scene& s) { s.outputs.o.data = nullptr; }, "o", "data",
     "null data with f32[2, 4, 3, 6]"},
    {"ODevice", dense, [](Scene& s) { s.outputs.o.device.type = Device::Type::cuda; }, "o", "memory on cpu",
     "cuda:0"},
    {"OExpanded", dense, [](Scene& s) { s.outputs.o.strides[1] = 0; }, "o", "do not overlap",
     "strides that overlap"},
    {"OInterleaved", dense, [](Scene& s) { s.outputs.o.strides[2] = 3; }, "o", "do not overlap",
     "strides that overlap"},
    {"LseShape", dense, [](Scene& s) { s.outputs.lse = s.make(DType::f32, {2, 4, 3, 1}); }, "lse",
     "[B, Hq, Sq] = [2, 4, 3]", "f32[2, 4, 3, 1]"},
    {"LseType", dense, [](Scene& s) { s.outputs.lse = s.make(DType::f64, {2, 4, 3}); }, "lse", "f32", "f64"},
    {"LseOfHalf", dense,
     [](Scene& s) {
       s.inputs.q = s.zeros(DType::f16, {2, 4, 3, 4});
       s.inputs.k = s.zeros(DType::f16, {2, 2, 5, 4});
       s.inputs.v = s.zeros(DType::f16, {2, 2, 5, 6});
       s.outputs.o = s.make(DType::f16, {2, 4, 3, 6});
       s.outputs.lse = s.make(DType::f16, {2, 4, 3});
     },
     "lse", "f32", "f16"},
    {"LseNull", dense, [](Scene& s) { s.outputs.lse.data = nullptr; }, "lse", "data",
     "null data with f32[2, 4, 3]"},
    {"LseExpanded", dense, [](Scene& s) { s.outputs.lse.strides[0] = 0; }, "lse", "do not overlap",
     "strides that overlap"},
    {"PackedOShape", packed, [](Scene& s) { s.outputs.o = s.make(DType::f32, {5, 4, 6}); }, "o",
     "[total_q, Hq, Dv] = [6, 4, 6]", "f32[5, 4, 6]"},
    {"PackedLseShape", packed, [](Scene& s) { s.outputs.lse = s.make(DType::f32, {6, 4}); }, "lse",
     "[Hq, total_q] = [4, 6]", "f32[6, 4]"},
};
INSTANTIATE_TEST_SUITE_P(Forward, ValidateOutputs, testing::ValuesIn(outputs), name_of);

const Refusal gradients[] = {
    {"OMissing", backward, [](Scene& s) { s.gradients.o = {}; }, "o", "[B, Hq, Sq, Dv] = [2, 4, 3, 6]", ""},
    {"OType", backward, [](Scene& s) { s.gradients.o = s.make(DType::bf16, {2, 4, 3, 6}); }, "o", "f32",
     "bf16"},
    {"DoMissing", backward, [](Scene& s) { s.gradients.d_o = {}; }, "d_o", "[B, Hq, Sq, Dv] = [2, 4, 3, 6]",
     ""},
    {"DoShape", backward, [](Scene& s) { s.gradients.d_o = s.make(DType::f32, {2, 4, 3, 4}); }, "d_o",
     "[B, Hq, Sq, Dv] = [2, 4, 3, 6]", "f32[2, 4, 3, 4]"},
    {"DoLastStride", backward, [](Scene& s) { s.gradients.d_o.strides[3] = 0; }, "d_o",
     "a contiguous last dimension", "stride 0"},
    {"DoNull", backward, [](Scene& s) { s.gradients.d_o.data = nullptr; }, "d_o", "data",
     "null data with f32[2, 4, 3, 6]"},
    {"LseMissing", backward, [](Scene& s) { s.gradients.lse = {}; }, "lse", "[B, Hq, Sq] = [2, 4, 3]", ""},
    {"LseShape", backward, [](Scene& s) { s.gradients.lse = s.make(DType::f32, {2, 3, 4}); }, "lse",
     "[B, Hq, Sq] = [2, 4, 3]", "f32[2, 3, 4]"},
    {"DlseShape", backward, [](Scene& s) { s.gradients.d_lse = s.make(DType::f32, {24}); }, "d_lse",
     "[B, Hq, Sq] = [2, 4, 3]", "f32[24]"},
    {"DlseType", backward, [](Scene& s) { s.gradients.d_lse = s.make(DType::bf16, {2, 4, 3}); }, "d_lse",
     "f32", "bf16"},
    {"DqShape", backward, [](Scene& s) { s.gradients.dq = s.make(DType::f32, {2, 4, 3, 6}); }, "dq",
     "the shape of q = [2, 4, 3, 4]", "f32[2, 4, 3, 6]"},
    {"DqType", backward, [](Scene& s) { s.gradients.dq = s.make(DType::f16, {2, 4, 3, 4}); }, "dq", "f32",
     "f16"},
    {"DqExpanded", backward, [](Scene& s) { s.gradients.dq.strides[0] = 0; }, "dq", "do not overlap",
     "strides that overlap"},
    {"DkShape", backward, [](Scene& s) { s.gradients.dk = s.make(DType::f32, {2, 4, 5, 4}); }, "dk",
     "the shape of k, [2, 2, 5, 4]", "f32[2, 4, 5, 4]"},
    {"DkRank", backward, [](Scene& s) { s.gradients.dk = s.make(DType::f32, {20, 4}); }, "dk",
     "the shape of k, [2, 2, 5, 4]", "f32[20, 4]"},
    {"DkType", backward, [](Scene& s) { s.gradients.dk = s.make(DType::f64, {2, 2, 5, 4}); }, "dk", "f32",
     "f64"},
    {"DkNull", backward, [](Scene& s) { s.gradients.dk.data = nullptr; }, "dk", "data",
     "null data with f32[2, 2, 5, 4]"},
    {"DkExpanded", backward, [](Scene& s) { s.gradients.dk.strides[1] = 0; }, "dk", "do not overlap",
     "strides that overlap"},
    {"DvShape", backward, [](Scene& s) { s.gradients.dv = s.make(DType::f32, {2, 2, 5, 4}); }, "dv",
     "the shape of v, [2, 2, 5, 6]", "f32[2, 2, 5, 4]"},
    {"DvLastStride", backward, [](Scene& s) { s.gradients.dv.strides[3] = 3; }, "dv",
     "a contiguous last dimension", "stride 3"},
    {"DmaskOfNone", backward, [](Scene& s) { s.inputs.mask = {}; }, "dmask", "an additive mask", "no mask"},
    {"DmaskOfBoolean", backward, [](Scene& s) { s.inputs.mask = s.zeros(DType::boolean, {2, 4, 3, 5}); },
     "dmask", "an additive mask", "a boolean mask"},
    {"DmaskShape", backward, [](Scene& s) { s.gradients.dmask = s.make(DType::f32, {1, 4, 3, 5}); }, "dmask",
     "the shape of mask, [2, 4, 3, 5]", "f32[1, 4, 3, 5]"},
    {"DmaskType", backward, [](Scene& s) { s.gradients.dmask = s.make(DType::f16, {2, 4, 3, 5}); }, "dmask",
     "f32 or the type of mask, f32", "f16"},
    {"DmaskNull", backward, [](Scene& s) { s.gradients.dmask.data = nullptr; }, "dmask", "data",
     "null data with f32[2, 4, 3, 5]"},
    {"DmaskExpanded", backward, [](Scene& s) { s.gradients.dmask.strides[1] = 0; }, "dmask", "do not overlap",
     "strides that overlap"},
    {"DsinksOfNone", backward, [](Scene& s) { s.inputs.sinks = {}; }, "dsinks", "sinks to differentiate",
     "no sinks"},
    {"DsinksShape", backward, [](Scene& s) { s.gradients.dsinks = s.make(DType::f32, {2, 4}); }, "dsinks",
     "the shape of sinks, [4]", "f32[2, 4]"},
    {"DsinksType", backward, [](Scene& s) { s.gradients.dsinks = s.make(DType::f16, {4}); }, "dsinks", "f32",
     "f16"},
    {"DsinksNull", backward, [](Scene& s) { s.gradients.dsinks.data = nullptr; }, "dsinks", "data",
     "null data with f32[4]"},
    {"DlogitScaleOfNone", backward, [](Scene& s) { s.inputs.logit_scale = {}; }, "dlogit_scale",
     "logit_scale to differentiate", "no logit_scale"},
    {"DlogitScaleShape", backward, [](Scene& s) { s.gradients.dlogit_scale = s.make(DType::f32, {2, 4}); },
     "dlogit_scale", "the shape of logit_scale, [4]", "f32[2, 4]"},
    {"DlogitScaleType", backward, [](Scene& s) { s.gradients.dlogit_scale = s.make(DType::f16, {4}); },
     "dlogit_scale", "f32", "f16"},
    {"DlogitScaleWithoutDq", backward, [](Scene& s) { s.gradients.dq = {}; }, "dq",
     "a tensor, since dlogit_scale", "none"},
    {"PackedDqShape", packed_backward, [](Scene& s) { s.gradients.dq = s.make(DType::f32, {5, 4, 4}); }, "dq",
     "[6, 4, 4]", "f32[5, 4, 4]"},
    {"PackedDkShape", packed_backward, [](Scene& s) { s.gradients.dk = s.make(DType::f32, {7, 2, 4}); }, "dk",
     "[9, 2, 4]", "f32[7, 2, 4]"},
    {"PackedDlseShape", packed_backward, [](Scene& s) { s.gradients.d_lse = s.make(DType::f32, {6, 4}); },
     "d_lse", "[Hq, total_q] = [4, 6]", "f32[6, 4]"},
    {"OptionsAreChecked", backward, [](Scene& s) { s.options.softcap = -2; }, "softcap", "0 or above", "-2"},
    {"IndicesAreChecked", backward, [](Scene& s) { s.inputs.key_lengths = s.indices({2}, {9, 0}); },
     "key_lengths", "lengths from 0 to 5", "9 at index 0"},
};
INSTANTIATE_TEST_SUITE_P(Backward, ValidateOutputs, testing::ValuesIn(gradients), name_of);

struct Place {
  const char* name;
  Tensor& (*of)(Scene&);
};

const Place inputs_of_dense[] = {
    {"q", [](Scene& s) -> Tensor& { return s.inputs.q; }},
    {"k", [](Scene& s) -> Tensor& { return s.inputs.k; }},
    {"v", [](Scene& s) -> Tensor& { return s.inputs.v; }},
    {"mask", [](Scene& s) -> Tensor& { return s.inputs.mask; }},
    {"alibi_slopes", [](Scene& s) -> Tensor& { return s.inputs.alibi_slopes; }},
    {"sinks", [](Scene& s) -> Tensor& { return s.inputs.sinks; }},
    {"logit_scale", [](Scene& s) -> Tensor& { return s.inputs.logit_scale; }},
    {"key_lengths", [](Scene& s) -> Tensor& { return s.inputs.key_lengths; }},
    {"blocks.counts", [](Scene& s) -> Tensor& { return s.inputs.blocks.counts; }},
    {"blocks.indices", [](Scene& s) -> Tensor& { return s.inputs.blocks.indices; }},
    {"blocks.full_counts", [](Scene& s) -> Tensor& { return s.inputs.blocks.full_counts; }},
    {"blocks.full_indices", [](Scene& s) -> Tensor& { return s.inputs.blocks.full_indices; }},
    {"blocks.tile_ids", [](Scene& s) -> Tensor& { return s.inputs.blocks.tile_ids; }},
    {"blocks.tiles", [](Scene& s) -> Tensor& { return s.inputs.blocks.tiles; }},
};
const Place inputs_of_packed[] = {
    {"q", [](Scene& s) -> Tensor& { return s.inputs.q; }},
    {"packed.cumulative_q", [](Scene& s) -> Tensor& { return s.inputs.packed.cumulative_q; }},
    {"packed.cumulative_k", [](Scene& s) -> Tensor& { return s.inputs.packed.cumulative_k; }},
};
const Place inputs_of_paged[] = {{"page_table", [](Scene& s) -> Tensor& { return s.inputs.page_table; }}};
const Place outputs_of_forward[] = {{"o", [](Scene& s) -> Tensor& { return s.outputs.o; }},
                                    {"lse", [](Scene& s) -> Tensor& { return s.outputs.lse; }}};
const Place inputs_of_backward[] = {{"o", [](Scene& s) -> Tensor& { return s.gradients.o; }},
                                    {"lse", [](Scene& s) -> Tensor& { return s.gradients.lse; }},
                                    {"d_o", [](Scene& s) -> Tensor& { return s.gradients.d_o; }},
                                    {"d_lse", [](Scene& s) -> Tensor& { return s.gradients.d_lse; }}};
const Place outputs_of_backward[] = {
    {"dq", [](Scene& s) -> Tensor& { return s.gradients.dq; }},
    {"dk", [](Scene& s) -> Tensor& { return s.gradients.dk; }},
    {"dv", [](Scene& s) -> Tensor& { return s.gradients.dv; }},
    {"dmask", [](Scene& s) -> Tensor& { return s.gradients.dmask; }},
    {"dsinks", [](Scene& s) -> Tensor& { return s.gradients.dsinks; }},
    {"dlogit_scale", [](Scene& s) -> Tensor& { return s.gradients.dlogit_scale; }}};

// Moves `output` and `other` to the same place: the call must name both and write nothing.
void expect_overlap(Scene scene, const Place& output, const Place& other) {
  SCOPED_TRACE(std::string(output.name) + " in the memory of " + other.name);
  scene.provide_workspace();
  const Tensor place = scene.make(DType::boolean, {4096});
  Tensor& input = other.of(scene);
  std::memcpy(place.data, input.data, static_cast<std::size_t>(input.size()) * size_of(input.dtype));
  input.data = output.of(scene).data = place.data;
  const std::vector<std::byte> before = scene.memory();
  const std::string message = message_of<InvalidArgument>([&] { scene.call(); });
  EXPECT_TRUE(scene.memory() == before) << "something was written";
  EXPECT_EQ(message, std::string(output.name) + ": expected memory that does not overlap " + other.name +
                         ", got an overlap");
}

TEST(ValidateOverlaps, ForwardOutputsStayApartFromEveryInputAndOneAnother) {
  for (const Place& output : outputs_of_forward) {
    for (const Place& input : inputs_of_dense) expect_overlap(dense_with_everything(), output, input);
    for (const Place& input : inputs_of_packed) expect_overlap(packed(), output, input);
    for (const Place& input : inputs_of_paged) expect_overlap(paged(), output, input);
  }
  expect_overlap(dense(), outputs_of_forward[1], outputs_of_forward[0]);
}

TEST(ValidateOverlaps, GradientsStayApartFromEveryInputAndOneAnother) {
  for (const Place& output : outputs_of_backward) {
    for (const Place& input : inputs_of_dense) expect_overlap(backward(), output, input);
    for (const Place& input : inputs_of_backward) expect_overlap(backward(), output, input);
    for (const Place* other = outputs_of_backward; other != &output; ++other) {
      expect_overlap(backward(), output, *other);
    }
  }
  for (const Place& input : inputs_of_packed)
    expect_overlap(packed_backward(), outputs_of_backward[0], input);
}

TEST(ValidateOverlaps, ASharedLastElementIsEnough) {
  Scene scene = dense();
  scene.provide_workspace();
  auto* last = static_cast<float*>(scene.inputs.q.data) + scene.inputs.q.size() - 1;
  scene.outputs.lse.data = last;
  EXPECT_EQ(message_of<InvalidArgument>([&] { scene.call(); }),
            "lse: expected memory that does not overlap q, got an overlap");
}

// Columns of one buffer [2, 2, 5, width], as wide as k and v.
void place_in_columns(Scene& scene, std::int64_t width, std::int64_t first_v) {
  const Tensor whole = scene.make(DType::f32, {2, 2, 5, width});
  const auto place = [&](Tensor& tensor, std::int64_t first) {
    tensor.data = static_cast<float*>(whole.data) + first;
    tensor.strides = whole.strides;
  };
  place(scene.gradients.dk, 0);
  place(scene.gradients.dv, first_v);
}

TEST(ValidateOverlaps, ColumnsThatShareAnElementAreRefused) {
  for (const auto& [width, first_v] : {std::pair(10, 3), std::pair(9, 3), std::pair(9, 4)}) {
    Scene scene = backward();
    scene.provide_workspace();
    place_in_columns(scene, width, first_v);
    const std::vector<std::byte> before = scene.memory();
    EXPECT_EQ(message_of<InvalidArgument>([&] { scene.call(); }),
              "dv: expected memory that does not overlap dk, got an overlap");
    EXPECT_TRUE(scene.memory() == before) << "something was written";
  }
}

class ValidateWorkspace : public testing::TestWithParam<Scene (*)()> {};

TEST_P(ValidateWorkspace, MissingOrOneByteTooSmallIsRefusedAndTheAskedSizeIsEnough) {
  Scene scene = GetParam()();
  const std::size_t needed = scene.workspace_bytes();
  ASSERT_GT(needed, 0u);
  const std::string expected = "workspace: expected at least " + std::to_string(needed) + " bytes, got ";
  const std::vector<std::byte> before = scene.memory();
  EXPECT_EQ(message_of<InvalidArgument>([&] { scene.call(); }), expected + "none");
  EXPECT_TRUE(scene.memory() == before) << "something was written";

  const Buffer memory(DType::boolean, {static_cast<std::int64_t>(needed)}, {.lead = 1});
  scene.context.workspace = {memory.view().data, needed - 1};
  EXPECT_EQ(message_of<InvalidArgument>([&] { scene.call(); }),
            expected + std::to_string(needed - 1) + " bytes");
  EXPECT_TRUE(scene.memory() == before) << "something was written";
  scene.context.workspace = {nullptr, needed};
  EXPECT_EQ(message_of<InvalidArgument>([&] { scene.call(); }), expected + "none");

  scene.context.workspace = {memory.view().data, needed};
  EXPECT_NO_THROW(scene.call());
  EXPECT_TRUE(memory.guards_intact());
  EXPECT_TRUE(scene.guards_intact());
}

INSTANTIATE_TEST_SUITE_P(Scenes, ValidateWorkspace,
                         testing::Values(dense, dense_with_everything, packed, paged, backward,
                                         packed_backward));

}  // namespace
}  // namespace tilewise::test::validate_outputs_test
