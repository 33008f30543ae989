// A GPU in software, for tests: what can be set about it and what it has counted.
//
// CUDA's runtime over host memory (runtime.cpp, memory.cpp, streams.cpp), and kernels that run on the CPU as fibers
// (block.cpp), whose loads and stores are watched (races.h). It finds
//  - indices outside of allocations and shared arrays, vectors at odd addresses, memory of the host, freed memory;
//  - races: between blocks, and between threads of a block without __syncthreads, or __syncwarp within a warp, between;
//  - shared memory that is read before the block has written it (it is NaN);
//  - barriers and shuffles that not all reach; results that depend on the order of blocks, warps and lanes: it is
//    random, and so is the order of a graph's nodes, within the captured edges (LOCKSTEP_SOFT_SEED repeats it);
//  - a missing wait: streams run as late as they may, kernels may be loaded at their first launch.
// Of each kernel, grid and block only the first launches are watched, and of those with many accesses some of the
// blocks. tests/mutants/soft_cuda has planted defects that it must find (scripts/try-mutants).
//
// It does not prove what only a GPU has: atomic operations and fences as means of order (an access that is ordered by
// them alone is reported), registers and shared memory that suffice, rounding of its own functions and fused products,
// NVIDIA's libraries, and speed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>

namespace lockstep::soft_cuda {

/// An error after which a real GPU hangs or returns garbage: a barrier that not all threads reach, a shuffle with a
/// missing lane, too large a grid or block. Names kernel, block and thread.
class KernelFault : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// When work given to streams is done.
enum class Streams {
  kEager,    // at once: no order between streams can be wrong
  kLazy,     // as late as allowed, when somebody waits for it: who forgets to wait finds old or poisoned bytes
  kThreads,  // by a thread of each stream, as a GPU does it; but for the default streams, which are lazy
  kLate,     // likewise, but some time later unless somebody waits: for ranks, who wait for each other's streams
};

/// kLazy where the environment says LOCKSTEP_SOFT_STREAMS=lazy: ctest runs the tests of lockstep_test(… CUDA LAZY) both
/// ways. kLate where it says late: so it runs those of lockstep_test(… SOFT_CUDA LATE).
Streams streams_by_default();

/// What LOCKSTEP_SOFT_SEED says; another one in each process. A process that fails prints it, and so does KernelFault.
std::uint64_t seed_by_default();

/// Whether the environment says LOCKSTEP_SOFT_LOADING=lazy.
bool lazy_loading_by_default();

/// What LOCKSTEP_TEST_GPUS says; 2.
int devices_by_default();

struct Machine {
  int devices = devices_by_default();
  std::size_t memory_bytes = std::size_t{16} << 30;  // of each
  int driver_version = 13000;                        // 0: no driver is loaded
  bool sees_devices = true;                          // false: a driver, but no GPU is visible
  int compute_major = 9;                             // of the compute capability
  bool runs_kernels = true;                          // false: they were compiled for other GPUs
  Streams streams = streams_by_default();
  /// The first launch of each kernel on a device waits for all that its streams were given, as loading its code may do
  /// where CUDA_MODULE_LOADING is LAZY. A collective that is among it must come to its end without the host.
  bool lazy_loading = lazy_loading_by_default();
  bool fused_attention = false;            // whether cuDNN has kernels for it: with them a cuDNN in software is used
  std::uint64_t seed = seed_by_default();  // of the order of blocks, of warps and of a graph's nodes
  /// Of so many launches of each kernel, grid and block, the accesses to memory are watched (races.h); of all since the
  /// process began.
  int watched_launches = 2;
};

/// Another machine from now on: all allocations, streams and events of the old one must be gone. probe_cuda() asks only
/// once in a process.
void set_machine(const Machine& machine);
/// In the middle of a test.
void set_memory_bytes(std::size_t bytes);
void set_streams(Streams streams);
void set_fused_attention(bool available);

struct Counts {
  std::uint64_t launches = 0;
  std::uint64_t copies = 0;
  std::uint64_t allocations = 0;  // of device memory that are not freed
  std::uint64_t pinned = 0;       // allocations of pinned memory that are not freed
  std::uint64_t contexts = 0;     // devices that this process has used, by calls that make a context of CUDA's
  std::uint64_t live_streams = 0, live_events = 0;
  std::uint64_t prioritised_graphs = 0;  // whose nodes keep the priorities of the streams that they came from
  std::uint64_t host_waits = 0;          // of the host for a stream, an event or a device
  std::uint64_t loading_waits = 0;       // of a first launch, with work pending
  std::uint64_t fused_attentions = 0;    // that cuDNN in software did
  std::uint64_t early_returns = 0;       // threads that had returned when the others of their block were at a barrier
};
Counts counts();

/// Gives back what cudaMalloc() gave without waiting for anything, as NCCL does with its own: what streams still do
/// with it is a fault, and no later allocation has its addresses.
void unmap(void* data);

/// Gives a stream anything: `work` runs in its order, on the thread that makes it run.
cudaError_t submit(cudaStream_t stream, std::function<void()> work);
/// Of something that waits for other processes. In a graph it stays before those that are captured later: ranks that
/// ran theirs in different orders would wait for each other, as on GPUs that cannot run two at once.
cudaError_t submit_collective(cudaStream_t stream, std::function<void()> work);

}  // namespace lockstep::soft_cuda
