// Streams and events of the soft device. Internal to tests/soft_cuda.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <mutex>

#include "soft_cuda.h"

namespace lockstep::soft_cuda {

const Machine& machine();
/// Guards everything but the work itself, which runs without it.
std::recursive_mutex& machine_mutex();
/// Runs what is left of a device's streams.
void finish_device(int device);
/// Runs what is left of `stream`.
cudaError_t finish(cudaStream_t stream);
/// The device of a stream, -1 for none that lives.
int device_of(cudaStream_t stream);
bool is_capturing(cudaStream_t stream);
int current_device();

void count_grid(std::uint64_t early_returns);
void count_copy();
void count_wait();
/// Notes `status` for cudaGetLastError().
cudaError_t noted(cudaError_t status);

/// What counts() gathers from its owners.
void count_streams(Counts& counts);
void count_memory(Counts& counts);

}  // namespace lockstep::soft_cuda
