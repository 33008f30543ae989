# CUDA, whole or not at all: toolkit, NCCL, cuDNN and cudnn-frontend's headers. Of these only the CUDA runtime is
# linked, statically; the program opens the others when it uses a GPU, so that it starts on machines without one.

# Where a project asks for CMake 3.25 itself, that version's module marks nvToolsExt as outdated, and fails with CUDA 13,
# which has none any more.
set(minimum ${CMAKE_MINIMUM_REQUIRED_VERSION})
set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
find_package(CUDAToolkit QUIET)
set(CMAKE_MINIMUM_REQUIRED_VERSION ${minimum})
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h HINTS ${PROJECT_SOURCE_DIR}/.cache/cudnn-frontend/include)
mark_as_advanced(NCCL_INCLUDE_DIR CUDNN_INCLUDE_DIR CUDNN_FRONTEND_INCLUDE_DIR)

set(LOCKSTEP_HAVE_CUDA OFF)
if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE OR NOT TARGET CUDA::cudart_static)
  list(APPEND LOCKSTEP_MISSING "CUDA: CPU only (the CUDA Toolkit brings it)")
elseif(CUDAToolkit_VERSION VERSION_LESS 12.4)
  list(APPEND LOCKSTEP_MISSING "CUDA: the CUDA Toolkit ${CUDAToolkit_VERSION} is too old (it takes 12.4 or newer)")
elseif(NOT NCCL_INCLUDE_DIR)
  list(APPEND LOCKSTEP_MISSING "CUDA: no NCCL (libnccl-dev brings it)")
elseif(NOT CUDNN_INCLUDE_DIR)
  list(APPEND LOCKSTEP_MISSING "CUDA: no cuDNN (cudnn9-cuda-${CUDAToolkit_VERSION_MAJOR} brings it)")
elseif(NOT CUDNN_FRONTEND_INCLUDE_DIR)
  list(APPEND LOCKSTEP_MISSING "CUDA: no cudnn-frontend (scripts/get-cudnn-frontend brings it)")
elseif(LOCKSTEP_SANITIZE)
  list(APPEND LOCKSTEP_MISSING "CUDA: left out of builds with sanitizers")
else()
  set(LOCKSTEP_HAVE_CUDA ON)
endif()

if(LOCKSTEP_HAVE_CUDA)
  # Machine code for data-centre cards, and PTX of the newest for what comes later.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
    if(CUDAToolkit_VERSION VERSION_LESS 12.8)  # knows no 100
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
    endif()
  endif()
  set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  if(LOCKSTEP_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${LOCKSTEP_CCACHE})
  endif()
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has it
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)

  # Headers of all, and the runtime.
  add_library(lockstep_cuda INTERFACE)
  add_library(lockstep::cuda ALIAS lockstep_cuda)
  target_include_directories(lockstep_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS} ${NCCL_INCLUDE_DIR}
                                                            ${CUDNN_INCLUDE_DIR} ${CUDNN_FRONTEND_INCLUDE_DIR})
  target_link_libraries(lockstep_cuda INTERFACE CUDA::cudart_static)
endif()
