#include <gtest/gtest.h>

#include <deque>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "property/check.h"

namespace tilewise::test::large_test {
namespace {

// Tensors of more than 2^31 elements. Each test hides a small problem in large memory, so that the reference
// can check all of it: an index that has lost its upper half reads or writes somewhere else.

constexpr std::int64_t two_to_31 = std::int64_t{1} << 31;

std::string lacking_memory(std::size_t bytes) {
  std::size_t free = 0, total = 0;
  cuda::check_cuda(cudaMemGetInfo(&free, &total), "asking for free memory");
  if (free >= bytes) return {};
  return "needs " + std::to_string(bytes >> 20) + " MiB of device memory, " + std::to_string(free >> 20) +
         " MiB are free";
}

void run_forward_now(const AttentionInputs& inputs, const AttentionOptions& options,
                     const AttentionOutputs& outputs) {
  Context context{.device = first_device};
  const DeviceMemory workspace(attention_forward_workspace(inputs, options, outputs, context) + 1);
  context.workspace = {workspace.data(), workspace.bytes()};
  attention_forward(inputs, options, outputs, context);
  wait_for_device();
}

void run_backward_now(const AttentionInputs& inputs, const AttentionOptions& options,
                      const AttentionGradients& gradients) {
  Context context{.device = first_device};
  const DeviceMemory workspace(attention_backward_workspace(inputs, options, gradients, context) + 1);
  context.workspace = {workspace.data(), workspace.bytes()};
  attention_backward(inputs, options, gradients, context);
  wait_for_device();
}

enum class Use { read, written };

// Runs a kernel on tensors that a `Place` has put on the device, from where it gets the results.
template <typename Place>
Subject subject_in(const std::string& kernel) {
  return {.kernel = kernel,
          .device = first_device,
          .repetition = 0,
          .forward =
              [](AttentionInputs inputs, const AttentionOptions& options, const AttentionOutputs& host,
                 const Context&) {
                AttentionOutputs outputs = host;
                Place place;
                for (Tensor* tensor : tensors_of(inputs)) place.put(*tensor, Use::read);
                for (Tensor* tensor : tensors_of(outputs)) place.put(*tensor, Use::written);
                run_forward_now(inputs, options, outputs);
                place.get(outputs.o, host.o);
                place.get(outputs.lse, host.lse);
              },
          .backward =
              [](AttentionInputs inputs, const AttentionOptions& options, const AttentionGradients& host,
                 const Context&) {
                AttentionGradients gradients = host;
                Place place;
                for (Tensor* tensor : tensors_of(inputs)) place.put(*tensor, Use::read);
                for (Tensor* tensor : read_by(gradients)) place.put(*tensor, Use::read);
                for (Tensor* tensor : written_by(gradients)) place.put(*tensor, Use::written);
                run_backward_now(inputs, options, gradients);
                place.get(gradients.dq, host.dq);
                place.get(gradients.dk, host.dk);
                place.get(gradients.dv, host.dv);
                place.get(gradients.dmask, host.dmask);
                place.get(gradients.dsinks, host.dsinks);
              }};
}

void expect_within_contract(const RandomProblem& problem, const Subject& subject) {
  const Checker checker(problem, all_cores());
  Passes ran;
  for (const std::string& failure : checker.check(subject, &ran)) ADD_FAILURE() << failure;
  EXPECT_TRUE(ran.forward);
}

// Two entries with more than 2^31 elements between them, in every tensor that has entries, and nothing but
// poison there. What is only read shares that memory.
class FarApart {
 public:
  static constexpr std::size_t room = std::size_t{4} << 20;  // at either end

  // Bytes that backward takes; forward takes less.
  static std::size_t bytes(DType dtype) {
    return distance(DType::f32) + 3 * distance(dtype) + distance(DType::f32) + 5 * room;
  }

  void put(Tensor& tensor, Use use) {
    if (!tensor.given()) return;
    const std::vector<std::byte> elements = elements_of(tensor);
    const Halves halves(tensor);
    std::byte* data = use == Use::read ? take_shared(halves.bytes) : own(tensor.dtype).data();
    copy_to_device(data, std::span(elements).first(halves.bytes));
    if (halves.far) copy_to_device(data + distance(tensor.dtype), std::span(elements).last(halves.bytes));
    tensor = Tensor(data, tensor.dtype, std::span(tensor.shape).first(static_cast<std::size_t>(tensor.rank)),
                    first_device);
    if (halves.far) tensor.strides[0] = elements_between;
  }

  void get(const Tensor& tensor, const Tensor& host) const {
    if (!host.given()) return;
    const Halves halves(host);
    std::vector<std::byte> elements((halves.far ? 2 : 1) * halves.bytes);
    const auto* data = static_cast<const std::byte*>(tensor.data);
    copy_to_host(std::span(elements).first(halves.bytes), data);
    if (halves.far) copy_to_host(std::span(elements).last(halves.bytes), data + distance(host.dtype));
    set_elements(host, elements);
  }

 private:
  static constexpr std::int64_t elements_between = two_to_31 + 4096;
  static constexpr std::size_t distance(DType dtype) {
    return static_cast<std::size_t>(elements_between) * size_of(dtype);
  }

  // How a tensor comes apart.
  struct Halves {
    bool far;
    std::size_t bytes;  // of a half, or of all
    explicit Halves(const Tensor& tensor)
        : far(tensor.rank >= 3 && tensor.extent(0) == 2),
          bytes(static_cast<std::size_t>(tensor.size()) * size_of(tensor.dtype) / (far ? 2 : 1)) {
      if (bytes > room) throw std::logic_error("the problem is too large for the room at either end");
    }
  };

  const DeviceMemory& own(DType dtype) {
    const DeviceMemory& memory = memory_.emplace_back(distance(dtype) + room);
    memory.fill(0xFF);
    return memory;
  }
  std::byte* take_shared(std::size_t bytes) {
    if (memory_.empty()) shared_ = own(DType::f32).data();
    if (used_ + bytes > room) throw std::logic_error("the problem is too large for the room at either end");
    return shared_ + std::exchange(used_, used_ + (bytes + 255) / 256 * 256);
  }

  std::deque<DeviceMemory> memory_;
  std::byte* shared_ = nullptr;
  std::size_t used_ = 0;
};

// Queries of a small problem among others that are zero, which backward cannot see since their d_o is zero.
// Their lse is large: no weight is so high that it must be mended. Tensors with queries are known by `few`.
template <std::int64_t total, std::int64_t few = 7>
class AmongMany {
 public:
  // Where query n of few stands: the first half at the start, the others at the end.
  static std::int64_t place(std::int64_t n) { return n < few / 2 ? n : total - few + n; }

  void put(Tensor& tensor, Use) {
    if (!tensor.given()) return;
    if (!by_query(tensor)) {
      tensor = tensors_.emplace_back(tensor).view();
      return;
    }
    const Tensor host = tensor;
    tensor.shape[2] = total;
    const auto rank = static_cast<std::size_t>(tensor.rank);
    const DeviceMemory& memory =
        memory_.emplace_back(static_cast<std::size_t>(tensor.size()) * size_of(tensor.dtype));
    memory.fill(tensor.rank == 3 ? 0x42 : 0);  // lse: 48.6
    wait_for_device();
    tensor = Tensor(memory.data(), tensor.dtype, std::span(tensor.shape).first(rank), first_device);
    const std::vector<std::byte> elements = elements_of(host);
    for_each_row(tensor, host, [&](std::byte* row, std::size_t offset, std::size_t bytes) {
      copy_to_device(row, std::span(elements).subspan(offset, bytes));
    });
  }

  void get(const Tensor& tensor, const Tensor& host) const {
    if (!host.given()) return;
    std::vector<std::byte> elements(static_cast<std::size_t>(host.size()) * size_of(host.dtype));
    if (by_query(host)) {
      for_each_row(tensor, host, [&](const std::byte* row, std::size_t offset, std::size_t bytes) {
        copy_to_host(std::span(elements).subspan(offset, bytes), row);
      });
    } else {
      copy_to_host(elements, static_cast<const std::byte*>(tensor.data));
    }
    set_elements(host, elements);
  }

 private:
  static bool by_query(const Tensor& tensor) { return tensor.rank >= 3 && tensor.extent(2) == few; }

  // Each query's row on the device, and where it stands among the host's elements.
  template <typename Body>
  static void for_each_row(const Tensor& large, const Tensor& host, const Body& body) {
    const std::int64_t width = host.rank == 4 ? host.extent(3) : 1;
    const std::size_t bytes = static_cast<std::size_t>(width) * size_of(host.dtype);
    std::size_t offset = 0;
    for (std::int64_t head = 0; head < host.extent(0) * host.extent(1); ++head) {
      for (std::int64_t n = 0; n < few; ++n, offset += bytes) {
        const std::int64_t row = head * total + place(n);
        body(static_cast<std::byte*>(large.data) + static_cast<std::size_t>(row) * bytes, offset, bytes);
      }
    }
  }

  std::deque<DeviceMemory> memory_;
  std::deque<DeviceTensor> tensors_;
};

class CudaLarge : public CudaKernelTest {};

constexpr std::int64_t few_queries = 7;

TEST_P(CudaLarge, TakesEntriesMoreThanTwoToThe31ElementsApart) {
  for (const DType dtype : {types.front(), types.back()}) {
    SCOPED_TRACE(to_string(dtype));
    const RandomProblem problem = suited_problem(GetParam(), 50, dtype);
    if (const std::string lack = lacking_memory(FarApart::bytes(dtype)); !lack.empty()) GTEST_SKIP() << lack;
    expect_within_contract(problem, subject_in<FarApart>(GetParam()));
  }
}

TEST_P(CudaLarge, TakesQueriesOfMoreThanTwoToThe31Elements) {
  constexpr std::int64_t total = (std::int64_t{1} << 17) + 1234;
  using Place = AmongMany<total, few_queries>;
  // Of many heads: some kernels' backward has a block for each that walks over all queries.
  const Sizes sizes{.b = 1, .hq = 16, .hkv = 8, .sq = few_queries, .sk = 9, .d = 1024, .dv = 1024};
  static_assert(16 * total * 1024 > two_to_31);
  const RandomProblem problem = dense_problem(51, DType::bf16, sizes);
  if (const std::string reason = reason_against(problem, GetParam()); !reason.empty()) GTEST_SKIP() << reason;
  constexpr std::size_t tensor = 16 * total * 1024 * 2;
  constexpr std::size_t scratch = 16 * total * (2 * 9 + 2) * 4;  // of the kernels that keep scores
  if (const std::string lack = lacking_memory(4 * tensor + scratch); !lack.empty()) GTEST_SKIP() << lack;
  expect_within_contract(problem, subject_in<Place>(GetParam()));
}

TEST_P(CudaLarge, TakesMoreThanTwoToThe31Scores) {
  constexpr std::int64_t total = 32801;
  using Place = AmongMany<total, few_queries>;
  const Sizes sizes{.b = 1, .hq = 2, .hkv = 2, .sq = few_queries, .sk = 32803, .d = 16, .dv = 16};
  static_assert(2 * total * 32803 > two_to_31);
  // In the first type in which the kernel takes such heads.
  RandomProblem problem;
  std::string reason;
  for (const DType dtype : types) {
    problem = dense_problem(52, dtype, sizes);
    reason = reason_against(problem, GetParam());
    if (reason.empty()) break;
  }
  if (!reason.empty()) GTEST_SKIP() << reason;
  constexpr std::size_t matrices = std::size_t{2 * 2} * total * 32803 * 4;  // of the kernels that keep scores
  if (const std::string lack = lacking_memory(matrices + (std::size_t{1} << 28)); !lack.empty()) {
    GTEST_SKIP() << lack;
  }
  expect_within_contract(problem, subject_in<Place>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Kernels, CudaLarge, testing::ValuesIn(cuda_kernels()), kernel_name);

// The default backward of f32 without features, which has kernels of its own.
class CudaLargePlain : public CudaKernelFixture<80>, public testing::WithParamInterface<std::string> {};

TEST_P(CudaLargePlain, TakesEntriesMoreThanTwoToThe31ElementsApart) {
  const RandomProblem problem =
      dense_problem(53, DType::f32, {.b = 2, .hq = 4, .hkv = 2, .sq = 150, .sk = 203, .d = 64, .dv = 64});
  if (const std::string lack = lacking_memory(FarApart::bytes(DType::f32)); !lack.empty()) {
    GTEST_SKIP() << lack;
  }
  ASSERT_EQ(reason_against(problem, GetParam(), Pass::backward), "");
  expect_within_contract(problem, subject_in<FarApart>(GetParam()));
}

TEST_P(CudaLargePlain, TakesQueriesOfMoreThanTwoToThe31Elements) {
  constexpr std::int64_t total = (std::int64_t{1} << 20) + 1234;
  constexpr std::int64_t few = 130;  // mma takes no fewer backward
  static_assert(32 * total * 64 > two_to_31);
  const RandomProblem problem =
      dense_problem(54, DType::f32, {.b = 1, .hq = 32, .hkv = 16, .sq = few, .sk = 70, .d = 64, .dv = 64});
  ASSERT_EQ(reason_against(problem, GetParam(), Pass::backward), "");
  // q, o, d_o and dq, and of mma the parts of two of them; 100 bytes and more a query of states and peaks.
  constexpr std::size_t tensor = 32 * total * 64 * 4;
  if (const std::string lack = lacking_memory(6 * tensor + 32 * total * 256); !lack.empty()) {
    GTEST_SKIP() << lack;
  }
  expect_within_contract(problem, subject_in<AmongMany<total, few>>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Kernels, CudaLargePlain, testing::Values("fused", "mma"), kernel_name);

}  // namespace
}  // namespace tilewise::test::large_test
