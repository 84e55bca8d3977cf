// Times candidates for the tuning table of the mma kernel's forward
// (src/cuda/attention/sm80/forward/tuning.h), bf16, over 16k tokens of hidden size 2048. Prints one JSON
// object per candidate and shape: whether the table has the candidate, its time, and the largest difference
// of its O from that of the fused kernel. `gpu-sweep mma` makes a record of them.
//   sweep_mma [head dim [sequence length]]

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "attention/validate.h"
#include "cuda/attention/sm80/forward/rows.cuh"
#include "sweep.cuh"
#include "tilewise/attention.h"

namespace tilewise::cuda::mma {
namespace {

using namespace sweep;

using T = __nv_bfloat16;

struct Candidates {
  static constexpr bool general = false;
  static constexpr ForwardConfig rows[] = {
      {.dim = 64, .warps = 4, .row_tiles = 2, .keys = 128, .blocks = 2},
      {.dim = 64, .warps = 4, .row_tiles = 2, .keys = 128, .old_maxima = true, .blocks = 2},
      {.dim = 64, .warps = 4, .row_tiles = 2, .keys = 64, .queries_stay = true, .blocks = 2},
      {.dim = 64, .warps = 4, .row_tiles = 2, .keys = 64, .blocks = 3},
      {.dim = 64, .warps = 8, .row_tiles = 2, .keys = 128, .blocks = 1},
      {.dim = 128, .warps = 4, .row_tiles = 2, .keys = 64, .blocks = 2},
      {.dim = 128, .warps = 4, .row_tiles = 2, .keys = 64, .old_maxima = true, .blocks = 2},
      {.dim = 128, .warps = 8, .row_tiles = 2, .keys = 64, .blocks = 1},
      {.dim = 256, .warps = 4, .row_tiles = 2, .keys = 64, .stages = 1, .paired = true, .blocks = 2},
      {.dim = 256, .warps = 8, .row_tiles = 2, .keys = 64, .stages = 1, .paired = true, .blocks = 1},
      {.dim = 256, .warps = 8, .row_tiles = 1, .keys = 64, .blocks = 1},
      {.dim = 256, .warps = 8, .row_tiles = 1, .keys = 32, .blocks = 1},
  };
};
static_assert(has_rows_of_table<PlainForward, Candidates>());

struct Sweep {
  Memory q{elements * 2}, k{elements * 2}, v{elements * 2}, o{elements * 2}, truth{elements * 2};
  Memory lse{tokens * hidden_size * 4};  // of the smallest head dim there may be

  Sweep() {
    std::uint32_t seed = 1;
    for (const Memory* memory : {&q, &k, &v}) {
      fill<<<elements / 256, 256>>>(static_cast<__nv_bfloat16*>(memory->data), seed++, 1.0f);
    }
    check_cuda(cudaDeviceSynchronize(), "inputs");
  }

  template <int row>
  void time(const AttentionCall& call, double flops) {
    constexpr ForwardConfig c = Candidates::rows[row];
    const AttentionProblem& problem = call.problem;
    if (c.dim != problem.dim_qk) return;
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, forward_kernel<T, Candidates, row>), "attributes");
    cudaMemset(o.data, 0xFF, elements * 2);
    const double ms = median_ms([&] { run_row<T, Candidates, row>(call, device_properties(0), Context{}); });
    print_problem("mma-sweep", "bf16", problem);
    std::printf(
        ", \"warps\": %d, \"row_tiles\": %d, \"keys\": %d, \"queries_stay\": %s, "
        "\"stages\": %d, \"paired\": %s, \"old_maxima\": %s, \"blocks\": %d",
        c.warps, c.row_tiles, c.keys, name_of(c.queries_stay), c.stages, name_of(c.paired),
        name_of(c.old_maxima), c.blocks);
    print_found({in_table<PlainForward>(c), attributes, c.shared_bytes(false), ms, flops});
    std::printf(", \"difference\": %g}\n", static_cast<double>(difference_of<T>(o, truth).largest));
    std::fflush(stdout);
  }

  void shape(std::int64_t dim, std::int64_t length, bool causal) {
    const Device device{Device::Type::cuda, 0};
    const std::int64_t sizes[] = {tokens / length, hidden_size / dim, length, dim};
    const auto tensor = [&](const Memory& memory) { return Tensor(memory.data, DType::bf16, sizes, device); };
    const AttentionInputs inputs{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
    AttentionOptions options{.causal = causal, .kernel = "fused"};
    const Context context{.device = device};
    attention_forward(inputs, options, {.o = tensor(truth)}, context);
    options.kernel = "auto";
    const AttentionOutputs outputs{.o = tensor(o),
                                   .lse = Tensor(lse.data, DType::f32, std::span(sizes).first(3), device)};
    const AttentionCall call = checked_forward(inputs, options, outputs, context);
    const double flops = 4.0 * static_cast<double>(elements * length) * (causal ? 0.5 : 1.0);
    for_each_row<Candidates>([&](auto row) { time<row>(call, flops); });
  }
};

void sweep(std::int64_t only_dim, std::int64_t only_length) {
  Sweep shapes;
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
