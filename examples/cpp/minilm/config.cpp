#include "config.h"

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "files.h"

namespace minilm {
namespace {

using Json = nlohmann::json;

void expect(const Json& json, const char* name, const std::string& value) {
  const std::string found = json.value(name, value);
  if (found != value)
    throw std::invalid_argument(std::string(name) + ": expected " + value + ", got " + found);
}

std::int64_t size(const Json& json, const char* name) {
  constexpr std::int64_t most = 1 << 24;  // far beyond any model, and products of two do not overflow
  const auto found = json.at(name).get<std::int64_t>();
  if (found < 1 || found > most) {
    throw std::invalid_argument(std::string(name) + ": expected 1 or above, got " + std::to_string(found));
  }
  return found;
}

}  // namespace

Config read_config(const std::filesystem::path& file) {
  try {
    const Json json = Json::parse(read_text(file), nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) throw std::invalid_argument("not an object in JSON");
    expect(json, "model_type", "bert");
    expect(json, "hidden_act", "gelu");
    expect(json, "position_embedding_type", "absolute");
    const Config config = {.embed_dim = size(json, "hidden_size"),
                           .heads = size(json, "num_attention_heads"),
                           .ffn_dim = size(json, "intermediate_size"),
                           .layers = size(json, "num_hidden_layers"),
                           .words = size(json, "vocab_size"),
                           .positions = size(json, "max_position_embeddings"),
                           .epsilon = json.value("layer_norm_eps", 1e-12f)};
    if (config.embed_dim % config.heads != 0) {
      throw std::invalid_argument("num_attention_heads: expected a divisor of hidden_size");
    }
    return config;
  } catch (const Json::exception& error) {
    throw std::runtime_error(file.string() + ": " + error.what());
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(file.string() + ": " + error.what());
  }
}

}  // namespace minilm
