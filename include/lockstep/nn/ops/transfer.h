// Tensors from one device to another.
#pragma once

#include <span>
#include <vector>

#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn {

/// `tensor`, made on `source`, as a tensor of `target` with the same shape, type and bits: a copy, or `tensor` itself
/// where the two are one backend. Between GPUs directly where they reach each other, else by way of the host. It runs
/// after all earlier work of `source`, and later work of either backend runs after it; the host waits where one of them
/// is the CPU. Nobody else calls either backend meanwhile. UsageError for a tensor that holds nothing.
Tensor to_device(Backend& target, const Tensor& tensor, Backend& source);

/// The same into memory that is there: `to`, made on `target`, of as many bytes (else UsageError). Both are contiguous.
void copy_to(Backend& target, const Tensor& to, const Tensor& from, Backend& source);

/// torch.tensor(values, device=target).reshape(shape): f32, of as many values (else UsageError), a copy of them.
Tensor tensor_of(Backend& target, const Shape& shape, std::span<const float> values);
/// tensor.float().cpu().flatten().tolist(): the values of a tensor of f32 or bf16, after all work that `source` was
/// given. Waits for it. UsageError for another type, and for one that holds nothing.
std::vector<float> values_of(Backend& source, const Tensor& tensor);

}  // namespace lockstep::nn
