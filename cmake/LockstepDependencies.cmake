# What is demanded, what is only found, and what the build says about it.

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(cxxopts REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(tomlplusplus REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(ZLIB REQUIRED)

# Its own package file wants its command-line tools to be installed too: find the library by name.
find_path(LIBZIP_INCLUDE_DIR zip.h REQUIRED)
find_library(LIBZIP_LIBRARY zip REQUIRED)
add_library(lockstep_libzip INTERFACE)
add_library(lockstep::libzip ALIAS lockstep_libzip)
target_include_directories(lockstep_libzip SYSTEM INTERFACE ${LIBZIP_INCLUDE_DIR})
target_link_libraries(lockstep_libzip INTERFACE ${LIBZIP_LIBRARY})

# By name, so that no pkg-config is needed.
find_path(HWLOC_INCLUDE_DIR hwloc.h REQUIRED)
find_library(HWLOC_LIBRARY hwloc REQUIRED)
add_library(lockstep_hwloc INTERFACE)
add_library(lockstep::hwloc ALIAS lockstep_hwloc)
target_include_directories(lockstep_hwloc SYSTEM INTERFACE ${HWLOC_INCLUDE_DIR})
target_link_libraries(lockstep_hwloc INTERFACE ${HWLOC_LIBRARY})

find_path(PCRE2_INCLUDE_DIR pcre2.h REQUIRED)
find_library(PCRE2_LIBRARY pcre2-8 REQUIRED)
add_library(lockstep_pcre2 INTERFACE)
add_library(lockstep::pcre2 ALIAS lockstep_pcre2)
target_include_directories(lockstep_pcre2 SYSTEM INTERFACE ${PCRE2_INCLUDE_DIR})
target_link_libraries(lockstep_pcre2 INTERFACE ${PCRE2_LIBRARY})

# oneDNN's own package file asks for OpenCL, which nothing here uses: find the library by name.
find_path(DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.hpp REQUIRED)
find_library(DNNL_LIBRARY dnnl REQUIRED)
add_library(lockstep_dnnl INTERFACE)
add_library(lockstep::dnnl ALIAS lockstep_dnnl)
target_include_directories(lockstep_dnnl SYSTEM INTERFACE ${DNNL_INCLUDE_DIR})
target_link_libraries(lockstep_dnnl INTERFACE ${DNNL_LIBRARY})
find_package(OpenMP REQUIRED COMPONENTS CXX)

set(LOCKSTEP_MISSING "")

find_package(MPI COMPONENTS C)
set(LOCKSTEP_HAVE_MPI ${MPI_C_FOUND})
if(NOT LOCKSTEP_HAVE_MPI)
  list(APPEND LOCKSTEP_MISSING "MPI: one process only (libopenmpi-dev and openmpi-bin bring it)")
endif()

include(LockstepCuda)

if(BUILD_TESTING)
  find_package(GTest REQUIRED)
endif()
find_package(benchmark QUIET)
if(NOT benchmark_FOUND)
  list(APPEND LOCKSTEP_MISSING "Google Benchmark: no micro-benchmarks (libbenchmark-dev brings it)")
endif()

function(lockstep_print_summary)
  message(STATUS "lockstep ${PROJECT_VERSION} (${CMAKE_BUILD_TYPE}, ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION})")
  if(LOCKSTEP_HAVE_MPI)
    message(STATUS "  MPI: ${MPI_C_LIBRARIES}")
  endif()
  if(LOCKSTEP_HAVE_CUDA)
    message(STATUS "  CUDA: toolkit ${CUDAToolkit_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
  endif()
  foreach(lack IN LISTS LOCKSTEP_MISSING)
    message(STATUS "  without ${lack}")
  endforeach()
endfunction()
