#include "nn/ops/cuda/op_profile.h"

#include <algorithm>
#include <map>

namespace lockstep::nn::cuda {

void OpProfile::begin(const char* what, double bytes, double flops, cudaStream_t stream) {
  if (depth_++ > 0) return;
  entries_.emplace_back(what, bytes, flops);
  entries_.back().from.record(stream);
}

void OpProfile::end(cudaStream_t stream) noexcept {
  try {
    if (--depth_ == 0) entries_.back().to.record(stream);
  } catch (...) {
    error_ = std::current_exception();
  }
}

std::vector<OperationCost> OpProfile::read() const {
  if (error_) std::rethrow_exception(error_);
  std::map<std::string, OperationCost> by_name;
  for (const Entry& entry : entries_) {
    entry.to.synchronize();
    OperationCost& cost = by_name[entry.what];
    cost.operation = entry.what;
    ++cost.calls;
    cost.ms += CudaEvent::ms_between(entry.from, entry.to);
    cost.bytes += entry.bytes;
    cost.flops += entry.flops;
  }
  std::vector<OperationCost> costs;
  for (auto& [name, cost] : by_name) costs.push_back(std::move(cost));
  std::ranges::stable_sort(costs, std::ranges::greater{}, &OperationCost::ms);
  return costs;
}

void OpProfileScope::begin(const char* what, std::initializer_list<const Tensor*> tensors, double flops) {
  double bytes = 0;
  for (const Tensor* tensor : tensors)
    if (tensor->defined())
      bytes += static_cast<double>(tensor->count()) * static_cast<double>(size_of(tensor->dtype()));
  context_.profile->begin(what, bytes, flops, native(context_.stream));
}

}  // namespace lockstep::nn::cuda
