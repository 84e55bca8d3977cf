#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "cuda/runtime/fault.h"

namespace tilewise::test::errors_test {
namespace {

// A sound call of both passes whose tensors say that they are on `device`. Nothing here reads them.
struct Call {
  RandomProblem problem;
  OutputBuffers output_buffers = make_outputs(problem);
  GradientBuffers gradient_buffers = make_gradients(problem);
  AttentionInputs inputs;
  AttentionOutputs outputs;
  AttentionGradients gradients;
  AttentionOptions options;
  Context context;

  explicit Call(Device device, RandomProblem problem_ = featured_problem(40, DType::f32))
      : problem(std::move(problem_)),
        inputs(on_device(problem.inputs(), device)),
        outputs(on_device(output_buffers.view(), device)),
        gradients(on_device(backward_arguments(problem, output_buffers, gradient_buffers), device)),
        options(problem.options),
        context{.device = device} {}

  void forward() const { attention_forward(inputs, options, outputs, context); }
  void backward() const { attention_backward(inputs, options, gradients, context); }
};

// The message with which an exception of that type is thrown; a failure where none is.
template <typename Exception>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

// Checks come before anything is launched, so these need no device.

TEST(CudaArguments, InAnotherPlaceThanTheContextSaysAreNamed) {
  const Call sound(first_device);
  const auto expect_named = [&](const std::string& name, Tensor AttentionInputs::* tensor, Device place) {
    Call call = sound;
    (call.inputs.*tensor).device = place;
    expect_contains(message_of<InvalidArgument>([&] { call.forward(); }),
                    name + ": expected memory on cuda:0, got " + to_string(place));
    expect_contains(message_of<InvalidArgument>([&] { call.backward(); }),
                    name + ": expected memory on cuda:0, got " + to_string(place));
  };
  for (const Device place : {Device{}, Device{Device::Type::cuda, 1}}) {
    expect_named("q", &AttentionInputs::q, place);
    expect_named("k", &AttentionInputs::k, place);
    expect_named("v", &AttentionInputs::v, place);
    expect_named("mask", &AttentionInputs::mask, place);
    expect_named("sinks", &AttentionInputs::sinks, place);
  }
  Call call = sound;
  call.outputs.o.device = {};
  expect_contains(message_of<InvalidArgument>([&] { call.forward(); }),
                  "o: expected memory on cuda:0, got cpu");
  call = sound;
  call.gradients.dk.device = {};
  expect_contains(message_of<InvalidArgument>([&] { call.backward(); }),
                  "dk: expected memory on cuda:0, got cpu");
  call = sound;
  call.context.device = {};
  expect_contains(message_of<InvalidArgument>([&] { call.forward(); }),
                  "q: expected memory on cpu, got cuda:0");
}

TEST(CudaArguments, OfAKernelForAnotherDeviceGiveItsReason) {
  for (const std::string& kernel : cuda_kernels()) {
    Call call((Device()));
    call.options.kernel = kernel;
    expect_contains(message_of<Unsupported>([&] { call.forward(); }), kernel + ": ");
  }
  Call call(first_device);
  for (const char* kernel : {"simd", "reference"}) {
    call.options.kernel = kernel;
    expect_contains(message_of<Unsupported>([&] { call.forward(); }), std::string(kernel) + ": ");
  }
}

TEST(CudaArguments, InDoublePrecisionGiveEveryKernelsReason) {
  const Call call(first_device, widened(featured_problem(40, DType::f32)));
  const std::string message = message_of<Unsupported>([&] { call.forward(); });
  for (const std::string_view kernel : attention_kernels()) {
    expect_contains(message, "\n  " + std::string(kernel) + ": ");
  }
}

TEST(CudaArguments, WithoutTheWorkspaceAskedForSayHowMuch) {
  Call call(first_device);
  call.options.kernel = "naive";
  const std::size_t bytes =
      attention_forward_workspace(call.inputs, call.options, call.outputs, call.context);
  ASSERT_GT(bytes, 0u);
  expect_contains(message_of<InvalidArgument>([&] { call.forward(); }),
                  "workspace: expected at least " + std::to_string(bytes) + " bytes, got none");
}

TEST(WithoutACudaDevice, CallsFailAsTheLibrarysExceptionAndTheCpuWorks) {
  if (cuda_presence().present) GTEST_SKIP() << "there is a CUDA device";
  const Call call(first_device, dense_problem(41, DType::f32));
  const std::string message = message_of<DeviceError>([&] { call.forward(); });
  expect_contains(message, "cudaError");
  const Call on_cpu((Device()), dense_problem(41, DType::f32));
  run_forward(on_cpu.inputs, on_cpu.options, on_cpu.outputs);
  EXPECT_TRUE(on_cpu.output_buffers.o.all_written());
}

class CudaErrors : public CudaTest {};

TEST_F(CudaErrors, ADeviceThatIsNotThereIsAnError) {
  int count = 0;
  cuda::check_cuda(cudaGetDeviceCount(&count), "counting devices");
  for (const int index : {count, 1000, -1}) {
    Call call({Device::Type::cuda, index}, dense_problem(42, DType::f32));
    call.options.kernel = "fused";
    expect_contains(message_of<DeviceError>([&] { call.forward(); }), "device");
  }
  int current = -1;
  cuda::check_cuda(cudaGetDevice(&current), "asking for the current device");
  EXPECT_EQ(current, 0);
  // The failed calls left nothing behind.
  const Stream stream;
  EXPECT_FALSE(DeviceProblem(dense_problem(42, DType::f32), "fused").run(stream).empty());
}

// A kernel that faults takes the whole context along, so this runs in a process of its own.
TEST_F(CudaErrors, AFaultOnTheDeviceComesOutOfTheNextCallWithTheKernelsName) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto call_after_fault = [] {
    const DeviceProblem problem(dense_problem(43, DType::f32), "fused");
    fault_on_device();
    try {
      problem.forward(nullptr);
    } catch (const DeviceError& error) {
      std::cerr << "DeviceError " << error.what() << std::endl;
      std::_Exit(3);
    }
    std::_Exit(4);
  };
  EXPECT_EXIT(call_after_fault(), testing::ExitedWithCode(3),
              "DeviceError tilewise fused forward: cudaError");
}

// An entry more would be for the kernels of many queries, which describe tensors to the driver: it takes no
// empty ones.
TEST_F(CudaErrors, ManyQueriesOfNoEntryAreNoError) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Buffer rows(dtype, {0, 2, 300, 64}), o(dtype, {0, 2, 300, 64}), lse(DType::f32, {0, 2, 300});
    run_forward_on_cuda({.q = rows.view(), .k = rows.view(), .v = rows.view()}, {}, {o.view(), lse.view()});
  }
}

}  // namespace
}  // namespace tilewise::test::errors_test
