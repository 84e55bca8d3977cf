#include "core/debug.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <string>

namespace tilewise {
namespace {

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

bool is_set(const char* name) { return !environment(name).empty() && environment(name) != "0"; }

// Opens the log: a file, to which lines are appended and which is never closed, or standard error. Negative:
// no log.
int open_log() {
  const std::string name(environment("TILEWISE_LOG"));
  if (name.empty()) return -1;
  if (name == "-" || name == "stderr") return STDERR_FILENO;
  const int file = open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0) {
    std::fprintf(stderr, "tilewise: TILEWISE_LOG: cannot open '%s': %s; nothing is logged\n", name.c_str(),
                 std::strerror(errno));
  }
  return file;
}

int log_file() {
  static const int file = open_log();
  return file;
}

/// "2026-01-31T23:59:59.123456Z"
std::string time_now() {
  std::timespec now{};
  std::timespec_get(&now, TIME_UTC);
  std::tm parts{};
  gmtime_r(&now.tv_sec, &parts);
  std::array<char, 32> date{}, fraction{};
  std::strftime(date.data(), date.size(), "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(fraction.data(), fraction.size(), ".%06ldZ", now.tv_nsec / 1000);
  return std::string(date.data()) + fraction.data();
}

}  // namespace

bool checks_indices(const Context& context) {
  static const bool asked = is_set("TILEWISE_CHECK");
  return asked || context.check_indices;
}

bool allows_trials() { return is_set("TILEWISE_TRIAL"); }

bool logs_launches() { return log_file() >= 0; }

void log_launch(std::string_view operation, std::string_view problem, std::string_view kernel) {
  std::string line = time_now() + ' ' + std::to_string(getpid()) + ' ' + std::string(operation);
  line.append(problem).append(": ").append(kernel).append("\n");
  // Each line is one write, so that lines of several processes do not mix. The mutex keeps lines of several
  // threads apart, since a write may be partial.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (std::string_view left = line; !left.empty();) {
    const ssize_t written = write(log_file(), left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // a full disk is no reason to fail a call
    left.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace tilewise
