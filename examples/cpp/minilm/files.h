#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

namespace minilm {

/// All of a file; an error that names it where it cannot be read, and where to get it if it is missing.
std::vector<std::byte> read_bytes(const std::filesystem::path& file);
std::string read_text(const std::filesystem::path& file);

}  // namespace minilm
