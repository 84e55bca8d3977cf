#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace minilm {

// A file of tensors: 8 bytes of length, a header in JSON that says of each tensor its type, its shape and
// where its bytes begin and end, and the bytes. Nothing in it is believed: what does not fit together is an
// error that names the file and, where there is one, the tensor.
class SafeTensors {
 public:
  struct Entry {
    std::string dtype;  ///< "F32", "I64", …
    std::vector<std::int64_t> shape;
    std::size_t begin, end;  ///< of its bytes, after the header
  };

  /// Reads all of a file.
  explicit SafeTensors(const std::filesystem::path& file);
  /// What a file would contain; `name` stands for it in messages.
  SafeTensors(std::string name, std::vector<std::byte> contents);

  const std::map<std::string, Entry, std::less<>>& entries() const { return entries_; }

  /// The bytes of an f32 tensor of this name and shape. They need not be aligned.
  std::span<const std::byte> f32(std::string_view tensor, std::span<const std::int64_t> shape) const;

 private:
  void read_header();
  void check_places() const;
  [[noreturn]] void fail(const std::string& reason) const;

  std::string name_;
  std::vector<std::byte> contents_;
  std::size_t data_ = 0;  // where the tensors' bytes begin
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace minilm
