#include "tokenizer.h"

#include <array>
#include <limits>
#include <stdexcept>

#include "files.h"
#include "unicode.h"

namespace minilm {
namespace {

constexpr std::size_t longest_word = 100;  // in characters; a longer one is unknown
constexpr std::array<std::string_view, 5> specials = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};

}  // namespace

Tokenizer::Tokenizer(const std::filesystem::path& vocabulary) : file_(vocabulary.string()) {
  const std::string text = read_text(vocabulary);
  for (std::size_t begin = 0; begin < text.size(); ++size_) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    numbers_.try_emplace(text.substr(begin, end - begin), static_cast<std::int32_t>(size_));
    begin = end + 1;
  }
  unknown_ = special("[UNK]");
  begin_ = special("[CLS]");
  end_ = special("[SEP]");
}

std::int32_t Tokenizer::special(std::string_view name) const {
  const auto found = numbers_.find(std::string(name));
  if (found == numbers_.end())
    throw std::runtime_error(file_ + ": a vocabulary without " + std::string(name));
  return found->second;
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, std::size_t longest) const {
  if (longest < 2) throw std::runtime_error("longest: expected 2 or above, got " + std::to_string(longest));
  std::vector<std::int32_t> tokens = {begin_};
  // The names of special tokens stand for these wherever they are written.
  while (!text.empty()) {
    std::size_t place = text.size();
    std::string_view name;
    for (const std::string_view candidate : specials) {
      if (const std::size_t found = text.find(candidate); found < place) {
        place = found;
        name = candidate;
      }
    }
    append_words(text.substr(0, place), tokens);
    if (!name.empty()) tokens.push_back(special(name));
    text.remove_prefix(place + name.size());
  }
  if (tokens.size() > longest - 1) tokens.resize(longest - 1);
  tokens.push_back(end_);
  return tokens;
}

void Tokenizer::append_words(std::string_view text, std::vector<std::int32_t>& tokens) const {
  std::u32string word, folded;
  const auto finish_word = [&] {
    if (!word.empty()) append_pieces(word, tokens);
    word.clear();
  };
  for (const char32_t character : decode(text)) {
    const bool apart = is_ideograph(character);
    if (apart || is_space(character)) finish_word();
    if (is_space(character)) continue;
    folded.clear();
    append_folded(character, folded);
    for (const char32_t part : folded) {
      if (is_punctuation(part)) {
        finish_word();
        append_pieces({&part, 1}, tokens);
      } else {
        word += part;
      }
    }
    if (apart) finish_word();
  }
  finish_word();
}

void Tokenizer::append_pieces(std::u32string_view word, std::vector<std::int32_t>& tokens) const {
  const std::size_t before = tokens.size();
  bool known = word.size() <= longest_word;
  while (known && !word.empty()) {
    // The longest piece that the word begins with; those within a word are written with ## before them.
    known = false;
    for (std::size_t length = word.size(); length > 0 && !known; --length) {
      const std::string prefix = tokens.size() == before ? "" : "##";
      if (const auto piece = numbers_.find(prefix + minilm::encode(word.substr(0, length)));
          piece != numbers_.end()) {
        tokens.push_back(piece->second);
        word.remove_prefix(length);
        known = true;
      }
    }
  }
  if (!known) {
    tokens.resize(before);
    tokens.push_back(unknown_);
  }
}

}  // namespace minilm
