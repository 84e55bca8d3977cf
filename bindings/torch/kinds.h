#pragma once

#include <stdexcept>
#include <string>

#include "tilewise/error.h"

namespace tilewise::torch_binding {

/// Runs `body`. The stable ABI knows only one type of exception. So the text of an exception names its type,
/// and the Python package converts it back.
template <typename Body>
void with_error_kinds(const Body& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    throw std::runtime_error(std::string("tilewise.InvalidArgument: ") + error.what());
  } catch (const Unsupported& error) {
    throw std::runtime_error(std::string("tilewise.Unsupported: ") + error.what());
  } catch (const DeviceError& error) {
    throw std::runtime_error(std::string("tilewise.DeviceError: ") + error.what());
  }
}

}  // namespace tilewise::torch_binding
