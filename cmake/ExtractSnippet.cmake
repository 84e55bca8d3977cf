# Writes the ```cpp block of INPUT that NUMBER counts, the first being 0, to OUTPUT. It must be a program; what is
# none begins with ```cpp fragment, and is not counted.

cmake_minimum_required(VERSION 3.25)

file(READ "${INPUT}" rest)
set(fence "\n```")
foreach(passed RANGE ${NUMBER})
  string(FIND "${rest}" "${fence}cpp\n" begin)
  if(begin EQUAL -1)
    message(FATAL_ERROR "${INPUT} has no \`\`\`cpp block ${NUMBER}")
  endif()
  math(EXPR begin "${begin} + 8") # past the fence and its newline
  string(SUBSTRING "${rest}" ${begin} -1 rest)
endforeach()
string(FIND "${rest}" "${fence}" length)
string(SUBSTRING "${rest}" 0 ${length} block)
if(NOT block MATCHES "int main *\\(")
  message(FATAL_ERROR "${INPUT}: \`\`\`cpp block ${NUMBER} has no main function; if it is meant to have none, "
                      "begin it with \`\`\`cpp fragment")
endif()
file(WRITE "${OUTPUT}" "${block}\n")
