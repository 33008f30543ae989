// A backend of shapes alone: what PyTorch calls the meta device.
#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn {

/// Stands in for `like`, of whose device it says it is: tensors have shapes and types and no memory, kernels compute
/// nothing, and the allocator counts what the real one would be asked for (CachingAllocator::stats). So a model can be
/// built (Generator::none()) and a step be walked to know what memory it takes, before any is taken. What kernels take
/// for themselves (packed weights, scratch) is not counted. Tensor::data() of one is a UsageError.
/// `like` must outlive it.
std::unique_ptr<Backend> make_meta_backend(Backend& like);

/// An address for tensors in memory of others (Backend::stage, a bound gradient): nothing is read or written there.
inline void* meta_address() { return reinterpret_cast<void*>(kShapesAlone); }

}  // namespace lockstep::nn
