// Times how long a call from C++ occupies the host: calls for a GPU, one after another, without waiting for
// the kernels they launch, compared with the launch of an empty kernel. Prints one JSON object per line, with
// times in microseconds. They are the minima of several rounds, since disturbances only make a call slower.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>

#include "cuda/runtime/launch.cuh"
#include "sweep.cuh"
#include "tilewise/attention.h"

namespace tilewise::cuda {
namespace {

using namespace sweep;

__global__ void nothing() {}

template <typename Body>
double host_us(const Body& body) {
  constexpr int rounds = 100;
  constexpr int calls = 100;  // fewer than fill the queue of a stream, which would make the host wait
  double least = 0;
  for (int round = 0; round < rounds; ++round) {
    check_cuda(cudaDeviceSynchronize(), "calls before");
    const auto begin = std::chrono::steady_clock::now();
    for (int call = 0; call < calls; ++call) body();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    least = round == 0 ? time.count() / calls : std::min(least, time.count() / calls);
  }
  check_cuda(cudaDeviceSynchronize(), "calls");
  return least;
}

/// Keeps the host busy until its clock is up, which takes seconds after idling: an empty launch took 4.0 us
/// at first and 2.7 us four seconds later.
void wake_host() {
  constexpr std::chrono::seconds enough{4};
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < enough) {
    for (int n = 0; n < 100; ++n) launch<nothing>({.name = "nothing", .blocks = 1, .threads = 32});
    check_cuda(cudaDeviceSynchronize(), "calls");
  }
}

void time_calls() {
  const Memory q{elements * 2}, k{elements * 2}, v{elements * 2}, o{elements * 2}, space{1 << 26};
  for (const Memory* memory : {&q, &k, &v}) {
    fill<<<elements / 256, 256>>>(static_cast<__nv_bfloat16*>(memory->data), 1, 1.0f);
  }
  const Device device{Device::Type::cuda, 0};
  const Context context{.device = device, .workspace = {space.data, 1 << 26}};
  wake_host();
  for (const std::int64_t length : {128, 512, 2048}) {
    for (const bool causal : {false, true}) {
      const std::int64_t sizes[] = {1, 16, length, 128};
      const auto tensor = [&](const Memory& memory) {
        return Tensor(memory.data, DType::bf16, sizes, device);
      };
      const AttentionInputs inputs{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
      const AttentionOutputs outputs{.o = tensor(o)};
      const AttentionOptions options{.causal = causal};
      const double launch_alone =
          host_us([] { launch<nothing>({.name = "nothing", .blocks = 1, .threads = 32}); });
      const double call = host_us([&] { attention_forward(inputs, options, outputs, context); });
      std::printf(
          "{\"heads\": 16, \"s\": %lld, \"d\": 128, \"causal\": %s, \"call\": %.2f, \"launch\": %.2f}\n",
          static_cast<long long>(length), causal ? "true" : "false", call, launch_alone);
    }
  }
}

}  // namespace
}  // namespace tilewise::cuda

int main() {
  try {
    tilewise::cuda::time_calls();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
