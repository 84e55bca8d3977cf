#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tilewise/error.h"
#include "tilewise/tuning.h"

namespace tilewise {

// Where choosers meet what a user measured: cuda/tile/tuning_table.h asks, the state behind answer_tuning()
// knows. Tables, problems and rows are named by texts in files and compared by hashes in calls, so a text and
// its hash come from one description.

/// The hash of a text, letter by letter (FNV-1a).
class TextHash {
 public:
  constexpr void put(std::string_view text) {
    for (const char letter : text) value_ = (value_ ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
  }
  constexpr std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325u;
};
/// The text itself.
class TextString {
 public:
  void put(std::string_view text) { value_ += text; }
  const std::string& value() const { return value_; }

 private:
  std::string value_;
};

/// A size to three significant bits: 1000 is 1024, 1100 too, 1200 is 1280.
constexpr std::int64_t rounded_size(std::int64_t size) {
  std::int64_t step = 1;
  while (size / step >= 8) step *= 2;
  return (size + step / 2) / step * step;
}

/// "bf16 batch=4 causal": words and named numbers, to a TextHash or a TextString.
template <typename Text>
class Description {
 public:
  constexpr explicit Description(Text& text) : text_(text) {}

  constexpr void word(std::string_view word) {
    if (word.empty()) return;
    separate();
    text_.put(word);
  }
  constexpr void number(std::string_view name, std::int64_t value) {
    separate();
    text_.put(name);
    text_.put(value < 0 ? "=-" : "=");
    char digits[20] = {};
    int first = 20;
    std::uint64_t rest =
        value < 0 ? 0 - static_cast<std::uint64_t>(value) : static_cast<std::uint64_t>(value);
    do {
      digits[--first] = static_cast<char>('0' + rest % 10);
      rest /= 10;
    } while (rest > 0);
    text_.put({digits + first, static_cast<std::size_t>(20 - first)});
  }
  constexpr void size(std::string_view name, std::int64_t value) { number(name, rounded_size(value)); }

  /// Several numbers, by names with a space between them.
  template <typename... Values>
  constexpr void numbers(std::string_view names, Values... values) {
    (number(next(names), values), ...);
    if (!names.empty()) throw InvalidArgument("a name without a number");
  }
  /// Those of several words that are true.
  template <typename... Given>
  constexpr void words(std::string_view names, Given... given) {
    const auto one = [&](bool is_given) {
      const std::string_view name = next(names);
      word(is_given ? name : "");
    };
    (one(given), ...);
    if (!names.empty()) throw InvalidArgument("a word more than there are conditions");
  }

 private:
  static constexpr std::string_view next(std::string_view& names) {
    if (names.empty()) throw InvalidArgument("fewer names than values");
    const std::string_view name = names.substr(0, names.find(' '));
    names.remove_prefix(name.size() == names.size() ? name.size() : name.size() + 1);
    return name;
  }
  constexpr void separate() {
    if (!first_) text_.put(" ");
    first_ = false;
  }
  Text& text_;
  bool first_ = true;
};

/// What choices are kept by: a table and a problem, each by the hash of its text.
constexpr std::uint64_t tuning_key(std::uint64_t table, std::uint64_t problem) {
  return (table ^ (problem << 1 | problem >> 63)) * 0x9e3779b97f4a7c15u;
}
constexpr std::uint64_t text_hash(std::string_view text) {
  TextHash hash;
  hash.put(text);
  return hash.value();
}

/// Grows whenever answers may become others: when choices come or go, and when somebody begins to listen.
inline std::atomic<std::uint32_t> tuning_epoch{1};
/// Whether a chooser has to ask: there are choices, or somebody listens, or no file was looked for yet.
inline std::atomic<bool> tuning_asked{true};

/// A TuningQuestion of a chooser. Texts are made where somebody listens.
struct TableQuestion {
  std::string_view table;
  int device = 0;
  std::uint64_t problem = 0;            ///< the hash of its text
  std::span<const std::uint64_t> rows;  ///< the same of each row
  std::uint64_t able = 0;               ///< bit n: row n can run the problem
  int chosen = -1;                      ///< the model's answer, an able row
  std::string (*device_text)(int device) = nullptr;
  std::string (*row_text)(int row) = nullptr;
  std::string (*problem_text)(const void* of) = nullptr;
  const void* of = nullptr;  ///< what problem_text describes
};

/// An able row: the measured one, or else the model's.
int answer_tuning(const TableQuestion& question);

/// A file's contents. Throws InvalidArgument where it cannot be read.
std::string read_tuning_file(const std::string& path);

}  // namespace tilewise
