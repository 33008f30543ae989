// Watches what the threads of a grid read and write: races, addresses outside of allocations, and shared memory that is
// read before it is written. Internal to tests/soft_cuda. All of it is called with one grid running at a time.
//
// Kernels are compiled with the calls that ThreadSanitizer places before each load and store, and races.cpp is what
// they call. Two accesses of one element race if one of them writes, not both are atomic, they are of different
// threads, and nothing orders them: nothing does between two blocks; __syncthreads does within a block, and __syncwarp
// among the lanes of its mask. Shuffles and votes do not, as CUDA's documentation says.
#pragma once

#include <vector_types.h>

#include <cstdint>
#include <string>

#include "block.h"

namespace lockstep::soft_cuda {

/// Whether this grid is watched: the first ones of each kernel and shape are (Machine::watched_launches).
bool begin_watch(const Kernel& kernel, dim3 grid, dim3 block);
void end_watch();

// Only for a grid that is watched.

/// A block begins. False: so much of the grid has been seen that the rest is not watched.
bool watch_block(std::uint64_t index);
void watch_barrier();  // of all threads of the block
void watch_warp_barrier(unsigned first, unsigned lanes);

/// Before each block of a grid that is not watched: what the kernel is known to have in shared memory becomes NaN.
void poison_shared(const void* kernel);

/// Of block.cpp. Ends the current thread with a KernelFault of this text, from wherever it is; its stack is abandoned.
[[noreturn]] void abandon_thread(const std::string& what);
/// "(1, 0, 0)": of the running grid.
std::string thread_text(unsigned thread);
std::string block_text(std::uint64_t index);
extern unsigned current_thread;

}  // namespace lockstep::soft_cuda
