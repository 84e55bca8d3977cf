// The benchmark of the CPU kernels: runs every kernel on each problem of a suite and writes a table for
// people and JSON lines for programs.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <iostream>
#include <optional>

#include "machine.h"
#include "progress.h"
#include "report.h"
#include "runner.h"
#include "suite.h"
#include "tilewise/tilewise.h"

namespace tilewise::bench {
namespace {

volatile std::sig_atomic_t interrupted = 0;

// The first Ctrl-C ends the run after the current round. A second one ends the process.
void on_interrupt(int signal) {
  interrupted = 1;
  std::signal(signal, SIG_DFL);
}

struct Arguments {
  std::string suite;
  std::vector<std::string> shapes;
  std::vector<std::string> dtypes;
  std::vector<std::string> passes;
  std::string causal;
  std::vector<int> threads;
  std::string json;
  bool quiet = false;
  Settings settings;
};

void add_options(CLI::App& app, Arguments& arguments) {
  const auto list = [&app](const char* name, auto& values, const char* help) {
    return app.add_option(name, values, help)->delimiter(',')->allow_extra_args(false);
  };
  std::string names;
  for (const std::string& name : suite_names()) names += (names.empty() ? "" : ", ") + name;
  app.add_option("--suite", arguments.suite,
                 "problems to run: a file, or one of " + names + " (default: quick if there is no --shape)");
  app.add_option(
         "--shape", arguments.shapes,
         "a problem of your own, \"b=1 hq=8 hkv=8 sq=1024 sk=1024 d=64 dv=64\"; also mask=additive|padding, "
         "window=256, blocks=0.25, dropout=0.1, deterministic=true; may be repeated")
      ->allow_extra_args(false);
  list("--kernels", arguments.settings.kernels, "kernels by name (default: all)");
  list("--dtype", arguments.dtypes, "f32, f16, bf16 (default: the suite's)");
  list("--pass", arguments.passes, "forward, backward (default: the suite's)");
  app.add_option("--causal", arguments.causal, "yes, no or both (default: the suite's)")
      ->check(CLI::IsMember({"yes", "no", "both"}));
  list("--threads", arguments.threads, "thread counts (default: 1 and all)")->check(CLI::Range(1, 4096));
  app.add_option("--level", arguments.settings.level,
                 "SIMD level of the simd kernel (default: the best one)");
  app.add_option("--min-time", arguments.settings.min_seconds, "seconds measured for each kernel of a row")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--reference-limit", arguments.settings.reference_gflop,
                 "largest problem, in GFLOP, for the slow reference")
      ->capture_default_str();
  app.add_option("--json", arguments.json, "file for the measurements, one JSON object per line");
  app.add_flag("--quiet", arguments.quiet, "no progress on stderr");
}

std::string joined(const std::vector<std::string_view>& names) {
  std::string text;
  for (const std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

void check_name(const std::string& argument, const std::string& given,
                const std::vector<std::string_view>& known) {
  if (std::find(known.begin(), known.end(), given) != known.end()) return;
  throw InvalidArgument(argument + ": expected one of " + joined(known) + ", got '" + given + "'");
}

void complete(Arguments& arguments) {
  Settings& settings = arguments.settings;
  for (const std::string& kernel : settings.kernels) check_name("kernels", kernel, attention_kernels());
  if (settings.kernels.empty()) {
    for (const std::string_view kernel : attention_kernels()) settings.kernels.emplace_back(kernel);
  }
  if (!settings.level.empty()) check_name("level", settings.level, simd_levels());
  if (arguments.threads.empty()) {
    arguments.threads = {1};
    if (hardware_threads() > 1) arguments.threads.push_back(hardware_threads());
  }
  if (arguments.suite.empty() && arguments.shapes.empty()) arguments.suite = "quick";
  settings.stop = [] { return interrupted != 0; };
}

std::vector<Problem> problems_of(const Arguments& arguments) {
  Selection selection;
  for (const std::string& name : arguments.dtypes) selection.dtypes.push_back(parse_dtype(name));
  for (const std::string& name : arguments.passes) selection.passes.push_back(parse_pass(name));
  if (arguments.causal == "no" || arguments.causal == "both") selection.causal.push_back(false);
  if (arguments.causal == "yes" || arguments.causal == "both") selection.causal.push_back(true);
  std::vector<Problem> problems;
  if (!arguments.suite.empty()) problems = load_suite(arguments.suite, selection);
  for (const std::string& shape : arguments.shapes) {
    for (Problem& problem : parse_shape(shape, selection)) problems.push_back(std::move(problem));
  }
  return problems;
}

int run(Arguments& arguments) {
  complete(arguments);
  const std::vector<Problem> problems = problems_of(arguments);
  const Environment environment = inspect(arguments.threads);
  std::optional<JsonLines> json;
  if (!arguments.json.empty()) json.emplace(arguments.json, environment);
  print_environment(std::cout, environment);

  std::signal(SIGINT, on_interrupt);
  std::signal(SIGTERM, on_interrupt);
  const Settings& settings = arguments.settings;
  std::vector<Measurement> measurements;
  bool wrong = false;
  {
    Progress progress(problems.size() * arguments.threads.size(), 2 * settings.min_seconds, arguments.quiet);
    for (const Problem& problem : problems) {
      for (const int threads : arguments.threads) {
        if (interrupted != 0) break;
        progress.begin(problem, threads);
        for (Measurement& measurement : measure(problem, threads, settings)) {
          if (json) json->add(measurement);
          wrong = wrong || measurement.skipped.starts_with("WRONG");
          measurements.push_back(std::move(measurement));
        }
        progress.end();
      }
    }
  }
  print_table(std::cout, environment, measurements);
  if (interrupted != 0) {
    std::cout << "Interrupted: the rows above are complete, the others were not measured.\n";
    return 130;
  }
  return wrong ? 1 : 0;
}

}  // namespace
}  // namespace tilewise::bench

int main(int argc, char** argv) {
  CLI::App app("Measures Tilewise's attention kernels and the machine they run on.");
  tilewise::bench::Arguments arguments;
  tilewise::bench::add_options(app, arguments);
  CLI11_PARSE(app, argc, argv);
  try {
    return tilewise::bench::run(arguments);
  } catch (const std::exception& error) {
    std::cerr << "tilewise_bench: " << error.what() << '\n';
    return 2;
  }
}
