#include "unicode.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "unicode_tables.h"

namespace minilm {
namespace {

constexpr CodePoints spaces[] = {{0x9, 0xa},       {0xd, 0xd},       {0x20, 0x20},     {0xa0, 0xa0},
                                 {0x1680, 0x1680}, {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f},
                                 {0x205f, 0x205f}, {0x3000, 0x3000}};
constexpr CodePoints ideographs[] = {{0x3400, 0x4dbf},   {0x4e00, 0x9fff},   {0xf900, 0xfaff},
                                     {0x20000, 0x2a6df}, {0x2a700, 0x2b81f}, {0x2b920, 0x2ceaf},
                                     {0x2f800, 0x2fa1f}};

bool contains(std::span<const CodePoints> table, char32_t character) {
  const auto range = std::ranges::lower_bound(table, character, {}, &CodePoints::last);
  return range != table.end() && character >= range->first;
}

// What follows `character` in a table of rows of `width`, ordered by their first; empty where there is no
// such row.
std::u32string_view find_row(std::u32string_view table, std::size_t width, char32_t character) {
  std::size_t low = 0, high = table.size() / width;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (table[middle * width] < character) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low * width == table.size() || table[low * width] != character) return {};
  return table.substr(low * width + 1, width - 1);
}

// A Hangul syllable is two or three letters, by arithmetic (The Unicode Standard, 3.12).
void append_hangul(char32_t syllable, std::u32string& text) {
  constexpr char32_t vowels = 21, trailing = 28;
  const char32_t index = syllable - 0xac00;
  text += 0x1100 + index / (vowels * trailing);
  text += 0x1161 + index / trailing % vowels;
  if (index % trailing != 0) text += 0x11a7 + index % trailing;
}

}  // namespace

std::u32string decode(std::string_view text) {
  std::u32string decoded;
  for (std::size_t n = 0; n < text.size();) {
    const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
    const unsigned char first = byte(n);
    const std::size_t length = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    bool valid = length != 0 && first < 0xf5 && length <= text.size() - n;
    char32_t character = length == 1 ? first : first & (0x7fu >> length);
    for (std::size_t more = 1; valid && more < length; ++more) {
      valid = (byte(n + more) & 0xc0) == 0x80;
      character = character << 6 | (byte(n + more) & 0x3fu);
    }
    constexpr char32_t least[] = {0, 0, 0x80, 0x800, 0x10000};  // what needs as many bytes
    if (!valid || character < least[length] || character > 0x10ffff ||
        (character >= 0xd800 && character < 0xe000)) {
      throw std::runtime_error("text: not UTF-8 at byte " + std::to_string(n));
    }
    decoded += character;
    n += length;
  }
  return decoded;
}

std::string encode(std::u32string_view text) {
  std::string encoded;
  const auto add = [&](char32_t bits) { encoded += static_cast<char>(bits); };
  for (const char32_t character : text) {
    if (character < 0x80) {
      add(character);
      continue;
    }
    if (character < 0x800) {
      add(0xc0 | character >> 6);
    } else {
      if (character < 0x10000) {
        add(0xe0 | character >> 12);
      } else {
        add(0xf0 | character >> 18);
        add(0x80 | (character >> 12 & 0x3f));
      }
      add(0x80 | (character >> 6 & 0x3f));
    }
    add(0x80 | (character & 0x3f));
  }
  return encoded;
}

bool is_space(char32_t character) { return contains(spaces, character); }
bool is_punctuation(char32_t character) { return contains(punctuation, character); }
bool is_ideograph(char32_t character) { return contains(ideographs, character); }

void append_folded(char32_t character, std::u32string& text) {
  if (contains(dropped, character)) return;
  if (character >= 0xac00 && character <= 0xd7a3) {
    append_hangul(character, text);
  } else if (const std::u32string_view one = find_row(folded, 2, character); !one.empty()) {
    text += one;
  } else if (const std::u32string_view several = find_row(split, 4, character); !several.empty()) {
    for (const char32_t part : several) {
      if (part != U'\ufffd') text += part;
    }
  } else {
    text += character;
  }
}

}  // namespace minilm
