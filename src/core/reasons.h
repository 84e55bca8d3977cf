#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tilewise {

// Why a kernel cannot take a problem, in the forms that several kernels share. A reason stands after "cannot:
// ", and its subject is the kernel, unless it names another.

/// "needs f16 or bf16, got f32"
inline std::string needs(std::string_view what, std::string_view got) {
  return std::string("needs ").append(what).append(", got ").append(got);
}
inline std::string needs(std::string_view what, std::int64_t got) { return needs(what, std::to_string(got)); }

/// "supports head dims up to 128 with softcap, got 192"
inline std::string supports_up_to(std::string_view what, std::int64_t most, std::int64_t got,
                                  std::string_view when = "") {
  return std::string("supports ").append(what).append(" up to ").append(std::to_string(most)).append(when) +
         ", got " + std::to_string(got);
}

}  // namespace tilewise
