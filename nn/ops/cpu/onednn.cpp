#include "nn/ops/cpu/onednn.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "base/error.h"
#include "base/signals.h"

namespace lockstep::nn::cpu {

OneDnn::OneDnn() : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {}

void OneDnn::FreeDeleter::operator()(void* data) const { std::free(data); }

void* OneDnn::scratch(std::size_t bytes) {
  if (bytes > scratch_bytes_) {
    constexpr std::size_t kPage = 4096;
    const std::size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    scratch_.reset();
    scratch_bytes_ = 0;
    scratch_.reset(std::aligned_alloc(kPage, rounded));
    if (scratch_ == nullptr) throw std::bad_alloc();
    scratch_bytes_ = rounded;
  }
  return scratch_.get();
}

HeldPrimitive::HeldPrimitive(OneDnn& onednn, const dnnl::primitive& primitive,
                             std::initializer_list<std::pair<int, dnnl::memory::desc>> arguments,
                             const dnnl::memory::desc& scratchpad)
    : onednn_(&onednn), primitive_(primitive), scratch_bytes_(scratchpad.get_size()) {
  onednn.count_primitive();
  memories_.reserve(arguments.size() + 1);
  for (const auto& [argument, desc] : arguments) {
    if (desc.get_size() == 0) continue;  // an optional argument that this primitive goes without
    memories_.emplace_back(desc, onednn.engine(), nullptr);
    arguments_.push_back({argument, memories_.back().get()});
  }
  if (scratch_bytes_ > 0) {
    memories_.emplace_back(scratchpad, onednn.engine(), nullptr);
    arguments_.push_back({DNNL_ARG_SCRATCHPAD, memories_.back().get()});
  }
}

void HeldPrimitive::bind(int argument, const void* data) {
  for (auto& held : arguments_) {
    if (held.arg != argument) continue;
    // The C call: the C++ one takes void* as well, and inputs are only read.
    const auto status = dnnl_memory_set_data_handle(held.memory, const_cast<void*>(data));
    LOCKSTEP_ASSERT(status == dnnl_success, "oneDNN returned status {}", static_cast<int>(status));
    return;
  }
  LOCKSTEP_ASSERT(false, "the primitive has no argument {}", argument);
}

void HeldPrimitive::run() {
  if (scratch_bytes_ > 0) bind(DNNL_ARG_SCRATCHPAD, onednn_->scratch(scratch_bytes_));
  const SignalsBlocked blocked;  // Note [Signals]
  const auto status = dnnl_primitive_execute(primitive_.get(), onednn_->stream().get(),
                                             static_cast<int>(arguments_.size()), arguments_.data());
  LOCKSTEP_ASSERT(status == dnnl_success, "oneDNN returned status {}", static_cast<int>(status));
}

dnnl::primitive_attr user_scratchpad() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

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
