// How a kernel runs on the CPU: block after block, the threads of a block as fibers of the calling thread.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <source_location>

namespace lockstep::soft_cuda {

/// What `launch` makes of a kernel and its arguments: call(arguments) is one thread's run.
struct Kernel {
  const char* what;
  void (*call)(const void* arguments);
  const void* arguments;
  std::size_t argument_bytes;
  const void* function;  // for those that are the same
};

/// Runs the whole grid, before it returns. Throws KernelFault. Blocks, the warps of a block between barriers and the
/// lanes of a warp run in random orders, so that a result which depends on it shows.
void run_grid(const Kernel& kernel, dim3 grid, dim3 block);
/// The next orders follow from the seed alone.
void forget_orders();
/// Before a launch, on the thread that makes it: see Machine::lazy_loading.
void load_kernel(const void* function);
/// Throws KernelFault for what no GPU starts.
void check_grid(const char* what, dim3 grid, dim3 block);

// From within a kernel. Lanes are threads of the same 32.

void sync_block(const char* what, std::source_location where);
/// Synchronizes the lanes in `mask`. Returns each lane's value, valid until these lanes synchronize again. Of what
/// synchronizes, __syncwarp alone orders memory.
const std::uint64_t* sync_warp(const char* what, unsigned mask, std::uint64_t brought, std::source_location where,
                               bool orders_memory = false);
extern int current_lane;
inline int lane() { return current_lane; }
/// Where threadIdx, blockIdx, blockDim and gridDim lie, and what else kernels read that is no memory of theirs.
std::uintptr_t places_begin();
std::size_t places_bytes();
/// An access that is atomic.
void watch_atomic(const void* at, std::size_t bytes);
/// Throws KernelFault with the names of kernel, block and thread.
[[noreturn]] void fail_thread(const char* what, std::source_location where);

}  // namespace lockstep::soft_cuda
