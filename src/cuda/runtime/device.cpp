#include "cuda/runtime/device.h"

#include <algorithm>
#include <array>
#include <mutex>

#include "core/reasons.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/code.h"

namespace tilewise::cuda {
namespace {

constexpr int max_devices = 64;

int attribute(cudaDeviceAttr what, int index) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, what, index), "reading a CUDA device's properties");
  return value;
}

DeviceProperties read_properties(int index) {
  DeviceProperties properties{
      .multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index),
      .compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                            attribute(cudaDevAttrComputeCapabilityMinor, index),
      .shared_bytes = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index))};
  const DeviceGuard guard(index);
  const int code = code_architecture();
  properties.has_code = code != 0;
  if (code == 0) return properties;
  // With code for an older architecture, the device counts as an older GPU.
  if (code < 90) properties.compute_capability = std::min(properties.compute_capability, code);
  properties.shared_bytes = std::min(properties.shared_bytes, shared_bytes_of(code));
  return properties;
}

struct Known {
  std::once_flag once;
  DeviceProperties properties;
};

Known& known_device(int index) {
  static std::array<Known, max_devices> all;
  if (index < 0 || index >= max_devices) {
    throw DeviceError("cuda:" + std::to_string(index) + ": no such device");
  }
  return all[static_cast<std::size_t>(index)];
}

}  // namespace

const DeviceProperties& device_properties(int index) {
  Known& known = known_device(index);
  std::call_once(known.once, [&] { known.properties = read_properties(index); });
  return known.properties;
}

void assume_device(int index, const DeviceProperties& properties) {
  Known& known = known_device(index);
  std::call_once(known.once, [&] { known.properties = properties; });
}

std::string device_text(int index) {
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, index), "reading a CUDA device's name");
  const DeviceProperties& properties = device_properties(index);
  return std::string(device.name) + ", " + std::to_string(properties.multiprocessors) + " SMs, " +
         std::to_string(properties.compute_capability / 10) + "." +
         std::to_string(properties.compute_capability % 10);
}

std::string unsuited_device(Device device) {
  if (device.type != Device::Type::cuda) return "runs on CUDA devices only";
  try {
    const DeviceProperties& properties = device_properties(device.index);
    if (properties.has_code) return {};
    const int capability = properties.compute_capability;
    return "this build has no code for compute capability " + std::to_string(capability / 10) + "." +
           std::to_string(capability % 10);
  } catch (const DeviceError&) {
    return {};
  }
}

std::string unsuited_shared_memory(Device device, std::size_t needed) {
  const std::size_t most = device_properties(device.index).shared_bytes;
  if (most >= needed) return {};
  return needs(std::to_string(needed) + " bytes of shared memory per CTA", std::to_string(most));
}

DeviceGuard::DeviceGuard(int index) {
  check_cuda(cudaGetDevice(&before_), "asking for the current CUDA device");
  if (before_ == index) return;
  check_cuda(cudaSetDevice(index), "making a CUDA device current");
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) cudaSetDevice(before_);
}

}  // namespace tilewise::cuda
