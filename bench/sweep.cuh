#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <vector>

#include "attention/problem.h"
#include "core/philox.h"
#include "cuda/runtime/check.h"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::sweep {

// Shared code of the programs that time candidates for tuning tables. Shapes are 16k tokens of hidden size
// 2048.

inline constexpr std::int64_t tokens = 16384;
inline constexpr std::int64_t hidden_size = 2048;
inline constexpr std::int64_t elements = tokens * hidden_size;

struct Memory {
  void* data = nullptr;
  explicit Memory(std::int64_t bytes) {
    check_cuda(cudaMalloc(&data, static_cast<std::size_t>(bytes)), "memory");
  }
  ~Memory() { cudaFree(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

struct Event {
  cudaEvent_t event;
  Event() { check_cuda(cudaEventCreate(&event), "an event"); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
};

/// The median time of several runs, after a few warm-ups.
template <typename Body>
double median_ms(const Body& body) {
  constexpr int warm_ups = 3;
  constexpr int runs = 20;
  for (int run = 0; run < warm_ups; ++run) body();
  std::vector<double> times;
  const Event begin, end;
  for (int run = 0; run < runs; ++run) {
    cudaEventRecord(begin.event);
    body();
    cudaEventRecord(end.event);
    check_cuda(cudaEventSynchronize(end.event), "a run");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin.event, end.event);
    times.push_back(static_cast<double>(ms));
  }
  std::nth_element(times.begin(), times.begin() + runs / 2, times.end());
  return times[runs / 2];
}

/// The same for several bodies, which take turns, since the clock of a GPU depends on its recent load.
inline std::vector<double> medians_ms(const std::vector<std::function<void()>>& bodies) {
  constexpr int warm_ups = 2;
  constexpr int runs = 20;
  std::vector<std::vector<double>> times(bodies.size());
  const Event begin, end;
  for (int run = 0; run < warm_ups + runs; ++run) {
    for (std::size_t n = 0; n < bodies.size(); ++n) {
      cudaEventRecord(begin.event);
      bodies[n]();
      cudaEventRecord(end.event);
      check_cuda(cudaEventSynchronize(end.event), "a run");
      float ms = 0;
      cudaEventElapsedTime(&ms, begin.event, end.event);
      if (run >= warm_ups) times[n].push_back(static_cast<double>(ms));
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& of : times) {
    std::nth_element(of.begin(), of.begin() + runs / 2, of.end());
    medians.push_back(of[runs / 2]);
  }
  return medians;
}

/// Whether the candidate is what large calls use: the first row of its head dim in the table.
template <typename Table, typename Config>
constexpr bool in_table(const Config& candidate) {
  for (const Config& row : Table::rows) {
    if (row.dim == candidate.dim) return row == candidate;
  }
  return false;
}

/// Whether the rows that large calls use are among the candidates, for all head dims of the candidates.
template <typename Table, typename Candidates>
constexpr bool has_rows_of_table() {
  for (const auto& candidate : Candidates::rows) {
    bool found = false;
    for (const auto& other : Candidates::rows) {
      found = found || (other.dim == candidate.dim && in_table<Table>(other));
    }
    if (!found) return false;
  }
  return true;
}

inline const char* name_of(bool value) { return value ? "true" : "false"; }

// A line of a sweep is a JSON object: first the problem, then the configuration of the candidate, then the
// results.

inline void print_problem(const char* suite, const char* dtype, const AttentionProblem& problem) {
  std::printf(
      "{\"suite\": \"%s\", \"op\": \"sweep\", \"dtype\": \"%s\", \"b\": %lld, \"hq\": %lld, \"sq\": %lld, "
      "\"d\": %lld, \"causal\": %s",
      suite, dtype, static_cast<long long>(problem.batch), static_cast<long long>(problem.heads_q),
      static_cast<long long>(problem.length_q), static_cast<long long>(problem.dim_qk),
      name_of(problem.features.causal));
}

struct Found {
  bool in_table;
  cudaFuncAttributes attributes;
  std::size_t shared_bytes;
  double ms;
  double flops;
};
inline void print_found(const Found& found) {
  std::printf(
      ", \"in_table\": %s, \"registers\": %d, \"local_bytes\": %d, \"shared_bytes\": %d, \"ms\": %.4f, "
      "\"tflops\": %.1f",
      name_of(found.in_table), found.attributes.numRegs, static_cast<int>(found.attributes.localSizeBytes),
      static_cast<int>(found.shared_bytes), found.ms, found.flops / found.ms * 1e-9);
}

/// The main function of a sweep: `sweep(head dim, length)` with the numbers of the command line, 0 where they
/// are missing. Returns the exit status.
template <typename Sweep>
int run_sweep(int argc, char** argv, const Sweep& sweep) {
  try {
    const auto number = [&](int n) { return argc > n ? std::atoll(argv[n]) : 0; };
    sweep(number(1), number(2));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

/// Fills with approximately normal numbers of standard deviation `size`. One thread per element.
template <typename T>
__global__ void fill(T* to, std::uint32_t seed, float size) {
  const std::uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  const auto words = philox({index, 0, 0, 0}, {seed, 0});
  float sum = 0;  // the sum of twelve uniform numbers
  for (const std::uint32_t word : words) {
    for (int part = 0; part < 3; ++part) sum += static_cast<float>(word >> (10 * part) & 1023) / 1023.0f;
  }
  to[index] = narrow<T>((sum - 6.0f) * size);
}

/// Raises *largest to the difference. NaN counts as infinite. Floats that are not negative compare like their
/// bits.
__device__ inline void raise_largest(int* largest, float difference) {
  atomicMax(largest, __float_as_int(difference >= 0 ? difference : __int_as_float(0x7f800000)));
}

/// Writes the largest difference to largest[0] and the largest element of b to largest[1].
template <typename T>
__global__ void compare(const T* a, const T* b, int* largest) {
  const std::uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  raise_largest(largest, fabsf(widen(a[index]) - widen(b[index])));
  raise_largest(largest + 1, fabsf(widen(b[index])));
}

/// The largest difference of the first `count` elements of a and b, and the largest element of b.
struct Difference {
  float largest = 0, of = 0;
  double relative() const { return static_cast<double>(largest) / static_cast<double>(of); }
};
template <typename T>
Difference difference_of(const Memory& a, const Memory& b, std::int64_t count = elements) {
  const Memory found{sizeof(Difference)};
  check_cuda(cudaMemset(found.data, 0, sizeof(Difference)), "comparing");
  compare<<<static_cast<unsigned>(count / 256), 256>>>(
      static_cast<const T*>(a.data), static_cast<const T*>(b.data), static_cast<int*>(found.data));
  Difference difference;
  check_cuda(cudaMemcpy(&difference, found.data, sizeof(Difference), cudaMemcpyDeviceToHost), "comparing");
  return difference;
}

}  // namespace tilewise::cuda::sweep
