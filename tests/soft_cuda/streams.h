// Streams and events of the soft device. Internal to tests/soft_cuda.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>

#include "soft_cuda.h"

namespace lockstep::soft_cuda {

const Machine& machine();
/// Guards everything but the work itself, which runs without it.
std::recursive_mutex& machine_mutex();
/// submit() of a copy, which may also go to a stream of another device than the current one.
cudaError_t submit_copy(cudaStream_t stream, std::function<void()> work);
/// Notes that the current device has been used: it has a context from now on.
void use_device();
/// Runs what is left of a device's streams. Whether there was anything.
bool finish_device(int device);
/// Runs what is left of `stream`.
cudaError_t finish(cudaStream_t stream);
/// The device of a stream, -1 for none that lives.
int device_of(cudaStream_t stream);
/// For calls that may not be made while this thread captures: success, or an error, and the capture is broken.
cudaError_t refuse_while_capturing();
bool is_capturing(cudaStream_t stream);
int current_device();

constexpr int kUnwrittenByte = 0xff;  // of memory that nobody has written: NaN, and -1

/// An allocation of device memory, or of host memory that kernels may use.
struct Extent {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
};
/// That `at` lies in, or in the margins of.
std::optional<Extent> extent_of(const void* at);

/// From the machine's seed: of orders that are not defined.
std::uint64_t random_for_grids();   // with the grid that runs
std::uint64_t random_for_graphs();  // with machine_mutex()

void count_grid(std::uint64_t early_returns);
void count_copy();
void count_wait();
void count_fused_attention();
void count_loading(bool has_waited);
/// Notes `status` for cudaGetLastError().
cudaError_t noted(cudaError_t status);

/// What counts() gathers from its owners.
void count_streams(Counts& counts);
void count_memory(Counts& counts);

}  // namespace lockstep::soft_cuda
