// Attention on the CPU from a plain C++ program: describe, ask, run, and check one row by hand.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tilewise/tilewise.h"

namespace {

constexpr std::int64_t batch = 2, heads_q = 8, heads_kv = 2, length = 100, dim = 64;

std::vector<float> random_values(std::int64_t count, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

// Row `row` of head `head` of entry `entry`, when there are `heads` heads.
const float* row_of(const std::vector<float>& values, std::int64_t heads, std::int64_t entry,
                    std::int64_t head, std::int64_t row) {
  return values.data() + ((entry * heads + head) * length + row) * dim;
}

// One row of causal attention straight from the formula.
std::vector<double> attention_row(const std::vector<float>& q, const std::vector<float>& k,
                                  const std::vector<float>& v, std::int64_t entry, std::int64_t head,
                                  std::int64_t row) {
  const std::int64_t head_kv = head / (heads_q / heads_kv);
  const float* query = row_of(q, heads_q, entry, head, row);
  std::vector<double> out(dim, 0.0);
  double denominator = 0;
  for (std::int64_t key = 0; key <= row; ++key) {
    const double score =
        std::inner_product(query, query + dim, row_of(k, heads_kv, entry, head_kv, key), 0.0) /
        std::sqrt(static_cast<double>(dim));
    const double weight = std::exp(score);  // random scores are small: no maximum to subtract
    const float* value = row_of(v, heads_kv, entry, head_kv, key);
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += weight * value[d];
    denominator += weight;
  }
  for (double& value : out) value /= denominator;
  return out;
}

}  // namespace

int main() {
  std::mt19937 generator(1);
  const std::vector<float> q = random_values(batch * heads_q * length * dim, generator);
  const std::vector<float> k = random_values(batch * heads_kv * length * dim, generator);
  const std::vector<float> v = random_values(batch * heads_kv * length * dim, generator);
  std::vector<float> o(q.size());

  // Tensors are views; two key heads serve eight query heads and are not repeated in memory.
  tilewise::AttentionInputs inputs;
  inputs.q = tilewise::Tensor::of(q.data(), {batch, heads_q, length, dim});
  inputs.k = tilewise::Tensor::of(k.data(), {batch, heads_kv, length, dim});
  inputs.v = tilewise::Tensor::of(v.data(), {batch, heads_kv, length, dim});
  tilewise::AttentionOptions options;
  options.causal = true;
  tilewise::AttentionOutputs outputs;
  outputs.o = tilewise::Tensor::of(o.data(), {batch, heads_q, length, dim});

  // The call allocates nothing: it says how much memory it needs and takes it from the caller.
  tilewise::Context context;
  std::vector<std::byte> workspace(tilewise::attention_forward_workspace(inputs, options, outputs, context));
  context.workspace = {workspace.data(), workspace.size()};

  const tilewise::Explanation explanation =
      tilewise::explain_attention_forward(inputs, options, outputs, context);
  for (const auto& entry : explanation.entries) {
    if (entry.verdict == tilewise::Explanation::Verdict::chosen) {
      std::printf("kernel   %s\n", entry.kernel.c_str());
    }
  }
  tilewise::attention_forward(inputs, options, outputs, context);
  std::printf("checksum %.6f\n", std::accumulate(o.begin(), o.end(), 0.0));

  const std::int64_t entry = 1, head = 5, row = 77;
  const std::vector<double> expected = attention_row(q, k, v, entry, head, row);
  const float* actual = row_of(o, heads_q, entry, head, row);
  double error = 0;
  for (std::size_t d = 0; d < expected.size(); ++d) {
    error = std::fmax(error, std::fabs(expected[d] - static_cast<double>(actual[d])));
  }
  std::printf("error    %.1e in row %lld\n", error, static_cast<long long>(row));
  return error < 1e-5 ? 0 : 1;
}
