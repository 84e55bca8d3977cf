#pragma once

#include <cstddef>
#include <string>

#include "tilewise/error.h"
#include "tilewise/tensor.h"

namespace tilewise::cuda {

/// What kernels are configured by: a device and the code that runs there; read once a device.
struct DeviceProperties {
  int multiprocessors = 0;
  int compute_capability = 0;    ///< 90 for sm_90
  std::size_t shared_bytes = 0;  ///< a block may have, when it asks
  bool has_code = true;          ///< whether this build has code that runs there
};

/// Throws DeviceError when there is no such device or no driver.
const DeviceProperties& device_properties(int index);

/// The device as tuning files name it: "NVIDIA H200, 132 SMs, 9.0".
std::string device_text(int index);

/// Empty where kernels of this build run on the device, else why none does. A device that cannot be asked is
/// left to the launch, which throws and says why.
std::string unsuited_device(Device device);

/// What `reason(properties)` has against a device; or why that cannot be asked.
template <typename Reason>
std::string reason_against_device(Device device, const Reason& reason) {
  try {
    return reason(device_properties(device.index));
  } catch (const DeviceError& error) {
    return error.what();
  }
}

/// Empty where a CTA may have so many bytes of shared memory on the device, else why not.
std::string unsuited_shared_memory(Device device, std::size_t needed);

/// For tests: device_properties(index) gives these from now on, if nobody has asked before. There need not be
/// such a device.
void assume_device(int index, const DeviceProperties& properties);

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
