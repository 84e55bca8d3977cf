#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "cuda/attention/simt/forward/softmax.cuh"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"
#include "support/random.h"

namespace tilewise::test::softmax_test {
namespace {

// The online softmax of `fused` by itself: rows of scores a tile of keys at a time, as the kernel has them in
// its lanes, against sums in float64. What is summed with the weights is one number a key.

constexpr int tiles = 6;
constexpr float scale = 0.125f;  // of plain scores, which are bare products

/// Scores of one warp, or of one of each group, [queries, tiles · keys], and values of the keys.
struct Rows {
  const float* scores;
  const float* values;
  float* means;  ///< [queries]: of values by weight, 0 where nothing is seen
  float* lse;    ///< [queries]: minus infinity there
};

template <typename C, bool general>
__global__ void weigh_rows(const Rows rows) {
  using namespace cuda::simt;
  TILEWISE_DYNAMIC_SHARED(float, handed_smem, 16);
  const ForwardPlace<C> place;
  constexpr float log2e = 1.44269504f;
  const float unit = general ? log2e : scale * log2e;
  const float slack = 8 / unit;
  SoftmaxRow<C> row;
  float o[C::M][C::V] = {};
  for (int m = 0; m < C::M; ++m) {
    row.maximum[m] = cuda::lowest;
    row.sum[m] = 0;
  }
  for (int tile = 0; tile < tiles; ++tile) {
    const int first = tile * C::keys + place.group * C::group_keys;
    float s[C::M][C::N];
    for (int m = 0; m < C::M; ++m) {
      for (int n = 0; n < C::N; ++n) {
        s[m][n] = rows.scores[place.query(m) * tiles * C::keys + first + place.key(n)];
      }
    }
    softmax<C, general>(s, o, unit, slack, row);
    for (int m = 0; m < C::M; ++m) {
      for (int n = 0; n < C::N; ++n) o[m][0] += s[m][n] * rows.values[first + place.key(n)];
    }
  }
  if constexpr (C::groups == 2) {
    join_groups<C, general>(o, unit, row, place.group, handed_smem);
    if (place.group == 1) return;
  }
  for (int m = 0; m < C::M; ++m) {
    const float sum = cuda::sum_over<C::C, C::Lanes::apart>(row.sum[m]);
    const float total = cuda::sum_over<C::C, C::Lanes::apart>(o[m][0]);
    if (place.lane.column != 0) continue;
    rows.means[place.query(m)] = sum > 0 ? total / sum : 0.0f;
    rows.lse[place.query(m)] =
        sum > 0 ? row.maximum[m] * (general ? 1.0f : scale) + logf(sum) : cuda::minus_infinity;
  }
}

/// How scores of query i go along its keys.
float score_of(int query, int key, int keys, double normal) {
  constexpr float hidden = -std::numeric_limits<float>::infinity();
  const auto at = static_cast<float>(key);
  const auto x = static_cast<float>(normal);
  switch (query % 8) {
    case 0: return x;
    case 1: return at;                                       // rises in every tile
    case 2: return -at;                                      // never
    case 3: return 3.0f;                                     // all alike
    case 4: return hidden;                                   // sees nothing
    case 5: return key < keys / 2 ? hidden : 20.0f * x;      // nothing at first
    case 6: return key == keys - 1 ? 4000.0f : 1000.0f * x;  // far apart, the highest last
    default: return key % 3 == 0 ? hidden : -3e4f + 30.0f * x;
  }
}

template <typename T>
Tensor view_of(std::vector<T>& values) {
  const std::int64_t shape[] = {static_cast<std::int64_t>(values.size())};
  return Tensor(values.data(), DType::f32, shape);
}

template <typename C, bool general>
void expect_softmax(std::uint64_t seed) {
  constexpr int keys = tiles * C::keys;
  SCOPED_TRACE("seed " + std::to_string(seed) + (general ? ", general" : ", plain"));
  Random rng(seed);
  std::vector<float> scores, values, means(C::queries, 77.0f), lse(C::queries, 77.0f);
  for (int i = 0; i < C::queries; ++i) {
    for (int j = 0; j < keys; ++j) scores.push_back(score_of(i, j, keys, rng.normal()));
  }
  for (int j = 0; j < keys; ++j) values.push_back(static_cast<float>(rng.normal()));
  DeviceTensor device_scores(view_of(scores)), device_values(view_of(values)), device_means(view_of(means)),
      device_lse(view_of(lse));
  const auto data = [](const DeviceTensor& tensor) { return static_cast<float*>(tensor.view().data); };
  const Rows rows{data(device_scores), data(device_values), data(device_means), data(device_lse)};
  constexpr std::size_t handed = C::groups == 2 ? C::group_warps * 32 * C::M * (C::V + 2) * sizeof(float) : 0;
  cuda::launch<weigh_rows<C, general>>(
      {.name = "a softmax by itself", .blocks = 1, .threads = C::threads, .shared_bytes = handed}, rows);
  wait_for_device();
  device_means.download(view_of(means));
  device_lse.download(view_of(lse));

  for (int i = 0; i < C::queries; ++i) {
    const double unit = general ? 1.0 : static_cast<double>(scale);
    double maximum = -std::numeric_limits<double>::infinity();
    for (int j = 0; j < keys; ++j) {
      maximum = std::max(maximum, unit * static_cast<double>(scores[static_cast<std::size_t>(i * keys + j)]));
    }
    const auto row = static_cast<std::size_t>(i);
    if (std::isinf(maximum)) {
      EXPECT_EQ(means[row], 0.0f) << "query " << i;
      EXPECT_EQ(lse[row], -std::numeric_limits<float>::infinity()) << "query " << i;
      continue;
    }
    double sum = 0, weighted = 0, size = 0;
    for (int j = 0; j < keys; ++j) {
      const double s = unit * static_cast<double>(scores[static_cast<std::size_t>(i * keys + j)]);
      const double weight = std::exp(s - maximum);
      const auto value = static_cast<double>(values[static_cast<std::size_t>(j)]);
      sum += weight;
      weighted += weight * value;
      size += weight * std::abs(value);
    }
    // An exponent is off by half a unit of the scores' distance from the maximum, which where its weight
    // counts is less than 100; and sums of f32 by a unit for each rescaling and addition.
    constexpr double unit_f32 = 0x1p-24;
    EXPECT_NEAR(static_cast<double>(means[row]), weighted / sum, 200 * unit_f32 * size / sum)
        << "query " << i;
    EXPECT_NEAR(static_cast<double>(lse[row]), maximum + std::log(sum),
                200 * unit_f32 + 4 * unit_f32 * std::abs(maximum))
        << "query " << i;
  }
}

class CudaSoftmax : public CudaTest {};

TEST_F(CudaSoftmax, OfTilesIsThatOfAllKeys) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    expect_softmax<cuda::simt::Wide64, false>(seed);
    expect_softmax<cuda::simt::Wide64, true>(seed);
    expect_softmax<cuda::simt::Small64, false>(seed);
    expect_softmax<cuda::simt::Long128, true>(seed);
  }
}

TEST_F(CudaSoftmax, OfTwoGroupsIsJoined) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    expect_softmax<cuda::simt::Half128, false>(seed);
    expect_softmax<cuda::simt::Half128, true>(seed);
  }
}

}  // namespace
}  // namespace tilewise::test::softmax_test
