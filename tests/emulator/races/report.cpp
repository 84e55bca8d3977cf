#include <link.h>
#include <unistd.h>

#include <cstdio>

#include "races/state.h"

namespace tilewise::emulator::races {

namespace {

std::uintptr_t base_of_program() {
  static const std::uintptr_t base = [] {
    std::uintptr_t found = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* to) {
          *static_cast<std::uintptr_t*>(to) = info->dlpi_addr;
          return 1;
        },
        &found);
    return found;
  }();
  return base;
}

}  // namespace

std::uint32_t place_of(const void* return_address) {
  return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(return_address) - base_of_program() - 1);
}

namespace {

// The source lines of an address, the innermost inlined function first.
std::string lines_of(std::uint32_t where) {
  char command[96];
  std::snprintf(command, sizeof command, "addr2line -ise /proc/%d/exe 0x%x", static_cast<int>(getpid()),
                where);
  std::string text;
  if (FILE* pipe = popen(command, "r")) {
    char line[512];
    for (int n = 0; n < 5 && std::fgets(line, sizeof line, pipe) != nullptr; ++n)
      text += std::string("      ") + line;
    pclose(pipe);
  }
  return text;
}

}  // namespace

std::string name_of(const BlockClock& block, std::size_t slot) {
  if (slot < block.thread_count) return "thread " + std::to_string(slot);
  if (slot < block.thread_count + block.warp_count) {
    return "wgmma of warp " + std::to_string(slot - block.thread_count);
  }
  return "a bulk copy";
}

namespace {

std::set<std::pair<std::uint32_t, std::uint32_t>> reported;

}  // namespace

void report(const std::string& what, std::uint32_t earlier, std::uint32_t later,
            const std::string& earlier_by, const std::string& later_by) {
  if (!reported.insert({earlier, later}).second) {
    if (found_text.empty()) found_text = "a race that was reported before";
    return;
  }
  const std::string title = "race: " + what;
  if (found_text.empty()) found_text = title;
  if (reported.size() > 40) return;
  std::fprintf(stderr, "%s: %s\n    %s\n%s    after %s\n%s", launch == nullptr ? "" : launch->name.c_str(),
               title.c_str(), later_by.c_str(), lines_of(later).c_str(), earlier_by.c_str(),
               lines_of(earlier).c_str());
}

}  // namespace tilewise::emulator::races
