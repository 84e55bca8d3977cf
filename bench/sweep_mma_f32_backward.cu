// Times candidates for the tuning table of the mma kernel's backward for f32
// (src/cuda/attention/sm80/backward_f32/tuning.h), over 16k tokens of hidden size 2048. Prints one JSON
// object per candidate and shape: whether the table has the candidate, its time, and the largest differences
// of dQ, dK and dV from those of the fused kernel. `gpu-sweep mma_f32_backward` makes a record of them.
//   sweep_mma_f32_backward [head dim [sequence length]]

#include <cstdio>

#include "attention/validate.h"
#include "cuda/attention/sm80/backward_f32/backward.cuh"
#include "sweep.cuh"
#include "tilewise/attention.h"

namespace tilewise::cuda::mma_f32 {
namespace {

using namespace sweep;

struct Candidates {
  static constexpr BackwardConfig rows[] = {
      {.dim = 64, .warps = 8, .blocks = 1},
      {.dim = 64, .warps = 8, .dims_at_once = 32, .blocks = 1},
      {.dim = 64, .warps = 8, .blocks = 2},
      {.dim = 64, .warps = 4, .blocks = 2},
      {.dim = 64, .warps = 4, .dims_at_once = 32, .blocks = 2},
      {.dim = 64, .warps = 4, .blocks = 3},
      {.dim = 128, .warps = 8, .blocks = 1},
      {.dim = 128, .warps = 8, .dims_at_once = 32, .blocks = 1},
      {.dim = 128, .warps = 4, .blocks = 1},
  };
};

static_assert(has_rows_of_table<FullBackward, Candidates>());

struct Sweep {
  Memory q{elements * 4}, k{elements * 4}, v{elements * 4}, o{elements * 4}, d_o{elements * 4};
  Memory dq{elements * 4}, dk{elements * 4}, dv{elements * 4};
  Memory dq_truth{elements * 4}, dk_truth{elements * 4}, dv_truth{elements * 4};
  Memory lse{tokens * hidden_size * 4};  // of the smallest head dim there may be
  Memory workspace{elements * 19};
  int multiprocessors;

  explicit Sweep(int multiprocessors_) : multiprocessors(multiprocessors_) {
    std::uint32_t seed = 1;
    for (const Memory* memory : {&q, &k, &v, &d_o}) {
      fill<<<elements / 256, 256>>>(static_cast<float*>(memory->data), seed++, 1.0f);
    }
    check_cuda(cudaDeviceSynchronize(), "inputs");
  }

  static double difference(const Memory& a, const Memory& b) {
    return static_cast<double>(difference_of<float>(a, b).largest);
  }

  template <int row>
  void time(const AttentionCall& call, double flops) {
    constexpr BackwardConfig c = Candidates::rows[row];
    const AttentionProblem& problem = call.problem;
    if (c.dim != problem.dim_qk) return;
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, backward_kernel<Candidates, row>), "attributes");
    for (const Memory* memory : {&dq, &dk, &dv}) cudaMemset(memory->data, 0xFF, elements * 4);
    const BackwardSpace space = backward_space_of(call, workspace.data);
    const auto all = [&] {
      run_chosen_backward<Candidates>(call, space, row, multiprocessors, nullptr);
      simt::mend_peaks(call, space.peaks, {}, nullptr);
    };
    const double ms = median_ms(all);
    print_problem("mma-f32-backward-sweep", "f32", problem);
    std::printf(", \"warps\": %d, \"dims_at_once\": %d, \"blocks\": %d", c.warps, c.dims_at_once, c.blocks);
    print_found({in_table<FullBackward>(c), attributes, c.shared_bytes(), ms, flops});
    std::printf(", \"dq_difference\": %g, \"dk_difference\": %g, \"dv_difference\": %g}\n",
                difference(dq, dq_truth), difference(dk, dk_truth), difference(dv, dv_truth));
    std::fflush(stdout);
  }

  void shape(std::int64_t dim, std::int64_t length, bool causal) {
    const Device device{Device::Type::cuda, 0};
    const std::int64_t sizes[] = {tokens / length, hidden_size / dim, length, dim};
    const auto tensor = [&](const Memory& memory) { return Tensor(memory.data, DType::f32, sizes, device); };
    const AttentionInputs inputs{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
    AttentionOptions options{.causal = causal, .kernel = "fused"};
    const Context context{.device = device,
                          .workspace = {workspace.data, static_cast<std::size_t>(elements * 19)}};
    const Tensor rows(lse.data, DType::f32, std::span(sizes).first(3), device);
    attention_forward(inputs, options, {.o = tensor(o), .lse = rows}, context);
    AttentionGradients gradients{.o = tensor(o),
                                 .lse = rows,
                                 .d_o = tensor(d_o),
                                 .dq = tensor(dq_truth),
                                 .dk = tensor(dk_truth),
                                 .dv = tensor(dv_truth)};
    attention_backward(inputs, options, gradients, context);
    options.kernel = "auto";
    gradients.dq = tensor(dq);
    gradients.dk = tensor(dk);
    gradients.dv = tensor(dv);
    const AttentionCall call = checked_backward(inputs, options, gradients, context);
    const double flops = 10.0 * static_cast<double>(elements * length) * (causal ? 0.5 : 1.0);
    for_each_row<Candidates>([&](auto row) { time<row>(call, flops); });
  }
};

void sweep(std::int64_t only_dim, std::int64_t only_length) {
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, 0), "the device");
  Sweep shapes(device.multiProcessorCount);
  for (const std::int64_t dim : {64, 128}) {
    for (const std::int64_t length : {1024, 4096, 16384}) {
      if ((only_dim != 0 && dim != only_dim) || (only_length != 0 && length != only_length)) continue;
      for (const bool causal : {false, true}) shapes.shape(dim, length, causal);
    }
  }
}

}  // namespace
}  // namespace tilewise::cuda::mma_f32

int main(int argc, char** argv) {
  return tilewise::cuda::sweep::run_sweep(argc, argv, tilewise::cuda::mma_f32::sweep);
}
