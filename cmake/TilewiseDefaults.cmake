# What a build does when nobody says otherwise. A parent project makes these choices itself.

if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

# Looked for on PATH alone, so that who leaves it out there builds without it.
find_program(TILEWISE_CCACHE ccache DOC "Compiler cache, used where present" NO_CMAKE_SYSTEM_PATH)
mark_as_advanced(TILEWISE_CCACHE)
if(TILEWISE_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${TILEWISE_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${TILEWISE_CCACHE}")
endif()
