// Times how CTAs of the wgmma kernel's backward may share a key tile
// (src/cuda/attention/sm90/backward/splits.h), bf16, for short batches. Prints one JSON object per split and
// shape: the estimate in microseconds by which splits_of() chooses, whether it chooses this one, `ms` of the
// whole call, and that of mma. Candidates take turns.
//   sweep_wgmma_backward_splits [head dim [sequence length]]

#include <cstdio>
#include <functional>
#include <vector>

#include "attention/validate.h"
#include "cuda/attention/sm90/backward/run.cuh"
#include "sweep.cuh"
#include "tilewise/attention.h"

namespace tilewise::cuda::wgmma_backward {
namespace {

using namespace sweep;

using T = __nv_bfloat16;

struct Shape {
  std::int64_t batch, heads_q, heads_kv, length, dim;
  bool causal;
};

struct Sweep {
  static constexpr std::size_t workspace_bytes = std::size_t{1} << 30;
  Memory q{elements * 2}, k{elements * 2}, v{elements * 2}, o{elements * 2}, d_o{elements * 2};
  Memory dq{elements * 2}, dk{elements * 2}, dv{elements * 2}, dk_of_mma{elements * 2};
  Memory lse{elements / 64 * 4};
  Memory workspace{workspace_bytes};

  Sweep() {
    std::uint32_t seed = 1;
    for (const Memory* memory : {&q, &k, &v, &d_o}) {
      fill<<<elements / 256, 256>>>(static_cast<T*>(memory->data), seed++, 1.0f);
    }
    check_cuda(cudaDeviceSynchronize(), "inputs");
  }

  void time(const Shape& shape) {
    const Device device{Device::Type::cuda, 0};
    const auto tensor = [&](const Memory& memory, std::int64_t heads) {
      const std::int64_t sizes[] = {shape.batch, heads, shape.length, shape.dim};
      return Tensor(memory.data, DType::bf16, sizes, device);
    };
    const AttentionInputs inputs{
        .q = tensor(q, shape.heads_q), .k = tensor(k, shape.heads_kv), .v = tensor(v, shape.heads_kv)};
    const std::int64_t rows[] = {shape.batch, shape.heads_q, shape.length};
    const Tensor lses(lse.data, DType::f32, rows, device);
    AttentionOptions options{.causal = shape.causal, .kernel = "auto"};
    const Context context{.device = device, .workspace = {workspace.data, workspace_bytes}};
    attention_forward(inputs, options, {.o = tensor(o, shape.heads_q), .lse = lses}, context);
    const auto gradients = [&](const Memory& to) {
      return AttentionGradients{.o = tensor(o, shape.heads_q),
                                .lse = lses,
                                .d_o = tensor(d_o, shape.heads_q),
                                .dq = tensor(dq, shape.heads_q),
                                .dk = tensor(to, shape.heads_kv),
                                .dv = tensor(dv, shape.heads_kv)};
    };
    const AttentionCall call = checked_backward(inputs, options, gradients(dk), context);
    options.kernel = "mma";
    const AttentionGradients of_mma = gradients(dk_of_mma);
    const Config& c = Configs::rows[row_of<Configs>(call.problem)];
    std::vector<Splits> all;
    std::vector<std::function<void()>> bodies{[&] { attention_backward(inputs, options, of_mma, context); }};
    for (const Splits splits : {Splits{}, Splits{2, 1}, Splits{4, 1}, Splits{8, 1}, Splits{1, 2},
                                Splits{1, 4}, Splits{2, 2}, Splits{4, 2}, Splits{8, 2}, Splits{8, 4}}) {
      if (call.group() % splits.heads != 0) continue;
      Arena arena(nullptr);
      workspace_of(call, c, splits, arena);
      if (arena.used() > workspace_bytes) continue;
      all.push_back(splits);
      bodies.push_back([&call, &context, splits] {
        with_row<Configs>(row_of<Configs>(call.problem), [&](auto row) {
          if constexpr (!Configs::rows[row].general) run<T, Configs, row>(call, splits, context);
        });
      });
    }
    const std::vector<double> ms = medians_ms(bodies);
    const SplitTimes times(call.problem, c, device_properties(0).multiprocessors);
    const Splits chosen = splits_of(call.problem, c);
    for (std::size_t n = 0; n < all.size(); ++n) {
      cudaMemset(dk.data, 0xFF, elements * 2);
      bodies[n + 1]();
      check_cuda(cudaDeviceSynchronize(), "a run");
      print_problem("wgmma-backward-splits-sweep", "bf16", call.problem);
      const std::int64_t count = shape.batch * shape.heads_kv * shape.length * shape.dim;
      std::printf(
          ", \"hkv\": %lld, \"head_splits\": %d, \"query_splits\": %d, \"in_table\": %s, \"estimate_us\": "
          "%.1f, "
          "\"ms\": %.4f, \"mma_ms\": %.4f, \"dk_difference\": %g}\n",
          static_cast<long long>(shape.heads_kv), all[n].heads, all[n].queries, name_of(all[n] == chosen),
          times.us(all[n].count()), ms[n + 1], ms[0], difference_of<T>(dk, dk_of_mma, count).relative());
      std::fflush(stdout);
    }
  }
};

void sweep(std::int64_t only_dim, std::int64_t only_length) {
  Sweep shapes;
  struct Heads {
    std::int64_t batch, q, kv, dim;
  };
  for (const Heads heads :
       {Heads{1, 64, 8, 128}, Heads{1, 32, 8, 128}, Heads{1, 32, 1, 128}, Heads{1, 32, 32, 128},
        Heads{1, 8, 8, 128}, Heads{1, 8, 8, 64}, Heads{1, 16, 16, 64}, Heads{4, 16, 16, 64},
        Heads{1, 8, 8, 256}, Heads{2, 64, 8, 128}}) {
    for (const std::int64_t length : {128, 256, 512, 1024, 2048, 4096}) {
      if ((only_dim != 0 && heads.dim != only_dim) || (only_length != 0 && length != only_length)) continue;
      if (heads.batch * heads.q * length * heads.dim > elements) continue;
      for (const bool causal : {false, true}) {
        shapes.time({heads.batch, heads.q, heads.kv, length, heads.dim, causal});
      }
    }
  }
}

}  // namespace
}  // namespace tilewise::cuda::wgmma_backward

int main(int argc, char** argv) {
  return tilewise::cuda::sweep::run_sweep(argc, argv, tilewise::cuda::wgmma_backward::sweep);
}
