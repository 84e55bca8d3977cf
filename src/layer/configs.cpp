#include <array>
#include <string>
#include <utility>

#include "core/check.h"
#include "tilewise/layer.h"

namespace tilewise {
namespace {

constexpr LayerConfig llama(std::int64_t embed_dim, std::int64_t heads_q, std::int64_t heads_kv,
                            std::int64_t ffn_dim) {
  return {.embed_dim = embed_dim,
          .heads_q = heads_q,
          .heads_kv = heads_kv,
          .head_dim = embed_dim / heads_q,
          .ffn_dim = ffn_dim,
          .gated = true,
          .activation = Activation::silu,
          .causal = true,
          .rotary = true};
}

constexpr LayerConfig encoder(bool norm_first) {
  return {.embed_dim = 768,
          .heads_q = 12,
          .heads_kv = 12,
          .head_dim = 64,
          .ffn_dim = 3072,
          .norm = Norm::layer,
          .epsilon = 1e-12f,
          .norm_first = norm_first};
}

constexpr std::array<std::pair<std::string_view, LayerConfig>, 6> configs = {{
    {"vit-b/16", encoder(true)},
    {"bert-base", encoder(false)},
    {"llama-2-7b", llama(4096, 32, 32, 11008)},
    {"llama-2-13b", llama(5120, 40, 40, 13824)},
    {"llama-2-70b", llama(8192, 64, 8, 28672)},
    {"llama-3-8b", llama(4096, 32, 8, 14336)},
}};

}  // namespace

LayerConfig layer_config(std::string_view name) {
  std::string names;
  for (const auto& [known, config] : configs) {
    if (known == name) return config;
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  reject("name", "one of " + names, "'" + std::string(name) + "'");
}

std::vector<std::string_view> layer_configs() {
  std::vector<std::string_view> names;
  for (const auto& [name, config] : configs) names.push_back(name);
  return names;
}

}  // namespace tilewise
