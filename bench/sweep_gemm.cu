// Times candidates for the tables of src/cuda/gemm/sm90/tiles/tuning.h on square products and on those of a
// Llama layer, and compares the results of each with those of the simt kernel. Prints one JSON object per
// candidate and shape.
//
//   sweep_gemm [M N K]

#include <cstdio>
#include <cstdlib>

#include "cuda/gemm/simt/simt.h"
#include "cuda/gemm/sm90/tiles/kernel.cuh"
#include "gemm/compose.h"
#include "sweep.cuh"

namespace tilewise::cuda::gemm {
namespace {

using namespace sweep;
using T = __nv_bfloat16;

struct Candidates {
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 256, .stages = 4},
      {.row_tiles = 1, .columns = 256, .stages = 4, .pair = Pair::shares_b},
      {.row_tiles = 2, .columns = 128, .stages = 4},
      {.row_tiles = 2, .columns = 128, .stages = 4, .pair = Pair::shares_a},
      {.row_tiles = 1, .columns = 192, .stages = 4},
      {.row_tiles = 1, .columns = 168, .stages = 5},
      {.row_tiles = 1, .columns = 168, .stages = 5, .pair = Pair::shares_b},
      {.row_tiles = 1, .columns = 128, .stages = 5},
      {.row_tiles = 1, .columns = 128, .stages = 6, .pair = Pair::shares_b},
  };
};

struct Shape {
  std::int64_t m, n, k;
};

/// The operands of several products, which are used in turn so that none is in the L2 from its last use.
struct Sweep {
  static constexpr int sets = 3;
  const Shape shape;
  const int multiprocessors;
  Memory a{sets * shape.m * shape.k * 2}, b{sets * shape.n * shape.k * 2};
  Memory out{shape.m * shape.n * 2}, truth{shape.m * shape.n * 2};

  Sweep(const Shape& of, int count) : shape(of), multiprocessors(count) {
    const auto random = [](const Memory& memory, std::int64_t elements, std::uint32_t seed, float size) {
      fill<<<static_cast<unsigned>(elements / 256), 256>>>(static_cast<T*>(memory.data), seed, size);
    };
    random(a, sets * shape.m * shape.k, 1, 1.0f);
    random(b, sets * shape.n * shape.k, 2, 1.0f / std::sqrt(static_cast<float>(shape.k)));
    run_simt(call(0, truth), {.device = {Device::Type::cuda, 0}});
    check_cuda(cudaDeviceSynchronize(), "inputs");
  }

  GemmCall call(int set, const Memory& to) const {
    const auto matrix = [](const Memory& memory, std::int64_t first, std::int64_t rows,
                           std::int64_t columns) {
      return Matrix{.data = static_cast<std::byte*>(memory.data) + first * rows * columns * 2,
                    .dtype = DType::bf16,
                    .rows = rows,
                    .columns = columns,
                    .stride_row = columns};
    };
    return gemm_call({Device::Type::cuda, 0}, matrix(a, set, shape.m, shape.k),
                     matrix(b, set, shape.n, shape.k), matrix(to, 0, shape.m, shape.n));
  }

  template <int row>
  void time() const {
    constexpr GemmConfig c = Candidates::rows[row];
    const auto run = [&](int set) { run_row<T, Candidates, row>(call(set, out), multiprocessors, nullptr); };
    check_cuda(cudaMemset(out.data, 0xFF, static_cast<std::size_t>(shape.m * shape.n) * 2), "poisoning");
    run(0);
    const float difference = difference_of<T>(out, truth, shape.m * shape.n).largest;
    int set = 0;
    const double ms = median_ms([&] { run(set++ % sets); });
    const double flops =
        2.0 * static_cast<double>(shape.m) * static_cast<double>(shape.n) * static_cast<double>(shape.k);
    const GemmConfig& chosen = Plain::rows[choose_row<Plain>(call(0, out).problem, multiprocessors)];
    const bool same = chosen.row_tiles == c.row_tiles && chosen.columns == c.columns && chosen.pair == c.pair;
    const char* const shared = c.pair == Pair::none ? "nothing" : c.pair == Pair::shares_a ? "a" : "b";
    std::printf(
        "{\"m\": %lld, \"n\": %lld, \"k\": %lld, \"rows\": %d, \"columns\": %d, \"stages\": %d, "
        "\"shares\": \"%s\", \"chosen\": %s, "
        "\"ms\": %.4f, \"tflops\": %.1f, \"difference\": %g}\n",
        static_cast<long long>(shape.m), static_cast<long long>(shape.n), static_cast<long long>(shape.k),
        c.rows(), c.columns, c.stages, shared, same ? "true" : "false", ms, flops / ms * 1e-9,
        static_cast<double>(difference));
    std::fflush(stdout);
  }

  void time_all() const {
    for_each_row<Candidates>([&](auto row) { time<row>(); });
  }
};

void sweep_shapes(const Shape& only) {
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, 0), "the device");
  std::printf("{\"device\": \"%s\", \"multiprocessors\": %d}\n", device.name, device.multiProcessorCount);
  if (only.m > 0) return Sweep(only, device.multiProcessorCount).time_all();
  for (const std::int64_t size : {2048, 4096, 8192}) {
    Sweep({size, size, size}, device.multiProcessorCount).time_all();
  }
  for (const std::int64_t tokens : {512, 1024, 2048, 4096}) {
    Sweep({tokens, 11008, 4096}, device.multiProcessorCount).time_all();
    Sweep({tokens, 4096, 11008}, device.multiProcessorCount).time_all();
  }
}

}  // namespace
}  // namespace tilewise::cuda::gemm

int main(int argc, char** argv) {
  try {
    const auto number = [&](int n) { return argc > n ? std::atoll(argv[n]) : 0; };
    tilewise::cuda::gemm::sweep_shapes({number(1), number(2), number(3)});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
