// Replays inputs without a fuzzer, so that what one found stays found by any compiler:
//   tilewise_fuzz_replay FOLDER    every line of the folder's attention.hex, operations.hex and layer.hex
//   tilewise_fuzz_replay -n COUNT  random inputs of every target
// A line is an input in hexadecimal digits; what follows a '#' is a remark.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz/oracle.h"

namespace {

using namespace tilewise::fuzz;
using Bytes = std::vector<std::uint8_t>;

struct Target {
  const char* name;
  void (*run)(std::span<const std::uint8_t>);
};
constexpr Target targets[] = {
    {"attention", fuzz_attention}, {"operations", fuzz_operations}, {"layer", fuzz_layer}};

Bytes bytes_of(std::string line) {
  line.resize(std::min(line.find('#'), line.size()));
  Bytes bytes;
  for (std::size_t n = 0; n + 1 < line.size(); n += 2) {
    if (line[n] == ' ') break;
    bytes.push_back(static_cast<std::uint8_t>(std::stoul(line.substr(n, 2), nullptr, 16)));
  }
  return bytes;
}

int replay_folder(const std::string& folder) {
  for (const Target& target : targets) {
    const std::string path = folder + "/" + target.name + ".hex";
    std::ifstream file(path);
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", path.c_str());
      return 1;
    }
    int count = 0;
    for (std::string line; std::getline(file, line); ++count) {
      // A failure aborts: the last line printed names its input.
      std::fprintf(stderr, "%s:%d\n", path.c_str(), count + 1);
      target.run(bytes_of(line));
    }
    std::printf("%s: %d inputs\n", target.name, count);
  }
  return 0;
}

int replay_random(std::uint64_t count) {
  for (const Target& target : targets) {
    for (std::uint64_t seed = 0; seed < count; ++seed) {
      tilewise::test::Random random(seed);
      Bytes bytes(static_cast<std::size_t>(random.between(0, 200)));
      for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.bits());
      std::fprintf(stderr, "%s: random input %llu\n", target.name, static_cast<unsigned long long>(seed));
      target.run(bytes);
    }
    std::printf("%s: %llu random inputs\n", target.name, static_cast<unsigned long long>(count));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2) return replay_folder(argv[1]);
  if (argc == 3 && std::string_view(argv[1]) == "-n")
    return replay_random(std::strtoull(argv[2], nullptr, 10));
  std::fprintf(stderr, "usage: tilewise_fuzz_replay FOLDER | -n COUNT\n");
  return 2;
}
