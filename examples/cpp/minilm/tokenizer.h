#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace minilm {

// BERT's tokenizer for uncased models: text is cut into words at spaces, punctuation and ideographs, freed of
// accents and capitals, and each word is put together from the longest pieces the vocabulary has.
class Tokenizer {
 public:
  /// A vocabulary in the form of vocab.txt: a piece a line, numbered from 0.
  explicit Tokenizer(const std::filesystem::path& vocabulary);

  /// [CLS], the pieces, [SEP]: `longest` tokens at most, for which the end of the text is left out.
  std::vector<std::int32_t> encode(std::string_view text, std::size_t longest) const;

  std::size_t size() const { return size_; }

 private:
  std::int32_t special(std::string_view name) const;
  void append_words(std::string_view text, std::vector<std::int32_t>& tokens) const;
  void append_pieces(std::u32string_view word, std::vector<std::int32_t>& tokens) const;

  std::string file_;
  std::unordered_map<std::string, std::int32_t> numbers_;
  std::size_t size_ = 0;
  std::int32_t unknown_ = 0, begin_ = 0, end_ = 0;
};

}  // namespace minilm
