# Installs BUILD_TREE to a prefix under WORK, then configures, builds and runs the programs of EXAMPLE against it.

cmake_minimum_required(VERSION 3.25)

file(REMOVE_RECURSE "${WORK}") # nothing of an earlier run may help
set(run COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD_TREE} --config ${CONFIG} --prefix ${WORK}/prefix ${run})
# Headers, the library, its CMake package and the licence, and nothing else.
file(GLOB_RECURSE installed RELATIVE ${WORK}/prefix ${WORK}/prefix/*)
list(FILTER installed EXCLUDE REGEX
     "^(include/tilewise/[a-z_]+\\.h|lib.*/libtilewise\\..*|lib.*/cmake/tilewise/.*|share/doc/tilewise/.*)$")
if(installed OR NOT EXISTS ${WORK}/prefix/share/doc/tilewise/LICENSE)
  message(FATAL_ERROR "Installed but not expected: ${installed}; or no licence")
endif()
execute_process(
  COMMAND ${CMAKE_COMMAND} -S ${EXAMPLE} -B ${WORK}/build -G ${GENERATOR} -D CMAKE_CXX_COMPILER=${COMPILER} -D
          CMAKE_BUILD_TYPE=${CONFIG} -D CMAKE_PREFIX_PATH=${WORK}/prefix ${run})
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK}/build --config ${CONFIG} ${run})
foreach(name example layer)
  find_program(${name} NAMES ${name} PATHS ${WORK}/build ${WORK}/build/${CONFIG} NO_DEFAULT_PATH REQUIRED)
  execute_process(COMMAND ${${name}} ${run})
endforeach()
# Without weights; tests/python runs it with them.
find_program(minilm NAMES minilm PATHS ${WORK}/build/minilm ${WORK}/build/minilm/${CONFIG} NO_DEFAULT_PATH REQUIRED)
execute_process(COMMAND ${minilm} --help ${run})
