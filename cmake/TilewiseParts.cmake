# The optional parts, each AUTO (built when possible), ON (an error when not) or OFF, and each with one line
# that says what became of it. bindings/torch looks for what it needs itself.

set(TILEWISE_CUDA AUTO CACHE STRING "CUDA kernels: AUTO, ON or OFF")
set(TILEWISE_TORCH AUTO CACHE STRING "PyTorch binding: AUTO, ON or OFF")

# Says that a part is left out, or fails where it was asked for.
function(tilewise_left_out name choice reason)
  if(NOT choice MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${name}: expected AUTO, ON or OFF, got '${choice}'")
  elseif(choice STREQUAL "ON")
    message(FATAL_ERROR "${name}: asked for, but ${reason}")
  elseif(choice STREQUAL "OFF")
    set(reason "switched off")
  endif()
  message(STATUS "${name}: left out (${reason})")
endfunction()

# Machine code for what most data centres have, and PTX from which the driver makes the rest.
set(TILEWISE_CUDA_ARCHITECTURES "75-virtual;80-real;90-real;90-virtual" CACHE STRING
    "Architectures the CUDA kernels are compiled for, as CMAKE_CUDA_ARCHITECTURES")

# CMake 3.25, which Debian 12 has, speaks of a library when it finds a toolkit, which CUDA 13 no longer has, and fails
# without a target of that name.
if(CMAKE_VERSION VERSION_LESS 3.26 AND NOT TARGET CUDA::nvToolsExt)
  add_library(CUDA::nvToolsExt INTERFACE IMPORTED GLOBAL)
endif()

# For tests where there is no GPU: the kernels are compiled as C++ and run by tests/emulator.
option(TILEWISE_EMULATOR "Run the CUDA kernels on the CPU; needs CUDA's headers, not nvcc" OFF)
option(TILEWISE_EMULATOR_RACES "With TILEWISE_EMULATOR: report accesses to memory that nothing puts in order" OFF)

set(TILEWISE_HAS_CUDA OFF)
set(TILEWISE_HAS_WGMMA OFF)
include(CheckLanguage)
if(NOT TILEWISE_CUDA STREQUAL "OFF" AND NOT TILEWISE_EMULATOR)
  set(CMAKE_CUDA_ARCHITECTURES ${TILEWISE_CUDA_ARCHITECTURES})
  check_language(CUDA)
endif()
if(TILEWISE_EMULATOR)
  set(TILEWISE_HAS_CUDA ON)
  # One architecture at a time: the newest that is asked for.
  string(REGEX MATCHALL "[0-9]+" numbers "${TILEWISE_CUDA_ARCHITECTURES}")
  list(SORT numbers COMPARE NATURAL ORDER DESCENDING)
  list(GET numbers 0 TILEWISE_EMULATED_ARCHITECTURE)
  if(TILEWISE_EMULATED_ARCHITECTURE EQUAL 90)
    set(TILEWISE_HAS_WGMMA ON)
  endif()
  message(STATUS "CUDA: emulated on the CPU, for tests (code of ${TILEWISE_EMULATED_ARCHITECTURE})")
elseif(TILEWISE_CUDA STREQUAL "OFF")
  tilewise_left_out("CUDA" OFF "")
elseif(NOT CMAKE_CUDA_COMPILER)
  tilewise_left_out("CUDA" "${TILEWISE_CUDA}" "no nvcc")
else()
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    tilewise_left_out("CUDA" "${TILEWISE_CUDA}" "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.8")
  else()
    set(TILEWISE_HAS_CUDA ON)
    if(TILEWISE_CUDA_ARCHITECTURES MATCHES "(^|;)(90|all|native)")
      set(TILEWISE_HAS_WGMMA ON) # with code for 90a, whatever of 90 is asked for
    endif()
    message(STATUS "CUDA: built (nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ${TILEWISE_CUDA_ARCHITECTURES})")
  endif()
endif()
