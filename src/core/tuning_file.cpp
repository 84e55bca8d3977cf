#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/check.h"
#include "core/tuning.h"

namespace tilewise {
namespace {

constexpr std::string_view format_name = "tilewise tuning";
constexpr double format_version = 1;
constexpr off_t most_bytes = 16 << 20;

/// A JSON parser for files from any source. Whatever a file contains, the parser stays inside the text, nests
/// no deeper than `most_depth`, and throws InvalidArgument if the text is wrong.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  /// Reads an object. Calls `member(name)` for each member, which must read the value.
  template <typename Member>
  void object(const Member& member) {
    const Level level(*this);
    expect('{');
    if (accept('}')) return;
    do {
      const std::string name = string();
      expect(':');
      member(name);
    } while (accept(','));
    expect('}');
  }
  template <typename Element>
  void array(const Element& element) {
    const Level level(*this);
    expect('[');
    if (accept(']')) return;
    do element();
    while (accept(','));
    expect(']');
  }
  std::string string() {
    expect('"');
    std::string result;
    while (true) {
      const char letter = next("the rest of a string");
      if (letter == '"') return result;
      if (static_cast<unsigned char>(letter) < 0x20) fail("a string without control characters");
      if (letter == '\\') {
        escape(result);
      } else {
        result += letter;
      }
    }
  }
  double number() {
    space();
    const std::size_t begin = at_;
    while (at_ < text_.size() && std::strchr("+-.eE0123456789", text_[at_]) != nullptr && text_[at_] != 0)
      ++at_;
    const std::string digits(text_.substr(begin, at_ - begin));
    char* end = nullptr;
    const double value = std::strtod(digits.c_str(), &end);
    if (digits.empty() || *end != 0 || !std::isfinite(value)) fail("a number", begin);
    return value;
  }
  /// Reads any value and ignores it.
  void skip() {
    switch (peek()) {
      case '{': return object([&](const std::string&) { skip(); });
      case '[': return array([&] { skip(); });
      case '"': string(); return;
      case 't': return word("true");
      case 'f': return word("false");
      case 'n': return word("null");
      default: number();
    }
  }
  void end() {
    space();
    if (at_ != text_.size()) fail("the end of the text");
  }
  [[noreturn]] void fail(std::string_view expected) const { fail(expected, at_); }

 private:
  struct Level {
    JsonReader& reader;
    explicit Level(JsonReader& reader_) : reader(reader_) {
      constexpr int most_depth = 32;
      if (++reader.depth_ > most_depth) reader.fail("no more than 32 levels");
    }
    ~Level() { --reader.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
  };

  [[noreturn]] void fail(std::string_view expected, std::size_t at) const {
    const std::string found =
        at < text_.size() ? "byte " + std::to_string(at) + " of the text" : "the end of the text";
    reject("tuning", expected, found);
  }
  void space() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
      ++at_;
  }
  char peek() {
    space();
    if (at_ >= text_.size()) fail("a value");
    return text_[at_];
  }
  char next(std::string_view expected) {
    if (at_ >= text_.size()) fail(expected);
    return text_[at_++];
  }
  bool accept(char letter) {
    space();
    if (at_ >= text_.size() || text_[at_] != letter) return false;
    ++at_;
    return true;
  }
  void expect(char letter) {
    if (!accept(letter)) fail(std::string("'") + letter + "'");
  }
  void word(std::string_view expected) {
    if (text_.substr(at_, expected.size()) != expected) fail(expected);
    at_ += expected.size();
  }
  void escape(std::string& to) {
    const char letter = next("the rest of a string");
    switch (letter) {
      case '"':
      case '\\':
      case '/': to += letter; return;
      case 'b': to += '\b'; return;
      case 'f': to += '\f'; return;
      case 'n': to += '\n'; return;
      case 'r': to += '\r'; return;
      case 't': to += '\t'; return;
      case 'u': break;
      default: fail("a JSON escape", at_ - 1);
    }
    unsigned code = 0;
    for (int n = 0; n < 4; ++n) {
      const char digit = next("four hexadecimal digits");
      const bool decimal = digit >= '0' && digit <= '9';
      const char low = static_cast<char>(digit | 0x20);
      if (!decimal && (low < 'a' || low > 'f')) fail("four hexadecimal digits", at_ - 1);
      code = code * 16 + static_cast<unsigned>(decimal ? digit - '0' : low - 'a' + 10);
    }
    // Texts of tables and rows are ASCII. Other characters match nothing here, so one replacement is enough.
    to += code < 0x80 ? static_cast<char>(code) : '?';
  }

  std::string_view text_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

void put_string(std::string& json, std::string_view name, std::string_view text) {
  json.append("\"").append(name).append("\": \"");
  for (const char letter : text) {
    if (static_cast<unsigned char>(letter) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned char>(letter));
      json += escaped;
    } else {
      if (letter == '"' || letter == '\\') json += '\\';
      json += letter;
    }
  }
  json += "\", ";
}
std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

TuningChoice choice_from(JsonReader& json) {
  TuningChoice choice;
  int texts = 0;
  json.object([&](const std::string& name) {
    std::string* const text = name == "device"    ? &choice.device
                              : name == "table"   ? &choice.table
                              : name == "problem" ? &choice.problem
                              : name == "row"     ? &choice.row
                                                  : nullptr;
    if (text != nullptr) {
      *text = json.string();
      ++texts;
    } else if (name == "microseconds") {
      choice.microseconds = json.number();
    } else if (name == "default_microseconds") {
      choice.default_microseconds = json.number();
    } else {
      json.skip();
    }
  });
  if (texts != 4) json.fail("a choice with device, table, problem and row, each once");
  return choice;
}

}  // namespace

std::string tuning_to_json(std::span<const TuningChoice> choices) {
  std::string json = "{\"format\": \"" + std::string(format_name) + "\", \"version\": 1, \"choices\": [";
  for (const TuningChoice& choice : choices) {
    json += &choice == choices.data() ? "\n  {" : ",\n  {";
    put_string(json, "device", choice.device);
    put_string(json, "table", choice.table);
    put_string(json, "problem", choice.problem);
    put_string(json, "row", choice.row);
    json += "\"microseconds\": " + number_text(choice.microseconds) +
            ", \"default_microseconds\": " + number_text(choice.default_microseconds) + "}";
  }
  return json + "\n]}\n";
}

std::vector<TuningChoice> tuning_from_json(std::string_view text) {
  JsonReader json(text);
  std::string format;
  double version = 0;
  std::vector<TuningChoice> choices;
  json.object([&](const std::string& name) {
    if (name == "format") {
      format = json.string();
    } else if (name == "version") {
      version = json.number();
    } else if (name == "choices") {
      json.array([&] { choices.push_back(choice_from(json)); });
    } else {
      json.skip();
    }
  });
  json.end();
  check(format == format_name, "tuning", "\"format\": \"" + std::string(format_name) + "\"",
        "'" + format.substr(0, 40) + "'");
  check(version == format_version, "tuning", "\"version\": 1", version);
  return choices;
}

std::string read_tuning_file(const std::string& path) {
  // O_NONBLOCK and the check for a regular file: a pipe would block the process, and a device might never
  // end.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) {
    const char* const asked = std::getenv("TILEWISE_TUNING");
    const bool nobody_asked = asked == nullptr || *asked == 0;
    if (errno == ENOENT && nobody_asked) return {};
    reject("tuning", "a file that can be read", std::strerror(errno));
  }
  struct stat facts{};
  std::string text;
  const bool regular = fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_size <= most_bytes;
  if (regular) {
    text.resize(static_cast<std::size_t>(facts.st_size));
    std::size_t used = 0;
    while (used < text.size()) {
      const ssize_t count = read(file, text.data() + used, text.size() - used);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;
      used += static_cast<std::size_t>(count);
    }
    text.resize(used);
  }
  close(file);
  check(regular, "tuning", "a regular file of at most 16 MiB", "something else");
  check(!text.empty(), "tuning", "JSON", "an empty file");
  return text;
}

std::string tuning_path() {
  const auto environment = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  const std::string asked = environment("TILEWISE_TUNING");
  if (asked == "0" || asked == "off") return {};
  if (!asked.empty()) return asked;
  std::string folder = environment("XDG_CACHE_HOME");
  if (folder.empty() || folder.front() != '/') {
    const std::string home = environment("HOME");
    if (home.empty()) return {};
    folder = home + "/.cache";
  }
  return folder + "/tilewise/tuning.json";
}

}  // namespace tilewise
