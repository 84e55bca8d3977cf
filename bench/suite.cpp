#include "suite.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tilewise/error.h"

namespace tilewise::bench {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* row_keys[] = {"b",       "hq",     "hkv",    "sq",     "sk",
                                    "d",       "dv",     "mask",   "window", "blocks",
                                    "dropout", "dtypes", "passes", "causal", "deterministic"};

// The folders of suites: those of the source tree from which this was built, and of the working directory.
std::vector<fs::path> suite_folders() {
  std::vector<fs::path> folders;
#ifdef TILEWISE_BENCH_DIR
  folders.push_back(fs::path(TILEWISE_BENCH_DIR) / "suites");
#endif
  folders.push_back(fs::path("bench") / "suites");
  return folders;
}

fs::path find_suite(const std::string& name_or_file) {
  if (fs::is_regular_file(name_or_file)) return name_or_file;
  for (const fs::path& folder : suite_folders()) {
    const fs::path file = folder / (name_or_file + ".json");
    if (fs::is_regular_file(file)) return file;
  }
  std::string names;
  for (const std::string& name : suite_names()) names += " " + name;
  throw InvalidArgument("suite: expected a file or one of" + (names.empty() ? " (none found)" : names) +
                        ", got '" + name_or_file + "'");
}

std::int64_t size_in(const json& row, const char* key, std::int64_t otherwise) {
  const std::int64_t size = row.value(key, otherwise);
  if (size < 1)
    throw InvalidArgument(std::string(key) + ": expected 1 or above, got " + std::to_string(size));
  return size;
}

double fraction_in(const json& row, const char* key, double otherwise) {
  const double fraction = row.value(key, otherwise);
  if (fraction < 0 || fraction > 1) {
    throw InvalidArgument(std::string(key) + ": expected a number from 0 to 1, got " +
                          std::to_string(fraction));
  }
  return fraction;
}

Shape shape_in(const json& row) {
  for (const char* key : {"hq", "sq", "d"}) {
    if (!row.contains(key)) throw InvalidArgument("shape: expected at least hq, sq and d, got " + row.dump());
  }
  Shape shape;
  shape.b = size_in(row, "b", 1);
  shape.hq = size_in(row, "hq", 1);
  shape.hkv = size_in(row, "hkv", shape.hq);
  shape.sq = size_in(row, "sq", 1);
  shape.sk = size_in(row, "sk", shape.sq);
  shape.d = size_in(row, "d", 64);
  shape.dv = size_in(row, "dv", shape.d);
  return shape;
}

MaskKind mask_in(const json& row) {
  const std::string name = row.value("mask", "none");
  if (name == "none") return MaskKind::none;
  if (name == "additive") return MaskKind::additive;
  if (name == "padding") return MaskKind::boolean;
  throw InvalidArgument("mask: expected additive or padding, got '" + name + "'");
}

Features features_in(const json& row) {
  Features features;
  features.mask = mask_in(row);
  if (row.contains("window")) features.window = size_in(row, "window", 1);
  features.blocks = fraction_in(row, "blocks", 1);
  features.dropout = fraction_in(row, "dropout", 0);
  return features;
}

// The value of a key that may be a list of booleans or a single one.
std::vector<bool> switches_in(const json& row, const char* key) {
  if (!row.contains(key)) return {false};
  if (row.at(key).is_boolean()) return {row.at(key).get<bool>()};
  return row.at(key).get<std::vector<bool>>();
}

// Adds one problem for each combination of type, pass, causal and deterministic. Forward is always
// deterministic, so it is added once.
void add_row(const json& row, const std::string& suite, const Selection& selection,
             std::vector<Problem>& problems) {
  if (row.contains("op")) {
    throw InvalidArgument("op: expected only attention, got " + row.at("op").dump() +
                          ", which `tilewise bench` measures");
  }
  for (const auto& [key, value] : row.items()) {
    if (std::find(std::begin(row_keys), std::end(row_keys), key) != std::end(row_keys)) continue;
    std::string known;
    for (const char* name : row_keys) known += std::string(" ") + name;
    throw InvalidArgument("shape: expected keys among" + known + ", got '" + key + "'");
  }
  Selection chosen = selection;
  if (chosen.dtypes.empty()) {
    for (const std::string& name : row.value("dtypes", std::vector<std::string>{"f32"})) {
      chosen.dtypes.push_back(parse_dtype(name));
    }
  }
  if (chosen.passes.empty()) {
    for (const std::string& name : row.value("passes", std::vector<std::string>{"forward"})) {
      chosen.passes.push_back(parse_pass(name));
    }
  }
  if (chosen.causal.empty()) chosen.causal = switches_in(row, "causal");

  Problem problem{.suite = suite, .name = {}, .shape = shape_in(row), .features = features_in(row)};
  const auto add = [&](bool deterministic) {
    problem.features.deterministic = deterministic;
    const std::string features = describe(problem.features);
    problem.name = describe(problem.shape) + (features.empty() ? "" : " " + features);
    problems.push_back(problem);
  };
  for (const DType dtype : chosen.dtypes) {
    for (const Pass pass : chosen.passes) {
      for (const bool causal : chosen.causal) {
        problem.dtype = dtype;
        problem.pass = pass;
        problem.causal = causal;
        if (pass == Pass::forward) {
          add(false);
        } else {
          for (const bool deterministic : switches_in(row, "deterministic")) add(deterministic);
        }
      }
    }
  }
}

// Whether some rows are attention, the only operation that this program measures.
bool has_attention(const json& rows) {
  return rows.empty() ||
         std::any_of(rows.begin(), rows.end(), [](const json& row) { return !row.contains("op"); });
}

}  // namespace

std::vector<Problem> load_suite(const std::string& name_or_file, const Selection& selection) {
  const fs::path file = find_suite(name_or_file);
  std::vector<Problem> problems;
  try {
    std::ifstream stream(file);
    const json suite = json::parse(stream);
    const json& rows = suite.at("rows");
    const bool some_of_attention = has_attention(rows);  // if so, other rows are left to `tilewise bench`
    for (const json& row : rows) {
      if (some_of_attention && row.contains("op")) continue;
      add_row(row, file.stem().string(), selection, problems);
    }
  } catch (const std::exception& error) {
    throw InvalidArgument(file.filename().string() + ": " + error.what());
  }
  return problems;
}

std::vector<Problem> parse_shape(const std::string& text, const Selection& selection) {
  json row = json::object();
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) throw InvalidArgument("shape: expected key=value, got '" + word + "'");
    const std::string value = word.substr(equals + 1);
    const json parsed = json::parse(value, nullptr, /*allow_exceptions=*/false);
    row[word.substr(0, equals)] = parsed.is_number() || parsed.is_boolean() ? parsed : json(value);
  }
  std::vector<Problem> problems;
  try {
    add_row(row, "command line", selection, problems);
  } catch (const json::exception& error) {
    throw InvalidArgument("shape: cannot read '" + text + "': " + error.what());
  }
  return problems;
}

namespace {

// Whether a suite has rows that this program can measure.
bool is_of_attention(const fs::path& file) {
  std::ifstream stream(file);
  const json suite = json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!suite.is_object() || !suite.contains("rows") || !suite.at("rows").is_array()) return false;
  return has_attention(suite.at("rows"));
}

}  // namespace

std::vector<std::string> suite_names() {
  std::vector<std::string> names;
  for (const fs::path& folder : suite_folders()) {
    if (!fs::is_directory(folder)) continue;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".json" && is_of_attention(entry.path())) {
        names.push_back(entry.path().stem().string());
      }
    }
    break;  // the second folder is usually the same as the first
  }
  std::sort(names.begin(), names.end());
  return names;
}

DType parse_dtype(const std::string& name) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw InvalidArgument("dtype: expected f32, f16 or bf16, got '" + name + "'");
}

Pass parse_pass(const std::string& name) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (name == describe(pass)) return pass;
  }
  throw InvalidArgument("pass: expected forward or backward, got '" + name + "'");
}

}  // namespace tilewise::bench
