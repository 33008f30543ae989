// A few bytes from the host into a stream: the simplest kernel, by which one sees whether kernels run at all.
#pragma once

#include <cstddef>
#include <span>

#include "lockstep/base/device.h"

namespace lockstep::nn::cuda {

constexpr std::size_t kMostWritten = 64;

/// Puts at most kMostWritten bytes to device memory `to`, in the order of `stream`. They travel with the kernel: `from`
/// may be changed at once, and no host memory needs to live on.
void write_bytes(std::span<const std::byte> from, void* to, StreamView stream);

/// Whether this build's kernels were compiled for the current GPU.
bool kernels_run_here();

}  // namespace lockstep::nn::cuda
