#pragma once

#include <stdexcept>
#include <string>

#include "tilewise/error.h"

namespace tilewise::torch_binding {

/// Runs `body`. The stable ABI has one kind of exception, so the library's carry their kind in the text,
/// which the Python package turns back into a type.
template <typename Body>
void with_kinds(const Body& body) {
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
