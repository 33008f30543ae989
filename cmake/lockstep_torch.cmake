# lockstep::torch, compiled in the build of whoever finds it: LibTorch's C++ interface is another one in each version, and in
# each way of building it. Read by lockstepConfig.cmake, which has lockstep_SOURCES; sets lockstep_torch_FOUND, or
# lockstep_LACK to what is missing.
#
# LibTorch is looked for at LOCKSTEP_TORCH (…/site-packages/torch of a wheel, or an unpacked libtorch), then where Torch_DIR
# says (…/share/cmake/Torch), then in CMAKE_PREFIX_PATH. Its own package file is not read: that of a build for CUDA asks
# for a CUDA Toolkit.

set(LOCKSTEP_TORCH "" CACHE PATH "LibTorch: the directory that has include/ and lib/, as site-packages/torch")
set(lockstep_torch_FOUND FALSE)
set(lockstep_torch_ROOT ${LOCKSTEP_TORCH})
if(NOT lockstep_torch_ROOT AND Torch_DIR)
  get_filename_component(lockstep_torch_ROOT "${Torch_DIR}/../../.." ABSOLUTE)
endif()
if(NOT lockstep_torch_ROOT)
  find_path(lockstep_torch_INCLUDE_DIR torch/csrc/autograd/function_hook.h)
  mark_as_advanced(lockstep_torch_INCLUDE_DIR)
  if(lockstep_torch_INCLUDE_DIR)
    get_filename_component(lockstep_torch_ROOT "${lockstep_torch_INCLUDE_DIR}" DIRECTORY)
  endif()
endif()
if(NOT lockstep_torch_ROOT)
  set(lockstep_LACK "its component 'torch' needs LibTorch: give -DLOCKSTEP_TORCH=/…/site-packages/torch or -DTorch_DIR=/…/share/cmake/Torch")
  return()
endif()
get_filename_component(lockstep_torch_ROOT "${lockstep_torch_ROOT}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")

foreach(file include/torch/csrc/autograd/function_hook.h include/torch/csrc/api/include/torch/torch.h lib/libtorch_cpu.so
             lib/libc10.so)
  if(NOT EXISTS ${lockstep_torch_ROOT}/${file})
    set(lockstep_LACK "no LibTorch in ${lockstep_torch_ROOT}, which lacks ${file}: give -DLOCKSTEP_TORCH=/…/site-packages/torch")
    return()
  endif()
endforeach()
file(STRINGS ${lockstep_torch_ROOT}/include/torch/csrc/autograd/function_hook.h lockstep_torch_HOOK
     REGEX "PostAccumulateGradHook" LIMIT_COUNT 1)
if(NOT lockstep_torch_HOOK)
  set(lockstep_LACK "LibTorch in ${lockstep_torch_ROOT} is too old: it has no PostAccumulateGradHook. Take 2.7 or newer")
  return()
endif()
if(EXISTS ${lockstep_torch_ROOT}/share/cmake/Torch/TorchConfig.cmake)
  file(STRINGS ${lockstep_torch_ROOT}/share/cmake/Torch/TorchConfig.cmake lockstep_torch_OLD_ABI
       REGEX "_GLIBCXX_USE_CXX11_ABI=0" LIMIT_COUNT 1)
  if(lockstep_torch_OLD_ABI)
    set(lockstep_LACK "LibTorch in ${lockstep_torch_ROOT} was built for the C++ ABI before C++11, and lockstep was not: take 2.7 or newer, or the cxx11-abi build")
    return()
  endif()
endif()
if(NOT CMAKE_CXX_COMPILER_LOADED)
  set(lockstep_LACK "its component 'torch' is compiled here: have CXX among the project's LANGUAGES")
  return()
endif()

set(lockstep_torch_FOUND TRUE)
if(NOT TARGET lockstep_torch)
  file(GLOB lockstep_torch_FILES ${lockstep_SOURCES}/bindings/torch/*.cpp)
  add_library(lockstep_torch STATIC EXCLUDE_FROM_ALL ${lockstep_torch_FILES})
  add_library(lockstep::torch ALIAS lockstep_torch)
  # LibTorch's headers are most of what is compiled: once for all files.
  set_target_properties(lockstep_torch PROPERTIES POSITION_INDEPENDENT_CODE ON UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  target_compile_features(lockstep_torch PUBLIC cxx_std_20)
  target_compile_options(lockstep_torch PRIVATE -Wno-error)  # warnings of the consumer's choice stop nobody
  target_include_directories(lockstep_torch PRIVATE ${lockstep_SOURCES})
  target_include_directories(lockstep_torch SYSTEM PUBLIC ${lockstep_torch_ROOT}/include
                                                          ${lockstep_torch_ROOT}/include/torch/csrc/api/include)
  # Not libtorch.so: it brings libtorch_cuda.so and all of CUDA's libraries.
  target_link_libraries(lockstep_torch PUBLIC lockstep::ddp ${lockstep_torch_ROOT}/lib/libtorch_cpu.so
                                              ${lockstep_torch_ROOT}/lib/libc10.so)
endif()
