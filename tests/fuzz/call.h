#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tilewise/tilewise.h"

namespace tilewise::fuzz {

/// What a call does with a tensor.
enum class Use : std::uint8_t {
  read,     ///< an input
  written,  ///< an output: what stood in it before does not matter
  updated,  ///< both
};

/// A tensor of a call. Until memory is made for it (see Memory), its address is a number without meaning, so
/// that what is drawn and what is made hostile does not depend on where the heap puts things.
struct Argument {
  std::string_view name;
  Tensor* view;
  Use use = Use::read;
  std::uintptr_t address = 0;        ///< of its first element; 0 for null data
  std::vector<std::byte> content{};  ///< its elements, the last index fastest; repeated where there are more

  bool reads() const { return use != Use::written; }
  bool writes() const { return use != Use::read; }
};

/// An operation of the library with its arguments, which stand in structs that the lambdas look at.
struct Call {
  std::string name;
  std::vector<Argument> arguments{};
  std::string_view* kernel = nullptr;  ///< the option of that name; null for a layer, which has none
  std::function<std::size_t(const Context&)> workspace{};
  std::function<void(const Context&)> run{};
  std::function<std::vector<Explanation>(const Context&)> explain{};
  /// A page table whose pages are written to: where it names one twice, who writes last decides.
  const Tensor* written_pages = nullptr;
  /// Each makes something wrong of the options, as the number says.
  std::vector<std::function<void(std::uint8_t)>> mistakes{};
  Context context{};

  void add(std::string_view argument, Tensor& view, Use use = Use::read) {
    arguments.push_back({.name = argument, .view = &view, .use = use});
  }
};

/// The call in words, for a failure.
std::string to_string(const Call& call);

/// Reports what is wrong with the call and aborts, which is what a fuzzer takes for a finding.
[[noreturn]] void fail(const Call& call, const std::string& text);

}  // namespace tilewise::fuzz
