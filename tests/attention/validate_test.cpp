#include "attention/validate_case.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

// Options, q, k, v and the optional inputs of dense calls. Layouts and outputs have files of their own.
namespace tilewise::test::validate_test {
namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t two31 = std::int64_t{1} << 31;

class Validate : public testing::TestWithParam<Refusal> {};

TEST_P(Validate, RefusesWithTheArgumentTheExpectedAndTheGivenAndWritesNothing) { expect_refusal(GetParam()); }

const auto name_of = [](const auto& tested) { return std::string(tested.param.name); };

const Refusal options[] = {
    {"UnknownKernel", dense, [](Scene& s) { s.options.kernel = "warp"; }, "kernel", "simd, reference",
     "'warp'"},
    {"EmptyKernel", dense, [](Scene& s) { s.options.kernel = ""; }, "kernel", "simd, reference", "''"},
    {"UnknownSimdLevel", dense, [](Scene& s) { s.context.simd_level = "mmx"; }, "simd_level", "one of ",
     "'mmx'"},
    {"ScaleNan", dense, [](Scene& s) { s.options.scale = nan_value; }, "scale", "a finite number", "nan"},
    {"ScaleInfinite", dense, [](Scene& s) { s.options.scale = -infinity; }, "scale", "a finite number",
     "-inf"},
    {"SoftcapNegative", dense, [](Scene& s) { s.options.softcap = -1.5f; }, "softcap", "0 or above", "-1.5"},
    {"SoftcapNan", dense, [](Scene& s) { s.options.softcap = nan_value; }, "softcap", "finite", "nan"},
    {"SoftcapInfinite", dense, [](Scene& s) { s.options.softcap = infinity; }, "softcap", "finite", "inf"},
    {"DropoutNegative", dense, [](Scene& s) { s.options.dropout.probability = -0.25f; },
     "dropout.probability", "[0, 1]", "-0.25"},
    {"DropoutAboveOne", dense, [](Scene& s) { s.options.dropout.probability = 1.5f; }, "dropout.probability",
     "[0, 1]", "1.5"},
    {"DropoutNan", dense, [](Scene& s) { s.options.dropout.probability = nan_value; }, "dropout.probability",
     "[0, 1]", "nan"},
    {"DropoutSeedType", dense, [](Scene& s) { s.inputs.dropout_seed = s.zeros(DType::i32, {2}); },
     "dropout_seed", "i64", "i32"},
    {"DropoutSeedShape", dense, [](Scene& s) { s.inputs.dropout_seed = s.zeros(DType::i64, {3}); },
     "dropout_seed", "[seed, offset] = [2]", "i64[3]"},
    {"DropoutSeedStride", dense,
     [](Scene& s) {
       s.inputs.dropout_seed = s.zeros(DType::i64, {4});
       s.inputs.dropout_seed.shape[0] = s.inputs.dropout_seed.strides[0] = 2;
     },
     "dropout_seed", "contiguous", "stride 2"},
    {"DropoutSeedDevice", dense,
     [](Scene& s) {
       s.inputs.dropout_seed = s.zeros(DType::i64, {2});
       s.inputs.dropout_seed.device = {Device::Type::cuda, 0};
     },
     "dropout_seed", "memory on cpu", "cuda:0"},
    {"DropoutSeedAlignment", dense,
     [](Scene& s) {
       s.inputs.dropout_seed = s.zeros(DType::i64, {3});
       s.inputs.dropout_seed.shape[0] = 2;
       s.inputs.dropout_seed.data = static_cast<std::byte*>(s.inputs.dropout_seed.data) + 4;
     },
     "dropout_seed", "aligned to 8 bytes", "an unaligned address"},
    {"WindowLeft", dense, [](Scene& s) { s.options.window.left = -1; }, "window.left", "0 or above", "-1"},
    {"WindowRight", dense, [](Scene& s) { s.options.window.right = -7; }, "window.right", "0 or above", "-7"},
};
INSTANTIATE_TEST_SUITE_P(Options, Validate, testing::ValuesIn(options), name_of);

const Refusal qkv[] = {
    {"QMissing", dense, [](Scene& s) { s.inputs.q = {}; }, "q", "rank 4 [B, Hq, Sq, D]", ""},
    {"KMissing", dense, [](Scene& s) { s.inputs.k = {}; }, "k", "rank 4 [B, Hkv, Sk, D]", ""},
    {"VMissing", dense, [](Scene& s) { s.inputs.v = {}; }, "v", "rank 4 [B, Hkv, Sk, Dv]", ""},
    {"QRank", dense, [](Scene& s) { s.inputs.q = s.zeros(DType::f32, {4, 3, 4}); }, "q",
     "rank 4 [B, Hq, Sq, D]", "f32[4, 3, 4]"},
    {"KRank", dense, [](Scene& s) { s.inputs.k = s.zeros(DType::f32, {2, 2, 1, 5, 4}); }, "k",
     "rank 4 [B, Hkv, Sk, D]", "f32[2, 2, 1, 5, 4]"},
    {"VRank", dense, [](Scene& s) { s.inputs.v = s.zeros(DType::f32, {60}); }, "v", "rank 4 [B, Hkv, Sk, Dv]",
     "f32[60]"},
    {"QNegativeExtent", dense, [](Scene& s) { s.inputs.q.shape[2] = -3; }, "q", "negative extent",
     "f32[2, 4, -3, 4]"},
    {"QDevice", dense, [](Scene& s) { s.inputs.q.device = {Device::Type::cuda, 2}; }, "q", "memory on cpu",
     "cuda:2"},
    {"KDevice", dense, [](Scene& s) { s.inputs.k.device = {Device::Type::cuda, 0}; }, "k", "memory on cpu",
     "cuda:0"},
    {"ContextDevice", dense, [](Scene& s) { s.context.device = {Device::Type::cuda, 1}; }, "q",
     "memory on cuda:1", "cpu"},
    {"QNull", dense, [](Scene& s) { s.inputs.q.data = nullptr; }, "q", "data",
     "null data with f32[2, 4, 3, 4]"},
    {"KNull", dense, [](Scene& s) { s.inputs.k.data = nullptr; }, "k", "data",
     "null data with f32[2, 2, 5, 4]"},
    {"VNull", dense, [](Scene& s) { s.inputs.v.data = nullptr; }, "v", "data",
     "null data with f32[2, 2, 5, 6]"},
    {"QType", dense, [](Scene& s) { s.inputs.q.dtype = DType::i32; }, "q", "f32, f16, bf16 or f64", "i32"},
    {"QBoolean", dense, [](Scene& s) { s.inputs.q.dtype = DType::boolean; }, "q", "f32, f16, bf16 or f64",
     "boolean"},
    {"KMixedType", dense, [](Scene& s) { s.inputs.k = s.zeros(DType::f16, {2, 2, 5, 4}); }, "k",
     "the type of q, f32", "f16"},
    {"VMixedType", dense, [](Scene& s) { s.inputs.v = s.zeros(DType::bf16, {2, 2, 5, 6}); }, "v",
     "the type of q, f32", "bf16"},
    {"QLastStride", dense, [](Scene& s) { s.inputs.q.strides[3] = 2; }, "q", "a contiguous last dimension",
     "stride 2"},
    {"KLastStride", dense, [](Scene& s) { s.inputs.k.strides[3] = 0; }, "k", "a contiguous last dimension",
     "stride 0"},
    {"VLastStride", dense, [](Scene& s) { s.inputs.v.strides[3] = -1; }, "v", "a contiguous last dimension",
     "stride -1"},
    {"QHeadDimZero", dense, [](Scene& s) { s.inputs.q = s.make(DType::f32, {2, 4, 3, 0}); }, "q",
     "a head dim from 1 to 4096", "f32[2, 4, 3, 0]"},
    {"QHeadDimTooLarge", dense, [](Scene& s) { s.inputs.q = s.make(DType::f32, {2, 4, 0, 4097}); }, "q",
     "a head dim from 1 to 4096", "f32[2, 4, 0, 4097]"},
    {"VHeadDimZero", dense, [](Scene& s) { s.inputs.v = s.make(DType::f32, {2, 2, 5, 0}); }, "v",
     "a head dim from 1 to 4096", "f32[2, 2, 5, 0]"},
    {"VHeadDimTooLarge", dense, [](Scene& s) { s.inputs.v = s.make(DType::f32, {2, 2, 5, 4097}); }, "v",
     "a head dim from 1 to 4096", "f32[2, 2, 5, 4097]"},
    {"KHeadDim", dense, [](Scene& s) { s.inputs.k = s.zeros(DType::f32, {2, 2, 5, 3}); }, "k",
     "the head dim of q, 4", "f32[2, 2, 5, 3]"},
    {"VHeads", dense, [](Scene& s) { s.inputs.v = s.zeros(DType::f32, {2, 4, 5, 6}); }, "v",
     "as many heads as k, 2", "f32[2, 4, 5, 6]"},
    {"HeadsDoNotDivide", dense, [](Scene& s) { s.inputs.q = s.zeros(DType::f32, {2, 3, 3, 4}); }, "q",
     "a multiple of k's 2 heads", "f32[2, 3, 3, 4]"},
    {"MoreKeyHeads", dense, [](Scene& s) { s.inputs.q = s.zeros(DType::f32, {2, 1, 3, 4}); }, "q",
     "a multiple of k's 2 heads", "f32[2, 1, 3, 4]"},
    {"NoKeyHeads", dense,
     [](Scene& s) {
       s.inputs.k = s.make(DType::f32, {2, 0, 5, 4});
       s.inputs.v = s.make(DType::f32, {2, 0, 5, 6});
     },
     "q", "k's 0 heads", "f32[2, 4, 3, 4]"},
    {"VLength", dense, [](Scene& s) { s.inputs.v = s.zeros(DType::f32, {2, 2, 4, 6}); }, "v",
     "the length of k, 5", "f32[2, 2, 4, 6]"},
    {"VBatch", dense, [](Scene& s) { s.inputs.v = s.zeros(DType::f32, {1, 2, 5, 6}); }, "v",
     "k's first extent, 2", "f32[1, 2, 5, 6]"},
    {"KBatch", dense,
     [](Scene& s) {
       s.inputs.k = s.zeros(DType::f32, {3, 2, 5, 4});
       s.inputs.v = s.zeros(DType::f32, {3, 2, 5, 6});
     },
     "k", "the batch of q, 2", "f32[3, 2, 5, 4]"},
    {"TooManyQueries", dense,
     [](Scene& s) {
       s.inputs.q = Tensor::of(static_cast<float*>(nullptr), {0, 4, two31, 4});
       s.inputs.k = Tensor::of(static_cast<float*>(nullptr), {0, 2, 5, 4});
       s.inputs.v = Tensor::of(static_cast<float*>(nullptr), {0, 2, 5, 6});
     },
     "q", "fewer than 2^31 queries", "f32[0, 4, 2147483648, 4]"},
    {"TooManyKeys", dense,
     [](Scene& s) {
       s.inputs.q = Tensor::of(static_cast<float*>(nullptr), {0, 4, 3, 4});
       s.inputs.k = Tensor::of(static_cast<float*>(nullptr), {0, 2, two31, 4});
       s.inputs.v = Tensor::of(static_cast<float*>(nullptr), {0, 2, two31, 6});
     },
     "k", "fewer than 2^31 keys", "f32[0, 2, 2147483648, 4]"},
    {"TooManyHeads", dense,
     [](Scene& s) {
       s.inputs.q = Tensor::of(static_cast<float*>(nullptr), {2, two31, 0, 4});
       s.inputs.k = Tensor::of(static_cast<float*>(nullptr), {2, 1, 0, 4});
       s.inputs.v = Tensor::of(static_cast<float*>(nullptr), {2, 1, 0, 6});
     },
     "q", "fewer than 2^32 heads", "f32[2, 2147483648, 0, 4]"},
};
INSTANTIATE_TEST_SUITE_P(QKV, Validate, testing::ValuesIn(qkv), name_of);

const Refusal optional_inputs[] = {
    {"MaskType", dense, [](Scene& s) { s.inputs.mask = s.zeros(DType::i32, {3, 5}); }, "mask",
     "boolean or floating", "i32"},
    {"MaskOtherHalf", dense, [](Scene& s) { s.inputs.mask = s.zeros(DType::f16, {3, 5}); }, "mask",
     "boolean, f32 or the type of q, f32", "f16"},
    {"MaskWider", dense, [](Scene& s) { s.inputs.mask = s.zeros(DType::f64, {3, 5}); }, "mask",
     "boolean, f32 or the type of q, f32", "f64"},
    {"MaskRank", dense, [](Scene& s) { s.inputs.mask = s.zeros(DType::f32, {1, 2, 4, 3, 5}); }, "mask",
     "rank 4", "f32[1, 2, 4, 3, 5]"},
    {"MaskKeys", dense, [](Scene& s) { s.inputs.mask = s.zeros(DType::f32, {2, 4, 3, 4}); }, "mask",
     "[B, Hq, Sq, Sk] = [2, 4, 3, 5]", "f32[2, 4, 3, 4]"},
    {"MaskQueries", dense, [](Scene& s) { s.inputs.mask = s.zeros(DType::boolean, {2, 5}); }, "mask",
     "[B, Hq, Sq, Sk] = [2, 4, 3, 5]", "boolean[2, 5]"},
    {"MaskKeyHeads", dense, [](Scene& s) { s.inputs.mask = s.zeros(DType::f32, {2, 2, 3, 5}); }, "mask",
     "[B, Hq, Sq, Sk] = [2, 4, 3, 5]", "f32[2, 2, 3, 5]"},
    {"MaskBatch", dense, [](Scene& s) { s.inputs.mask = s.zeros(DType::f32, {3, 1, 1, 1}); }, "mask",
     "[B, Hq, Sq, Sk] = [2, 4, 3, 5]", "f32[3, 1, 1, 1]"},
    {"MaskEmpty", dense, [](Scene& s) { s.inputs.mask = s.make(DType::f32, {3, 0}); }, "mask",
     "[B, Hq, Sq, Sk] = [2, 4, 3, 5]", "f32[3, 0]"},
    {"MaskNull", dense, [](Scene& s) { s.inputs.mask = Tensor::of(static_cast<bool*>(nullptr), {3, 5}); },
     "mask", "data", "null data with boolean[3, 5]"},
    {"MaskDevice", dense_with_everything, [](Scene& s) { s.inputs.mask.device.type = Device::Type::cuda; },
     "mask", "memory on cpu", "cuda:0"},
    {"SlopesType", dense, [](Scene& s) { s.inputs.alibi_slopes = s.zeros(DType::f16, {4}); }, "alibi_slopes",
     "f32", "f16"},
    {"SlopesWider", dense, [](Scene& s) { s.inputs.alibi_slopes = s.zeros(DType::f64, {4}); }, "alibi_slopes",
     "f32", "f64"},
    {"SlopesHeads", dense, [](Scene& s) { s.inputs.alibi_slopes = s.zeros(DType::f32, {2}); }, "alibi_slopes",
     "[Hq] or [B, Hq] = [2, 4]", "f32[2]"},
    {"SlopesBatch", dense, [](Scene& s) { s.inputs.alibi_slopes = s.zeros(DType::f32, {1, 4}); },
     "alibi_slopes", "[Hq] or [B, Hq] = [2, 4]", "f32[1, 4]"},
    {"SlopesNull", dense_with_everything, [](Scene& s) { s.inputs.alibi_slopes.data = nullptr; },
     "alibi_slopes", "data", "null data with f32[4]"},
    {"SinksType", dense, [](Scene& s) { s.inputs.sinks = s.zeros(DType::bf16, {4}); }, "sinks", "f32",
     "bf16"},
    {"SinksShape", dense, [](Scene& s) { s.inputs.sinks = s.zeros(DType::f32, {2, 4}); }, "sinks",
     "[Hq] = [4]", "f32[2, 4]"},
    {"SinksNull", dense_with_everything, [](Scene& s) { s.inputs.sinks.data = nullptr; }, "sinks", "data",
     "null data with f32[4]"},
    {"LogitScaleType", dense, [](Scene& s) { s.inputs.logit_scale = s.zeros(DType::bf16, {4}); },
     "logit_scale", "f32", "bf16"},
    {"LogitScaleShape", dense, [](Scene& s) { s.inputs.logit_scale = s.zeros(DType::f32, {2, 4}); },
     "logit_scale", "[Hq] = [4]", "f32[2, 4]"},
    {"LogitScaleNull", dense_with_everything, [](Scene& s) { s.inputs.logit_scale.data = nullptr; },
     "logit_scale", "data", "null data with f32[4]"},
    {"LengthsType", dense, [](Scene& s) { s.inputs.key_lengths = s.zeros(DType::f32, {2}); }, "key_lengths",
     "i32", "f32"},
    {"LengthsShape", dense, [](Scene& s) { s.inputs.key_lengths = s.indices({3}, {1, 1, 1}); }, "key_lengths",
     "[B] = [2]", "i32[3]"},
    {"LengthsNull", dense_with_everything, [](Scene& s) { s.inputs.key_lengths.data = nullptr; },
     "key_lengths", "data", "null data with i32[2]"},
    {"LengthNegative", dense, [](Scene& s) { s.inputs.key_lengths = s.indices({2}, {3, -1}); }, "key_lengths",
     "lengths from 0 to 5", "-1 at index 1"},
    {"LengthTooLong", dense, [](Scene& s) { s.inputs.key_lengths = s.indices({2}, {6, 5}); }, "key_lengths",
     "lengths from 0 to 5", "6 at index 0"},
};
INSTANTIATE_TEST_SUITE_P(OptionalInputs, Validate, testing::ValuesIn(optional_inputs), name_of);

}  // namespace
}  // namespace tilewise::test::validate_test
