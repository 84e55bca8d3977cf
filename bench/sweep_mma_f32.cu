// Times candidates for the tuning tables of the mma kernel's forward for f32
// (src/cuda/attention/sm80/forward_f32/tuning.h), over 16k tokens of hidden size 2048. Prints one JSON object
// per candidate and shape: whether its table has the candidate; `ms` of the call; `split_ms`, the part of it
// that splits K and V into 16-bit parts; the largest difference of its O from that of the fused kernel.
// `gpu-sweep mma_f32` makes a record of them.
//   sweep_mma_f32 [head dim [sequence length]]

#include <cstdio>

#include "attention/validate.h"
#include "cuda/attention/sm80/forward_f32/forward.cuh"
#include "sweep.cuh"
#include "tilewise/attention.h"

namespace tilewise::cuda::mma_f32 {
namespace {

using namespace sweep;

struct FullCandidates {
  static constexpr int keys = 32;
  static constexpr int parts = 2;
  static constexpr ForwardConfig rows[] = {
      {.dim = 64,
       .warps = 4,
       .row_tiles = 2,
       .keys_at_once = 16,
       .dims_at_once = 16,
       .buffers = 4,
       .queries_stay = true,
       .blocks = 2},
      {.dim = 64,
       .warps = 4,
       .row_tiles = 2,
       .keys_at_once = 32,
       .dims_at_once = 16,
       .buffers = 4,
       .queries_stay = true,
       .blocks = 2},
      {.dim = 64,
       .warps = 4,
       .row_tiles = 2,
       .keys_at_once = 32,
       .dims_at_once = 32,
       .buffers = 4,
       .queries_stay = true,
       .blocks = 2},
      {.dim = 64,
       .warps = 4,
       .row_tiles = 2,
       .keys_at_once = 32,
       .dims_at_once = 32,
       .buffers = 4,
       .blocks = 2},
      {.dim = 64,
       .warps = 4,
       .row_tiles = 1,
       .keys_at_once = 32,
       .dims_at_once = 32,
       .buffers = 4,
       .blocks = 3},
      {.dim = 64,
       .warps = 8,
       .row_tiles = 1,
       .keys_at_once = 32,
       .dims_at_once = 32,
       .buffers = 4,
       .blocks = 2},
      {.dim = 128,
       .warps = 4,
       .row_tiles = 2,
       .keys_at_once = 16,
       .dims_at_once = 16,
       .buffers = 3,
       .blocks = 2},
      {.dim = 128,
       .warps = 4,
       .row_tiles = 2,
       .keys_at_once = 32,
       .dims_at_once = 16,
       .buffers = 3,
       .blocks = 2},
      {.dim = 128,
       .warps = 4,
       .row_tiles = 2,
       .keys_at_once = 32,
       .dims_at_once = 32,
       .buffers = 3,
       .blocks = 2},
      {.dim = 128,
       .warps = 4,
       .row_tiles = 2,
       .keys_at_once = 16,
       .dims_at_once = 32,
       .buffers = 3,
       .blocks = 2},
      {.dim = 128,
       .warps = 8,
       .row_tiles = 2,
       .keys_at_once = 32,
       .dims_at_once = 32,
       .buffers = 4,
       .blocks = 1},
      {.dim = 128,
       .warps = 8,
       .row_tiles = 2,
       .keys_at_once = 32,
       .dims_at_once = 16,
       .buffers = 3,
       .blocks = 1},
      {.dim = 128,
       .warps = 4,
       .row_tiles = 1,
       .keys_at_once = 32,
       .dims_at_once = 32,
       .buffers = 3,
       .blocks = 2},
      {.dim = 256,
       .warps = 8,
       .row_tiles = 1,
       .keys_at_once = 32,
       .dims_at_once = 16,
       .buffers = 3,
       .blocks = 1},
      {.dim = 256,
       .warps = 8,
       .row_tiles = 1,
       .keys_at_once = 32,
       .dims_at_once = 32,
       .buffers = 3,
       .blocks = 1},
  };
};

struct Tf32Candidates {
  static constexpr int keys = 64;
  static constexpr int parts = 1;
  static constexpr ForwardConfig rows[] = {
      {.dim = 64,
       .warps = 4,
       .row_tiles = 2,
       .keys = 64,
       .parts = 1,
       .keys_at_once = 32,
       .dims_at_once = 16,
       .buffers = 4,
       .queries_stay = false,
       .blocks = 2},
      {.dim = 64,
       .warps = 4,
       .row_tiles = 2,
       .keys = 64,
       .parts = 1,
       .keys_at_once = 64,
       .dims_at_once = 32,
       .buffers = 4,
       .queries_stay = false,
       .blocks = 2},
      {.dim = 64,
       .warps = 4,
       .row_tiles = 2,
       .keys = 64,
       .parts = 1,
       .keys_at_once = 32,
       .dims_at_once = 32,
       .buffers = 4,
       .queries_stay = true,
       .blocks = 2},
      {.dim = 64,
       .warps = 4,
       .row_tiles = 1,
       .keys = 64,
       .parts = 1,
       .keys_at_once = 64,
       .dims_at_once = 32,
       .buffers = 4,
       .queries_stay = true,
       .blocks = 3},
      {.dim = 128,
       .warps = 4,
       .row_tiles = 2,
       .keys = 64,
       .parts = 1,
       .keys_at_once = 16,
       .dims_at_once = 16,
       .buffers = 4,
       .blocks = 2},
      {.dim = 128,
       .warps = 4,
       .row_tiles = 2,
       .keys = 64,
       .parts = 1,
       .keys_at_once = 32,
       .dims_at_once = 16,
       .buffers = 4,
       .blocks = 2},
      {.dim = 128,
       .warps = 4,
       .row_tiles = 2,
       .keys = 64,
       .parts = 1,
       .keys_at_once = 32,
       .dims_at_once = 32,
       .buffers = 4,
       .blocks = 2},
      {.dim = 256,
       .warps = 8,
       .row_tiles = 1,
       .keys = 64,
       .parts = 1,
       .keys_at_once = 32,
       .dims_at_once = 32,
       .buffers = 4,
       .blocks = 1},
  };
};

static_assert(has_rows_of_table<FullForward, FullCandidates>());
static_assert(has_rows_of_table<Tf32Forward, Tf32Candidates>());

struct Sweep {
  Memory q{elements * 4}, k{elements * 4}, v{elements * 4}, o{elements * 4}, truth{elements * 4};
  Memory lse{tokens * hidden_size * 4};  // of the smallest head dim there may be
  Memory workspace{elements * 9};
  int multiprocessors;

  explicit Sweep(int multiprocessors_) : multiprocessors(multiprocessors_) {
    std::uint32_t seed = 1;
    for (const Memory* memory : {&q, &k, &v}) {
      fill<<<elements / 256, 256>>>(static_cast<float*>(memory->data), seed++, 1.0f);
    }
    check_cuda(cudaDeviceSynchronize(), "inputs");
  }

  template <typename Table, typename Candidates, int row>
  void time(const AttentionCall& call, double flops) {
    constexpr ForwardConfig c = Candidates::rows[row];
    const AttentionProblem& problem = call.problem;
    if (c.dim != problem.dim_qk) return;
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, forward_kernel<Candidates, row>), "attributes");
    cudaMemset(o.data, 0xFF, elements * 4);
    const ForwardSpace space = space_of<Candidates>(call, workspace.data);
    const double ms = median_ms([&] { run_row<Candidates, row>(call, space, multiprocessors, nullptr); });
    const double split_ms = median_ms([&] { split_keys<Candidates, c.dim>(call, space, nullptr); });
    print_problem("mma-f32-sweep", "f32", problem);
    std::printf(
        ", \"parts\": %d, \"warps\": %d, \"row_tiles\": %d, \"keys\": %d, \"keys_at_once\": %d, "
        "\"dims_at_once\": %d, \"buffers\": %d, \"queries_stay\": %s, \"blocks\": %d",
        c.parts, c.warps, c.row_tiles, c.keys, c.keys_at_once, c.dims_at_once, c.buffers,
        name_of(c.queries_stay), c.blocks);
    print_found({in_table<Table>(c), attributes, c.shared_bytes(), ms, flops});
    std::printf(", \"split_ms\": %.4f, \"difference\": %g}\n", split_ms,
                static_cast<double>(difference_of<float>(o, truth).largest));
    std::fflush(stdout);
  }

  template <typename Table, typename Candidates>
  void time_all(const AttentionCall& call, double flops) {
    for_each_row<Candidates>([&](auto row) { time<Table, Candidates, row>(call, flops); });
  }

  void shape(std::int64_t dim, std::int64_t length, bool causal) {
    const Device device{Device::Type::cuda, 0};
    const std::int64_t sizes[] = {tokens / length, hidden_size / dim, length, dim};
    const auto tensor = [&](const Memory& memory) { return Tensor(memory.data, DType::f32, sizes, device); };
    const AttentionInputs inputs{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
    AttentionOptions options{.causal = causal, .kernel = "fused"};
    const Context context{.device = device};
    attention_forward(inputs, options, {.o = tensor(truth)}, context);
    options.kernel = "auto";
    const AttentionOutputs outputs{.o = tensor(o),
                                   .lse = Tensor(lse.data, DType::f32, std::span(sizes).first(3), device)};
    const AttentionCall call = checked_forward(inputs, options, outputs, context);
    const double flops = 4.0 * static_cast<double>(elements * length) * (causal ? 0.5 : 1.0);
    time_all<FullForward, FullCandidates>(call, flops);
    time_all<Tf32Forward, Tf32Candidates>(call, flops);
  }
};

void sweep(std::int64_t only_dim, std::int64_t only_length) {
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, 0), "the device");
  Sweep shapes(device.multiProcessorCount);
  for (const std::int64_t dim : {64, 128, 256}) {
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
