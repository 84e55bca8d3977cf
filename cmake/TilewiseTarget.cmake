# tilewise_target(<target>): the flags every target of this project is compiled with.
#
# Nothing here may depend on the machine that builds: no -march=native. The binary runs on the architecture's
# baseline and Highway picks better instructions at run time.

set(TILEWISE_WARNINGS
    -Wall
    -Wextra
    -Wpedantic
    -Wshadow
    -Wconversion # offsets are 64 bits wide and statistics are f32: narrowing must be written down
    -Wdouble-promotion
    -Wold-style-cast
    -Wnon-virtual-dtor
    -Woverloaded-virtual
    -Wundef
    -Wvla)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 sees overruns in the standard library's inlined std::sort and std::string that are not there.
  # The sanitized tests look for real ones.
  list(APPEND TILEWISE_WARNINGS -Wno-array-bounds -Wno-restrict)
endif()

function(tilewise_target target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set(visibility hidden)
  set(hides_inlines ON)
  if(TILEWISE_SHARE_LIBRARY) # programs look inside
    set(visibility default)
    set(hides_inlines OFF)
    set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Shared) # one, whoever launches
  endif()
  set_target_properties(
    ${target}
    PROPERTIES CXX_EXTENSIONS OFF
               CUDA_VISIBILITY_PRESET ${visibility}
               CXX_VISIBILITY_PRESET ${visibility}
               VISIBILITY_INLINES_HIDDEN ${hides_inlines})
  # The host code nvcc makes of a .cu file does not live up to all of these warnings.
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${TILEWISE_WARNINGS} $<$<BOOL:${TILEWISE_WERROR}>:-Werror>
                      $<$<CONFIG:Release>:-g1>> # enough for a profile or a backtrace with lines
                      # CMake 3.25 does not know nvcc 13's standards: said outright.
                      $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 $<$<BOOL:${TILEWISE_WERROR}>:-Werror=all-warnings>>)
  # Indices into vectors, arrays and spans are checked where assertions are.
  target_compile_definitions(${target} PRIVATE $<$<CONFIG:Debug>:_GLIBCXX_ASSERTIONS>)
  if(TILEWISE_SANITIZE)
    set(sanitize -fsanitize=${TILEWISE_SANITIZE})
    # The sanitizers' own code in the optimiser's way gives false maybe-uninitialized warnings.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${sanitize} -fno-sanitize-recover=all
                                             -fno-omit-frame-pointer
                                             $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>>)
    target_link_options(${target} PUBLIC ${sanitize})
  endif()
endfunction()

# tilewise_unity(<target> <sources>...): C++ files of one folder are compiled as one, since most of their time is that of
# headers. Names in their unnamed namespaces have to differ, then.
function(tilewise_unity target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${TILEWISE_UNITY} UNITY_BUILD_MODE GROUP)
  foreach(source IN LISTS ARGN)
    cmake_path(GET source PARENT_PATH folder)
    string(MAKE_C_IDENTIFIER "${target}/${folder}" group)
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
  endforeach()
endfunction()

# tilewise_hopper_target(<target>): CUDA code for sm_90a alone, after tilewise_target. Fails to build where ptxas
# gives up what the kernels were written for.
function(tilewise_hopper_target target)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF) # CMake 3.25 does not know 90a: said outright
  # A list of words, not a string: without a compiler cache there is no second word, and not an empty one either.
  set_property(TARGET ${target} PROPERTY CUDA_COMPILER_LAUNCHER ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/check_ptxas.sh
                                         ${CMAKE_CUDA_COMPILER_LAUNCHER})
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_90a,code=sm_90a -Xptxas=-v
                      --expt-relaxed-constexpr>)
endfunction()
