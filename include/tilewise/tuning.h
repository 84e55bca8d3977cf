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
// predicts to be the fastest. If a user has measured on their own GPU which row is fastest, the plan takes
// that one instead. `tilewise tune` measures and writes the file, whose format is in docs/tuning.md.

/// The result of a measurement: on this device, `row` is the fastest row of the table for the problem. All
/// four strings come from a TuningQuestion.
struct TuningChoice {
  std::string device;
  std::string table;
  std::string problem;
  std::string row;
  double microseconds = 0;          ///< time of that row
  double default_microseconds = 0;  ///< time of the row that the model takes
};

/// A choice that a plan made among the rows of a tuning table that can run its problem.
struct TuningQuestion {
  std::string device;   ///< "NVIDIA H200, 132 SMs, 9.0"
  std::string table;    ///< "attention.sm90.forward"
  std::string problem;  ///< "bf16 batch=1 heads=16 …"; sizes are rounded to three significant bits
  std::vector<std::string> rows;
  std::size_t default_row = 0;  ///< index in `rows`: the model's choice
  std::size_t taken_row = 0;    ///< index in `rows`: the row that the plan took
};

/// Runs `body` and returns the questions of the plans that it makes, each question once. Plans that other
/// threads make meanwhile count, too.
std::vector<TuningQuestion> tuning_questions(const std::function<void()>& body);
/// The same in two steps, for callers in other languages.
void begin_tuning_questions();
std::vector<TuningQuestion> end_tuning_questions();

/// A row that tune_call() has timed.
struct TunedRow {
  const TuningQuestion& question;
  std::size_t row;
  double microseconds;
};

/// Times the rows of each question of a call and returns the fastest one for each. `microseconds` makes the
/// call, including its plan, and returns how long it took. It is called `rounds` times per row, alternating
/// between rows, and medians are compared. `progress` is called for each row that was timed. Afterwards,
/// plans go by the same choices as before.
std::vector<TuningChoice> tune_call(const std::function<double()>& microseconds, int rounds = 5,
                                    const std::function<void(const TunedRow&)>& progress = {});

/// Converts choices to the contents of a tuning file and back. tuning_from_json throws InvalidArgument if the
/// text is not a tuning file.
std::string tuning_to_json(std::span<const TuningChoice> choices);
std::vector<TuningChoice> tuning_from_json(std::string_view text);

/// From now on, plans of this process go by these choices and not by a file.
void use_tuning(std::span<const TuningChoice> choices);
/// From now on, plans go by the file again, which is read anew.
void use_tuning_file();

/// The path of the tuning file: TILEWISE_TUNING, or tilewise/tuning.json in the user's cache folder. Empty if
/// TILEWISE_TUNING is "0" or "off", or if there is no such folder.
std::string tuning_path();

/// The choices that plans go by.
struct TuningStatus {
  std::string path;        ///< path of the file, which need not exist; empty if files are turned off
  bool from_file = false;  ///< whether the file was read
  std::vector<TuningChoice> choices;  ///< for all devices
  std::string trouble;                ///< why the file is ignored; empty if it is not
};
TuningStatus tuning_status();

}  // namespace tilewise
#pragma GCC visibility pop
