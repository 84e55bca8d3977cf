#include "core/tuning.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "core/check.h"

namespace tilewise {
namespace {

/// An immutable set of choices that plans go by.
class Choices {
 public:
  Choices(std::vector<TuningChoice> all, TuningStatus status)
      : all_(std::move(all)), status_(std::move(status)) {
    status_.choices = all_;
  }

  bool empty() const { return all_.empty(); }
  const std::vector<TuningChoice>& all() const { return all_; }
  const TuningStatus& status() const { return status_; }

  /// The hash of the row that a measurement chose; 0 if there is none.
  std::uint64_t find(const TableQuestion& question) const {
    const std::uint64_t key = tuning_key(text_hash(question.table), question.problem);
    const auto& rows = of_device(question);
    const auto found = rows.find(key);
    return found == rows.end() ? 0 : found->second;
  }

 private:
  using Rows = std::unordered_map<std::uint64_t, std::uint64_t>;
  static constexpr std::size_t most_devices = 64;

  const Rows& of_device(const TableQuestion& question) const {
    const auto index = static_cast<std::size_t>(question.device) % most_devices;
    std::call_once(known_[index], [&] {
      const std::string device = question.device_text(question.device);
      for (const TuningChoice& choice : all_) {
        if (choice.device != device) continue;
        rows_[index][tuning_key(text_hash(choice.table), text_hash(choice.problem))] = text_hash(choice.row);
      }
      if (rows_[index].empty() && status_.from_file) {
        std::fprintf(stderr, "tilewise: %s: measured on %s, not on %s; it is not used there\n",
                     status_.path.c_str(), all_.front().device.c_str(), device.c_str());
      }
    });
    return rows_[index];
  }

  std::vector<TuningChoice> all_;
  TuningStatus status_;
  mutable std::array<std::once_flag, most_devices> known_;
  mutable std::array<Rows, most_devices> rows_;
};

/// Collects the questions between begin_tuning_questions() and end_tuning_questions().
struct Listener {
  /// The index of each question in `questions`, by device and table, and by problem.
  std::map<std::pair<std::string, std::string>, std::size_t> known;
  std::vector<TuningQuestion> questions;
};

using InUse = std::shared_ptr<const Choices>;

std::mutex mutex;  // protects current() and listeners()
InUse& current() {
  static InUse choices;
  return choices;
}
std::vector<Listener>& listeners() {
  static std::vector<Listener> all;
  return all;
}
std::atomic<bool> somebody_listens{false};

/// Sets the choices in use. The caller holds `mutex`.
void set(std::vector<TuningChoice> choices, TuningStatus status) {
  current() = std::make_shared<const Choices>(std::move(choices), std::move(status));
  tuning_asked().store(!current()->empty() || !listeners().empty());
  ++tuning_epoch();
}

/// Sets the choices to those of the file. The caller holds `mutex`.
void read_file() {
  TuningStatus status{.path = tuning_path(), .from_file = false, .choices = {}, .trouble = {}};
  std::vector<TuningChoice> choices;
  try {
    if (!status.path.empty()) {
      const std::string text = read_tuning_file(status.path);
      if (!text.empty()) {
        choices = tuning_from_json(text);
        status.from_file = true;
      }
    }
  } catch (const Error& error) {
    status.trouble = error.what();
    std::fprintf(stderr, "tilewise: %s: %s; the file is ignored\n", status.path.c_str(), error.what());
  }
  set(std::move(choices), std::move(status));
}

InUse choices_in_use() {
  const std::lock_guard lock(mutex);
  if (current() == nullptr) read_file();
  return current();
}

/// Passes a question and its answer to all listeners. The caller holds `mutex`.
void listen(const TableQuestion& question, int taken) {
  TuningQuestion heard{.device = question.device_text(question.device),
                       .table = std::string(question.table),
                       .problem = question.problem_text(question.of),
                       .rows = {}};
  for (int row = 0; row < static_cast<int>(question.rows.size()); ++row) {
    if ((question.able >> row & 1) == 0) continue;
    if (row == question.chosen) heard.default_row = heard.rows.size();
    if (row == taken) heard.taken_row = heard.rows.size();
    heard.rows.push_back(question.row_text(row));
  }
  for (Listener& listener : listeners()) {
    const auto [place, is_new] =
        listener.known.try_emplace({heard.device + heard.table, heard.problem}, listener.questions.size());
    if (is_new) listener.questions.push_back(heard);
  }
}

}  // namespace

std::atomic<std::uint32_t>& tuning_epoch() {
  static std::atomic<std::uint32_t> epoch{1};
  return epoch;
}
std::atomic<bool>& tuning_asked() {
  static std::atomic<bool> asked{true};
  return asked;
}

void begin_tuning_questions() {
  const std::lock_guard lock(mutex);
  listeners().emplace_back();
  somebody_listens.store(true);
  tuning_asked().store(true);
  ++tuning_epoch();
}
std::vector<TuningQuestion> end_tuning_questions() {
  const std::lock_guard lock(mutex);
  if (listeners().empty()) return {};
  std::vector<TuningQuestion> questions = std::move(listeners().back().questions);
  listeners().pop_back();
  somebody_listens.store(!listeners().empty());
  tuning_asked().store(!listeners().empty() || current() == nullptr || !current()->empty());
  return questions;
}

namespace {

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

int answer_tuning(const TableQuestion& question) {
  const InUse choices = choices_in_use();
  int taken = question.chosen;
  if (!choices->empty()) {
    const std::uint64_t row = choices->find(question);
    for (int n = 0; row != 0 && n < static_cast<int>(question.rows.size()); ++n) {
      if ((question.able >> n & 1) != 0 && question.rows[static_cast<std::size_t>(n)] == row) taken = n;
    }
  }
  if (somebody_listens.load()) {
    const std::lock_guard lock(mutex);
    listen(question, taken);
  }
  return taken;
}

std::vector<TuningQuestion> tuning_questions(const std::function<void()>& body) {
  begin_tuning_questions();
  try {
    body();
  } catch (...) {
    end_tuning_questions();
    throw;
  }
  return end_tuning_questions();
}

std::vector<TuningChoice> tune_call(const std::function<double()>& microseconds, int rounds,
                                    const std::function<void(const TunedRow&)>& progress) {
  check(rounds >= 1, "rounds", "1 or more", rounds);
  // Another row must be at least this much faster than the model's row. A smaller difference is noise.
  constexpr double worth_it = 0.99;
  const std::vector<TuningQuestion> questions = tuning_questions([&] { microseconds(); });
  const InUse before = choices_in_use();
  std::vector<TuningChoice> found;
  const auto time_all = [&] {
    for (const TuningQuestion& question : questions) {
      if (question.rows.size() < 2) continue;
      const auto choice_of = [&](std::size_t row) {
        return TuningChoice{question.device, question.table, question.problem, question.rows[row]};
      };
      std::vector<std::vector<double>> times(question.rows.size());
      for (int round = 0; round < rounds; ++round) {
        for (std::size_t row = 0; row < question.rows.size(); ++row) {
          std::vector<TuningChoice> trial = before->all();
          trial.insert(trial.end(), found.begin(), found.end());
          trial.push_back(choice_of(row));
          use_tuning(trial);
          times[row].push_back(microseconds());
        }
      }
      std::size_t best = question.default_row;
      const double by_default = median(times[best]);
      double least = worth_it * by_default;
      for (std::size_t row = 0; row < question.rows.size(); ++row) {
        const double time = median(times[row]);
        if (progress) progress({question, row, time});
        if (row == question.default_row || time >= least) continue;
        best = row;
        least = time;
      }
      TuningChoice choice = choice_of(best);
      choice.default_microseconds = by_default;
      choice.microseconds = best == question.default_row ? by_default : least;
      found.push_back(std::move(choice));
    }
  };
  const auto restore = [&] {
    const std::lock_guard lock(mutex);
    set(before->all(), before->status());
  };
  try {
    time_all();
  } catch (...) {
    restore();
    throw;
  }
  restore();
  return found;
}

void use_tuning(std::span<const TuningChoice> choices) {
  const std::lock_guard lock(mutex);
  set({choices.begin(), choices.end()}, {});
}

void use_tuning_file() {
  const std::lock_guard lock(mutex);
  read_file();
}

TuningStatus tuning_status() { return choices_in_use()->status(); }

}  // namespace tilewise
