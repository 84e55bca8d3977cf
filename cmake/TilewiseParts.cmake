# The optional parts, each AUTO (built when possible), ON (an error when not) or OFF, and each with one line
# that says what became of it. Neither part has sources yet; the search for its toolkit comes with them.

set(TILEWISE_CUDA AUTO CACHE STRING "CUDA kernels: AUTO, ON or OFF")
set(TILEWISE_TORCH AUTO CACHE STRING "PyTorch binding: AUTO, ON or OFF")

function(tilewise_part name choice directory missing)
  if(NOT choice MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${name}: expected AUTO, ON or OFF, got '${choice}'")
  elseif(choice STREQUAL "OFF")
    set(reason "switched off")
  elseif(NOT IS_DIRECTORY "${PROJECT_SOURCE_DIR}/${directory}")
    set(reason "${missing}")
  else()
    message(FATAL_ERROR "${name}: ${directory} is there, but cmake/TilewiseParts.cmake cannot build it yet")
  endif()
  if(choice STREQUAL "ON")
    message(FATAL_ERROR "${name}: asked for, but ${reason}")
  endif()
  message(STATUS "${name}: left out (${reason})")
endfunction()

tilewise_part("CUDA" "${TILEWISE_CUDA}" src/cuda "no kernels in this version")
tilewise_part("PyTorch" "${TILEWISE_TORCH}" bindings/torch "no binding in this version")
