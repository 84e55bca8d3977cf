#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)
namespace tilewise {

// Some kernels are compiled in several configurations: the rows of a tuning table, which differ in tile
// sizes, stages and warps, and not in what they compute. A plan takes the row that a model of the GPU
// favours. Where a user has measured which row is fastest on their own GPU, the plan takes that one.
// `tilewise tune` measures and writes the file; docs/tuning.md has its format.

/// One measurement: on that device, the table's row is the fastest for that problem. All four are texts that
/// a TuningQuestion gave.
struct TuningChoice {
  std::string device;
  std::string table;
  std::string problem;
  std::string row;
  double microseconds = 0;          ///< of that row
  double default_microseconds = 0;  ///< of the row that is taken without a measurement
};

/// A question that a call put to a tuning table: which of `rows`, those that can run the problem?
struct TuningQuestion {
  std::string device;   ///< "NVIDIA H200, 132 SMs, 9.0"
  std::string table;    ///< "attention.sm90.forward"
  std::string problem;  ///< "bf16 batch=1 heads=16 …"; sizes are rounded to three significant bits
  std::vector<std::string> rows;
  std::size_t default_row = 0;  ///< in `rows`: the model's answer
  std::size_t taken_row = 0;    ///< the answer that was given
};

/// What the calls that `body` makes ask, each question once. Calls that other threads make meanwhile count,
/// too. A plan asks when it is made.
std::vector<TuningQuestion> tuning_questions(const std::function<void()>& body);
/// The same in two halves, for callers in another language.
void begin_tuning_questions();
std::vector<TuningQuestion> end_tuning_questions();

/// A row that tune_call() has timed.
struct TunedRow {
  const TuningQuestion& question;
  std::size_t row;
  double microseconds;
};

/// For each question of a call with several rows, times the rows and keeps the fastest. `microseconds` makes
/// the call, plan and all, and returns how long it took; it is called `rounds` times a row, in turns, and the
/// medians count. `progress` hears of each row that was timed. What was in use before is in use again
/// afterwards.
std::vector<TuningChoice> tune_call(const std::function<double()>& microseconds, int rounds = 5,
                                    const std::function<void(const TunedRow&)>& progress = {});

/// The contents of a tuning file. from_json throws InvalidArgument where the text is none.
std::string tuning_to_json(std::span<const TuningChoice> choices);
std::vector<TuningChoice> tuning_from_json(std::string_view text);

/// Plans of this process go by these choices from now on, and no longer by a file.
void use_tuning(std::span<const TuningChoice> choices);
/// Plans go by the file again, which is read anew.
void use_tuning_file();

/// TILEWISE_TUNING, or tilewise/tuning.json in the user's cache folder. Empty where TILEWISE_TUNING is "0" or
/// "off", or where there is no such folder.
std::string tuning_path();

/// What plans go by.
struct TuningStatus {
  std::string path;                   ///< of the file, there or not; empty where files are turned off
  bool from_file = false;             ///< whether it was read
  std::vector<TuningChoice> choices;  ///< of all devices
  std::string trouble;                ///< why the file is ignored; empty where it is not
};
TuningStatus tuning_status();

}  // namespace tilewise
#pragma GCC visibility pop
