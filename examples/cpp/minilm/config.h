#pragma once

#include <cstdint>
#include <filesystem>

namespace minilm {

// The sizes of a BERT model, from its config.json.
struct Config {
  std::int64_t embed_dim, heads, ffn_dim, layers, words, positions;
  float epsilon;
};

/// An error that names the file, what is missing or what the model here cannot do.
Config read_config(const std::filesystem::path& file);

}  // namespace minilm
