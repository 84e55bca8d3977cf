#include "tilewise/tensor.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "tilewise/error.h"

namespace tilewise {
namespace {

using Extents = std::vector<std::int64_t>;

Extents strides_of(const Tensor& tensor) {
  return {tensor.strides.begin(), tensor.strides.begin() + tensor.rank};
}
Extents shape_of(const Tensor& tensor) { return {tensor.shape.begin(), tensor.shape.begin() + tensor.rank}; }

TEST(Tensor, DefaultIsNotGiven) {
  const Tensor tensor;
  EXPECT_FALSE(tensor.given());
  EXPECT_EQ(tensor.rank, 0);
  EXPECT_EQ(tensor.data, nullptr);
}

TEST(Tensor, RowMajorStridesCountElements) {
  float data[2 * 3 * 4 * 5];
  const Tensor tensor = Tensor::of(data, {2, 3, 4, 5});
  EXPECT_TRUE(tensor.given());
  EXPECT_EQ(tensor.data, data);
  EXPECT_EQ(tensor.dtype, DType::f32);
  EXPECT_EQ(tensor.device, Device{});
  EXPECT_EQ(shape_of(tensor), (Extents{2, 3, 4, 5}));
  EXPECT_EQ(strides_of(tensor), (Extents{60, 20, 5, 1}));
  EXPECT_EQ(tensor.size(), 120);
  EXPECT_EQ(tensor.extent(2), 4);
  EXPECT_EQ(tensor.stride(1), 20);
}

TEST(Tensor, TypeFollowsThePointer) {
  EXPECT_EQ(Tensor::of(static_cast<double*>(nullptr), {0}).dtype, DType::f64);
  EXPECT_EQ(Tensor::of(static_cast<f16*>(nullptr), {0}).dtype, DType::f16);
  EXPECT_EQ(Tensor::of(static_cast<bf16*>(nullptr), {0}).dtype, DType::bf16);
  EXPECT_EQ(Tensor::of(static_cast<bool*>(nullptr), {0}).dtype, DType::boolean);
  EXPECT_EQ(Tensor::of(static_cast<std::int32_t*>(nullptr), {0}).dtype, DType::i32);
  EXPECT_EQ(Tensor::of(static_cast<const float*>(nullptr), {0}).dtype, DType::f32);
}

TEST(Tensor, ZeroExtentsHaveNoElementsAndStridesAsIfTheyWereOne) {
  const Tensor tensor = Tensor::of(static_cast<float*>(nullptr), {2, 0, 4, 5});
  EXPECT_TRUE(tensor.given());
  EXPECT_EQ(tensor.size(), 0);
  EXPECT_EQ(strides_of(tensor), (Extents{20, 20, 5, 1}));
}

TEST(Tensor, StridesOfItsOwnAreKept) {
  float data[100];
  const Extents shape{2, 3}, strides{1, 10};
  const Tensor tensor(data, DType::f32, shape, strides, {Device::Type::cuda, 1});
  EXPECT_EQ(shape_of(tensor), shape);
  EXPECT_EQ(strides_of(tensor), strides);
  EXPECT_EQ(tensor.device, (Device{Device::Type::cuda, 1}));
  EXPECT_EQ(tensor.size(), 6);
}

TEST(Tensor, SizesThatDoNotFitAreTheLargest) {
  constexpr std::int64_t half = std::int64_t{1} << 32, most = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(Tensor::of(static_cast<float*>(nullptr), {half, half}).size(), most);
  EXPECT_EQ(Tensor::of(static_cast<float*>(nullptr), {half, half, 0}).size(), 0);
  EXPECT_EQ(strides_of(Tensor::of(static_cast<float*>(nullptr), {2, half, half})), (Extents{most, half, 1}));
  Tensor wild = Tensor::of(static_cast<float*>(nullptr), {1, 1, 1, 1, 3});
  wild.rank = 1000;
  EXPECT_EQ(wild.size(), 3);
  EXPECT_EQ(to_string(wild), "f32[rank 1000]");
  wild.rank = -1;
  EXPECT_EQ(wild.size(), 1);
  EXPECT_EQ(to_string(wild), "f32[rank -1]");
}

TEST(Tensor, SizesAre64Bit) {
  const Tensor tensor = Tensor::of(static_cast<float*>(nullptr), {1 << 20, 1 << 20, 4});
  EXPECT_EQ(tensor.size(), std::int64_t{1} << 42);
  EXPECT_EQ(tensor.stride(0), std::int64_t{1} << 22);
}

TEST(Tensor, RejectsMoreThanFiveDimensionsAndStridesThatDoNotMatch) {
  const auto message_of = [](const auto& make) -> std::string {
    try {
      make();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "nothing thrown";
  };
  const Extents six(6, 1), two(2, 1), three(3, 1), five(5, 1);
  EXPECT_EQ(message_of([&] { Tensor(nullptr, DType::f32, six); }),
            "shape: expected at most 5 dimensions, got 6");
  EXPECT_EQ(message_of([&] { Tensor(nullptr, DType::f32, two, three); }),
            "strides: expected as many strides as extents, got 3");
  EXPECT_EQ(Tensor(nullptr, DType::f32, five).rank, 5);
}

TEST(Tensor, PrintsTypeAndShape) {
  const Tensor tensor = Tensor::of(static_cast<bf16*>(nullptr), {2, 8, 128, 64});
  EXPECT_EQ(to_string(tensor), "bf16[2, 8, 128, 64]");
  EXPECT_EQ(shape_string(tensor), "[2, 8, 128, 64]");
  EXPECT_EQ(shape_string(Tensor::of(static_cast<float*>(nullptr), {0})), "[0]");
  EXPECT_EQ(shape_string(Tensor{}), "[]");
}

TEST(Device, PrintsAndCompares) {
  EXPECT_EQ(to_string(Device{}), "cpu");
  EXPECT_EQ(to_string(Device{Device::Type::cuda, 3}), "cuda:3");
  EXPECT_EQ(Device{}, (Device{Device::Type::cpu, 0}));
  EXPECT_NE((Device{Device::Type::cuda, 0}), (Device{Device::Type::cuda, 1}));
  EXPECT_NE((Device{Device::Type::cuda, 0}), Device{});
}

TEST(DType, HasSizeNameAndKind) {
  struct Row {
    DType dtype;
    std::size_t size;
    const char* name;
    bool floating;
  };
  for (const Row& row : {Row{DType::f32, 4, "f32", true}, Row{DType::f16, 2, "f16", true},
                         Row{DType::bf16, 2, "bf16", true}, Row{DType::f64, 8, "f64", true},
                         Row{DType::boolean, 1, "boolean", false}, Row{DType::i32, 4, "i32", false}}) {
    EXPECT_EQ(size_of(row.dtype), row.size) << row.name;
    EXPECT_EQ(to_string(row.dtype), row.name);
    EXPECT_EQ(is_floating(row.dtype), row.floating) << row.name;
  }
}

TEST(Error, EveryCauseIsAnErrorAndNoneIsAnother) {
  static_assert(std::is_base_of_v<Error, InvalidArgument> && std::is_base_of_v<Error, Unsupported> &&
                std::is_base_of_v<Error, DeviceError> && std::is_base_of_v<std::runtime_error, Error>);
  static_assert(!std::is_base_of_v<InvalidArgument, Unsupported> &&
                !std::is_base_of_v<Unsupported, DeviceError>);
  EXPECT_STREQ(InvalidArgument("text").what(), "text");
}

}  // namespace
}  // namespace tilewise
