# Writes the first ```cpp block of INPUT that has a main function to OUTPUT.

cmake_minimum_required(VERSION 3.25)

file(READ "${INPUT}" rest)
set(fence "\n```")
while(TRUE)
  string(FIND "${rest}" "${fence}cpp\n" begin)
  if(begin EQUAL -1)
    message(FATAL_ERROR "${INPUT} has no \`\`\`cpp block with a main function")
  endif()
  math(EXPR begin "${begin} + 8") # past the fence and its newline
  string(SUBSTRING "${rest}" ${begin} -1 rest)
  string(FIND "${rest}" "${fence}" length)
  string(SUBSTRING "${rest}" 0 ${length} block)
  if(block MATCHES "int main *\\(")
    break()
  endif()
  string(SUBSTRING "${rest}" ${length} -1 rest)
endwhile()
file(WRITE "${OUTPUT}" "${block}\n")
