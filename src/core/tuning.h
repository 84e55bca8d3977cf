#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tilewise/error.h"
#include "tilewise/tuning.h"

namespace tilewise {

// The measurements of a user, for the functions that choose rows: cuda/tile/tuning_table.h asks
// answer_tuning(). In files, tables, problems and rows are named by texts. Calls compare hashes of these
// texts, so a text and its hash are made from the same description.

/// The FNV-1a hash of a text.
class TextHash {
 public:
  constexpr void put(std::string_view text) {
    for (const char letter : text) value_ = (value_ ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
  }
  constexpr std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325u;
};
/// The text itself, with the interface of TextHash.
class TextString {
 public:
  void put(std::string_view text) { value_ += text; }
  const std::string& value() const { return value_; }

 private:
  std::string value_;
};

/// A size rounded to three significant bits: 1000 and 1100 to 1024, 1200 to 1280.
constexpr std::int64_t rounded_size(std::int64_t size) {
  std::int64_t step = 1;
  while (size / step >= 8) step *= 2;
  return (size + step / 2) / step * step;
}

/// Puts words and named numbers, such as "bf16 batch=4 causal", into a TextHash or a TextString.
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

  /// Puts several numbers. `names` are separated by spaces.
  template <typename... Values>
  constexpr void numbers(std::string_view names, Values... values) {
    (number(next(names), values), ...);
    if (!names.empty()) throw InvalidArgument("a name without a number");
  }
  /// Puts those words whose conditions are true. `names` are separated by spaces.
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

/// The key of a choice, from the hashes of its table and its problem.
constexpr std::uint64_t tuning_key(std::uint64_t table, std::uint64_t problem) {
  return (table ^ (problem << 1 | problem >> 63)) * 0x9e3779b97f4a7c15u;
}
constexpr std::uint64_t text_hash(std::string_view text) {
  TextHash hash;
  hash.put(text);
  return hash.value();
}

// Functions, since a variable in a header would exist twice: in the library and in a program that links it.
/// Incremented whenever answers may change: when choices are set and when a listener starts.
std::atomic<std::uint32_t>& tuning_epoch();
/// Whether a chooser has to ask at all: there are choices or listeners, or the file has not been looked for
/// yet.
std::atomic<bool>& tuning_asked();

/// A TuningQuestion in the form in which a chooser asks it. The functions make the texts, for listeners
/// alone.
struct TableQuestion {
  std::string_view table;
  int device = 0;
  std::uint64_t problem = 0;            ///< the hash of its text
  std::span<const std::uint64_t> rows;  ///< the hash of each row's text
  std::uint64_t able = 0;               ///< bit n: row n can run the problem
  int chosen = -1;                      ///< the model's choice, an able row
  std::string (*device_text)(int device) = nullptr;
  std::string (*row_text)(int row) = nullptr;
  std::string (*problem_text)(const void* of) = nullptr;
  const void* of = nullptr;  ///< what problem_text describes
};

/// Returns the row that a measurement chose if it is able, else the model's choice.
int answer_tuning(const TableQuestion& question);

/// The contents of a file. Throws InvalidArgument if it cannot be read.
std::string read_tuning_file(const std::string& path);

}  // namespace tilewise
