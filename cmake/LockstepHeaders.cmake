# What nearly all files include takes longer to read than most files to compile: so it is read once, or once for several.

option(LOCKSTEP_PRECOMPILED_HEADERS "Read the standard library's headers once; off, each file of a module must include what it uses" ON)

option(LOCKSTEP_UNITY_BUILD "Compile several files at a time; off, each has a compile command of its own" ON)

set(LOCKSTEP_COMMON_HEADERS
  <fmt/format.h> <algorithm> <array> <atomic> <chrono> <cmath> <cstdint> <cstring> <filesystem> <fstream> <functional> <map>
  <memory> <mutex> <numeric> <optional> <span> <string> <string_view> <thread> <utility> <vector>)

# What files that read precompiled headers are compiled with.
set(LOCKSTEP_PRECOMPILED_OPTIONS "")
if(LOCKSTEP_CCACHE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND LOCKSTEP_PRECOMPILED_OPTIONS $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)  # or ccache compiles all again
endif()
# In a precompiled header GCC 12 takes the standard library for ours, and sees copies past the end of std::strings.
set(untrue array-bounds stringop-overflow maybe-uninitialized mismatched-new-delete)
list(TRANSFORM untrue PREPEND -Wno-)
list(APPEND LOCKSTEP_PRECOMPILED_OPTIONS "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:${untrue}>")

# Precompiled headers are read by files alone that have the same macros, and OpenMP defines one.
if("nn" IN_LIST modules)
  lockstep_find(OpenMP::OpenMP_CXX)
  get_target_property(openmp OpenMP::OpenMP_CXX INTERFACE_COMPILE_OPTIONS)
  add_compile_options("${openmp}")
endif()
# base's headers have fmt's, and JSON's.
lockstep_find(fmt::fmt nlohmann_json::nlohmann_json)
foreach(library fmt::fmt nlohmann_json::nlohmann_json)
  include_directories(SYSTEM $<TARGET_PROPERTY:${library},INTERFACE_INCLUDE_DIRECTORIES>)
  add_compile_definitions($<TARGET_PROPERTY:${library},INTERFACE_COMPILE_DEFINITIONS>)
endforeach()
if(LOCKSTEP_PRECOMPILED_HEADERS)
  file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/headers.cpp CONTENT "")
  add_library(lockstep_headers OBJECT EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/headers.cpp)
  target_compile_options(lockstep_headers PRIVATE "${LOCKSTEP_PRECOMPILED_OPTIONS}")
  target_precompile_headers(lockstep_headers PRIVATE ${LOCKSTEP_COMMON_HEADERS})
endif()

# lockstep_precompiled(TARGET): a library of ours whose C++ files may read them.
function(lockstep_precompiled target)
  if(LOCKSTEP_PRECOMPILED_HEADERS)
    target_precompile_headers(${target} REUSE_FROM lockstep_headers)
    target_compile_options(${target} PRIVATE "${LOCKSTEP_PRECOMPILED_OPTIONS}")
  endif()
endfunction()
