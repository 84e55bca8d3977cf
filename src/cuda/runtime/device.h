#pragma once

#include <cstddef>
#include <string>

#include "tilewise/error.h"
#include "tilewise/tensor.h"

namespace tilewise::cuda {

/// The properties of a device and of the code that runs there, by which kernels are configured. Read once per
/// device.
struct DeviceProperties {
  int multiprocessors = 0;
  int compute_capability = 0;    ///< 90 for sm_90
  std::size_t shared_bytes = 0;  ///< the most that a CTA can have
  bool has_code = true;          ///< whether this build has code that runs there
};

/// Throws DeviceError if there is no such device or no driver.
const DeviceProperties& device_properties(int index);

/// The device as tuning files name it: "NVIDIA H200, 132 SMs, 9.0".
std::string device_text(int index);

/// The reason why no kernel of this build runs on the device; empty if kernels run there. Also empty for a
/// device that cannot be asked: the launch then throws with the reason.
std::string unsuited_device(Device device);

/// The reason that `reason(properties)` gives against a device, or the reason why the device cannot be asked.
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

/// For tests: makes device_properties(index) return these, unless it has been called before. The device need
/// not exist.
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
