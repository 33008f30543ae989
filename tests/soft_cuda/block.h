// How a kernel runs on the CPU: block after block, the threads of a block as fibers of the calling thread.
#pragma once

#include <vector_types.h>

#include <cstdint>
#include <source_location>

namespace lockstep::soft_cuda {

/// What `launch` makes of a kernel and its arguments: call(arguments) is one thread's run.
struct Kernel {
  const char* what;
  void (*call)(const void* arguments);
  const void* arguments;
};

/// Runs the whole grid, before it returns. Throws KernelFault. Odd and even blocks take their threads in opposite
/// orders, so that a result which depends on it shows.
void run_grid(const Kernel& kernel, dim3 grid, dim3 block);
/// Throws KernelFault for what no GPU starts.
void check_grid(const char* what, dim3 grid, dim3 block);

// From within a kernel. Lanes are threads of the same 32.

void sync_block(const char* what, std::source_location where);
/// Synchronizes the lanes in `mask`. Returns each lane's value, valid until these lanes synchronize again.
const std::uint64_t* sync_warp(const char* what, unsigned mask, std::uint64_t brought, std::source_location where);
extern int current_lane;
inline int lane() { return current_lane; }
/// Throws KernelFault with the names of kernel, block and thread.
[[noreturn]] void fail_thread(const char* what, std::source_location where);

}  // namespace lockstep::soft_cuda
