#pragma once

#include <cstddef>

#include "tilewise/tensor.h"

namespace tilewise::cuda {

/// What kernels are configured by: a device and the code that runs there; read once a device.
struct DeviceProperties {
  int multiprocessors = 0;
  int compute_capability = 0;    ///< 90 for sm_90
  std::size_t shared_bytes = 0;  ///< a block may have, when it asks
};

/// Throws DeviceError when there is no such device or no driver.
const DeviceProperties& device_properties(int index);

/// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace tilewise::cuda
