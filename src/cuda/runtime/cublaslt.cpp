#include "cuda/runtime/cublaslt.h"

#include <dlfcn.h>

#include <array>
#include <mutex>
#include <type_traits>

#include "cuda/runtime/check.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {
namespace {

struct Found {
  CublasLt functions{};
  std::string reason;  ///< why there is none
};

// Prefers a library that is loaded already, such as PyTorch's: a process should not have two.
void* open_library() {
  constexpr std::array names = {"libcublasLt.so.13", "libcublasLt.so.12"};
  for (const int how : {RTLD_NOLOAD, 0}) {
    for (const char* name : names) {
      if (void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL | how)) return library;
    }
  }
  return nullptr;
}

Found look_for_library() {
  void* library = open_library();
  if (library == nullptr) return {.reason = "needs cuBLASLt 12 or 13, which was not found"};
  Found found;
  const auto look_up = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && found.reason.empty()) {
      found.reason = std::string("needs a cuBLASLt with the function ") + name;
    }
  };
  CublasLt& lt = found.functions;
  look_up(lt.create, "cublasLtCreate");
  look_up(lt.create_description, "cublasLtMatmulDescCreate");
  look_up(lt.set_description, "cublasLtMatmulDescSetAttribute");
  look_up(lt.destroy_description, "cublasLtMatmulDescDestroy");
  look_up(lt.create_layout, "cublasLtMatrixLayoutCreate");
  look_up(lt.destroy_layout, "cublasLtMatrixLayoutDestroy");
  look_up(lt.create_preference, "cublasLtMatmulPreferenceCreate");
  look_up(lt.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  look_up(lt.destroy_preference, "cublasLtMatmulPreferenceDestroy");
  look_up(lt.choose, "cublasLtMatmulAlgoGetHeuristic");
  look_up(lt.multiply, "cublasLtMatmul");
  return found;
}

// While a stream of this thread is being captured, CUDA refuses calls that might synchronise. Creating a
// handle involves no stream, so this scope permits it.
class OutsideOfCapture {
 public:
  OutsideOfCapture() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "leaving a capture"); }
  ~OutsideOfCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideOfCapture(const OutsideOfCapture&) = delete;
  OutsideOfCapture& operator=(const OutsideOfCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A device's handle, or the reason why there is none: even if the library loads, memory may be too small or
// the driver too old.
struct Made {
  CublasLt::Handle handle = nullptr;
  std::string reason;
};

Made make_for(int device) {
  Made made;
  const CublasLt* const lt = find_cublaslt(&made.reason);
  if (lt == nullptr) return made;
  try {
    const DeviceGuard guard(device);
    const OutsideOfCapture outside;
    made.reason = make_handle(*lt, made.handle);
  } catch (const DeviceError& error) {
    made.reason = error.what();
  }
  return made;
}

const Made& made_for(int device) {
  constexpr std::size_t most_devices = 64;
  static std::array<Made, most_devices> all;
  static std::array<std::once_flag, most_devices> once;
  const auto slot = static_cast<std::size_t>(device);
  std::call_once(once.at(slot), [&] { all[slot] = make_for(device); });
  return all[slot];
}

}  // namespace

const CublasLt* find_cublaslt(std::string* reason) {
  static const Found found = look_for_library();
  if (reason != nullptr) *reason = found.reason;
  return found.reason.empty() ? &found.functions : nullptr;
}

std::string make_handle(const CublasLt& lt, CublasLt::Handle& handle) {
  const CublasLt::Status status = lt.create(&handle);
  if (status == 0) return {};
  handle = nullptr;
  return "cuBLASLt failed to create a handle: status " + std::to_string(status);
}

std::string missing_cublaslt(int device) { return made_for(device).reason; }

CublasLt::Handle cublaslt_handle() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current CUDA device");
  const Made& made = made_for(device);
  if (made.handle == nullptr) throw DeviceError(made.reason);
  return made.handle;
}

void check_cublaslt(CublasLt::Status status, const char* what) {
  if (status != 0) throw DeviceError(std::string(what) + ": cuBLAS status " + std::to_string(status));
}

}  // namespace tilewise::cuda
