// Copies between a GPU and the host that the host waits for: outside of steps.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

/// Between the host's bytes and as many of a tensor's first ones, in the order of the stream.
void copy_to_device(Context& context, std::span<const std::byte> from, const Tensor& to);
void copy_to_host(Context& context, const Tensor& from, std::span<std::byte> to);
/// All of a tensor's, after those that `to` has.
void append_bytes(Context& context, const Tensor& from, std::vector<std::byte>& to);

/// `values` as `dtype`, f32, bf16 or f16, in new memory.
Tensor upload_as(Context& context, std::span<const float> values, DType dtype);

}  // namespace lockstep::nn::cuda
