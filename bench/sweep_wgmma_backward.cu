// Times candidates for the configurations of the wgmma kernel's backward
// (src/cuda/attention/sm90/backward/config.h), bf16, over 16k tokens of hidden size 2048. Prints one JSON
// object per candidate and shape: whether the table has the candidate; `ms` of the whole call; the largest
// differences from the gradients of mma, relative to their largest element. Candidates take turns.
//   sweep_wgmma_backward [head dim [sequence length]]

#include <cstdio>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/validate.h"
#include "cuda/attention/sm90/backward/run.cuh"
#include "sweep.cuh"
#include "tilewise/attention.h"

namespace tilewise::cuda::wgmma_backward {
namespace {

using namespace sweep;

using T = __nv_bfloat16;

struct Candidates {
  static constexpr Config rows[] = {
      {.dim = 64, .dim_v = 64, .queries = 128},
      {.dim = 64, .dim_v = 64, .queries = 128, .turns = true},
      {.dim = 64, .dim_v = 64, .queries = 128, .preload = true},
      {.dim = 64, .dim_v = 64, .queries = 128, .turns = true, .preload = true},
      {.dim = 96, .dim_v = 96, .queries = 64},
      {.dim = 96, .dim_v = 96, .queries = 64, .preload = true},
      {.dim = 96, .dim_v = 96, .queries = 64, .turns = true, .preload = true},
      {.dim = 128, .dim_v = 128, .queries = 64},
      {.dim = 128, .dim_v = 128, .queries = 64, .turns = true},
      {.dim = 128, .dim_v = 128, .queries = 64, .turns = true, .preload = true},
      {.dim = 192, .dim_v = 192, .queries = 64, .keys = 64},
      {.dim = 192, .dim_v = 192, .queries = 64, .keys = 64, .preload = true},
      {.dim = 256, .dim_v = 256, .queries = 64, .keys = 64, .d_o_stages = 1},
      {.dim = 256, .dim_v = 256, .queries = 64, .keys = 64, .d_o_stages = 1, .preload = true},
  };
};

struct Gradients {
  Memory dq{elements * 2}, dk{elements * 2}, dv{elements * 2};
};

struct Sweep {
  Memory q{elements * 2}, k{elements * 2}, v{elements * 2}, o{elements * 2}, d_o{elements * 2};
  Memory lse{elements / 64 * 4};
  Gradients got, truth;
  Memory workspace{std::int64_t{1} << 30};

  Sweep() {
    std::uint32_t seed = 1;
    for (const Memory* memory : {&q, &k, &v, &d_o}) {
      fill<<<elements / 256, 256>>>(static_cast<T*>(memory->data), seed++, 1.0f);
    }
    check_cuda(cudaDeviceSynchronize(), "inputs");
  }

  void shape(std::int64_t dim, std::int64_t length, bool causal) {
    const Device device{Device::Type::cuda, 0};
    const std::int64_t heads = hidden_size / dim;
    const std::int64_t sizes[] = {tokens / length, heads, length, dim};
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
    options.kernel = "mma";
    attention_backward(inputs, options, gradients(truth), context);
    const AttentionCall call = checked_backward(inputs, options, gradients(got), context);
    const std::int64_t count = tokens * heads * dim;
    const double flops = 10.0 * static_cast<double>(tokens * heads * dim * length) * (causal ? 0.5 : 1.0);
    std::vector<std::function<void()>> bodies;
    std::vector<Config> configs;
    [&]<std::size_t... n>(std::index_sequence<n...>) {
      const auto add = [&](auto number) {
        constexpr int row = decltype(number)::value;
        if (Candidates::rows[row].dim != dim) return;
        bodies.push_back([&call, &context] { run<T, Candidates, row>(call, {}, context); });
        configs.push_back(Candidates::rows[row]);
      };
      (add(std::integral_constant<int, static_cast<int>(n)>{}), ...);
    }(std::make_index_sequence<std::size(Candidates::rows)>{});
    const std::vector<double> ms = medians_ms(bodies);
    for (std::size_t n = 0; n < bodies.size(); ++n) {
      for (const Memory* memory : {&got.dq, &got.dk, &got.dv}) cudaMemset(memory->data, 0xFF, elements * 2);
      bodies[n]();
      check_cuda(cudaDeviceSynchronize(), "a run");
      const Config& c = configs[n];
      print_problem("wgmma-backward-sweep", "bf16", call.problem);
      std::printf(", \"queries\": %d, \"keys\": %d, \"turns\": %s, \"preload\": %s, \"in_table\": %s",
                  c.queries, c.keys, name_of(c.turns), name_of(c.preload), name_of(in_table<Configs>(c)));
      std::printf(
          ", \"ms\": %.4f, \"tflops\": %.1f, \"dq_difference\": %g, \"dk_difference\": %g, "
          "\"dv_difference\": %g}\n",
          ms[n], flops / ms[n] * 1e-9, difference_of<T>(got.dq, truth.dq, count).relative(),
          difference_of<T>(got.dk, truth.dk, count).relative(),
          difference_of<T>(got.dv, truth.dv, count).relative());
      std::fflush(stdout);
    }
  }
};

void sweep(std::int64_t only_dim, std::int64_t only_length) {
  Sweep shapes;
  for (const std::int64_t dim : {64, 96, 128, 192, 256}) {
    for (const std::int64_t length : {512, 1024, 2048, 4096, 8192, 16384}) {
      if ((only_dim != 0 && dim != only_dim) || (only_length != 0 && length != only_length)) continue;
      for (const bool causal : {false, true}) shapes.shape(dim, length, causal);
    }
  }
}

}  // namespace
}  // namespace tilewise::cuda::wgmma_backward

int main(int argc, char** argv) {
  return tilewise::cuda::sweep::run_sweep(argc, argv, tilewise::cuda::wgmma_backward::sweep);
}
