# What is demanded, what is only found, and what the build says about it.

# A library is looked for only if a module of the build names it: a program that embeds one component needs no other
# component's libraries.

# Libraries that are found by header and name: no pkg-config is needed, and no package file that asks for more than is used
# (libzip's wants its command-line tools, oneDNN's OpenCL). lockstep::NAME is the third word's.
set(LOCKSTEP_LIBRARIES
    "oneapi/dnnl/dnnl.hpp dnnl dnnl"
    "hwloc.h hwloc hwloc"
    "zip.h zip libzip"
    "pcre2.h pcre2-8 pcre2"
    "spng.h spng spng"
    "turbojpeg.h turbojpeg turbojpeg"
    "utf8proc.h utf8proc utf8proc")

# lockstep_find_library(NAME): lockstep::NAME.
function(lockstep_find_library name)
  set(found ${LOCKSTEP_LIBRARIES})
  list(FILTER found INCLUDE REGEX " ${name}$")
  separate_arguments(found)
  list(GET found 0 header)
  list(GET found 1 library)
  string(TOUPPER ${name} upper)
  find_path(${upper}_INCLUDE_DIR ${header} REQUIRED)
  find_library(${upper}_LIBRARY ${library} REQUIRED)
  mark_as_advanced(${upper}_INCLUDE_DIR ${upper}_LIBRARY)
  add_library(lockstep_${name} INTERFACE)
  add_library(lockstep::${name} ALIAS lockstep_${name})
  target_include_directories(lockstep_${name} SYSTEM INTERFACE ${${upper}_INCLUDE_DIR})
  target_link_libraries(lockstep_${name} INTERFACE ${${upper}_LIBRARY})
endfunction()

# lockstep_find(TARGETS…): those that nobody has found yet.
function(lockstep_find)
  set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
  list(TRANSFORM LOCKSTEP_LIBRARIES REPLACE ".* " "lockstep::" OUTPUT_VARIABLE by_name)
  foreach(target IN LISTS ARGN)
    if(TARGET ${target} OR NOT target MATCHES "^([A-Za-z0-9_]+)::(.*)")
      continue()
    elseif(target IN_LIST by_name)
      lockstep_find_library(${CMAKE_MATCH_2})
    elseif(NOT CMAKE_MATCH_1 STREQUAL "lockstep")
      find_package(${CMAKE_MATCH_1} REQUIRED)
    endif()
  endforeach()
endfunction()

# lockstep_files_linked_by(COMPONENT RESULT): what a consumer of its static library links besides: -lNAME, and whole paths of
# what lies elsewhere than the system's libraries.
function(lockstep_files_linked_by component result)
  get_property(modules GLOBAL PROPERTY LOCKSTEP_MODULES_${component})
  set(files "")
  foreach(module IN LISTS modules)
    get_property(links GLOBAL PROPERTY LOCKSTEP_LINKS_${module})
    if(TARGET lockstep_${module}_cuda)
      list(APPEND links lockstep::cuda)
    endif()
    lockstep_files_of(${links})
  endforeach()
  set(words "")
  foreach(file IN LISTS files)
    get_filename_component(folder "${file}" DIRECTORY)
    if(folder IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES AND file MATCHES "/lib([^/]+)[.](so|a)[.0-9]*$")
      list(APPEND words -l${CMAKE_MATCH_1})
    else()
      list(APPEND words ${file})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES words)
  set(${result} ${words} PARENT_SCOPE)
endfunction()

# Appends the files of these targets, and of what they link, to `files`.
macro(lockstep_files_of)
  set(pending ${ARGN})
  while(pending)
    list(POP_FRONT pending item)
    if(NOT TARGET "${item}")
      if(item MATCHES "^(/|-l)")
        list(APPEND files ${item})
      elseif(item MATCHES "^[a-z]+$")
        list(APPEND files -l${item})
      endif()
      continue()
    endif()
    get_target_property(linked ${item} INTERFACE_LINK_LIBRARIES)
    if(linked)
      list(APPEND pending ${linked})
    endif()
    get_target_property(kind ${item} TYPE)
    if(NOT kind STREQUAL "INTERFACE_LIBRARY")
      get_target_property(location ${item} LOCATION)
      list(APPEND files ${location})
    endif()
  endwhile()
endmacro()

set(LOCKSTEP_MISSING "")

set(LOCKSTEP_HAVE_MPI OFF)
if("comm" IN_LIST modules)
  find_package(MPI COMPONENTS C)
  set(LOCKSTEP_HAVE_MPI ${MPI_C_FOUND})
  if(NOT LOCKSTEP_HAVE_MPI)
    list(APPEND LOCKSTEP_MISSING "MPI: no --backend mpi, and no ranks of mpirun (libopenmpi-dev and openmpi-bin bring it)")
  endif()
endif()

include(LockstepCuda)

if(LOCKSTEP_TESTS)
  find_package(GTest REQUIRED)
endif()
if(LOCKSTEP_PROGRAM)
  find_package(benchmark QUIET)
  if(NOT benchmark_FOUND)
    list(APPEND LOCKSTEP_MISSING "Google Benchmark: no micro-benchmarks (libbenchmark-dev brings it)")
  endif()
endif()

function(lockstep_print_summary)
  message(STATUS "lockstep ${PROJECT_VERSION} (${CMAKE_BUILD_TYPE}, ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION})")
  if(LOCKSTEP_HAVE_MPI)
    message(STATUS "  MPI: ${MPI_C_LIBRARIES}")
  endif()
  if(LOCKSTEP_HAVE_CUDA)
    message(STATUS "  CUDA: toolkit ${CUDAToolkit_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
  endif()
  if(NOT LOCKSTEP_LLD)
    message(STATUS "  linked without LLD, which is faster (lld brings it)")
  endif()
  foreach(lack IN LISTS LOCKSTEP_MISSING)
    message(STATUS "  without ${lack}")
  endforeach()
endfunction()
