#include "nn/ops/cpu/packed_weights.h"

#include <algorithm>

namespace lockstep::nn::cpu {

PackedWeights::PackedWeights() : allocator_(make_host_memory()) {}

// Under the lock from start to end: whoever comes while it is being packed wants it too.
Tensor PackedWeights::get(const void* w, std::uint64_t version, const dnnl::memory::desc& layout,
                          FunctionRef<void(const Tensor&)> pack) {
  const std::lock_guard lock(mutex_);
  auto entry = std::ranges::find_if(entries_, [&](const Entry& e) { return e.w == w && e.layout == layout; });
  if (entry != entries_.end() && entry->version == version) return entry->memory;
  // Others may still read the one before.
  const Tensor made =
      Tensor::empty(allocator_, {static_cast<std::int64_t>((layout.get_size() + sizeof(float) - 1) / sizeof(float))});
  pack(made);
  if (entry == entries_.end())
    entries_.push_back({w, version, layout, made});
  else
    *entry = {w, version, layout, made};
  return made;
}

std::size_t PackedWeights::count() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace lockstep::nn::cpu
