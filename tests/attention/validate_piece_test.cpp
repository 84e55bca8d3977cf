#include <gtest/gtest.h>

#include "attention/validate.h"
#include "attention/validate_case.h"

// Pieces of a whole: what is refused, and what a kernel is told of them.
namespace tilewise::test::validate_piece_test {
namespace {

// Queries 2 to 4 and keys 1 to 5 of a whole of 6 queries and 8 keys; heads 0 to 3 of 8.
Scene piece() {
  Scene s = dense();
  s.options.piece = {.q_offset = 2, .k_offset = 1, .length_q = 6, .length_k = 8, .heads_q = 8};
  return s;
}

Scene share() {
  Scene s = backward_of(piece());
  s.gradients.o = {};
  s.gradients.delta = s.zeros(DType::f32, {2, 4, 3});
  return s;
}

class ValidatePiece : public testing::TestWithParam<Refusal> {};

TEST_P(ValidatePiece, RefusesWithTheArgumentTheExpectedAndTheGivenAndWritesNothing) {
  expect_refusal(GetParam());
}

const Refusal refusals[] = {
    {"QueriesPastTheEnd", piece, [](Scene& s) { s.options.piece->q_offset = 4; }, "piece.q_offset",
     "from 0 up to 6 of the whole", "3 positions from 4 in steps of 1"},
    {"QueriesBefore", piece, [](Scene& s) { s.options.piece->q_offset = -1; }, "piece.q_offset",
     "from 0 up to 6 of the whole", "3 positions from -1"},
    {"KeysPastTheEnd", piece, [](Scene& s) { s.options.piece->k_offset = 4; }, "piece.k_offset",
     "from 0 up to 8 of the whole", "5 positions from 4 in steps of 1"},
    {"LengthOfKeys", piece, [](Scene& s) { s.options.piece->length_k = -1; }, "piece.length_k", "0 or above",
     "-1"},
    {"Step", piece, [](Scene& s) { s.options.piece->step = 0; }, "piece.step", "1 or above", "0"},
    {"Heads", piece, [](Scene& s) { s.options.piece->head_offset = 5; }, "piece.head_offset",
     "from 0 up to 8 of the whole", "4 positions from 5"},
    {"Batch", piece, [](Scene& s) { s.options.piece->batch_offset = -1; }, "piece.batch_offset", "0 or above",
     "-1"},
    {"Lengths", piece, [](Scene& s) { s.inputs.key_lengths = s.indices({2}, {5, 4}); }, "key_lengths",
     "none with a piece", "some"},
    {"Blocks", piece, [](Scene& s) { s.inputs.blocks.counts = s.indices({1, 1, 1}, {0}); }, "blocks",
     "none with a piece", "some"},
    {"Packed", packed, [](Scene& s) { s.options.piece = Piece{}; }, "piece", "dense tensors", "packed"},
    {"OutputType", piece, [](Scene& s) { s.outputs.o = s.make(DType::f16, {2, 4, 3, 6}); }, "o", "f32",
     "f16"},
    {"DeltaOfAWhole", share, [](Scene& s) { s.options.piece = {}; }, "delta", "none without a piece", "f32"},
    {"DeltaAndSinks", share, [](Scene& s) { s.inputs.sinks = s.zeros(DType::f32, {4}); }, "sinks",
     "none with delta", "f32[4]"},
    {"DeltaAndOutput", share, [](Scene& s) { s.gradients.o = s.outputs.o; }, "o", "none with delta", "f32"},
    {"DeltaType", share, [](Scene& s) { s.gradients.delta = s.make(DType::f64, {2, 4, 3}); }, "delta", "f32",
     "f64"},
    {"GradientOfLseType", share, [](Scene& s) { s.gradients.d_lse = s.make(DType::f64, {2, 4, 3}); }, "d_lse",
     "f32", "f64"},
    {"DeltaShape", share, [](Scene& s) { s.gradients.delta = s.make(DType::f32, {2, 4, 4}); }, "delta",
     "[B, Hq, Sq] = [2, 4, 3]", "f32[2, 4, 4]"},
};

INSTANTIATE_TEST_SUITE_P(Piece, ValidatePiece, testing::ValuesIn(refusals),
                         [](const auto& tested) { return std::string(tested.param.name); });

AttentionProblem problem_of(const Scene& s) {
  return checked_forward(s.inputs, s.options, s.outputs, s.context).problem;
}

// Kernels that know of no pieces take those that look like a whole problem, and no other.
TEST(PieceSeams, WhatHidesNothingIsAPlainProblem) {
  Scene s = piece();
  s.options.causal = true;
  s.options.piece = {.q_offset = 5, .k_offset = 0, .length_q = 8, .length_k = 8, .heads_q = 4};
  const AttentionProblem problem = problem_of(s);
  EXPECT_FALSE(problem.features.causal || problem.features.window);
  EXPECT_EQ(unsuited_piece(problem), "");
}

TEST(PieceSeams, TheDiagonalIsCausal) {
  Scene s = piece();
  s.options.causal = true;
  s.options.piece = {.q_offset = 3, .k_offset = 3, .length_q = 8, .length_k = 8, .heads_q = 4};
  const AttentionProblem problem = problem_of(s);
  EXPECT_TRUE(problem.features.causal && !problem.features.window);
  EXPECT_EQ(unsuited_piece(problem), "");
}

TEST(PieceSeams, AShiftedBandIsAWindow) {
  Scene s = piece();
  s.options.causal = true;
  s.options.window = {.left = 3, .right = {}};
  s.options.piece = {.q_offset = 2, .k_offset = 0, .length_q = 8, .length_k = 8, .heads_q = 4};
  const AttentionCall call = checked_forward(s.inputs, s.options, s.outputs, s.context);
  EXPECT_EQ(call.band.left, 1);
  EXPECT_EQ(call.band.right, 2);
  EXPECT_TRUE(!call.problem.features.causal && call.problem.features.window);
  EXPECT_EQ(unsuited_piece(call.problem), "");
}

TEST(PieceSeams, BottomRightIsOfTheWhole) {
  Scene s = piece();
  s.options.causal = true;
  s.options.alignment = Alignment::bottom_right;
  s.options.piece = {.q_offset = 1, .k_offset = 2, .length_q = 6, .length_k = 8, .heads_q = 4};
  const AttentionCall call = checked_forward(s.inputs, s.options, s.outputs, s.context);
  EXPECT_EQ(call.band.right, 1);  // query 1 stands at key 3, the second here
}

TEST(PieceSeams, AKernelWithoutPiecesSaysWhatItLacks) {
  const auto reason = [](void (*change)(Scene&)) {
    Scene s = piece();
    change(s);
    return unsuited_piece(problem_of(s));
  };
  EXPECT_NE(reason([](Scene& s) {
              s.options.causal = true;
              s.options.piece->q_offset = 0;
            }).find("own key"),
            std::string::npos);
  EXPECT_NE(reason([](Scene& s) { s.inputs.alibi_slopes = s.zeros(DType::f32, {4}); }).find("ALiBi"),
            std::string::npos);
  EXPECT_NE(reason([](Scene& s) { s.options.dropout.probability = 0.5f; }).find("dropout"),
            std::string::npos);
  EXPECT_NE(reason([](Scene& s) { s.outputs.lse = s.make(DType::f64, {2, 4, 3}); }).find("f32"),
            std::string::npos);
  Scene s = share();
  EXPECT_NE(
      unsuited_piece(checked_backward(s.inputs, s.options, s.gradients, s.context).problem).find("keys"),
      std::string::npos);
}

}  // namespace
}  // namespace tilewise::test::validate_piece_test
