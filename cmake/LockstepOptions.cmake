# Language level, warnings and sanitizers: what every target of ours is compiled with, and none of a program that has
# this directory within its own build (add_subdirectory, FetchContent).

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  include(CTest)
endif()
set(LOCKSTEP_TESTS OFF)
if(PROJECT_IS_TOP_LEVEL AND BUILD_TESTING)
  set(LOCKSTEP_TESTS ON)
endif()

option(LOCKSTEP_WARNINGS_AS_ERRORS "Treat compiler warnings as errors (the presets turn it on)" OFF)
set(LOCKSTEP_SANITIZE "" CACHE STRING "Sanitizers for every target: address,undefined or thread")

# One binary that runs at the bin's root: README and benchmarks rely on build/lockstep.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})

# errno of math functions is never read, and floating point traps are never on: loops with sqrt or conditions vectorise.
include_directories(${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR})
set(warnings -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wold-style-cast -Wcast-align -Woverloaded-virtual -Wdouble-promotion)
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${warnings};-fno-math-errno;-fno-trapping-math>")
# GCC 12 sees overlapping copies in "text" + std::string (GCC bug 105651).
add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>)
# GCC looks for garbage from 128 MB on, precompiled headers included: a tenth of its time. Where each core has 1 GB, it does
# so from 512 MB on.
cmake_host_system_information(RESULT megabytes QUERY TOTAL_PHYSICAL_MEMORY)
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
math(EXPR megabytes "${megabytes} / ${cores}")
set(heap --param=ggc-min-heapsize=524288)
if(megabytes GREATER_EQUAL 1000 AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${heap}>" "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${heap}>")
endif()
# fmt 9 takes nvcc for a compiler without constexpr, and its checks of format strings then do not compile.
add_compile_options(
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra;-DFMT_USE_CONSTEXPR=1>")
if(LOCKSTEP_WARNINGS_AS_ERRORS)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>)
endif()
if(LOCKSTEP_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${LOCKSTEP_SANITIZE};-fno-omit-frame-pointer>")
  add_link_options(-fsanitize=${LOCKSTEP_SANITIZE})
  add_compile_definitions(LOCKSTEP_SANITIZED=1)
  # GCC does not instrument fences, and says so at each: those in comm/shm stand between processes, of which it sees one.
  # With what it inserts, it takes variables of its own headers (GCC bug 105593) and optionals that are empty for uninitialised.
  add_compile_options("$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-tsan;-Wno-maybe-uninitialized>")
endif()

# The release binary carries only what it calls.
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffunction-sections> $<$<COMPILE_LANGUAGE:CXX>:-fdata-sections>)
  add_link_options(-Wl,--gc-sections)
endif()

# There are some sixty programs to link, and LLD takes a quarter of GNU ld's time. -DLOCKSTEP_LLD=OFF leaves it out.
include(CheckLinkerFlag)
check_linker_flag(CXX -fuse-ld=lld LOCKSTEP_LLD)
if(LOCKSTEP_LLD)
  add_link_options($<$<LINK_LANGUAGE:C,CXX>:-fuse-ld=lld>)
endif()

find_program(LOCKSTEP_CCACHE ccache)
mark_as_advanced(LOCKSTEP_CCACHE)
if(LOCKSTEP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Precompiled headers: ccache looks at what they were made of.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${LOCKSTEP_CCACHE})
endif()
