# CUDA, whole or not at all: toolkit, NCCL, cuDNN and cudnn-frontend's headers. Of these only the CUDA runtime is
# linked, statically; the program opens the others when it uses a GPU, so that it starts on machines without one.

# lockstep_nvidia_packages(RESULT MAJOR): directories `nvidia` among Python's packages whose cuDNN is for that CUDA: wheels
# for different ones lie under the same names.
function(lockstep_nvidia_packages result major)
  set(places /usr/lib/python3 /usr/lib/python3.* /usr/local/lib/python3.*)
  foreach(place $ENV{VIRTUAL_ENV} $ENV{CONDA_PREFIX} $ENV{HOME}/.local /opt/conda)
    list(APPEND places ${place}/lib/python3.*)
  endforeach()
  list(TRANSFORM places APPEND /*-packages/nvidia_cudnn_cu${major}-*.dist-info OUTPUT_VARIABLE stamps)
  file(GLOB stamps ${stamps})
  list(TRANSFORM stamps REPLACE "/[^/]*$" "/nvidia")
  set(${result} ${stamps} PARENT_SCOPE)
endfunction()

# What scripts/get-cuda has fetched is whole, and was fetched because the machine lacked something.
set(LOCKSTEP_FETCHED_CUDA ${PROJECT_SOURCE_DIR}/.cache/cuda/nvidia)
set(nvidia_packages "")
if(EXISTS ${LOCKSTEP_FETCHED_CUDA} AND NOT CUDAToolkit_ROOT AND NOT DEFINED ENV{CUDAToolkit_ROOT})
  set(nvidia_packages ${LOCKSTEP_FETCHED_CUDA})
  set(CUDAToolkit_ROOT ${LOCKSTEP_FETCHED_CUDA}/cu13)
endif()
# Where a project asks for CMake 3.25 itself, that version's module marks nvToolsExt as outdated, and fails with CUDA 13,
# which has none any more.
set(minimum ${CMAKE_MINIMUM_REQUIRED_VERSION})
set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
find_package(CUDAToolkit QUIET)
set(CMAKE_MINIMUM_REQUIRED_VERSION ${minimum})
if(CUDAToolkit_FOUND AND NOT nvidia_packages)
  lockstep_nvidia_packages(nvidia_packages ${CUDAToolkit_VERSION_MAJOR})
endif()
list(TRANSFORM nvidia_packages APPEND /cudnn/include OUTPUT_VARIABLE cudnn_places)
list(TRANSFORM nvidia_packages APPEND /nccl/include OUTPUT_VARIABLE nccl_places)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS ${nccl_places})
find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS ${cudnn_places})
find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h HINTS ${PROJECT_SOURCE_DIR}/.cache/cudnn-frontend/include)
mark_as_advanced(NCCL_INCLUDE_DIR CUDNN_INCLUDE_DIR CUDNN_FRONTEND_INCLUDE_DIR)

# Collectives alone need NCCL's headers, and no cuDNN.
set(lockstep_computes ON)
if(LOCKSTEP_COMPONENTS STREQUAL comm)
  set(lockstep_computes OFF)
endif()
set(LOCKSTEP_HAVE_CUDA OFF)
if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE OR NOT TARGET CUDA::cudart_static)
  list(APPEND LOCKSTEP_MISSING "CUDA: CPU only (the CUDA Toolkit brings it)")
elseif(CUDAToolkit_VERSION VERSION_LESS 12.4)
  list(APPEND LOCKSTEP_MISSING "CUDA: the CUDA Toolkit ${CUDAToolkit_VERSION} is too old (it takes 12.4 or newer)")
elseif(NOT NCCL_INCLUDE_DIR)
  list(APPEND LOCKSTEP_MISSING "CUDA: no NCCL (libnccl-dev brings it)")
elseif(NOT CUDNN_INCLUDE_DIR AND lockstep_computes)
  list(APPEND LOCKSTEP_MISSING "CUDA: no cuDNN (cudnn9-cuda-${CUDAToolkit_VERSION_MAJOR} brings it)")
elseif(NOT CUDNN_FRONTEND_INCLUDE_DIR AND lockstep_computes)
  list(APPEND LOCKSTEP_MISSING "CUDA: no cudnn-frontend (scripts/get-cudnn-frontend brings it)")
elseif(LOCKSTEP_SANITIZE)
  list(APPEND LOCKSTEP_MISSING "CUDA: left out of builds with sanitizers")
else()
  set(LOCKSTEP_HAVE_CUDA ON)
endif()

if(LOCKSTEP_HAVE_CUDA)
  # A library whose headers are a package's is opened from there.
  foreach(include ${CUDAToolkit_INCLUDE_DIRS} ${CUDNN_INCLUDE_DIR} ${NCCL_INCLUDE_DIR})
    foreach(place IN LISTS nvidia_packages)
      cmake_path(IS_PREFIX place ${include} is_package)
      if(is_package)
        cmake_path(REPLACE_FILENAME include lib OUTPUT_VARIABLE libraries)
        list(APPEND CMAKE_BUILD_RPATH ${libraries})
      endif()
    endforeach()
  endforeach()
  list(REMOVE_DUPLICATES CMAKE_BUILD_RPATH)
  # Machine code for the GPUs of this machine. Where it has none, as where packages are built: for data-centre cards, and
  # PTX of the newest for what comes later.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE capabilities ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
    list(TRANSFORM capabilities REPLACE "[.]" "")
    list(FILTER capabilities EXCLUDE REGEX "^[1-7].$")  # too old for the kernels: the program says so
    list(REMOVE_DUPLICATES capabilities)
    list(TRANSFORM capabilities APPEND -real OUTPUT_VARIABLE CMAKE_CUDA_ARCHITECTURES)
    if(NOT CMAKE_CUDA_ARCHITECTURES AND CUDAToolkit_VERSION VERSION_LESS 12.8)  # knows no 100
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
    elseif(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
    endif()
  endif()
  set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  if(LOCKSTEP_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${LOCKSTEP_CCACHE})
  endif()
  enable_language(CUDA)
  # The host's part of .cu files starts kernels, and optimizing it takes half of nvcc's time. Device code has its own level;
  # where that is the least, no GPU will run any of it (scripts/lib/cuda.sh).
  set(host -O1)
  if(CMAKE_CUDA_FLAGS MATCHES "-Xptxas -O0")
    set(host -O0)
  endif()
  string(REPLACE "-O3" "${host}" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has it
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  # A seventh of the size. Drivers before CUDA 12.4's do not read it, so builds for those do without.
  if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 13)
    add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)

  # Headers of all, and the runtime.
  add_library(lockstep_cuda INTERFACE)
  add_library(lockstep::cuda ALIAS lockstep_cuda)
  set(includes ${CUDAToolkit_INCLUDE_DIRS} ${NCCL_INCLUDE_DIR} ${CUDNN_INCLUDE_DIR} ${CUDNN_FRONTEND_INCLUDE_DIR})
  list(FILTER includes EXCLUDE REGEX "NOTFOUND$")
  target_include_directories(lockstep_cuda SYSTEM INTERFACE ${includes})
  target_link_libraries(lockstep_cuda INTERFACE CUDA::cudart_static)
endif()
