// Times candidates for the tuning table of the mma kernel's backward
// (src/cuda/attention/sm80/backward/choice.h), bf16, over 16k tokens of hidden size 2048. Prints one JSON
// object per candidate and shape: whether the table has the candidate; `ms` of its main kernel alone;
// `all_ms` of the whole call with the table's own row; the largest differences from the gradients of the
// fused kernel, relative to their largest element. `gpu-sweep mma_backward` makes a record of them.
//   sweep_mma_backward [head dim [sequence length]]

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "attention/validate.h"
#include "cuda/attention/sm80/backward/backward.cuh"
#include "sweep.cuh"
#include "tilewise/attention.h"

namespace tilewise::cuda::mma {
namespace {

using namespace sweep;

using T = __nv_bfloat16;

struct Candidates {
  static constexpr bool general = false;
  static constexpr BackwardConfig rows[] = {
      {.dim = 128,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 2,
       .dq_dim_warps = 4,
       .pairs_ahead = true,
       .stages = 3},
      {.dim = 128,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 2,
       .dq_dim_warps = 4,
       .pairs_ahead = true,
       .stages = 3,
       .matrix_stores = true},
      {.dim = 128,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 2,
       .dq_dim_warps = 4,
       .pairs_ahead = true},
      {.dim = 256,
       .warps = 8,
       .queries = 64,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 4,
       .dq_dim_warps = 4,
       .pairs_ahead = true},
      {.dim = 256,
       .warps = 8,
       .queries = 64,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 4,
       .dq_dim_warps = 4,
       .pairs_ahead = true,
       .matrix_stores = true},
      {.dim = 64,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 2,
       .dq_dim_warps = 2,
       .pairs_ahead = true,
       .stages = 3},
      {.dim = 256,
       .warps = 8,
       .queries = 32,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 16,
       .dim_warps = 4,
       .dq_dim_warps = 4,
       .pairs_ahead = true,
       .stages = 3},
      {.dim = 64,
       .warps = 4,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 1,
       .dq_dim_warps = 2,
       .weights_stay = true,
       .blocks = 2},
      {.dim = 64,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 8,
       .queries_at_once = 64,
       .dim_warps = 1,
       .dq_dim_warps = 2,
       .weights_stay = true,
       .blocks = 1},
      {.dim = 64,
       .warps = 8,
       .queries = 128,
       .keys = 128,
       .key_warps = 8,
       .queries_at_once = 64,
       .dim_warps = 1,
       .dq_dim_warps = 2,
       .weights_stay = true,
       .blocks = 1},
      {.dim = 64,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 2,
       .dq_dim_warps = 2,
       .blocks = 1},
      {.dim = 64,
       .warps = 8,
       .queries = 128,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 2,
       .dq_dim_warps = 2,
       .blocks = 1},
      {.dim = 64,
       .warps = 8,
       .queries = 64,
       .keys = 256,
       .key_warps = 8,
       .queries_at_once = 32,
       .dim_warps = 1,
       .dq_dim_warps = 2,
       .weights_stay = true,
       .blocks = 1},
      {.dim = 64,
       .warps = 4,
       .queries = 64,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 1,
       .dq_dim_warps = 2,
       .weights_stay = true,
       .blocks = 2},
      {.dim = 64,
       .warps = 4,
       .queries = 64,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 1,
       .dq_dim_warps = 2,
       .weights_stay = true,
       .blocks = 3},
      {.dim = 128,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 2,
       .dq_dim_warps = 4,
       .blocks = 1},
      {.dim = 128,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 4,
       .queries_at_once = 16,
       .dim_warps = 2,
       .dq_dim_warps = 4,
       .blocks = 1},
      {.dim = 128,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 8,
       .queries_at_once = 32,
       .dim_warps = 1,
       .dq_dim_warps = 4,
       .weights_stay = true,
       .blocks = 1},
      {.dim = 128,
       .warps = 8,
       .queries = 64,
       .keys = 128,
       .key_warps = 8,
       .queries_at_once = 16,
       .dim_warps = 1,
       .dq_dim_warps = 4,
       .weights_stay = true,
       .blocks = 1},
      {.dim = 128,
       .warps = 8,
       .queries = 32,
       .keys = 128,
       .key_warps = 8,
       .queries_at_once = 32,
       .dim_warps = 1,
       .dq_dim_warps = 4,
       .weights_stay = true,
       .blocks = 1},
      {.dim = 128,
       .warps = 4,
       .queries = 64,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 16,
       .dim_warps = 1,
       .dq_dim_warps = 2,
       .weights_stay = true,
       .blocks = 2},
      {.dim = 128,
       .warps = 4,
       .queries = 64,
       .keys = 64,
       .key_warps = 2,
       .queries_at_once = 32,
       .dim_warps = 2,
       .dq_dim_warps = 2,
       .blocks = 2},
      {.dim = 256,
       .warps = 8,
       .queries = 64,
       .keys = 64,
       .key_warps = 2,
       .queries_at_once = 16,
       .dim_warps = 4,
       .dq_dim_warps = 4,
       .blocks = 1},
      {.dim = 256,
       .warps = 8,
       .queries = 64,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 32,
       .dim_warps = 4,
       .dq_dim_warps = 4,
       .blocks = 1},
      {.dim = 256,
       .warps = 8,
       .queries = 64,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 16,
       .dim_warps = 4,
       .dq_dim_warps = 4,
       .blocks = 1},
      {.dim = 256,
       .warps = 8,
       .queries = 32,
       .keys = 64,
       .key_warps = 4,
       .queries_at_once = 16,
       .dim_warps = 4,
       .dq_dim_warps = 4,
       .blocks = 1},
  };
};
static_assert(has_rows_of_table<PlainBackward, Candidates>());

struct Gradients {
  Memory dq{elements * 2}, dk{elements * 2}, dv{elements * 2};
};

struct Sweep {
  Memory q{elements * 2}, k{elements * 2}, v{elements * 2}, o{elements * 2}, d_o{elements * 2};
  Memory lse{elements / 64 * 4};
  Gradients got, truth;
  Memory workspace{std::int64_t{1} << 30};
  int multiprocessors;

  explicit Sweep(int multiprocessors_) : multiprocessors(multiprocessors_) {
    std::uint32_t seed = 1;
    for (const Memory* memory : {&q, &k, &v, &d_o}) {
      fill<<<elements / 256, 256>>>(static_cast<T*>(memory->data), seed++, 1.0f);
    }
    check_cuda(cudaDeviceSynchronize(), "inputs");
  }

  /// Times one candidate's main kernel. For the gradients, the call's own kernels run before and after it.
  template <int row>
  void time(const AttentionCall& call, const Context& context, double flops, double all_ms) {
    constexpr BackwardConfig c = Candidates::rows[row];
    const AttentionProblem& problem = call.problem;
    if (c.dim != problem.dim_qk) return;
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, backward_kernel<T, Candidates, row>), "attributes");
    const BackwardSpace space(call, context.workspace.data, 1);
    const auto run = [&] { run_backward_row<T, Candidates, row>(call, space, multiprocessors, nullptr); };
    const double ms = median_ms(run);
    for (const Memory* memory : {&got.dq, &got.dk, &got.dv}) cudaMemset(memory->data, 0xFF, elements * 2);
    prepare_backward(call, space, context);
    run();
    finish_backward(call, space, context);
    print_problem("mma-backward-sweep", "bf16", problem);
    std::printf(
        ", \"warps\": %d, \"queries\": %d, \"keys\": %d, \"key_warps\": %d, \"queries_at_once\": %d, "
        "\"dim_warps\": %d, \"dq_dim_warps\": %d, \"weights_stay\": %s, \"pairs_ahead\": %s, \"stages\": %d, "
        "\"matrix_stores\": %s, \"blocks\": %d",
        c.warps, c.queries, c.keys, c.key_warps, c.queries_at_once, c.dim_warps, c.dq_dim_warps,
        name_of(c.weights_stay), name_of(c.pairs_ahead), c.stages, name_of(c.matrix_stores), c.blocks);
    print_found({in_table<PlainBackward>(c), attributes, c.shared_bytes(Candidates::general), ms, flops});
    std::printf(", \"all_ms\": %.4f, \"dq_difference\": %g, \"dk_difference\": %g, \"dv_difference\": %g}\n",
                all_ms, difference_of<T>(got.dq, truth.dq).relative(),
                difference_of<T>(got.dk, truth.dk).relative(), difference_of<T>(got.dv, truth.dv).relative());
    std::fflush(stdout);
  }

  void shape(std::int64_t dim, std::int64_t length, bool causal) {
    const Device device{Device::Type::cuda, 0};
    const std::int64_t sizes[] = {tokens / length, hidden_size / dim, length, dim};
    const auto tensor = [&](const Memory& memory) { return Tensor(memory.data, DType::bf16, sizes, device); };
    const AttentionInputs inputs{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
    const Tensor lses(lse.data, DType::f32, std::span(sizes).first(3), device);
    AttentionOptions options{.causal = causal, .kernel = "auto"};
    const Context context{.device = device, .workspace = {workspace.data, std::size_t{1} << 30}};
    attention_forward(inputs, options, {.o = tensor(o), .lse = lses}, context);
    const auto gradients = [&](const Gradients& to) {
      return AttentionGradients{.o = tensor(o),
                                .lse = lses,
                                .d_o = tensor(d_o),
                                .dq = tensor(to.dq),
                                .dk = tensor(to.dk),
                                .dv = tensor(to.dv)};
    };
    options.kernel = "fused";
    attention_backward(inputs, options, gradients(truth), context);
    options.kernel = "mma";
    const double all_ms = median_ms([&] { attention_backward(inputs, options, gradients(got), context); });
    const AttentionCall call = checked_backward(inputs, options, gradients(got), context);
    const double flops = 10.0 * static_cast<double>(elements * length) * (causal ? 0.5 : 1.0);
    for_each_row<Candidates>([&](auto row) { time<row>(call, context, flops, all_ms); });
  }
};

void sweep(std::int64_t only_dim, std::int64_t only_length) {
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, 0), "the device");
  Sweep shapes(device.multiProcessorCount);
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const std::int64_t length : {512, 1024, 4096, 16384}) {
      if ((only_dim != 0 && dim != only_dim) || (only_length != 0 && length != only_length)) continue;
      for (const bool causal : {false, true}) shapes.shape(dim, length, causal);
    }
  }
}

}  // namespace
}  // namespace tilewise::cuda::mma

int main(int argc, char** argv) {
  return tilewise::cuda::sweep::run_sweep(argc, argv, tilewise::cuda::mma::sweep);
}
