#include "safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "files.h"

namespace minilm {
namespace {

using Json = nlohmann::json;

constexpr std::size_t length_bytes = 8;
constexpr std::uint64_t longest_header = 100'000'000;  // the format's own limit

// Bytes of an element, or 0 for a type the format does not have.
std::size_t element_bytes(std::string_view dtype) {
  constexpr std::pair<std::string_view, std::size_t> known[] = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
      {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},     {"I64", 8},     {"U64", 8}, {"F64", 8}};
  for (const auto& [name, bytes] : known) {
    if (name == dtype) return bytes;
  }
  return 0;
}

// Where the product would overflow, the most there could be: more than any file has.
std::size_t bytes_of(const SafeTensors::Entry& entry) {
  std::size_t bytes = element_bytes(entry.dtype);
  for (const std::int64_t extent : entry.shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes)) {
      return std::numeric_limits<std::size_t>::max();
    }
  }
  return bytes;
}

std::string text_of(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

// A number of the header: none below 0, and none with a fraction.
std::size_t size_at(const Json& value) {
  if (!value.is_number_unsigned()) throw std::invalid_argument("a whole number, 0 or above, was expected");
  return value.get<std::size_t>();
}

SafeTensors::Entry entry_of(const Json& description) {
  SafeTensors::Entry entry;
  entry.dtype = description.at("dtype").get<std::string>();
  if (element_bytes(entry.dtype) == 0) throw std::invalid_argument("no such type: " + entry.dtype);
  const Json& shape = description.at("shape");
  if (!shape.is_array()) throw std::invalid_argument("a list was expected for its shape");
  for (const Json& extent : shape) {
    const std::size_t size = size_at(extent);
    if (size > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max())) {
      throw std::invalid_argument("an extent beyond 64 bits");
    }
    entry.shape.push_back(static_cast<std::int64_t>(size));
  }
  const Json& offsets = description.at("data_offsets");
  if (!offsets.is_array() || offsets.size() != 2)
    throw std::invalid_argument("two data_offsets were expected");
  entry.begin = size_at(offsets[0]);
  entry.end = size_at(offsets[1]);
  return entry;
}

}  // namespace

SafeTensors::SafeTensors(const std::filesystem::path& file) : SafeTensors(file.string(), read_bytes(file)) {}

SafeTensors::SafeTensors(std::string name, std::vector<std::byte> contents)
    : name_(std::move(name)), contents_(std::move(contents)) {
  read_header();
  check_places();
}

void SafeTensors::read_header() {
  if (contents_.size() < length_bytes) {
    fail("cut off: " + std::to_string(contents_.size()) + " bytes, and the length of the header takes 8");
  }
  std::uint64_t length = 0;
  for (std::size_t n = length_bytes; n-- > 0;)
    length = length << 8 | std::to_integer<std::uint64_t>(contents_[n]);
  if (length > longest_header) {
    fail("a header of " + std::to_string(length) + " bytes; at most 100000000 are allowed");
  }
  if (length > contents_.size() - length_bytes) {
    fail("cut off: a header of " + std::to_string(length) + " bytes in a file of " +
         std::to_string(contents_.size()));
  }
  data_ = length_bytes + static_cast<std::size_t>(length);

  const char* text = reinterpret_cast<const char*>(contents_.data()) + length_bytes;
  const Json header = Json::parse(text, text + length, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) fail("the header is not an object in JSON");
  for (const auto& [tensor, description] : header.items()) {
    if (tensor == "__metadata__") continue;
    try {
      entries_.emplace(tensor, entry_of(description));
    } catch (const std::exception& error) {  // what JSON lacks, or is of another kind
      fail("tensor " + tensor + ": " + error.what());
    }
  }
}

void SafeTensors::check_places() const {
  std::vector<std::pair<std::string_view, const Entry*>> ordered;
  for (const auto& [tensor, entry] : entries_) ordered.emplace_back(tensor, &entry);
  std::ranges::sort(ordered, {},
                    [](const auto& item) { return std::pair(item.second->begin, item.second->end); });

  const std::size_t available = contents_.size() - data_;
  std::size_t taken = 0;  // the tensors lie one after another, without gaps
  for (const auto& [tensor, entry] : ordered) {
    const std::string place = "tensor " + std::string(tensor) + ": bytes " + std::to_string(entry->begin) +
                              " to " + std::to_string(entry->end);
    if (entry->end < entry->begin || entry->end > available) {
      fail(place + ", of " + std::to_string(available));
    }
    if (entry->end - entry->begin != bytes_of(*entry)) {
      fail(place + " are not " + entry->dtype + " " + text_of(entry->shape));
    }
    if (entry->begin < taken) fail(place + " overlap those of another");
    if (entry->begin > taken) fail(place + " leave a gap before them");
    taken = entry->end;
  }
  if (taken != available) {
    fail(std::to_string(available - taken) + " bytes at the end belong to no tensor");
  }
}

std::span<const std::byte> SafeTensors::f32(std::string_view tensor,
                                            std::span<const std::int64_t> shape) const {
  const auto found = entries_.find(tensor);
  if (found == entries_.end()) fail("no tensor " + std::string(tensor));
  const Entry& entry = found->second;
  if (entry.dtype != "F32" || !std::ranges::equal(entry.shape, shape)) {
    fail("tensor " + std::string(tensor) + ": expected F32 " + text_of(shape) + ", got " + entry.dtype + " " +
         text_of(entry.shape));
  }
  return std::span(contents_).subspan(data_ + entry.begin, entry.end - entry.begin);
}

void SafeTensors::fail(const std::string& reason) const { throw std::runtime_error(name_ + ": " + reason); }

}  // namespace minilm
