// Two Llama-like layers that generate, from a plain C++ program: a prompt at once, then token by token with a
// cache of keys and values, checked against all tokens at once.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "tilewise/tilewise.h"

namespace {

using tilewise::Tensor;

constexpr std::int64_t prompt = 20, steps = 5, total = prompt + steps;

struct Layer {
  tilewise::LayerConfig config;
  std::vector<std::vector<float>> memory;
  tilewise::LayerWeights weights;

  Layer(const tilewise::LayerConfig& shape, std::mt19937& generator) : config(shape) {
    const std::int64_t width_q = shape.heads_q * shape.head_dim, width_kv = shape.heads_kv * shape.head_dim;
    const auto matrix = [&](std::int64_t rows, std::int64_t columns) {
      std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(columns)));
      memory.emplace_back(static_cast<std::size_t>(rows * columns));
      for (float& value : memory.back()) value = normal(generator);
      return Tensor::of(memory.back().data(), {rows, columns});
    };
    weights.q = matrix(width_q, shape.embed_dim);
    weights.k = matrix(width_kv, shape.embed_dim);
    weights.v = matrix(width_kv, shape.embed_dim);
    weights.out = matrix(shape.embed_dim, width_q);
    weights.gate = matrix(shape.ffn_dim, shape.embed_dim);
    weights.up = matrix(shape.ffn_dim, shape.embed_dim);
    weights.down = matrix(shape.embed_dim, shape.ffn_dim);
  }
};

struct Cache {
  std::vector<float> k, v;
};

// x [1, count, E] through all layers; with caches, the tokens stand at `start` and after.
std::vector<float> run(const std::vector<Layer>& layers, std::vector<float> x, std::int64_t count,
                       const std::vector<float>& cos, const std::vector<float>& sin,
                       std::vector<Cache>* caches, std::int32_t start) {
  const tilewise::LayerConfig& config = layers.front().config;
  std::vector<float> out(x.size());
  std::vector<std::int32_t> positions(static_cast<std::size_t>(count));
  for (std::size_t n = 0; n < positions.size(); ++n) positions[n] = start + static_cast<std::int32_t>(n);
  const std::int32_t length = start + static_cast<std::int32_t>(count);
  std::vector<std::byte> workspace;
  for (std::size_t n = 0; n < layers.size(); ++n) {
    tilewise::LayerInputs inputs;
    inputs.x = Tensor::of(x.data(), {1, count, config.embed_dim});
    inputs.cos = Tensor::of(cos.data(), {total, config.head_dim / 2});
    inputs.sin = Tensor::of(sin.data(), {total, config.head_dim / 2});
    inputs.positions = Tensor::of(positions.data(), {1, count});
    if (caches != nullptr) {
      Cache& cache = (*caches)[n];
      inputs.k_cache = Tensor::of(cache.k.data(), {1, config.heads_kv, total, config.head_dim});
      inputs.v_cache = Tensor::of(cache.v.data(), {1, config.heads_kv, total, config.head_dim});
      inputs.cache_starts = Tensor::of(&start, {1});
      inputs.key_lengths = Tensor::of(&length, {1});
    }
    const tilewise::LayerOutputs outputs{Tensor::of(out.data(), {1, count, config.embed_dim})};
    tilewise::Context context;
    const std::size_t bytes =
        tilewise::layer_workspace(config, layers[n].weights, inputs, {}, outputs, context);
    workspace.resize(std::max(workspace.size(), bytes));
    context.workspace = {workspace.data(), workspace.size()};
    tilewise::layer_forward(config, layers[n].weights, inputs, {}, outputs, context);
    std::swap(x, out);
  }
  return x;
}

}  // namespace

int main() {
  std::mt19937 generator(7);
  tilewise::LayerConfig config = tilewise::layer_config("llama-2-70b");  // made small
  config.embed_dim = 256;
  config.heads_q = 8;
  config.heads_kv = 2;
  config.head_dim = 32;
  config.ffn_dim = 688;
  std::vector<Layer> layers;
  for (int n = 0; n < 2; ++n) layers.emplace_back(config, generator);

  std::vector<float> cos, sin;
  for (std::int64_t position = 0; position < total; ++position) {
    for (std::int64_t pair = 0; pair < config.head_dim / 2; ++pair) {
      const double exponent = -2.0 * static_cast<double>(pair) / static_cast<double>(config.head_dim);
      const double angle = static_cast<double>(position) * std::pow(10000.0, exponent);
      cos.push_back(static_cast<float>(std::cos(angle)));
      sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }

  std::vector<float> tokens(static_cast<std::size_t>(total * config.embed_dim));
  std::normal_distribution<float> normal;
  for (float& value : tokens) value = normal(generator);
  const std::vector<float> whole = run(layers, tokens, total, cos, sin, nullptr, 0);

  const auto row = [&](std::int64_t n) { return tokens.begin() + n * config.embed_dim; };
  const std::size_t places = static_cast<std::size_t>(config.heads_kv * total * config.head_dim);
  std::vector<Cache> caches(layers.size(), Cache{std::vector<float>(places), std::vector<float>(places)});
  std::vector<float> found = run(layers, {row(0), row(prompt)}, prompt, cos, sin, &caches, 0);
  for (std::int64_t n = prompt; n < total; ++n) {
    const std::vector<float> next =
        run(layers, {row(n), row(n + 1)}, 1, cos, sin, &caches, static_cast<std::int32_t>(n));
    found.insert(found.end(), next.begin(), next.end());
  }

  float largest = 0;
  for (std::size_t n = 0; n < whole.size(); ++n) largest = std::max(largest, std::fabs(whole[n] - found[n]));
  std::printf("%zu layers, %lld tokens: token by token is within %.1e of all at once\n", layers.size(),
              static_cast<long long>(total), static_cast<double>(largest));
  return largest < 1e-4f ? 0 : 1;
}
