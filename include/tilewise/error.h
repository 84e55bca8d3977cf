#pragma once

#include <stdexcept>
#include <string>

#pragma GCC visibility push(default)
namespace tilewise {

/// What every exception of the library derives from.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An argument is malformed. The message names it, what was expected and what came.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The arguments are sound, but no kernel (or not the one asked for) can take the problem.
class Unsupported : public Error {
 public:
  using Error::Error;
};

/// A device or its driver failed.
class DeviceError : public Error {
 public:
  using Error::Error;
};

}  // namespace tilewise
#pragma GCC visibility pop
