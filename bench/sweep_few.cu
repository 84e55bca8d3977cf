// Times ways of a network's two products with few tokens (src/cuda/gemm/few.cuh, few_tile.cuh) beside each
// other, and compares each with products by plain sums. Prints a line of JSON each. A worker, the same
// program in a process of its own, runs them: one that ends or hangs is named, and a new worker goes on.
//
//   sweep_few [--tokens 16] [--kind gelu|swiglu] [--only TEXT] [--skip TEXT] [--rounds 40] [--no-reads]
//             [--no-overlaps] [--seconds 55]
//
// Compiled with -DTILEWISE_STAMPS it says when blocks came where, instead. It links with nothing of the
// library but cuda/runtime/{check,launch,range}.cpp and cuda/tile/tensor_map.cpp.

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/gemm/few_tile_rows.cuh"
#include "cuda/gemm/few_whole.cuh"
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
      {.tokens = 16, .rows = 88, .columns = 48, .gated = true, .stages = 7, .token_stages = 6, .blocks = 1},
      {.tokens = 32, .rows = 88, .columns = 48, .gated = true, .stages = 7, .token_stages = 6, .blocks = 1},
      {.tokens = 64, .rows = 88, .columns = 48, .gated = true, .stages = 7, .token_stages = 6, .blocks = 1},
      // Up.
      {.tokens = 16, .rows = 88, .columns = 48, .stages = 8, .token_stages = 6},
      {.tokens = 32, .rows = 88, .columns = 48, .stages = 7, .token_stages = 6},
      {.tokens = 64, .rows = 88, .columns = 48, .stages = 6, .token_stages = 5},
      {.tokens = 16, .rows = 88, .columns = 48, .panels = 2, .slabs = true, .stages = 4, .token_stages = 4},
      {.tokens = 32, .rows = 88, .columns = 48, .panels = 2, .slabs = true, .stages = 4, .token_stages = 2},
      {.tokens = 64, .rows = 168, .columns = 96, .stages = 4, .token_stages = 3},
      // Down.
      {.tokens = 16, .rows = 32, .parts = units, .columns = 32, .panels = 2, .stages = 8, .token_stages = 8},
      {.tokens = 32, .rows = 32, .parts = units, .columns = 32, .panels = 2, .stages = 8, .token_stages = 5},
      {.tokens = 64, .rows = 32, .parts = units, .columns = 32, .panels = 1, .stages = 10, .token_stages = 7},
      {.tokens = 16,
       .rows = 32,
       .parts = units,
       .columns = 32,
       .panels = 2,
       .slabs = true,
       .stages = 8,
       .token_stages = 8},
      {.tokens = 16,
       .rows = 32,
       .parts = units,
       .columns = 32,
       .panels = 4,
       .slabs = true,
       .stages = 4,
       .token_stages = 4},
      {.tokens = 32,
       .rows = 32,
       .parts = units,
       .columns = 32,
       .panels = 2,
       .slabs = true,
       .stages = 8,
       .token_stages = 5},
      {.tokens = 64,
       .rows = 32,
       .parts = units,
       .columns = 32,
       .panels = 2,
       .slabs = true,
       .stages = 6,
       .token_stages = 4},
      {.tokens = 16,
       .rows = 64,
       .parts = units,
       .columns = 64,
       .panels = 1,
       .stages = 10,
       .token_stages = 10},
      {.tokens = 16,
       .rows = 64,
       .parts = units,
       .columns = 64,
       .panels = 2,
       .slabs = true,
       .stages = 4,
       .token_stages = 4},
      {.tokens = 32, .rows = 64, .parts = units, .columns = 64, .panels = 1, .stages = 8, .token_stages = 8},
      {.tokens = 32,
       .rows = 64,
       .parts = units,
       .columns = 64,
       .panels = 2,
       .slabs = true,
       .stages = 4,
       .token_stages = 4},
      {.tokens = 64, .rows = 64, .parts = units, .columns = 64, .panels = 1, .stages = 8, .token_stages = 6},
      {.tokens = 64,
       .rows = 64,
       .parts = units,
       .columns = 64,
       .panels = 2,
       .slabs = true,
       .stages = 4,
       .token_stages = 3},
      {.tokens = 16, .rows = 128, .columns = 64, .stages = 5, .token_stages = 5},
      {.tokens = 32, .rows = 128, .columns = 64, .stages = 5, .token_stages = 4},
      {.tokens = 64, .rows = 128, .columns = 64, .stages = 5, .token_stages = 3},
  };
};

struct Wholes {
  static constexpr FewWholeConfig rows[] = {
      {.tokens = 16, .gated = true},
      {.tokens = 16},
      {.tokens = 32, .parts = 2, .splits = 2, .rows = 168, .gated = true, .stages = 7},
      {.tokens = 32, .parts = 2, .splits = 2, .rows = 168},
      {.tokens = 16, .unit_blocks = 43, .parts = 2, .splits = 4, .rows = 128, .stages = 7},
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
bool straight = false;  // blocks of tiles begin with the same summands, all of them

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
Product by_tiles(int splits) {
  static constexpr FewTileConfig c = Tiles::rows[row];
  prefer_shared_memory(few_tile_kernel<T, Tiles, row>);
  std::string name = "tiles " + std::to_string(c.rows) + "/" + std::to_string(splits);
  if (c.blocks == 1) name += " deep";
  if (c.slabs) name += " slab " + std::to_string(c.panels);
  const auto tiles = [splits](const GemmCall& call) {
    FewTiles found = tiles_of(call.problem, c, splits, multiprocessors);
    if (straight) found.turn = 0;
    return found;
  };
  return {name,
          [=](const GemmCall& call, const FewSpace& space, FewTurn turn, const FewOverlap& overlap) {
            run_few_tile<T, Tiles, row>(call, space, tiles(call), turn, overlap, {}, nullptr);
          },
          [=](const GemmCall& call) { return weights_of(call.b, tiles(call), {}, c.stages); }, true};
}

template <int row>
Product by_whole_rows() {
  static constexpr FewWholeConfig c = Wholes::rows[row];
  prefer_shared_memory(few_whole_kernel<T, Wholes, row>);
  return {"whole rows/" + std::to_string(c.splits),
          [](const GemmCall& call, const FewSpace& space, FewTurn turn, const FewOverlap& overlap) {
            run_few_whole<T, Wholes, row>(call, space, multiprocessors, turn, overlap, nullptr);
          },
          [](const GemmCall& call) {
            constexpr int held = 20;  // about what places hold, in units of 64 summands
            return weights_of(call.b, whole_tiles<c>(call.problem, multiprocessors), {}, held);
          },
          true};
}

/// Rows of the tables of tiles and of whole rows that suit.
std::vector<Product> tile_products(int tokens, bool gated, bool down) {
  std::vector<Product> found;
  const auto add = [&]<int row>() {
    constexpr FewTileConfig c = Tiles::rows[row];
    if (c.tokens != tokens || c.gated != gated) return;
    if ((c.rows == 88 || c.rows == 168) == down) return;
    const int splits = down ? c.rows / 32 : c.rows == 168 ? 2 : 1;
    found.push_back(by_tiles<row>(splits));
  };
  [&]<int... row>(std::integer_sequence<int, row...>) {
    (add.template operator()<row>(), ...);
  }(std::make_integer_sequence<int, static_cast<int>(std::size(Tiles::rows))>{});
  if (down && tokens == 16) found.push_back(by_whole_rows<4>());
  if (!down && tokens == 16) found.push_back(gated ? by_whole_rows<0>() : by_whole_rows<1>());
  if (!down && tokens == 32) found.push_back(gated ? by_whole_rows<2>() : by_whole_rows<3>());
  return found;
}

Product present(int tokens, bool gated) {
  if (tokens == 1) {
    return {"present",
            [](const GemmCall& call, const FewSpace&, FewTurn turn, const FewOverlap&) {
              run_stream<T>(call, multiprocessors, turn, nullptr);
            },
            nullptr};
  }
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
  bool straight = false;
  bool apart = false;  ///< the second begins when the first has ended, as where they are two calls

  std::string name() const {
    std::string text = late ? " late" : "";
    if (hand) text += " hand";
    if (opening > 0) text += " open " + std::to_string(opening);
    if (bridge > 0) text += " bridge " + std::to_string(bridge) + "@" + std::to_string(pace);
    if (straight) text += " straight";
    if (apart) text += " apart";
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

// ---- A network and ways of it

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
  /// Root of the mean of squares, by the truth's, and the largest difference.
  std::pair<double, double> error(const Memory& found, const Memory& truth, std::int64_t count) const {
    check_cuda(cudaMemset(sums.data, 0, 16), "comparing");
    add_squares<<<static_cast<unsigned>(count / 256), 256>>>(static_cast<const T*>(found.data),
                                                             static_cast<const T*>(truth.data),
                                                             static_cast<double*>(sums.data));
    double squares[2];
    check_cuda(cudaMemcpy(squares, sums.data, 16, cudaMemcpyDeviceToHost), "comparing");
    check_cuda(cudaMemset(sums.data, 0, 16), "comparing");
    compare<<<static_cast<unsigned>(count / 256), 256>>>(
        static_cast<const T*>(found.data), static_cast<const T*>(truth.data), static_cast<int*>(sums.data));
    float largest[2];
    check_cuda(cudaMemcpy(largest, sums.data, 8, cudaMemcpyDeviceToHost), "comparing");
    return {std::sqrt(squares[0] / squares[1]), static_cast<double>(largest[0])};
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
  std::string pair{};  ///< none where a product is alone
  bool first_look = true;
  bool up = true, down = true;  ///< which products it has
  double error_h = 0, error = 0, largest_h = 0, largest = 0;
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
            straight = stand.straight;
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
            second.run(down, network.workspace(), stand.apart ? FewTurn::first : FewTurn::second, of_second);
          }};
}

/// A product alone: the second of tokens that are there.
Way way_alone(const Network& network, int tokens, bool gated, const Product& product, bool up,
              bool is_straight) {
  Way way{(up ? "up alone: " : "down alone: ") + product.name + (is_straight ? " straight" : ""),
          [=, &network](int set) {
            straight = is_straight;
            const GemmCall call = up ? network.first(set, tokens, gated) : network.second(set, tokens);
            product.run(call, network.workspace(), FewTurn::first, {});
          }};
  way.up = up;
  way.down = !up;
  return way;
}

void check_way(const Network& network, int tokens, Way& way) {
  constexpr int again = 6;
  const auto bytes = static_cast<std::size_t>(tokens * hidden * 2);
  unsigned long long bits = 0;
  for (int time = 0; time < again; ++time) {
    network.poison();
    if (!way.up) {
      check_cuda(cudaMemcpy(network.h.data, network.true_h.data, bytes, cudaMemcpyDeviceToDevice), "h");
    }
    way.run(1);
    if (time > 0) way.run(0), way.run(1);  // back to back, on other weights between
    check_cuda(cudaDeviceSynchronize(), way.name.c_str());
    const unsigned long long found = network.bits(tokens);
    way.same = way.same && (time == 0 || found == bits);
    bits = found;
  }
  std::tie(way.error_h, way.largest_h) = network.error(network.h, network.true_h, tokens * hidden);
  std::tie(way.error, way.largest) = way.down ? network.error(network.out, network.true_out, tokens * embed)
                                              : std::pair(way.error_h, way.largest_h);
}

bool is_right(const Way& way) { return way.error_h < 6e-3 && way.error < 6e-3 && way.same; }

/// By turns.
void time_ways(const std::vector<Way*>& ways, int rounds) {
  std::vector<std::pair<cudaEvent_t, cudaEvent_t>> events(ways.size());
  for (auto& [from, to] : events) {
    check_cuda(cudaEventCreate(&from), "an event");
    check_cuda(cudaEventCreate(&to), "an event");
  }
  for (Way* way : ways) way->us.clear();
  constexpr int warm_ups = 2;
  for (int round = 0; round < warm_ups + rounds; ++round) {
    keep_busy<<<1, 1>>>(400000 + 25000ll * static_cast<long long>(ways.size()));
    for (std::size_t n = 0; n < ways.size(); ++n) {
      const std::size_t which = (n + static_cast<std::size_t>(round)) % ways.size();
      check_cuda(cudaEventRecord(events[which].first), "an event");
      ways[which]->run(static_cast<int>(n + static_cast<std::size_t>(round)) % sets);
      check_cuda(cudaEventRecord(events[which].second), "an event");
    }
    check_cuda(cudaDeviceSynchronize(), "a round");
    if (round < warm_ups) continue;
    for (std::size_t n = 0; n < ways.size(); ++n) {
      float ms = 0;
      check_cuda(cudaEventElapsedTime(&ms, events[n].first, events[n].second), "a time");
      ways[n]->us.push_back(1e3 * static_cast<double>(ms));
    }
  }
  for (auto& [from, to] : events) {
    cudaEventDestroy(from);
    cudaEventDestroy(to);
  }
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

// ---- What a worker does

struct Pair {
  Product first, second;

  std::string name() const { return first.name + " > " + second.name; }
};

/// All ways of a problem. Those of a first look come with `pair` alone known; the others are ways in which
/// the two of a pair stand to each other, for pairs that were fast.
struct Problem {
  int tokens = 0;
  bool gated = false;
  std::vector<Way> ways;
};

Problem problem_of(const Network& network, int tokens, bool gated) {
  Problem problem{tokens, gated, {}};
  const auto add = [&](const Pair& pair, const Stand& stand, bool first_look) {
    problem.ways.push_back(way_of(network, tokens, gated, pair.first, pair.second, stand));
    problem.ways.back().pair = pair.name();
    problem.ways.back().first_look = first_look;
  };
  const Pair now{present(tokens, gated), present(tokens, false)};
  add(now, {}, true);
  add(now, {.apart = true}, true);
  if (tokens == 1) return problem;
  std::vector<Pair> pairs = {{runs(tokens, gated), runs(tokens, false)}};
  const std::vector<Product> ups = tile_products(tokens, gated, false);
  const std::vector<Product> downs = tile_products(tokens, false, true);
  for (const bool up : {true, false}) {
    problem.ways.push_back(way_alone(network, tokens, gated, up ? now.first : now.second, up, false));
    for (const Product& product : up ? ups : downs) {
      for (const bool is_straight : {false, true}) {
        problem.ways.push_back(way_alone(network, tokens, gated, product, up, is_straight));
      }
    }
  }
  for (const Product& up : ups) {
    for (const Product& down : downs) pairs.push_back({up, down});
    pairs.push_back({up, runs(tokens, false)});
  }
  for (const Pair& pair : pairs) {
    const bool tiles = pair.first.hands_over;
    const bool hands = pair.first.hands_over && pair.second.hands_over;
    for (const bool straight : {false, true}) {
      if (straight && !tiles) continue;
      add(pair, {.straight = straight}, true);
      add(pair, {.late = true, .bridge = 8, .pace = 500, .straight = straight}, true);
      if (hands)
        add(pair, {.late = true, .bridge = 8, .pace = 500, .hand = true, .straight = straight}, true);
    }
    for (const bool straight : {false, true}) {
      if (straight && !tiles) continue;
      for (const bool late : {false, true}) {
        for (const int opening : {0, 8}) {
          if (opening > 0 || late) add(pair, {.late = late, .opening = opening, .straight = straight}, false);
        }
        for (const int bridge : {4, 8, 16}) {
          for (const int pace : {0, 400, 800}) {
            add(pair, {.late = late, .bridge = bridge, .pace = pace, .straight = straight}, false);
          }
        }
        if (!hands) continue;
        for (const int bridge : {0, 4, 12, 16}) {
          add(pair, {.late = late, .bridge = bridge, .pace = 400, .hand = true, .straight = straight}, false);
        }
      }
    }
  }
  return problem;
}

void time_reads(const Network& network) {
  constexpr ReadPattern patterns[] = {
      {.name = "84 rows x 128 B", .rows = 84, .unit_rows = 84, .unit_panels = 1, .stages = 8},
      {.name = "84 rows x 512 B", .rows = 84, .unit_rows = 84, .unit_panels = 4, .stages = 2},
      {.name = "28 rows x 512 B", .rows = 84, .unit_rows = 28, .unit_panels = 4, .stages = 7},
      {.name = "12 rows x 2 KiB", .rows = 84, .unit_rows = 12, .unit_panels = 16, .stages = 4},
      {.name = "4 rows x 8 KiB, bulk",
       .rows = 84,
       .unit_rows = 4,
       .unit_panels = 64,
       .stages = 3,
       .bulk = true},
      {.name = "88 rows x 256 B, slab",
       .rows = 88,
       .unit_rows = 88,
       .unit_panels = 2,
       .stages = 4,
       .slab = true},
      {.name = "28 rows x 128 B", .rows = 84, .unit_rows = 28, .unit_panels = 1, .stages = 24},
      {.name = "28 rows x 256 B, slab",
       .rows = 84,
       .unit_rows = 28,
       .unit_panels = 2,
       .stages = 12,
       .slab = true},
      {.name = "28 rows x 512 B, slab",
       .rows = 84,
       .unit_rows = 28,
       .unit_panels = 4,
       .stages = 6,
       .slab = true},
      {.name = "12 rows x 1 KiB, slab",
       .rows = 84,
       .unit_rows = 12,
       .unit_panels = 8,
       .stages = 8,
       .slab = true},
      {.name = "12 rows x 2 KiB, slab",
       .rows = 84,
       .unit_rows = 12,
       .unit_panels = 16,
       .stages = 4,
       .slab = true},
  };
  const Event begin, end;
  const auto time = [&](const char* name, double bytes, const std::function<void(int)>& run) {
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
          .map = pattern.slab
                     ? map_of_panels(b.data, b.dtype, b.rows, b.columns, b.stride_row, pattern.unit_rows,
                                     pattern.unit_panels)
                     : map_of_matrix(b.data, b.dtype, b.rows, b.columns, b.stride_row, pattern.unit_rows),
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

/// Takes orders from standard input, a line each, and answers with lines of which the last is "done" or, when
/// it gives up, "failed" and why:
///   device                   what a line of JSON says of it
///   begin TOKENS GATED       the ways of a problem, a line each: first look or not and matrices, pair, name
///   check WAY                its errors, and whether it is right
///   time ROUNDS WAY ...      median and least of each
///   stamps WAY               when blocks came where
///   reads                    reading alone
int work() {
  try {
    cudaDeviceProp device{};
    check_cuda(cudaGetDeviceProperties(&device, 0), "the device");
    multiprocessors = device.multiProcessorCount;
    const Network network;
    Problem problem;
    std::string line;
    while (std::getline(std::cin, line)) {
      std::istringstream words(line);
      std::string order;
      words >> order;
      if (order == "device") {
        std::printf("{\"device\": \"%s\", \"multiprocessors\": %d, \"l2\": %d}\n", device.name,
                    multiprocessors, device.l2CacheSize);
      } else if (order == "begin") {
        int tokens = 0, gated = 0;
        words >> tokens >> gated;
        network.make_truth(1, tokens, gated != 0);
        problem = problem_of(network, tokens, gated != 0);
        for (const Way& way : problem.ways) {
          const int matrices = (way.up ? (gated != 0 ? 2 : 1) : 0) + (way.down ? 1 : 0);
          std::printf("%d%d\t%s\t%s\n", way.first_look ? 1 : 0, matrices, way.pair.c_str(), way.name.c_str());
        }
      } else if (order == "check") {
        std::size_t which = 0;
        words >> which;
        Way& way = problem.ways.at(which);
        check_way(network, problem.tokens, way);
        std::printf("%.3e %.3e %.3e %.3e %d %d\n", way.error_h, way.error, way.largest_h, way.largest,
                    way.same ? 1 : 0, is_right(way) ? 1 : 0);
      } else if (order == "time") {
        int rounds = 0;
        words >> rounds;
        std::vector<Way*> ways;
        for (std::size_t which = 0; words >> which;) ways.push_back(&problem.ways.at(which));
        time_ways(ways, rounds);
        for (const Way* way : ways) std::printf("%.3f %.3f\n", way->median(), way->least());
#ifdef TILEWISE_STAMPS
      } else if (order == "stamps") {
        std::size_t which = 0;
        words >> which;
        print_stamps(problem.gated ? "swiglu" : "gelu", problem.tokens, problem.ways.at(which));
#endif
      } else if (order == "reads") {
        time_reads(network);
      }
      std::printf("done\n");
      std::fflush(stdout);
    }
    std::fflush(stdout);
    _exit(0);  // nothing is given back one by one
  } catch (const std::exception& error) {
    std::printf("failed %s\n", error.what());
    std::fflush(stdout);
    _exit(1);
  }
}

// ---- Who gives the orders: it never asks anything of CUDA itself, so that no way can end it

double now() {
  return 1e-3 * static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

struct Options {
  int tokens = 0;
  std::string kind, only, skip;
  int rounds = 40;
  double seconds = 55;
  bool reads = true, overlaps = true, worker = false;
};

class Worker {
 public:
  Worker(std::string program, double until) : program_(std::move(program)), until_(until) {}
  ~Worker() { end(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// The lines of the answer; where there is none, false and why, and the worker has ended.
  bool ask(const std::string& order, double seconds, std::vector<std::string>& lines, std::string& error) {
    if (process_ < 0) {
      start();
      seconds += 15;  // for the context and inputs
    }
    lines.clear();
    const std::string text = order + "\n";
    if (write(to_, text.data(), text.size()) < 0) {
      end();
      error = "the worker is not there";
      return false;
    }
    const double limit = std::min(now() + seconds, until_);
    for (;;) {
      for (std::size_t at = rest_.find('\n'); at != std::string::npos; at = rest_.find('\n')) {
        const std::string line = rest_.substr(0, at);
        rest_.erase(0, at + 1);
        if (line == "done") return true;
        if (line.starts_with("failed ")) {
          error = line.substr(7);
          end();
          return false;
        }
        lines.push_back(line);
      }
      pollfd waits{from_, POLLIN, 0};
      const double left = limit - now();
      if (left <= 0 || poll(&waits, 1, static_cast<int>(left * 1000) + 1) == 0) {
        error = now() >= until_ ? "time is over" : "hangs";
        end();
        return false;
      }
      char bytes[4096];
      const ssize_t count = read(from_, bytes, sizeof(bytes));
      if (count <= 0) {
        const int status = end();
        error = WIFSIGNALED(status) ? "ended by signal " + std::to_string(WTERMSIG(status)) : "ended";
        return false;
      }
      rest_.append(bytes, static_cast<std::size_t>(count));
    }
  }
  /// Whether it knows a problem's ways: a new one does not.
  bool is_there() const { return process_ >= 0; }

 private:
  void start() {
    int orders[2], answers[2];
    if (pipe(orders) != 0 || pipe(answers) != 0) std::abort();
    process_ = fork();
    if (process_ == 0) {
      dup2(orders[0], 0);
      dup2(answers[1], 1);
      for (const int file : {orders[0], orders[1], answers[0], answers[1]}) close(file);
      execl(program_.c_str(), program_.c_str(), "--worker", static_cast<char*>(nullptr));
      _exit(127);
    }
    close(orders[0]);
    close(answers[1]);
    to_ = orders[1];
    from_ = answers[0];
    rest_.clear();
  }
  int end() {
    if (process_ < 0) return 0;
    close(to_);
    close(from_);
    kill(process_, SIGKILL);
    int status = 0;
    waitpid(process_, &status, 0);
    process_ = -1;
    return status;
  }

  std::string program_;
  double until_;
  pid_t process_ = -1;
  int to_ = -1, from_ = -1;
  std::string rest_;
};

/// What is known of a way.
struct Known {
  bool first_look = false;
  int matrices = 0;
  std::string pair, name;
  std::string error;
  double error_h = 0, rms = 0, largest_h = 0, largest = 0;
  bool same = false, right = false, checked = false;
  double us = 0, least = 0;
};

class Sweep {
 public:
  Sweep(const Options& options, const std::string& program)
      : options_(options), until_(now() + options.seconds), worker_(program, until_) {}

  int run() {
    std::vector<std::string> lines;
    std::string error;
    if (!worker_.ask("device", 5, lines, error)) {
      std::printf("{\"error\": \"%s\"}\n", error.c_str());
      return 1;
    }
    for (const std::string& line : lines) std::printf("%s\n", line.c_str());
    for (const int tokens : {16, 64, 32, 1}) {
      for (const bool gated : {true, false}) {
        if (options_.tokens != 0 && options_.tokens != tokens) continue;
        if (!options_.kind.empty() && (options_.kind == "swiglu") != gated) continue;
        if (now() < until_) network(tokens, gated);
      }
    }
#ifndef TILEWISE_STAMPS
    if (options_.reads && now() < until_) {
      if (!worker_.ask("reads", 10, lines, error))
        std::printf("{\"reads\": true, \"error\": \"%s\"}\n", error.c_str());
      for (const std::string& line : lines) std::printf("%s\n", line.c_str());
    }
#endif
    for (const std::string& conclusion : conclusions_) std::printf("%s\n", conclusion.c_str());
    std::printf("{\"finished\": %s, \"seconds\": %.1f}\n", name_of(now() < until_),
                now() - until_ + options_.seconds);
    return 0;
  }

 private:
  bool is_wanted(const std::string& name) const {
    return (options_.only.empty() || name.find(options_.only) != std::string::npos) &&
           (options_.skip.empty() || name.find(options_.skip) == std::string::npos);
  }

  /// A worker that knows the problem.
  bool ready() {
    if (worker_.is_there() && begun_) return true;
    std::vector<std::string> lines;
    std::string error;
    begun_ = worker_.ask("begin " + std::to_string(tokens_) + (gated_ ? " 1" : " 0"), 10, lines, error);
    if (!begun_) {
      std::printf("{\"kind\": \"%s\", \"tokens\": %d, \"error\": \"beginning: %s\"}\n", kind(), tokens_,
                  error.c_str());
      return false;
    }
    if (!ways_.empty()) return true;
    for (const std::string& line : lines) {
      const std::size_t one = line.find('\t'), two = line.find('\t', one + 1);
      Known way{};
      way.first_look = line[0] == '1';
      way.matrices = line[1] - '0';
      way.pair = line.substr(one + 1, two - one - 1);
      way.name = line.substr(two + 1);
      ways_.push_back(way);
    }
    return true;
  }

  void check(std::size_t which) {
    Known& way = ways_[which];
    if (way.checked) return;
    way.checked = true;
    constexpr int patience = 2;  // a new worker takes a second or two
    if (std::count(ended_.begin(), ended_.end(), way.pair) >= patience && !way.pair.empty()) {
      way.error = "left out: others of the pair ended the worker";
      print(way);
      return;
    }
    if (!ready()) return;
    std::vector<std::string> lines;
    if (!worker_.ask("check " + std::to_string(which), 5, lines, way.error)) {
      ended_.push_back(way.pair);
      print(way);
      return;
    }
    std::istringstream words(lines.empty() ? "" : lines[0]);
    words >> way.error_h >> way.rms >> way.largest_h >> way.largest >> way.same >> way.right;
    if (!way.right) {
      way.error = way.same ? "wrong" : "differs from time to time";
      print(way);
    }
  }

  /// By turns; where some ended the worker, in halves.
  void time(const std::vector<std::size_t>& which) {
    if (which.empty() || now() >= until_ || !ready()) return;
    std::string order = "time " + std::to_string(options_.rounds);
    for (const std::size_t n : which) order += " " + std::to_string(n);
    std::vector<std::string> lines;
    std::string error;
    if (worker_.ask(order, 5 + 0.05 * static_cast<double>(which.size()), lines, error) &&
        lines.size() == which.size()) {
      for (std::size_t n = 0; n < which.size(); ++n) {
        std::istringstream words(lines[n]);
        words >> ways_[which[n]].us >> ways_[which[n]].least;
      }
      return;
    }
    if (which.size() == 1) {
      ways_[which[0]].error = "timing: " + error;
      print(ways_[which[0]]);
      return;
    }
    const auto half = which.begin() + static_cast<std::ptrdiff_t>(which.size() / 2);
    time({which.begin(), half});
    time({half, which.end()});
  }

  const char* kind() const { return gated_ ? "swiglu" : "gelu"; }

  void print(const Known& way) const {
    std::printf("{\"kind\": \"%s\", \"tokens\": %d, \"way\": \"%s\"", kind(), tokens_, way.name.c_str());
    if (way.us > 0) {
      const double bytes = static_cast<double>(way.matrices * hidden * embed * 2);
      std::printf(", \"us\": %.2f, \"least_us\": %.2f, \"tbps\": %.3f", way.us, way.least,
                  bytes / way.us * 1e-6);
    }
    if (way.rms > 0) {
      std::printf(", \"rms_h\": %.2e, \"rms\": %.2e, \"largest_h\": %.2e, \"largest\": %.2e, \"same\": %s",
                  way.error_h, way.rms, way.largest_h, way.largest, name_of(way.same));
    }
    if (!way.error.empty()) std::printf(", \"error\": \"%s\"", way.error.c_str());
    std::printf("}\n");
    std::fflush(stdout);
  }

  /// Checks, times and prints, the fastest first; gives them.
  std::vector<std::size_t> look(const std::vector<std::size_t>& which) {
    for (const std::size_t n : which) {
      if (now() < until_) check(n);
    }
    std::vector<std::size_t> right;
    for (const std::size_t n : which) {
      if (ways_[n].right) right.push_back(n);
    }
#ifdef TILEWISE_STAMPS
    for (const std::size_t n : right) {
      std::vector<std::string> lines;
      std::string error;
      if (!ready() || !worker_.ask("stamps " + std::to_string(n), 5, lines, error)) continue;
      for (const std::string& line : lines) std::printf("%s\n", line.c_str());
    }
    return {};
#else
    time(right);
    std::erase_if(right, [&](std::size_t n) { return ways_[n].us == 0; });
    std::sort(right.begin(), right.end(),
              [&](std::size_t a, std::size_t b) { return ways_[a].us < ways_[b].us; });
    for (const std::size_t n : right) print(ways_[n]);
    return right;
#endif
  }

  void network(int tokens, bool gated) {
    tokens_ = tokens;
    gated_ = gated;
    begun_ = false;
    ways_.clear();
    ended_.clear();
    if (!ready()) return;
    std::vector<std::size_t> first;
    for (std::size_t n = 0; n < ways_.size(); ++n) {
      if (ways_[n].first_look && (n == 0 || is_wanted(ways_[n].name))) first.push_back(n);
    }
    std::vector<std::size_t> found = look(first);
    std::erase_if(found, [&](std::size_t n) { return ways_[n].pair.empty(); });
    double before = ways_[0].us;
    // How the two stand to each other, for the three fastest pairs.
    std::vector<std::string> pairs;
    for (const std::size_t n : found) {
      const bool known = std::find(pairs.begin(), pairs.end(), ways_[n].pair) != pairs.end();
      if (!known && pairs.size() < 3 && ways_[n].pair != ways_[0].pair) pairs.push_back(ways_[n].pair);
    }
    if (options_.overlaps && !pairs.empty()) {
      std::vector<std::size_t> second = {0, found[0]};
      if (found[0] == 0) second.pop_back();
      for (std::size_t n = 0; n < ways_.size(); ++n) {
        const bool of_these = std::find(pairs.begin(), pairs.end(), ways_[n].pair) != pairs.end();
        if (of_these && !ways_[n].first_look && is_wanted(ways_[n].name)) second.push_back(n);
      }
      found = look(second);
      before = ways_[0].us;
    }
    for (std::size_t n = 0; n < std::min<std::size_t>(found.size(), 4); ++n) {
      char text[400];
      std::snprintf(text, sizeof(text),
                    "{\"best\": %d, \"kind\": \"%s\", \"tokens\": %d, \"way\": \"%s\", \"us\": %.2f, "
                    "\"present_us\": %.2f}",
                    static_cast<int>(n), kind(), tokens, ways_[found[n]].name.c_str(), ways_[found[n]].us,
                    before);
      conclusions_.emplace_back(text);
    }
  }

  Options options_;
  double until_;
  Worker worker_;
  int tokens_ = 0;
  bool gated_ = false, begun_ = false;
  std::vector<Known> ways_;
  std::vector<std::string> ended_;  // pairs, once for each way that ended a worker
  std::vector<std::string> conclusions_;
};

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
      options.seconds = std::atof(text().c_str());
    else if (name == "--no-reads")
      options.reads = false;
    else if (name == "--no-overlaps")
      options.overlaps = false;
    else if (name == "--worker")
      options.worker = true;
    else {
      std::fprintf(stderr, "%s: unknown\n", name.c_str());
      return 2;
    }
  }
  signal(SIGPIPE, SIG_IGN);
  return options.worker ? tilewise::cuda::gemm::work()
                        : tilewise::cuda::gemm::Sweep(options, "/proc/self/exe").run();
}
