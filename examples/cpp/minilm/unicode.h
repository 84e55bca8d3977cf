#pragma once

#include <string>
#include <string_view>

namespace minilm {

/// UTF-8 as code points; an error that says where it is not UTF-8.
std::u32string decode(std::string_view text);
std::string encode(std::u32string_view text);

bool is_space(char32_t character);
bool is_punctuation(char32_t character);
/// Chinese characters, Japanese kanji and Korean hanja, each of which is a word.
bool is_ideograph(char32_t character);

/// Appends to `text` what an uncased model sees of a character: without accents, in lower case, or nothing.
void append_folded(char32_t character, std::u32string& text);

}  // namespace minilm
