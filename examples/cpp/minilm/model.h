#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <vector>

#include "config.h"
#include "memory.h"
#include "safetensors.h"
#include "tilewise/tilewise.h"

namespace minilm {

using Tokens = std::vector<std::int32_t>;

// BERT as a sentence encoder: embeddings, layers, the mean over a sentence's tokens, made 1 long.
class Model {
 public:
  /// Of a folder with config.json and model.safetensors.
  Model(const std::filesystem::path& folder, tilewise::Device device);

  /// A vector for each sentence. Shorter ones are padded to the longest, which changes nothing in their
  /// vectors.
  std::vector<std::vector<float>> embed(const std::vector<Tokens>& sentences);

  /// Which kernels a layer runs for these sentences.
  std::string explain(const std::vector<Tokens>& sentences);

 private:
  // What the layers work on; its memory is kept for the next.
  struct Batch {
    std::int64_t sentences = 0, tokens = 0;
    bool padded = false;
    Memory x, y, mask;  // [B, S, E] twice, and boolean [B, 1, 1, S]
  };

  tilewise::Tensor load(const std::string& name, std::initializer_list<std::int64_t> shape);
  tilewise::LayerWeights load_layer(std::int64_t number);
  void resize_batch(const std::vector<Tokens>& sentences);
  void look_up(const std::vector<Tokens>& sentences);
  void normalise();
  tilewise::LayerInputs inputs() const;
  tilewise::LayerOutputs outputs() const;
  void reserve_workspace(std::size_t bytes);

  Config config_;
  SafeTensors file_;
  tilewise::Context context_;
  tilewise::LayerConfig shape_;
  std::vector<Memory> weights_;
  tilewise::Tensor norm_, norm_bias_;
  std::vector<tilewise::LayerWeights> layers_;
  Batch batch_;
  Memory workspace_;
};

}  // namespace minilm
