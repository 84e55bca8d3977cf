# Which code a .cu file becomes. A pass of the compiler makes PTX of the source, once for each architecture that the
# source may tell from others, and ptxas makes machine code of it: of the time, half is one and half the other. So
# sources say what they tell apart, and are compiled for it alone:
#
#   tilewise_code(<sources>... [SINCE_80] [NOTHING_OF_90])
#
# SINCE_80: kernels that exist from 8.0 on, and are empty before.
# NOTHING_OF_90: the same for 9.0 as for 8.0, so the PTX of 8.0 serves all from there on. Headers that do tell 9.0 apart
# refuse to be part of such a source.

# CMake's own way for what names no number (all, native).
set(TILEWISE_CODE_BY_SOURCE ON)
foreach(architecture IN LISTS TILEWISE_CUDA_ARCHITECTURES)
  if(NOT architecture MATCHES "^[0-9]+(-real|-virtual)?$")
    set(TILEWISE_CODE_BY_SOURCE OFF)
  endif()
endforeach()

function(tilewise_code)
  cmake_parse_arguments(PARSE_ARGV 0 code "SINCE_80;NOTHING_OF_90" "" "")
  if(NOT TILEWISE_CODE_BY_SOURCE OR TILEWISE_EMULATOR)
    return()
  endif()
  list(SORT TILEWISE_CUDA_ARCHITECTURES COMPARE NATURAL)
  string(REGEX MATCH "(^|;)(8[0-9]|9[0-9]|1[0-9][0-9])" newer "${TILEWISE_CUDA_ARCHITECTURES}")
  set(first_newer ${CMAKE_MATCH_2})
  set(passes)
  foreach(architecture IN LISTS TILEWISE_CUDA_ARCHITECTURES)
    string(REGEX MATCH "^[0-9]+" number ${architecture})
    if(code_SINCE_80 AND newer AND number LESS 80)
      continue()
    endif()
    set(pass ${number})
    if(code_NOTHING_OF_90 AND number GREATER_EQUAL 80)
      set(pass ${first_newer})
    endif()
    list(APPEND passes ${pass})
    if(NOT architecture MATCHES "-virtual")
      list(APPEND code_of_${pass} sm_${number})
    endif()
    if(NOT architecture MATCHES "-real")
      list(APPEND code_of_${pass} compute_${pass})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES passes)
  set(options $<$<BOOL:${code_NOTHING_OF_90}>:-DTILEWISE_NOTHING_OF_90>)
  foreach(pass IN LISTS passes)
    list(REMOVE_DUPLICATES code_of_${pass})
    list(JOIN code_of_${pass} "," targets)
    list(APPEND options "--generate-code=arch=compute_${pass},code=[${targets}]")
  endforeach()
  set_source_files_properties(${code_UNPARSED_ARGUMENTS} PROPERTIES COMPILE_OPTIONS "${options}")
endfunction()

#   tilewise_together(<list> <sources>...)
#
# Replaces small sources of a list, of the same passes, by one that includes them, with TILEWISE_UNITY: every file pays
# for its headers once a pass and once more for the host. Names in their unnamed namespaces have to differ.
function(tilewise_together list)
  if(NOT TILEWISE_UNITY OR TILEWISE_EMULATOR)
    return()
  endif()
  list(GET ARGN 0 first)
  get_source_file_property(options ${first} COMPILE_OPTIONS)
  set(text)
  foreach(source IN LISTS ARGN)
    list(FIND ${list} ${source} place)
    if(place EQUAL -1)
      message(FATAL_ERROR "tilewise_together: ${source} is not in ${list}")
    endif()
    list(REMOVE_AT ${list} ${place})
    string(APPEND text "#include \"${source}\"\n")
  endforeach()
  string(MAKE_C_IDENTIFIER "${first}" name)
  set(together ${CMAKE_CURRENT_BINARY_DIR}/together/${name}.cu)
  file(CONFIGURE OUTPUT ${together} CONTENT "${text}")
  if(options)
    set_source_files_properties(${together} PROPERTIES COMPILE_OPTIONS "${options}")
  endif()
  set(${list} ${${list}} ${together} PARENT_SCOPE)
endfunction()

# For the emulator: the sources are C++ behind what nvcc gives every source. Of unrolled loops and of what kernels leave
# unused g++ would have much to say.
function(tilewise_emulated target)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cu$")
  set(emulator ${PROJECT_SOURCE_DIR}/tests/emulator)
  set(options -w -O1 -ffp-contract=off -include ${emulator}/prelude.h)
  target_compile_definitions(${target} PRIVATE TILEWISE_EMULATOR
                                               TILEWISE_EMULATED_ARCHITECTURE=${TILEWISE_EMULATED_ARCHITECTURE})
  if(TILEWISE_EMULATOR_RACES) # only the calls: tests/emulator/races has the functions
    list(APPEND options -fsanitize=thread -g1 --param=tsan-instrument-func-entry-exit=0
         --param=tsan-distinguish-volatile=1)
    target_compile_definitions(${target} PRIVATE TILEWISE_EMULATOR_RACES)
  endif()
  set_source_files_properties(${sources} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "${options}")
  target_include_directories(${target} BEFORE PRIVATE ${emulator} ${emulator}/include)
endfunction()
