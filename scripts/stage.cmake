# What scripts/stage.sh adds to the project. Every program that looks inside the library would carry all kernels:
# here they share them, in one library in which everything is visible.

function(tilewise_share_objects)
  find_package(OpenMP REQUIRED COMPONENTS CXX)
  find_package(CUDAToolkit REQUIRED)
  set_target_properties(tilewise_objects PROPERTIES CXX_VISIBILITY_PRESET default CUDA_VISIBILITY_PRESET default)
  add_library(tilewise_shared SHARED $<TARGET_OBJECTS:tilewise_objects>)
  target_link_libraries(tilewise_shared PRIVATE OpenMP::OpenMP_CXX CUDA::cudart_static)
  # Before the objects on the linker's command line, so that nothing is left to be taken from the archive.
  target_link_options(tilewise_internal INTERFACE LINKER:--push-state,--no-as-needed $<TARGET_FILE:tilewise_shared>
                      LINKER:--pop-state)
  add_dependencies(tilewise_internal tilewise_shared)
endfunction()

cmake_language(DEFER CALL tilewise_share_objects) # when all targets are there
