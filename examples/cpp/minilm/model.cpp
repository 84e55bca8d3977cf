#include "model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace minilm {
namespace {

using tilewise::DType;
using tilewise::Tensor;

tilewise::LayerConfig shape_of(const Config& config) {
  tilewise::LayerConfig shape =
      tilewise::layer_config("bert-base");  // its kind: norms after the residual, gelu
  shape.embed_dim = config.embed_dim;
  shape.heads_q = shape.heads_kv = config.heads;
  shape.head_dim = config.embed_dim / config.heads;
  shape.ffn_dim = config.ffn_dim;
  shape.epsilon = config.epsilon;
  return shape;
}

// [B, S, E] as [B·S, E].
Tensor rows_of(const Tensor& tensor) {
  return Tensor(tensor.data, tensor.dtype, std::array{tensor.extent(0) * tensor.extent(1), tensor.extent(2)},
                tensor.device);
}

// Adds a row of a table of f32, whose bytes need not be aligned.
void add_row(std::span<const std::byte> table, std::int64_t row, std::span<float> sum) {
  const std::byte* at = table.data() + static_cast<std::size_t>(row) * sum.size_bytes();
  for (float& value : sum) {
    float next;
    std::memcpy(&next, at, sizeof next);
    value += next;
    at += sizeof next;
  }
}

// The mean of rows, scaled to a length of 1.
std::vector<float> pool(std::span<const float> rows, std::size_t width) {
  std::vector<float> mean(width);
  for (std::size_t row = 0; row < rows.size(); row += width) {
    for (std::size_t n = 0; n < width; ++n) mean[n] += rows[row + n];
  }
  double squares = 0;  // the number of rows does not matter to a direction
  for (const float value : mean) squares += static_cast<double>(value) * static_cast<double>(value);
  const auto length = static_cast<float>(std::max(std::sqrt(squares), 1e-12));
  for (float& value : mean) value /= length;
  return mean;
}

}  // namespace

Model::Model(const std::filesystem::path& folder, tilewise::Device device)
    : config_(read_config(folder / "config.json")),
      file_(folder / "model.safetensors"),
      shape_(shape_of(config_)) {
  context_.device = device;
  batch_.x = batch_.y = batch_.mask = workspace_ = Memory(device, 0);
  norm_ = load("embeddings.LayerNorm.weight", {config_.embed_dim});
  norm_bias_ = load("embeddings.LayerNorm.bias", {config_.embed_dim});
  for (std::int64_t n = 0; n < config_.layers; ++n) layers_.push_back(load_layer(n));
}

Tensor Model::load(const std::string& name, std::initializer_list<std::int64_t> shape) {
  const std::span<const std::int64_t> extents(shape.begin(), shape.size());
  weights_.emplace_back(context_.device, file_.f32(name, extents));
  return weights_.back().view(DType::f32, extents);
}

tilewise::LayerWeights Model::load_layer(std::int64_t number) {
  const std::int64_t width = config_.embed_dim, hidden = config_.ffn_dim;
  const auto named = [&](const char* part) { return "encoder.layer." + std::to_string(number) + "." + part; };
  const auto matrix = [&](const char* part, std::int64_t rows, std::int64_t columns) {
    return load(named(part) + ".weight", {rows, columns});
  };
  const auto vector = [&](const std::string& part, std::int64_t size) {
    return load(named(part.c_str()), {size});
  };
  return {.q = matrix("attention.self.query", width, width),
          .q_bias = vector("attention.self.query.bias", width),
          .k = matrix("attention.self.key", width, width),
          .k_bias = vector("attention.self.key.bias", width),
          .v = matrix("attention.self.value", width, width),
          .v_bias = vector("attention.self.value.bias", width),
          .out = matrix("attention.output.dense", width, width),
          .out_bias = vector("attention.output.dense.bias", width),
          .up = matrix("intermediate.dense", hidden, width),
          .up_bias = vector("intermediate.dense.bias", hidden),
          .down = matrix("output.dense", width, hidden),
          .down_bias = vector("output.dense.bias", width),
          .attention_norm = vector("attention.output.LayerNorm.weight", width),
          .attention_norm_bias = vector("attention.output.LayerNorm.bias", width),
          .ffn_norm = vector("output.LayerNorm.weight", width),
          .ffn_norm_bias = vector("output.LayerNorm.bias", width)};
}

void Model::resize_batch(const std::vector<Tokens>& sentences) {
  const auto [shortest, longest] = std::ranges::minmax(sentences, {}, &Tokens::size);
  if (shortest.empty() || std::cmp_greater(longest.size(), config_.positions)) {
    throw std::runtime_error("sentences: expected 1 to " + std::to_string(config_.positions) +
                             " tokens each");
  }
  const std::size_t places = sentences.size() * longest.size();
  const std::size_t bytes = places * static_cast<std::size_t>(config_.embed_dim) * sizeof(float);
  batch_.sentences = std::ssize(sentences);
  batch_.tokens = std::ssize(longest);
  batch_.padded = shortest.size() != longest.size();
  batch_.x.reserve(bytes);
  batch_.y.reserve(bytes);
  batch_.mask.reserve(places);
}

// Word, position and the first of two segments, summed up on the host; the mask is true for real tokens.
void Model::look_up(const std::vector<Tokens>& sentences) {
  const auto words =
      file_.f32("embeddings.word_embeddings.weight", std::array{config_.words, config_.embed_dim});
  const auto positions =
      file_.f32("embeddings.position_embeddings.weight", std::array{config_.positions, config_.embed_dim});
  const auto segments =
      file_.f32("embeddings.token_type_embeddings.weight", std::array{std::int64_t{2}, config_.embed_dim});

  const auto width = static_cast<std::size_t>(config_.embed_dim),
             length = static_cast<std::size_t>(batch_.tokens);
  std::vector<float> rows(sentences.size() * length * width);
  std::vector<std::byte> mask(sentences.size() * length);
  for (std::size_t sentence = 0; sentence < sentences.size(); ++sentence) {
    for (std::size_t place = 0; place < sentences[sentence].size(); ++place) {
      const std::int32_t token = sentences[sentence][place];
      if (token < 0 || token >= config_.words) {
        throw std::runtime_error("token " + std::to_string(token) + ": the model has " +
                                 std::to_string(config_.words) + " words");
      }
      const std::size_t row = sentence * length + place;
      const std::span<float> sum = std::span(rows).subspan(row * width, width);
      add_row(words, token, sum);
      add_row(positions, static_cast<std::int64_t>(place), sum);
      add_row(segments, 0, sum);
      mask[row] = std::byte{1};
    }
  }
  batch_.x.upload(std::as_bytes(std::span(rows)));
  batch_.mask.upload(mask);
}

tilewise::LayerInputs Model::inputs() const {
  tilewise::LayerInputs inputs;
  inputs.x = batch_.x.view(DType::f32, std::array{batch_.sentences, batch_.tokens, config_.embed_dim});
  if (batch_.padded) {
    inputs.mask = batch_.mask.view(
        DType::boolean, std::array{batch_.sentences, std::int64_t{1}, std::int64_t{1}, batch_.tokens});
  }
  return inputs;
}

tilewise::LayerOutputs Model::outputs() const {
  return {batch_.y.view(DType::f32, std::array{batch_.sentences, batch_.tokens, config_.embed_dim})};
}

void Model::reserve_workspace(std::size_t bytes) {
  workspace_.reserve(bytes);
  context_.workspace = {workspace_.data(), workspace_.bytes()};
}

// The norm after the embeddings, from x to y.
void Model::normalise() {
  const tilewise::NormInputs from{.x = rows_of(inputs().x), .weight = norm_, .bias = norm_bias_};
  const tilewise::NormOptions options{.norm = tilewise::Norm::layer, .epsilon = config_.epsilon};
  const tilewise::NormOutputs to{.y = rows_of(outputs().out)};
  reserve_workspace(tilewise::norm_forward_workspace(from, options, to, context_));
  tilewise::norm_forward(from, options, to, context_);
}

std::vector<std::vector<float>> Model::embed(const std::vector<Tokens>& sentences) {
  if (sentences.empty()) return {};
  resize_batch(sentences);
  look_up(sentences);
  normalise();
  for (const tilewise::LayerWeights& layer : layers_) {
    std::swap(batch_.x, batch_.y);  // what was written last is read next
    reserve_workspace(tilewise::layer_workspace(shape_, layer, inputs(), {}, outputs(), context_));
    tilewise::layer_forward(shape_, layer, inputs(), {}, outputs(), context_);
  }

  const auto width = static_cast<std::size_t>(config_.embed_dim),
             length = static_cast<std::size_t>(batch_.tokens);
  std::vector<float> states(sentences.size() * length * width);
  batch_.y.download(std::as_writable_bytes(std::span(states)));
  std::vector<std::vector<float>> vectors;
  for (std::size_t n = 0; n < sentences.size(); ++n) {
    const auto rows = std::span(states).subspan(n * length * width, sentences[n].size() * width);
    vectors.push_back(pool(rows, width));
  }
  return vectors;
}

std::string Model::explain(const std::vector<Tokens>& sentences) {
  if (sentences.empty()) return {};
  resize_batch(sentences);
  std::string text;
  for (const tilewise::Explanation& one :
       tilewise::explain_layer(shape_, layers_.front(), inputs(), {}, outputs(), context_)) {
    text += tilewise::to_string(one);
  }
  return text;
}

}  // namespace minilm
