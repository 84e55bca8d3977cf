// Times ways of a network's two products with few tokens (src/cuda/gemm/few.cuh, few_tile.cuh) beside each
// other, and compares each with products by plain sums. Prints a line of JSON each.
//
//   sweep_few [--tokens 16] [--kind gelu|swiglu] [--only TEXT] [--skip TEXT] [--rounds 40] [--no-reads]
//             [--no-overlaps] [--seconds 38]
//
// Compiled with -DTILEWISE_STAMPS it says when blocks came where, instead. It links with nothing of the
// library but cuda/runtime/{check,launch,range}.cpp and cuda/tile/tensor_map.cpp.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cuda/gemm/few_tile_rows.cuh"
#include "gemm/compose.h"
#include "read_patterns.cuh"
#include "sweep.cuh"

namespace tilewise::cuda::gemm {
namespace {

using namespace sweep;
using T = __nv_bfloat16;

constexpr std::int64_t embed = 4096, hidden = 11008, most = 64;
constexpr int sets = 2;  // of weights, each more than the L2 holds

// ---- Candidates

/// As the tables that are in use, but that a launch says how they stand to each other.
struct Runs {
  static constexpr FewConfig rows[] = {
      {.tokens = 16, .stages = 5, .overlaps = true},
      {.tokens = 32, .stages = 5, .overlaps = true},
      {.tokens = 64, .stages = 4, .overlaps = true},
      {.tokens = 16, .stages = 5, .gated = true, .overlaps = true},
      {.tokens = 32, .stages = 4, .gated = true, .overlaps = true},
      {.tokens = 64, .stages = 3, .gated = true, .overlaps = true},
  };
};

struct Tiles {
  static constexpr FewTileParts units = FewTileParts::units;
  static constexpr FewTileConfig rows[] = {
      // Gate and up.
      {.tokens = 16, .rows = 88, .columns = 48, .gated = true, .stages = 4, .token_stages = 4},
      {.tokens = 32, .rows = 88, .columns = 48, .gated = true, .stages = 4, .token_stages = 4},
      {.tokens = 64, .rows = 88, .columns = 48, .gated = true, .stages = 4, .token_stages = 3},
      {.tokens = 16, .rows = 88, .columns = 48, .gated = true, .stages = 4, .token_stages = 4, .runs = true},
      {.tokens = 32, .rows = 88, .columns = 48, .gated = true, .stages = 4, .token_stages = 4, .runs = true},
      {.tokens = 64, .rows = 88, .columns = 48, .gated = true, .stages = 4, .token_stages = 3, .runs = true},
      {.tokens = 16, .rows = 88, .columns = 48, .gated = true, .stages = 7, .token_stages = 6, .blocks = 1},
      {.tokens = 32, .rows = 88, .columns = 48, .gated = true, .stages = 7, .token_stages = 6, .blocks = 1},
      {.tokens = 64, .rows = 88, .columns = 48, .gated = true, .stages = 7, .token_stages = 6, .blocks = 1},
      // Up.
      {.tokens = 16, .rows = 88, .columns = 48, .stages = 8, .token_stages = 6},
      {.tokens = 32, .rows = 88, .columns = 48, .stages = 7, .token_stages = 6},
      {.tokens = 64, .rows = 88, .columns = 48, .stages = 6, .token_stages = 5},
      {.tokens = 16, .rows = 88, .columns = 48, .stages = 8, .token_stages = 6, .runs = true},
      {.tokens = 32, .rows = 88, .columns = 48, .stages = 7, .token_stages = 6, .runs = true},
      {.tokens = 64, .rows = 88, .columns = 48, .stages = 6, .token_stages = 5, .runs = true},
      {.tokens = 16, .rows = 168, .columns = 96, .stages = 4, .token_stages = 4},
      {.tokens = 32, .rows = 168, .columns = 96, .stages = 4, .token_stages = 4},
      {.tokens = 64, .rows = 168, .columns = 96, .stages = 4, .token_stages = 3},
      {.tokens = 64, .rows = 168, .columns = 96, .stages = 4, .token_stages = 3, .runs = true},
      // Down.
      {.tokens = 16, .rows = 32, .parts = units, .columns = 32, .panels = 2, .stages = 8, .token_stages = 8},
      {.tokens = 32, .rows = 32, .parts = units, .columns = 32, .panels = 2, .stages = 7, .token_stages = 5},
      {.tokens = 64, .rows = 32, .parts = units, .columns = 32, .panels = 1, .stages = 10, .token_stages = 7},
      {.tokens = 16, .rows = 64, .parts = units, .columns = 64, .panels = 2, .stages = 5, .token_stages = 5},
      {.tokens = 32, .rows = 64, .parts = units, .columns = 64, .panels = 1, .stages = 8, .token_stages = 8},
      {.tokens = 64, .rows = 64, .parts = units, .columns = 64, .panels = 1, .stages = 7, .token_stages = 6},
      {.tokens = 16, .rows = 128, .columns = 64, .stages = 5, .token_stages = 5},
      {.tokens = 32, .rows = 128, .columns = 64, .stages = 5, .token_stages = 4},
      {.tokens = 64, .rows = 128, .columns = 64, .stages = 5, .token_stages = 3},
      {.tokens = 16,
       .rows = 32,
       .parts = units,
       .columns = 32,
       .panels = 2,
       .stages = 8,
       .token_stages = 8,
       .runs = true},
      {.tokens = 32,
       .rows = 32,
       .parts = units,
       .columns = 32,
       .panels = 2,
       .stages = 7,
       .token_stages = 5,
       .runs = true},
      {.tokens = 32,
       .rows = 64,
       .parts = units,
       .columns = 64,
       .panels = 1,
       .stages = 8,
       .token_stages = 8,
       .runs = true},
      {.tokens = 64, .rows = 128, .columns = 64, .stages = 5, .token_stages = 3, .runs = true},
  };
};

/// What runs a product.
struct Product {
  std::string name;
  std::function<void(const GemmCall&, const FewSpace&, FewTurn, const FewOverlap&)> run;
  std::function<FewWeights(const GemmCall&)> weights;  ///< null where it is as the launch does not say
  bool hands_over = false;                             ///< knows of FewHandover
};

int multiprocessors = 132;

/// A kernel and those of the product behind it want room beside each other.
template <typename Kernel>
void prefer_shared_memory(Kernel* kernel) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "a kernel's shared memory");
}

template <typename Table, int row>
Product by_table(const char* name) {
  if constexpr (Table::rows[row].overlaps) prefer_shared_memory(few_overlap_kernel<T, Table, row>);
  return {name,
          [](const GemmCall& call, const FewSpace& space, FewTurn turn, const FewOverlap& overlap) {
            run_few_row<T, Table, row>(call, space, multiprocessors, turn, nullptr, overlap);
          },
          Table::rows[row].overlaps ? std::function<FewWeights(const GemmCall&)>([](const GemmCall& call) {
            return weights_of(call.b, {}, share_of(call.problem, Table::rows[row], multiprocessors),
                              Table::rows[row].stages);
          })
                                    : nullptr};
}

template <int row>
Product by_tiles(int splits, const FewRunLength& length) {
  static constexpr FewTileConfig c = Tiles::rows[row];
  prefer_shared_memory(few_tile_kernel<T, Tiles, row>);
  std::string name = "tiles " + std::to_string(c.rows) + "/" + std::to_string(splits);
  if (c.blocks == 1) name += " deep";
  if (c.runs) {
    name += " runs " + std::to_string(512 * length.pieces) + "+" + std::to_string(length.lead);
  }
  const auto tiles = [splits](const GemmCall& call) {
    return tiles_of(call.problem, c, splits, multiprocessors);
  };
  return {name,
          [=](const GemmCall& call, const FewSpace& space, FewTurn turn, const FewOverlap& overlap) {
            run_few_tile<T, Tiles, row>(call, space, tiles(call), turn, overlap, length, nullptr);
          },
          [=](const GemmCall& call) { return weights_of(call.b, tiles(call), {}, c.stages); }, true};
}

/// Rows of the table of tiles that suit, each with some splits and lengths.
std::vector<Product> tile_products(int tokens, bool gated, bool down) {
  std::vector<Product> found;
  const auto add = [&]<int row>() {
    constexpr FewTileConfig c = Tiles::rows[row];
    if (c.tokens != tokens || c.gated != gated) return;
    if ((c.rows == 88 || c.rows == 168) == down) return;
    const int splits = down ? c.rows / 32 : c.rows == 168 ? 2 : 1;
    const std::vector<int> lengths = c.runs ? std::vector<int>{1, 2, 4} : std::vector<int>{1};
    const std::vector<int> leads = c.runs ? std::vector<int>{2, 6} : std::vector<int>{0};
    for (const int pieces : lengths) {
      for (const int lead : leads) found.push_back(by_tiles<row>(splits, {pieces, lead}));
    }
  };
  [&]<int... row>(std::integer_sequence<int, row...>) {
    (add.template operator()<row>(), ...);
  }(std::make_integer_sequence<int, static_cast<int>(std::size(Tiles::rows))>{});
  return found;
}

Product present(int tokens, bool gated) {
  if (gated) {
    return tokens == 16   ? by_table<FewGated, 1>("present")
           : tokens == 32 ? by_table<FewGated, 2>("present")
                          : by_table<FewGated, 3>("present");
  }
  return tokens == 16   ? by_table<Few, 1>("present")
         : tokens == 32 ? by_table<Few, 2>("present")
                        : by_table<Few, 3>("present");
}
Product runs(int tokens, bool gated) {
  if (gated) {
    return tokens == 16   ? by_table<Runs, 3>("runs")
           : tokens == 32 ? by_table<Runs, 4>("runs")
                          : by_table<Runs, 5>("runs");
  }
  return tokens == 16   ? by_table<Runs, 0>("runs")
         : tokens == 32 ? by_table<Runs, 1>("runs")
                        : by_table<Runs, 2>("runs");
}

/// How the two stand to each other.
struct Stand {
  bool late = false;
  int opening = 0, bridge = 0, pace = 0;
  bool hand = false;

  std::string name() const {
    std::string text = late ? " late" : "";
    if (hand) text += " hand";
    if (opening > 0) text += " open " + std::to_string(opening);
    if (bridge > 0) text += " bridge " + std::to_string(bridge) + "@" + std::to_string(pace);
    return text;
  }
};

// ---- The truth

/// A warp an element of the result.
__global__ void plain_product(const T* a, const T* b, const T* gate, Activation activation, T* out, int m,
                              int n, int k) {
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int token = warp % m, row = warp / m;
  if (row >= n) return;
  float sum = 0, gated = 0;
  for (int at = lane; at < k; at += 32) {
    const float x = widen(a[static_cast<std::int64_t>(token) * k + at]);
    sum = fmaf(x, widen(b[static_cast<std::int64_t>(row) * k + at]), sum);
    if (gate != nullptr) gated = fmaf(x, widen(gate[static_cast<std::int64_t>(row) * k + at]), gated);
  }
  for (int apart = 16; apart > 0; apart /= 2) {
    sum += __shfl_xor_sync(~0u, sum, apart);
    gated += __shfl_xor_sync(~0u, gated, apart);
  }
  if (lane != 0) return;
  with_activation(activation, [&]<Activation f>() {
    sum = gate != nullptr ? activate<f, false>(gated) * sum : activate<f, false>(sum);
  });
  out[static_cast<std::int64_t>(token) * n + row] = narrow<T>(sum);
}

/// Adds squares of differences, and of the truth; what is no number counts as infinite. Whole warps.
__global__ void add_squares(const T* found, const T* truth, double* sums) {
  const std::uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  const double difference = static_cast<double>(widen(found[index]) - widen(truth[index]));
  double wrong = fabs(difference) < 1e30 ? difference * difference : 1e300;
  double all = static_cast<double>(widen(truth[index])) * static_cast<double>(widen(truth[index]));
  for (int apart = 16; apart > 0; apart /= 2) {
    wrong += __shfl_xor_sync(~0u, wrong, apart);
    all += __shfl_xor_sync(~0u, all, apart);
  }
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(sums, wrong);
  atomicAdd(sums + 1, all);
}

/// A number that differs where bits do, whatever the order of the threads. Whole warps.
__global__ void add_bits(const std::uint16_t* of, unsigned long long* sum) {
  const std::uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long bits =
      (static_cast<unsigned long long>(of[index]) + 1) * (index * 2654435761ull + 12345);
  for (int apart = 16; apart > 0; apart /= 2) bits += __shfl_xor_sync(~0u, bits, apart);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, bits);
}

__global__ void keep_busy(long long clocks) {
  const long long begin = clock64();
  while (clock64() - begin < clocks) {
  }
}

// ---- The program

struct Options {
  int tokens = 0;
  std::string kind, only, skip;
  int rounds = 40;
  int seconds = 38;
  bool reads = true, overlaps = true;
};

/// What is at work, for a program that hangs.
struct Watch {
  std::atomic<const char*> at{"the beginning"};
  std::atomic<long long> since{0};
  char text[200] = {};

  static long long now() {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  void begin(const std::string& what) {
    std::snprintf(text, sizeof(text), "%s", what.c_str());
    at = text;
    since = now();
  }
  void start(int seconds) {
    const long long begun = now();
    since = begun;
    std::thread([this, begun, seconds] {
      constexpr int most_of_one = 8000;
      for (;;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        const bool hangs = now() - since > most_of_one;
        if (!hangs && now() - begun < 1000ll * seconds) continue;
        std::printf("{\"watchdog\": \"%s\", \"at\": \"%s\"}\n", hangs ? "hangs" : "time is over", at.load());
        std::fflush(stdout);
        _exit(hangs ? 3 : 4);
      }
    }).detach();
  }
} watch;

struct Network {
  Memory up{sets * hidden * embed * 2}, gate{sets * hidden * embed * 2}, down{sets * hidden * embed * 2};
  Memory x{most * embed * 2}, h{most * hidden * 2}, out{most * embed * 2};
  Memory true_h{most * hidden * 2}, true_out{most * embed * 2};
  Memory space{32 << 20}, sums{64};

  Network() {
    const auto random = [](const Memory& memory, std::int64_t count, std::uint32_t seed, float size) {
      fill<<<static_cast<unsigned>(count / 256), 256>>>(static_cast<T*>(memory.data), seed, size);
    };
    random(up, sets * hidden * embed, 1, 1.0f / 64);
    random(gate, sets * hidden * embed, 2, 1.0f / 64);
    random(down, sets * hidden * embed, 3, 1.0f / 105);
    random(x, most * embed, 4, 1.0f);
    check_cuda(cudaMemset(space.data, 0xA5, 32 << 20), "workspace");
    check_cuda(cudaDeviceSynchronize(), "inputs");
  }

  static Matrix matrix(const Memory& memory, int set, std::int64_t rows, std::int64_t columns) {
    return {.data = static_cast<std::byte*>(memory.data) + set * rows * columns * 2,
            .dtype = DType::bf16,
            .rows = rows,
            .columns = columns,
            .stride_row = columns};
  }
  GemmCall first(int set, int tokens, bool gated) const {
    return gemm_call({Device::Type::cuda, 0}, matrix(x, 0, tokens, embed), matrix(up, set, hidden, embed),
                     matrix(h, 0, tokens, hidden),
                     {.gate = gated ? matrix(gate, set, hidden, embed) : Matrix{},
                      .activation = gated ? Activation::silu : Activation::gelu});
  }
  GemmCall second(int set, int tokens) const {
    return gemm_call({Device::Type::cuda, 0}, matrix(h, 0, tokens, hidden), matrix(down, set, embed, hidden),
                     matrix(out, 0, tokens, embed));
  }
  /// Both products share it, as in the library.
  FewSpace workspace() const {
    auto* first = static_cast<std::byte*>(space.data);
    return {reinterpret_cast<float*>(first + 65536), reinterpret_cast<std::uint32_t*>(first)};
  }

  std::uint32_t* handover() const {
    return reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(space.data) + 32768);
  }

  void make_truth(int set, int tokens, bool gated) const {
    const auto* const weights = static_cast<const T*>(up.data) + set * hidden * embed;
    const auto* const gates = static_cast<const T*>(gate.data) + set * hidden * embed;
    const auto* const downs = static_cast<const T*>(down.data) + set * hidden * embed;
    plain_product<<<static_cast<unsigned>(tokens * hidden / 8), 256>>>(
        static_cast<const T*>(x.data), weights, gated ? gates : nullptr,
        gated ? Activation::silu : Activation::gelu, static_cast<T*>(true_h.data), tokens,
        static_cast<int>(hidden), static_cast<int>(embed));
    plain_product<<<static_cast<unsigned>(tokens * embed / 8), 256>>>(
        static_cast<const T*>(true_h.data), downs, nullptr, Activation::none, static_cast<T*>(true_out.data),
        tokens, static_cast<int>(embed), static_cast<int>(hidden));
    check_cuda(cudaDeviceSynchronize(), "the truth");
  }
  double error(const Memory& found, const Memory& truth, std::int64_t count) const {
    check_cuda(cudaMemset(sums.data, 0, 16), "comparing");
    add_squares<<<static_cast<unsigned>(count / 256), 256>>>(static_cast<const T*>(found.data),
                                                             static_cast<const T*>(truth.data),
                                                             static_cast<double*>(sums.data));
    double squares[2];
    check_cuda(cudaMemcpy(squares, sums.data, 16, cudaMemcpyDeviceToHost), "comparing");
    return std::sqrt(squares[0] / squares[1]);
  }
  unsigned long long bits(int tokens) const {
    check_cuda(cudaMemset(sums.data, 0, 8), "bits");
    for (const auto& [memory, count] : {std::pair{&h, tokens * hidden}, std::pair{&out, tokens * embed}}) {
      add_bits<<<static_cast<unsigned>(count / 256), 256>>>(static_cast<const std::uint16_t*>(memory->data),
                                                            static_cast<unsigned long long*>(sums.data));
    }
    unsigned long long found = 0;
    check_cuda(cudaMemcpy(&found, sums.data, 8, cudaMemcpyDeviceToHost), "bits");
    return found;
  }
  void poison() const {
    check_cuda(cudaMemset(h.data, 0xFF, static_cast<std::size_t>(most * hidden) * 2), "poisoning");
    check_cuda(cudaMemset(out.data, 0xFF, static_cast<std::size_t>(most * embed) * 2), "poisoning");
  }
};

/// A way of both products.
struct Way {
  std::string name;
  std::function<void(int set)> run;
  double error_h = 0, error = 0;
  bool same = true;
  std::vector<double> us;

  double median() const {
    std::vector<double> sorted = us;
    std::sort(sorted.begin(), sorted.end());
    return sorted.empty() ? 1e9 : sorted[sorted.size() / 2];
  }
  double least() const { return us.empty() ? 1e9 : *std::min_element(us.begin(), us.end()); }
};

Way way_of(const Network& network, int tokens, bool gated, const Product& first, const Product& second,
           const Stand& stand) {
  return {first.name + " > " + second.name + stand.name(), [=, &network](int set) {
            const GemmCall up = network.first(set, tokens, gated), down = network.second(set, tokens);
            FewOverlap of_first{.late = stand.late, .bridge = stand.bridge, .pace = stand.pace};
            FewOverlap of_second{.late = stand.late, .opening = stand.opening};
            if (second.weights != nullptr) of_second.own = of_first.behind = second.weights(down);
            if (second.weights == nullptr) of_first.bridge = 0;
            if (stand.hand && first.hands_over && second.hands_over) {
              of_first.gives = {network.handover(), 2 * first.weights(up).tiles.tiles, new_owner()};
              of_second.takes = of_first.gives;
            }
            first.run(up, network.workspace(), FewTurn::first, of_first);
            second.run(down, network.workspace(), FewTurn::second, of_second);
          }};
}

void check_way(const Network& network, int tokens, Way& way) {
  watch.begin("checking " + way.name);
  constexpr int again = 6;
  unsigned long long bits = 0;
  for (int time = 0; time < again; ++time) {
    network.poison();
    way.run(1);
    if (time > 0) way.run(0), way.run(1);  // back to back, on other weights between
    check_cuda(cudaDeviceSynchronize(), way.name.c_str());
    const unsigned long long found = network.bits(tokens);
    way.same = way.same && (time == 0 || found == bits);
    bits = found;
  }
  way.error_h = network.error(network.h, network.true_h, tokens * hidden);
  way.error = network.error(network.out, network.true_out, tokens * embed);
}

bool is_right(const Way& way) { return way.error_h < 6e-3 && way.error < 6e-3 && way.same; }

/// By turns; what is wrong is left out.
void time_ways(std::vector<Way>& ways, int rounds) {
  const Event begin, end;
  std::vector<std::pair<cudaEvent_t, cudaEvent_t>> events(ways.size());
  for (auto& [from, to] : events) {
    check_cuda(cudaEventCreate(&from), "an event");
    check_cuda(cudaEventCreate(&to), "an event");
  }
  constexpr int warm_ups = 2;
  for (int round = 0; round < warm_ups + rounds; ++round) {
    watch.begin("a round of " + std::to_string(ways.size()));
    keep_busy<<<1, 1>>>(400000 + 25000ll * static_cast<long long>(ways.size()));
    for (std::size_t n = 0; n < ways.size(); ++n) {
      const std::size_t which = (n + static_cast<std::size_t>(round)) % ways.size();
      if (!is_right(ways[which])) continue;
      check_cuda(cudaEventRecord(events[which].first), "an event");
      ways[which].run(static_cast<int>(n + static_cast<std::size_t>(round)) % sets);
      check_cuda(cudaEventRecord(events[which].second), "an event");
    }
    check_cuda(cudaDeviceSynchronize(), "a round");
    if (round < warm_ups) continue;
    for (std::size_t n = 0; n < ways.size(); ++n) {
      if (!is_right(ways[n])) continue;
      float ms = 0;
      check_cuda(cudaEventElapsedTime(&ms, events[n].first, events[n].second), "a time");
      ways[n].us.push_back(1e3 * static_cast<double>(ms));
    }
  }
  for (auto& [from, to] : events) {
    cudaEventDestroy(from);
    cudaEventDestroy(to);
  }
}

void print_way(const char* kind, int tokens, bool gated, const Way& way) {
  const double bytes = static_cast<double>((gated ? 3 : 2) * hidden * embed * 2);
  std::printf(
      "{\"kind\": \"%s\", \"tokens\": %d, \"way\": \"%s\", \"us\": %.2f, \"least_us\": %.2f, \"tbps\": %.3f, "
      "\"error_h\": %.2e, \"error\": %.2e, \"same\": %s, \"right\": %s}\n",
      kind, tokens, way.name.c_str(), way.median(), way.least(), bytes / way.median() * 1e-6, way.error_h,
      way.error, name_of(way.same), name_of(is_right(way)));
  std::fflush(stdout);
}

#ifdef TILEWISE_STAMPS
void print_stamps(const char* kind, int tokens, const Way& way) {
  static unsigned long long host[stamped_kernels][stamped_blocks][stamp_points];
  constexpr const char* points[] = {"start",      "first loads", "",          "last load", "bridge",
                                    "ahead over", "first unit",  "last unit", "taken",     "end"};
  for (int time = 0; time < 4; ++time) way.run(time % sets);
  check_cuda(cudaDeviceSynchronize(), "stamps");
  check_cuda(cudaMemcpyToSymbol(stamps, host, sizeof(host)), "stamps");
  way.run(1);
  check_cuda(cudaDeviceSynchronize(), "stamps");
  check_cuda(cudaMemcpyFromSymbol(host, stamps, sizeof(host)), "stamps");
  unsigned long long zero = ~0ull;
  for (const auto& block : host[0]) zero = block[0] != 0 ? std::min(zero, block[0]) : zero;
  for (int kernel = 0; kernel < stamped_kernels; ++kernel) {
    for (int point = 0; point < 10; ++point) {
      std::vector<double> us;
      for (const auto& block : host[kernel]) {
        if (block[point] != 0) us.push_back(1e-3 * static_cast<double>(block[point] - zero));
      }
      if (us.empty() || *points[point] == 0) continue;
      std::sort(us.begin(), us.end());
      std::printf(
          "{\"kind\": \"%s\", \"tokens\": %d, \"way\": \"%s\", \"product\": %d, \"point\": \"%s\", "
          "\"blocks\": "
          "%d, \"least_us\": %.2f, \"median_us\": %.2f, \"most_us\": %.2f}\n",
          kind, tokens, way.name.c_str(), kernel, points[point], static_cast<int>(us.size()), us.front(),
          us[us.size() / 2], us.back());
    }
  }
  std::memset(host, 0, sizeof(host));
  std::fflush(stdout);
}
#endif

/// The fastest of a problem beside the present one, for the end.
std::vector<std::string> conclusions;

bool is_wanted(const Options& options, const std::string& name) {
  return (options.only.empty() || name.find(options.only) != std::string::npos) &&
         (options.skip.empty() || name.find(options.skip) == std::string::npos);
}

/// Checks, times and prints; the fastest first.
void compare_ways(const Network& network, const char* kind, int tokens, bool gated, std::vector<Way>& ways,
                  const Options& options) {
  std::erase_if(ways, [&](const Way& way) { return !is_wanted(options, way.name); });
  for (Way& way : ways) {
    check_way(network, tokens, way);
    if (!is_right(way)) print_way(kind, tokens, gated, way);
  }
#ifdef TILEWISE_STAMPS
  for (const Way& way : ways) print_stamps(kind, tokens, way);
#else
  time_ways(ways, options.rounds);
  std::sort(ways.begin(), ways.end(), [](const Way& a, const Way& b) { return a.median() < b.median(); });
  for (const Way& way : ways) {
    if (is_right(way)) print_way(kind, tokens, gated, way);
  }
  double before = 0;
  for (const Way& way : ways) before = way.name == "present > present" ? way.median() : before;
  for (std::size_t n = 0; n < std::min<std::size_t>(ways.size(), 3); ++n) {
    char text[400];
    std::snprintf(text, sizeof(text),
                  "{\"best\": %d, \"kind\": \"%s\", \"tokens\": %d, \"way\": \"%s\", \"us\": %.2f, "
                  "\"present_us\": %.2f}",
                  static_cast<int>(n), kind, tokens, ways[n].name.c_str(), ways[n].median(), before);
    conclusions.emplace_back(text);
  }
#endif
}

/// Products that are worth a second look, with all of the others' standings.
struct Pair {
  Product first, second;
};

void sweep_network(const Network& network, int tokens, bool gated, const Options& options) {
  const char* const kind = gated ? "swiglu" : "gelu";
  network.make_truth(1, tokens, gated);
  const std::vector<Product> ups = tile_products(tokens, gated, false);
  const std::vector<Product> downs = tile_products(tokens, false, true);
  const auto is_plain = [](const Product& product) {
    return product.name.find(" runs") == std::string::npos && product.name.find("deep") == std::string::npos;
  };
  const Stand usual{.late = true, .bridge = 8, .pace = 500};
  const Stand by_hand{.late = true, .bridge = 8, .pace = 500, .hand = true};
  std::vector<Pair> pairs = {{present(tokens, gated), present(tokens, false)},
                             {runs(tokens, gated), runs(tokens, false)}};
  // Every first with the first of the seconds and the other way round, and all plain ones with each other.
  for (const Product& up : ups) {
    for (const Product& down : downs) {
      const bool counts = (is_plain(up) && is_plain(down)) || &up == &ups[0] || &down == &downs[0];
      if (counts) pairs.push_back({up, down});
    }
  }
  // Pieces of rows in both, by the same lengths.
  for (const Product& up : ups) {
    for (const Product& down : downs) {
      const auto length = [](const Product& product) {
        const std::size_t at = product.name.find(" runs");
        return at == std::string::npos ? std::string() : product.name.substr(at);
      };
      if (!length(up).empty() && length(up) == length(down)) pairs.push_back({up, down});
    }
  }
  std::vector<Way> ways;
  for (const Pair& pair : pairs) {
    const bool open = pair.first.weights != nullptr;
    const bool plain = is_plain(pair.first) && is_plain(pair.second) && pair.first.hands_over;
    for (const Stand& stand : {Stand{}, usual, by_hand}) {
      if ((!open && stand.late) || (!plain && stand.hand)) continue;
#ifdef TILEWISE_STAMPS
      if (!is_plain(pair.first) || !is_plain(pair.second)) continue;
#endif
      ways.push_back(way_of(network, tokens, gated, pair.first, pair.second, stand));
    }
  }
  compare_ways(network, kind, tokens, gated, ways, options);
  if (!options.overlaps || ways.empty()) return;
#ifndef TILEWISE_STAMPS
  // How the two stand to each other, for runs and for the two fastest pairs of tiles.
  std::vector<Pair> best = {pairs[1]};
  for (const Way& way : ways) {
    for (const Pair& pair : pairs) {
      const std::string name = pair.first.name + " > " + pair.second.name;
      const auto is = [&](const Pair& other) { return other.first.name + " > " + other.second.name == name; };
      const bool same =
          way.name == name || way.name == name + usual.name() || way.name == name + by_hand.name();
      if (same && is_right(way) && pair.first.weights != nullptr && best.size() < 3 &&
          std::none_of(best.begin(), best.end(), is)) {
        best.push_back(pair);
      }
    }
  }
  std::vector<Way> standings = {way_of(network, tokens, gated, pairs[0].first, pairs[0].second, {})};
  for (const Pair& pair : best) {
    for (const bool late : {false, true}) {
      for (const int opening : {0, 4, 8}) {
        standings.push_back(way_of(network, tokens, gated, pair.first, pair.second, {late, opening, 0, 0}));
      }
      for (const int bridge : {4, 8, 12, 16}) {
        for (const int pace : {0, 400, 800}) {
          standings.push_back(
              way_of(network, tokens, gated, pair.first, pair.second, {late, 0, bridge, pace}));
        }
      }
      if (!pair.first.hands_over) continue;
      for (const int bridge : {0, 8, 12}) {
        standings.push_back(
            way_of(network, tokens, gated, pair.first, pair.second, {late, 0, bridge, 400, true}));
      }
    }
  }
  compare_ways(network, kind, tokens, gated, standings, options);
#endif
}

void time_reads(const Network& network, const Options& options) {
  constexpr ReadPattern patterns[] = {
      {"84 rows x 128 B", 84, 84, 1, 8},
      {"84 rows x 128 B, turned", 84, 84, 1, 8, false, true},
      {"84 rows x 512 B", 84, 84, 4, 2, false, true},
      {"28 rows x 512 B", 84, 28, 4, 7, false, true},
      {"28 rows x 1 KiB", 84, 28, 8, 4, false, true},
      {"12 rows x 1 KiB", 84, 12, 8, 8, false, true},
      {"12 rows x 2 KiB", 84, 12, 16, 4, false, true},
      {"12 rows x 2 KiB, bulk", 84, 12, 16, 4, true, true},
      {"12 rows x 1 KiB, bulk", 84, 12, 8, 8, true, true},
      {"28 rows x 512 B, bulk", 84, 28, 4, 7, true, true},
      {"4 rows x 8 KiB, bulk", 84, 4, 64, 3, true, true},
      {"84 rows x 128 B, runs 512", 84, 84, 1, 8, false, true, 1, 4},
      {"84 rows x 128 B, runs 1 KiB", 84, 84, 1, 8, false, true, 2, 2},
      {"84 rows x 128 B, runs 2 KiB", 84, 84, 1, 8, false, true, 4, 1},
      {"84 rows x 128 B, runs 4 KiB", 84, 84, 1, 8, false, true, 8, 1},
  };
  const Event begin, end;
  const auto time = [&](const char* name, double bytes, const std::function<void(int)>& run) {
    if (!is_wanted(options, name)) return;
    watch.begin(std::string("reading by ") + name);
    std::vector<double> us;
    for (int n = 0; n < 24; ++n) {
      keep_busy<<<1, 1>>>(60000);
      cudaEventRecord(begin.event);
      run(n);
      cudaEventRecord(end.event);
      check_cuda(cudaEventSynchronize(end.event), name);
      float ms = 0;
      cudaEventElapsedTime(&ms, begin.event, end.event);
      if (n >= 4) us.push_back(1e3 * static_cast<double>(ms));
    }
    std::sort(us.begin(), us.end());
    std::printf("{\"read\": \"%s\", \"us\": %.2f, \"least_us\": %.2f, \"tbps\": %.3f}\n", name,
                us[us.size() / 2], us[0], bytes / us[us.size() / 2] * 1e-6);
    std::fflush(stdout);
  };
  time("nothing", 0, [](int) { empty_kernel<<<1, 32>>>(); });
  for (const ReadPattern& pattern : patterns) {
    const int bytes = pattern.shared_bytes();
    check_cuda(cudaFuncSetAttribute(read_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "shared memory");
    const auto run = [&](int n) {
      // Up, gate and up of the other set, ...: 90 MB each.
      const Matrix b = Network::matrix(n % 2 == 0 ? network.up : network.gate, n / 2 % sets, hidden, embed);
      ReadArguments arguments{
          .map = map_of_matrix(b.data, b.dtype, b.rows, b.columns, b.stride_row, pattern.unit_rows),
          .runs = map_of_runs(b.data, b.dtype, b.rows, b.columns, b.stride_row, run_rows,
                              std::max(pattern.run_pieces, 1)),
          .data = b.data,
          .stride = b.stride_row * 2,
          .panels = static_cast<int>(b.columns / 64),
          .n = static_cast<int>(b.rows),
          .pattern = pattern};
      const auto blocks = static_cast<unsigned>((b.rows + pattern.rows - 1) / pattern.rows);
      read_kernel<<<blocks, 32, static_cast<std::size_t>(bytes)>>>(arguments);
      check_cuda(cudaGetLastError(), pattern.name);
    };
    time(pattern.name, static_cast<double>(hidden * embed * 2), run);
  }
}

void sweep_all(const Options& options) {
  watch.start(options.seconds);
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, 0), "the device");
  multiprocessors = device.multiProcessorCount;
  std::printf("{\"device\": \"%s\", \"multiprocessors\": %d, \"l2\": %d}\n", device.name, multiprocessors,
              device.l2CacheSize);
  watch.begin("inputs");
  const Network network;
#ifndef TILEWISE_STAMPS
  if (options.reads) time_reads(network, options);
#endif
  for (const int tokens : {16, 64, 32}) {
    for (const bool gated : {true, false}) {
      if (options.tokens != 0 && options.tokens != tokens) continue;
      if (!options.kind.empty() && (options.kind == "swiglu") != gated) continue;
      sweep_network(network, tokens, gated, options);
    }
  }
  for (const std::string& conclusion : conclusions) std::printf("%s\n", conclusion.c_str());
  std::printf("{\"finished\": true}\n");
}

}  // namespace
}  // namespace tilewise::cuda::gemm

int main(int argc, char** argv) {
  tilewise::cuda::gemm::Options options;
  for (int n = 1; n < argc; ++n) {
    const std::string name = argv[n];
    const auto text = [&] { return n + 1 < argc ? std::string(argv[++n]) : std::string(); };
    if (name == "--tokens")
      options.tokens = std::atoi(text().c_str());
    else if (name == "--kind")
      options.kind = text();
    else if (name == "--only")
      options.only = text();
    else if (name == "--skip")
      options.skip = text();
    else if (name == "--rounds")
      options.rounds = std::atoi(text().c_str());
    else if (name == "--seconds")
      options.seconds = std::atoi(text().c_str());
    else if (name == "--no-reads")
      options.reads = false;
    else if (name == "--no-overlaps")
      options.overlaps = false;
    else {
      std::fprintf(stderr, "%s: unknown\n", name.c_str());
      return 2;
    }
  }
  try {
    tilewise::cuda::gemm::sweep_all(options);
    return 0;
  } catch (const std::exception& error) {
    std::printf("{\"error\": \"%s\", \"at\": \"%s\"}\n", error.what(), tilewise::cuda::gemm::watch.at.load());
    return 1;
  }
}
