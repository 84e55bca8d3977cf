#include "report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "machine.h"
#include "tilewise/error.h"
#include "tilewise/version.h"

namespace tilewise::bench {
namespace {

using nlohmann::ordered_json;

// Six digits are more than a measurement has.
ordered_json number(double value) {
  std::ostringstream text;
  text << std::setprecision(6) << value;
  return std::isfinite(value) ? ordered_json(std::stod(text.str())) : ordered_json(nullptr);
}

ordered_json by_threads(const std::map<int, double>& values) {
  ordered_json object = ordered_json::object();
  for (const auto& [threads, value] : values) object[std::to_string(threads)] = number(value);
  return object;
}

ordered_json line_of(const Environment& environment) {
  return {{"environment",
           {{"device", "cpu"},
            {"cpu", environment.cpu},
            {"simd_levels", environment.simd_levels},
            {"threads", environment.threads},
            {"compiler", environment.compiler},
            {"version", environment.version},
            {"fma_instructions", environment.fma_instructions},
            {"peak_gflops", by_threads(environment.peak_gflops)},
            {"copy_gbps", by_threads(environment.copy_gbps)}}}};
}

ordered_json line_of(const Measurement& m) {
  const Problem& problem = m.problem;
  const Shape& s = problem.shape;
  ordered_json line = {{"suite", problem.suite},
                       {"op", "attention"},
                       {"pass", describe(problem.pass)},
                       {"impl", m.kernel},
                       {"device", "cpu"},
                       {"dtype", to_string(problem.dtype)},
                       {"b", s.b},
                       {"hq", s.hq},
                       {"hkv", s.hkv},
                       {"sq", s.sq},
                       {"sk", s.sk},
                       {"d", s.d},
                       {"dv", s.dv},
                       {"causal", problem.causal},
                       {"window", nullptr}};
  if (problem.features.window) line["window"] = {*problem.features.window, *problem.features.window};
  const bool ran = m.skipped.empty();
  const auto figure = [ran](double value) { return ran ? number(value) : ordered_json(nullptr); };
  line["ms"] = figure(m.ms);
  line["spread"] = figure(m.spread);
  line["tflops"] = figure(m.gflops * 1e-3);
  line["gbps"] = figure(m.gbps);
  line["peak_mb"] = figure(m.peak_mb);
  line["error"] = m.error ? figure(*m.error) : ordered_json(nullptr);
  line["features"] = describe(problem.features);
  line["threads"] = m.threads;
  line["level"] = m.level.empty() ? ordered_json(nullptr) : ordered_json(m.level);
  line["rounds"] = m.rounds;
  line["ms_min"] = figure(m.ms_min);
  line["cpu_share"] = figure(m.cpu_share);
  line["peak_gflops"] = figure(m.peak_gflops);
  line["percent_of_peak"] = figure(m.percent_of_peak);
  if (!ran) line["skipped"] = m.skipped;
  return line;
}

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

std::string scientific(double value) {
  std::ostringstream text;
  text << std::scientific << std::setprecision(1) << value;
  return text.str();
}

struct Column {
  const char* title;
  int width;
  bool left;  // words to the left, numbers to the right
};

constexpr std::array columns = {
    Column{"problem", 0, true}, Column{"dtype", 5, true},    Column{"pass", 8, true},
    Column{"causal", 6, true},  Column{"kernel", 9, true},   Column{"threads", 7, false},
    Column{"ms", 8, false},     Column{"GFLOP/s", 8, false}, Column{"peak", 7, false},
    Column{"% peak", 6, false}, Column{"GB/s", 6, false},    Column{"spread", 6, false},
    Column{"error", 7, false}};

// `name_width` is the width of the first column, the only one whose contents are the user's.
std::string joined(const std::vector<std::string>& cells, std::size_t name_width) {
  std::ostringstream line;
  for (std::size_t n = 0; n < cells.size(); ++n) {
    const Column& column = columns[n];
    line << (n == 0 ? "" : "  ") << (column.left ? std::left : std::right)
         << std::setw(n == 0 ? static_cast<int>(name_width) : column.width) << cells[n];
  }
  return line.str();
}

// The machine's peak over the run, by threads.
struct Range {
  double low, high;
};
using Peaks = std::map<int, Range>;

Peaks peaks_of(const Environment& environment, const std::vector<Measurement>& measurements) {
  Peaks peaks;
  for (const auto& [threads, peak] : environment.peak_gflops) peaks[threads] = {peak, peak};
  for (const Measurement& m : measurements) {
    if (!m.skipped.empty()) continue;
    Range& range = peaks.at(m.threads);
    range = {std::min(range.low, m.peak_gflops), std::max(range.high, m.peak_gflops)};
  }
  return peaks;
}

// Whether somebody else had the cores while the row was measured. A clock alone moves by a few percent.
bool disturbed(const Measurement& m, const Peaks& peaks) {
  return m.cpu_share < 0.95 || m.peak_gflops < 0.9 * peaks.at(m.threads).high;
}

std::vector<std::string> cells_of(const Measurement& m, const Peaks& peaks) {
  std::vector<std::string> cells = {m.problem.name,
                                    std::string(to_string(m.problem.dtype)),
                                    describe(m.problem.pass),
                                    m.problem.causal ? "yes" : "no",
                                    m.kernel,
                                    std::to_string(m.threads)};
  if (!m.skipped.empty()) return cells;
  cells.push_back(fixed(m.ms, m.ms < 10 ? 3 : 1));
  cells.push_back(fixed(m.gflops, 1));
  cells.push_back(fixed(m.peak_gflops, 1));
  cells.push_back((disturbed(m, peaks) ? "*" : "") + fixed(m.percent_of_peak, 1));
  cells.push_back(fixed(m.gbps, 1));
  cells.push_back(fixed(100 * m.spread, 0) + "%");
  cells.push_back(m.error ? scientific(*m.error) : "-");
  return cells;
}

void print_footer(std::ostream& out, const std::vector<Measurement>& measurements, const Peaks& peaks) {
  out << "\nms: median. % peak: useful FLOPs against the f32 peak measured with the row. GB/s: inputs and\n"
         "outputs once. spread: distance of the quartiles. error: largest absolute error against float64,\n"
         "in sampled rows.\n";
  for (const auto& [threads, range] : peaks) {
    out << "f32 FMA peak over the run, " << threads << (threads == 1 ? " thread: " : " threads: ")
        << fixed(range.low, 1) << " to " << fixed(range.high, 1) << " GFLOP/s\n";
  }
  const bool any = std::any_of(measurements.begin(), measurements.end(), [&](const Measurement& m) {
    return m.skipped.empty() && disturbed(m, peaks);
  });
  if (any) out << "* the machine was busy with something else: run these rows again\n";
}

}  // namespace

Environment inspect(const std::vector<int>& thread_counts) {
  Environment environment{.cpu = cpu_name(),
                          .simd_levels = {},
                          .threads = hardware_threads(),
                          .compiler = compiler_name(),
                          .version = std::string(version),
                          .fma_instructions = fma_instructions(),
                          .peak_gflops = {},
                          .copy_gbps = {}};
  for (const std::string_view level : simd_levels()) environment.simd_levels.emplace_back(level);
  std::vector<int> counts = thread_counts;
  counts.push_back(1);
  counts.push_back(environment.threads);
  for (const int threads : counts) {
    if (environment.peak_gflops.contains(threads)) continue;
    environment.peak_gflops[threads] = fma_peak_gflops(threads);
    environment.copy_gbps[threads] = copy_gbps(threads);
  }
  return environment;
}

JsonLines::JsonLines(const std::string& file, const Environment& environment) : stream_(file) {
  if (!stream_) throw InvalidArgument("json: expected a file that can be written, got '" + file + "'");
  stream_ << line_of(environment).dump() << std::endl;
}

void JsonLines::add(const Measurement& measurement) { stream_ << line_of(measurement).dump() << std::endl; }

void print_environment(std::ostream& out, const Environment& environment) {
  out << "tilewise " << environment.version << ", " << environment.compiler << "\n"
      << environment.cpu << ", " << environment.threads << " threads, simd levels:";
  for (const std::string& level : environment.simd_levels) out << ' ' << level;
  out << "\n";
  for (const auto& [threads, peak] : environment.peak_gflops) {
    out << threads << (threads == 1 ? " thread:  " : " threads: ") << "f32 FMA peak " << fixed(peak, 1)
        << " GFLOP/s (" << environment.fma_instructions << "), copy "
        << fixed(environment.copy_gbps.at(threads), 1) << " GB/s\n";
  }
  out << std::flush;
}

void print_table(std::ostream& out, const Environment& environment,
                 const std::vector<Measurement>& measurements) {
  if (measurements.empty()) {
    out << "Nothing was measured.\n";
    return;
  }
  std::vector<std::string> titles;
  for (const Column& column : columns) titles.emplace_back(column.title);
  std::size_t name_width = titles.front().size();
  for (const Measurement& m : measurements) name_width = std::max(name_width, m.problem.name.size());
  out << '\n' << joined(titles, name_width) << '\n';
  const Peaks peaks = peaks_of(environment, measurements);
  for (const Measurement& m : measurements) {
    out << joined(cells_of(m, peaks), name_width);
    if (!m.skipped.empty()) out << "  skipped: " << m.skipped.substr(0, m.skipped.find('\n'));
    out << '\n';
  }
  print_footer(out, measurements, peaks);
}

}  // namespace tilewise::bench
