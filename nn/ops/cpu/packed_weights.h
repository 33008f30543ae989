// Weights in the layouts that oneDNN wants, for several backends at once.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

#include <cstdint>
#include <mutex>
#include <vector>

#include "lockstep/base/function_ref.h"
#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn::cpu {

/// Packed copies of weights, one for each layout, whoever asks. Thread-safe. Must outlive the handles that it gives
/// out.
class PackedWeights {
 public:
  PackedWeights();

  /// The weights at `w` in `layout`: made by `pack`, which fills its argument, unless they have been of this `version`
  /// (Parameter::version) before.
  Tensor get(const void* w, std::uint64_t version, const dnnl::memory::desc& layout,
             FunctionRef<void(const Tensor&)> pack);

  /// How many there are.
  std::size_t count() const;

 private:
  struct Entry {
    const void* w;
    std::uint64_t version;
    dnnl::memory::desc layout;
    Tensor memory;
  };
  CachingAllocator allocator_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace lockstep::nn::cpu
