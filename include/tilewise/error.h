#pragma once

#include <stdexcept>
#include <string>

#pragma GCC visibility push(default)
namespace tilewise {

/// The base class of all exceptions of the library.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An argument is wrong. The message names it and says what was expected and what was given.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The arguments are valid, but no kernel, or not the one that was named, can compute the problem.
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
