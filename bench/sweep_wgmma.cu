// Times candidates for the tuning table of the wgmma kernel's forward
// (src/cuda/attention/sm90/forward/tuning.h), bf16, over 16k tokens of hidden size 2048, and windows in
// sequences of 16k. Prints one JSON object for the device and one per candidate and shape, with the largest
// difference of its O from that of the mma kernel. Candidates take turns. "chosen" marks the one that the
// table would choose.
//   sweep_wgmma [head dim [sequence length]]
//   sweep_wgmma --check
// With --check it compares small shapes, many with partial tiles, with a plain computation in f32. The exit
// status is 1 if a difference is too large.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "attention/validate.h"
#include "cuda/attention/sm90/forward/rows.cuh"
#include "sweep.cuh"
#include "tilewise/attention.h"

namespace tilewise::cuda::wgmma {
namespace {

using namespace sweep;

struct Candidates {
  static constexpr ForwardConfig rows[] = {
      trimmed(staged({.dim = 64, .dim_v = 64, .consumers = 3, .keys = 128, .stages = 3, .q_stages = 6})),
      ordered(
          trimmed(staged({.dim = 64, .dim_v = 64, .consumers = 3, .keys = 128, .stages = 3, .q_stages = 6}))),
      trimmed(staged({.dim = 64, .dim_v = 64, .consumers = 4, .keys = 64, .stages = 6, .q_stages = 8})),
      ordered(
          trimmed(staged({.dim = 64, .dim_v = 64, .consumers = 4, .keys = 64, .stages = 6, .q_stages = 8}))),
      ordered(staged({.dim = 128, .dim_v = 128, .consumers = 3, .keys = 80, .stages = 3, .q_stages = 6})),
      staged({.dim = 128, .dim_v = 128, .consumers = 3, .keys = 64, .stages = 4, .q_stages = 6}),
      staged({.dim = 128, .dim_v = 128, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 4}),
      ordered(staged({.dim = 128, .dim_v = 128, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 4})),
      {.dim = 192, .dim_v = 128, .consumers = 2, .keys = 112, .stages = 2},
      {.dim = 192, .dim_v = 128, .consumers = 2, .keys = 128, .stages = 2},
      {.dim = 256, .dim_v = 256, .consumers = 2, .keys = 80, .stages = 2},
      ordered({.dim = 256, .dim_v = 256, .consumers = 2, .keys = 80, .stages = 2}),
      paneled({.dim = 256, .dim_v = 256, .consumers = 2, .keys = 64, .stages = 2}),
      ordered(paneled({.dim = 256, .dim_v = 256, .consumers = 2, .keys = 64, .stages = 2})),
  };
};

/// Computes attention of one query per CTA in f32. The largest differences of the call's O and LSE from that
/// go to differences[0] and differences[1].
template <typename T>
__global__ void compare_with_formula(const __grid_constant__ AttentionCall call, int* differences) {
  extern __shared__ float scores_smem[];
  __shared__ float statistics[2];
  const AttentionProblem& problem = call.problem;
  const std::int64_t i = blockIdx.x % problem.length_q;
  const std::int64_t h = blockIdx.x / problem.length_q % problem.heads_q;
  const std::int64_t b = blockIdx.x / problem.length_q / problem.heads_q;
  const KeyRange keys = call.keys_of(call.sequence(b), i);
  const auto* q = reinterpret_cast<const T*>(call.q.at(b, h, i));
  for (std::int64_t j = keys.first + threadIdx.x; j < keys.last; j += blockDim.x) {
    const auto* k = reinterpret_cast<const T*>(call.k.at(b, h / call.group(), j));
    float s = 0;
    for (std::int64_t d = 0; d < problem.dim_qk; ++d) s += widen(q[d]) * widen(k[d]);
    scores_smem[j] = s * static_cast<float>(call.scale);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float maximum = minus_infinity;
    for (std::int64_t j = keys.first; j < keys.last; ++j) maximum = fmaxf(maximum, scores_smem[j]);
    float sum = 0;
    for (std::int64_t j = keys.first; j < keys.last; ++j) {
      scores_smem[j] = expf(scores_smem[j] - maximum);
      sum += scores_smem[j];
    }
    statistics[0] = sum;
    statistics[1] = sum == 0 ? minus_infinity : maximum + logf(sum);
    const float lse = *reinterpret_cast<const float*>(call.lse.at(b, h, i));
    raise_largest(&differences[1], lse == statistics[1] ? 0.0f : fabsf(lse - statistics[1]));
  }
  __syncthreads();
  const auto* o = reinterpret_cast<const T*>(call.o.at(b, h, i));
  for (std::int64_t d = threadIdx.x; d < problem.dim_v; d += blockDim.x) {
    float sum = 0;
    for (std::int64_t j = keys.first; j < keys.last; ++j) {
      sum += scores_smem[j] * widen(reinterpret_cast<const T*>(call.v.at(b, h / call.group(), j))[d]);
    }
    raise_largest(&differences[0], fabsf(widen(o[d]) - (statistics[0] == 0 ? 0 : sum / statistics[0])));
  }
}

int multiprocessors() {
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "the device");
  return count;
}

struct Sweep {
  using T = __nv_bfloat16;
  Memory q{elements * 2}, k{elements * 2}, v{elements * 2}, o{elements * 2}, truth{elements * 2};
  Memory lse{tokens * hidden_size * 4};  // of the smallest head dim there may be
  Memory counter{64};
  const Context context{.device = {Device::Type::cuda, 0}, .workspace = {counter.data, 64}};

  Sweep() {
    std::uint32_t seed = 1;
    for (const Memory* memory : {&q, &k, &v}) {
      fill<<<elements / 256, 256>>>(static_cast<T*>(memory->data), seed++, 1.0f);
    }
    check_cuda(cudaDeviceSynchronize(), "inputs");
  }

  /// The largest difference of the candidate's O from that of mma.
  template <int row>
  float difference(const AttentionCall& call) {
    cudaMemset(o.data, 0xFF, elements * 2);
    run_row<T, Candidates, row>(call, context);
    return difference_of<T>(o, truth).largest;
  }

  void shape(std::int64_t dim, std::int64_t length, bool causal, std::int64_t window) {
    const Device device{Device::Type::cuda, 0};
    const std::int64_t sizes[] = {tokens / length, hidden_size / dim, length, dim};
    const auto tensor = [&](const Memory& memory) { return Tensor(memory.data, DType::bf16, sizes, device); };
    const AttentionInputs inputs{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
    AttentionOptions options{.causal = causal, .kernel = "mma"};
    if (window > 0) options.window.left = window;
    attention_forward(inputs, options, {.o = tensor(truth)}, context);
    options.kernel = "auto";
    const AttentionOutputs outputs{.o = tensor(o),
                                   .lse = Tensor(lse.data, DType::f32, std::span(sizes).first(3), device)};
    const AttentionCall call = checked_forward(inputs, options, outputs, context);
    ForwardConfig chosen = Forward::rows[choose_row<Forward>(call, multiprocessors()).row];
    chosen.even = chosen.uneven = {};
    std::vector<ForwardConfig> configs;
    std::vector<float> differences;
    std::vector<std::function<void()>> calls;
    for_each_row<Candidates>([&](auto row) {
      if (Candidates::rows[row].dim != dim || Candidates::rows[row].dim_v != dim) return;
      configs.push_back(Candidates::rows[row]);
      differences.push_back(difference<row>(call));
      calls.emplace_back([&] { run_row<T, Candidates, row>(call, context); });
    });
    const std::vector<double> times = medians_ms(calls);
    const double keys = window > 0 ? static_cast<double>(window + 1) : static_cast<double>(length);
    const double flops = 4.0 * static_cast<double>(elements) * keys * (causal && window == 0 ? 0.5 : 1.0);
    for (std::size_t n = 0; n < configs.size(); ++n) {
      const ForwardConfig& c = configs[n];
      const auto word = [](bool yes) { return yes ? "true" : "false"; };
      std::printf(
          "{\"d\": %d, \"s\": %lld, \"causal\": %s, \"window\": %lld, \"consumers\": %d, \"keys\": %d, "
          "\"stages\": %d, \"q_stages\": %d, \"staged\": %s, \"ordered\": %s, \"paneled\": %s, "
          "\"chosen\": %s, \"shared\": %d, \"ms\": %.4f, \"tflops\": %.1f, \"difference\": %g}\n",
          c.dim, static_cast<long long>(length), word(causal), static_cast<long long>(window), c.consumers,
          c.keys, c.stages, c.q_stages, word(c.staged), word(c.ordered), word(c.paneled), word(chosen == c),
          static_cast<int>(c.shared_bytes()), times[n], flops / times[n] * 1e-9,
          static_cast<double>(differences[n]));
    }
    std::fflush(stdout);
  }
};

void sweep(std::int64_t only_dim, std::int64_t only_length) {
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, 0), "the device");
  std::printf("{\"device\": \"%s\", \"multiprocessors\": %d}\n", device.name, device.multiProcessorCount);
  Sweep shapes;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const std::int64_t length : {512, 1024, 2048, 4096, 8192, 16384}) {
      if ((only_dim != 0 && dim != only_dim) || (only_length != 0 && length != only_length)) continue;
      for (const bool causal : {false, true}) shapes.shape(dim, length, causal, 0);
      for (const std::int64_t window : {256, 1024, 4096}) {
        if (length == tokens) shapes.shape(dim, length, true, window);
      }
    }
  }
}

struct Shape {
  std::int64_t b, hq, hkv, sq, sk, d, dv;
  AttentionOptions options;
  float size = 1;  ///< standard deviation of Q, on which the spread of scores depends
};

/// Compares all candidates that can compute a shape with the formula.
template <typename T>
struct Check {
  static constexpr DType dtype = std::is_same_v<T, __half> ? DType::f16 : DType::bf16;
  const Shape& n;
  const Device device{Device::Type::cuda, 0};
  const std::int64_t q_size = n.b * n.hq * n.sq * n.d;
  const std::int64_t k_size = n.b * n.hkv * n.sk * n.d;
  const std::int64_t v_size = n.b * n.hkv * n.sk * n.dv;
  const std::int64_t o_size = n.b * n.hq * n.sq * n.dv;
  Memory q{(q_size + 255) / 256 * 512}, k{(k_size + 255) / 256 * 512}, v{(v_size + 255) / 256 * 512};
  Memory o{o_size * 2}, lse{n.b * n.hq * n.sq * 4}, differences{8}, counter{64};
  const Context context{.device = {Device::Type::cuda, 0}, .workspace = {counter.data, 64}};
  bool right = true;

  explicit Check(const Shape& shape) : n(shape) {
    const auto random = [](const Memory& memory, std::int64_t size, std::uint32_t seed, float deviation) {
      fill<<<static_cast<unsigned>((size + 255) / 256), 256>>>(static_cast<T*>(memory.data), seed, deviation);
    };
    random(q, q_size, 1, n.size);
    random(k, k_size, 2, 1);
    random(v, v_size, 3, 1);
    const auto tensor = [&](const Memory& memory, DType type, std::initializer_list<std::int64_t> sizes) {
      return Tensor(memory.data, type, std::span(sizes.begin(), sizes.size()), device);
    };
    const AttentionInputs inputs{.q = tensor(q, dtype, {n.b, n.hq, n.sq, n.d}),
                                 .k = tensor(k, dtype, {n.b, n.hkv, n.sk, n.d}),
                                 .v = tensor(v, dtype, {n.b, n.hkv, n.sk, n.dv})};
    const AttentionOutputs outputs{.o = tensor(o, dtype, {n.b, n.hq, n.sq, n.dv}),
                                   .lse = tensor(lse, DType::f32, {n.b, n.hq, n.sq})};
    const AttentionCall call = checked_forward(inputs, n.options, outputs, context);
    cudaMemset(counter.data, 0xFF, 64);
    for_each_row<Candidates>([&](auto row) { by_candidate<row>(call); });
  }

  template <int row>
  void by_candidate(const AttentionCall& call) {
    constexpr ForwardConfig c = Candidates::rows[row];
    if (c.dim < n.d || c.dim_v < n.dv || c.dim > n.d + 192) return;
    std::printf(
        "{\"check\": \"%s\", \"dim\": %d, \"dim_v\": %d, \"consumers\": %d, \"keys\": %d, \"stages\": %d, "
        "\"q_stages\": %d",
        to_string(call.problem).c_str(), c.dim, c.dim_v, c.consumers, c.keys, c.stages, c.q_stages);
    std::fflush(stdout);  // so that a kernel that hangs can be identified
    cudaMemset(o.data, 0xFF, static_cast<std::size_t>(o_size) * 2);
    cudaMemset(lse.data, 0xFF, static_cast<std::size_t>(n.b * n.hq * n.sq) * 4);
    cudaMemset(differences.data, 0, 8);
    run_row<T, Candidates, row>(call, context);
    check_cuda(cudaDeviceSynchronize(), "the kernel");
    compare_with_formula<T>
        <<<static_cast<unsigned>(n.b * n.hq * n.sq), 128, static_cast<std::size_t>(n.sk) * 4>>>(
            call, static_cast<int*>(differences.data));
    float largest[2];
    check_cuda(cudaMemcpy(largest, differences.data, 8, cudaMemcpyDeviceToHost), "comparing");
    // The standard deviation of V is 1, and O is rounded to 8 or 11 bits.
    const bool good = largest[0] < (dtype == DType::f16 ? 0.004f : 0.03f) && largest[1] < 0.002f;
    right &= good;
    std::printf(", \"o\": %g, \"lse\": %g, \"right\": %s}\n", static_cast<double>(largest[0]),
                static_cast<double>(largest[1]), good ? "true" : "false");
    std::fflush(stdout);
  }
};

bool check() {
  const AttentionOptions full;
  const AttentionOptions causal{.causal = true};
  const AttentionOptions bottom_right{.causal = true, .alignment = Alignment::bottom_right};
  const AttentionOptions window{.window = {.left = 100, .right = 30}};
  const AttentionOptions narrow_window{.causal = true, .window = {.left = 5}};
  const Shape shapes[] = {
      {1, 1, 1, 64, 16, 64, 64, full},               // one warpgroup, less than one K tile
      {1, 1, 1, 192, 384, 64, 64, full},             // whole tiles
      {1, 1, 1, 192, 400, 128, 128, full},           //
      {1, 1, 1, 128, 400, 256, 256, full},           //
      {1, 1, 1, 1, 1, 64, 64, full},                 // one query, one key
      {2, 3, 3, 100, 1, 128, 128, full},             //
      {2, 4, 2, 333, 517, 64, 64, full},             // odd lengths, groups of heads
      {2, 4, 1, 333, 517, 128, 128, causal},         //
      {1, 6, 3, 517, 333, 128, 128, causal},         // queries after the last key
      {1, 4, 2, 517, 333, 64, 64, bottom_right},     // empty rows
      {1, 4, 2, 333, 517, 256, 256, bottom_right},   //
      {2, 4, 2, 197, 197, 64, 64, full},             // five keys in the last tile
      {2, 2, 2, 700, 700, 64, 64, window},           //
      {2, 2, 2, 700, 700, 128, 128, narrow_window},  //
      {1, 2, 2, 700, 300, 256, 256, window},         // Q tiles whose rows are all empty
      {1, 2, 1, 200, 260, 192, 128, causal},         // Dv other than D
      {1, 2, 1, 200, 260, 40, 24, full},             // padded
      {1, 2, 1, 200, 260, 72, 104, causal},          //
      {1, 2, 1, 130, 260, 200, 136, full},           //
      {8, 40, 8, 260, 260, 64, 64, causal},          // many tiles per CTA
      {8, 40, 8, 260, 260, 128, 128, full},          //
      {8, 40, 8, 260, 260, 128, 128, causal},        //
      {8, 40, 8, 140, 260, 256, 256, causal},        //
      {1, 2, 2, 512, 2048, 64, 64, full, 12},        // large scores: maxima rise
      {1, 2, 2, 512, 2048, 128, 128, full, 12},      //
  };
  bool right = true;
  for (const Shape& shape : shapes) {
    right &= Check<__nv_bfloat16>(shape).right;
    right &= Check<__half>(shape).right;
  }
  std::printf("{\"right\": %s}\n", right ? "true" : "false");
  return right;
}

}  // namespace
}  // namespace tilewise::cuda::wgmma

int main(int argc, char** argv) {
  try {
    using namespace tilewise::cuda::wgmma;
    if (argc > 1 && std::strcmp(argv[1], "--check") == 0) return check() ? 0 : 1;
    sweep(argc > 1 ? std::atoll(argv[1]) : 0, argc > 2 ? std::atoll(argv[2]) : 0);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
