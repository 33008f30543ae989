#include "lockstep/parallel/distributed_data_parallel.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "base/error.h"
#include "comm/agree.h"
#include "lockstep/nn/layers/layers.h"

namespace lockstep::parallel {
namespace {

class GroupExchange final : public nn::StatisticsExchange {
 public:
  /// Collective. For tensors of at most `most` f32.
  GroupExchange(comm::ProcessGroup& group, nn::Backend& backend, std::int64_t most)
      : group_(group),
        group_lifetime_(group.lifetime()),
        backend_(backend),
        arena_(group.allocate(static_cast<std::size_t>(group.size()) * slot_bytes(most))) {}

  nn::Tensor gather(const nn::Tensor& mine) override {
    check_group();
    // Slices of whole cache lines: rank r's begins where its row does (comm::slice_of).
    const std::size_t bytes = slot_bytes(mine.count());
    const auto ranks = static_cast<std::size_t>(group_.size());
    backend_.pointwise().copy(mine, floats(static_cast<std::size_t>(group_.rank()) * bytes, {mine.count()}));
    group_.all_gather(region(ranks * bytes)).wait(backend_.stream());
    return floats(0, {group_.size(), static_cast<std::int64_t>(bytes / sizeof(float))});
  }

  nn::Tensor sum(const nn::Tensor& mine) override {
    check_group();
    const nn::Tensor all = floats(0, {mine.count()});
    backend_.pointwise().copy(mine, all);
    group_.all_reduce(region(mine.bytes()), comm::ReduceOp::kSum).wait(backend_.stream());
    return all;
  }

 private:
  void check_group() const {
    check_usage(group_lifetime_.alive(), "a synchronised batch normalisation over a group that is gone",
                "keep the group (the session) as long as the module");
  }
  static std::size_t slot_bytes(std::int64_t count) {
    return comm::align_up(static_cast<std::size_t>(count) * sizeof(float));
  }
  nn::Tensor floats(std::size_t at_byte, const nn::Shape& shape) const {
    return nn::Tensor::view_of(arena_->data() + at_byte, shape);
  }
  comm::Region region(std::size_t bytes) const {
    return {.arena = arena_.get(), .count = bytes / sizeof(float), .dtype = DType::kF32};
  }

  comm::ProcessGroup& group_;
  Lifetime::Ref group_lifetime_;
  nn::Backend& backend_;
  std::unique_ptr<comm::Arena> arena_;
};

}  // namespace

int convert_sync_batchnorm(nn::Module& module, comm::ProcessGroup& group) {
  std::vector<nn::BatchNorm*> norms;
  std::int64_t widest = 0;
  for (const auto& [name, child] : module.named_modules()) {
    auto* const norm = dynamic_cast<nn::BatchNorm*>(child);
    if (norm == nullptr) continue;
    norms.push_back(norm);
    widest = std::max(widest, norm->num_features());
  }
  comm::compare_manifests(group, {{"batch normalisations", fmt::to_string(norms.size())},
                                  {"features of the widest", fmt::to_string(widest)}});
  if (norms.empty()) return 0;
  const auto exchange = std::make_shared<GroupExchange>(group, *module.named_buffers().front().backend, 2 * widest + 1);
  for (nn::BatchNorm* const norm : norms) norm->synchronise(exchange);
  return static_cast<int>(norms.size());
}

}  // namespace lockstep::parallel
