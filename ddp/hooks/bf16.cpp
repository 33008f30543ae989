// Buckets travel as bf16, half of f32's bytes.
#include <algorithm>

#include "base/error.h"
#include "ddp/hooks/compression.h"
#include "ddp/hooks/hook_layout.h"
#include "lockstep/ddp/comm_hook.h"

namespace lockstep::ddp {
namespace {

/// Each rank's gradients are rounded to bf16, summed in f32 and rounded to bf16 (comm Note [Rank order]). Where several
/// hosts have several ranks each, each host's sum is rounded too, unless `exact`.
class Bf16Hook final : public CommHook {
 public:
  explicit Bf16Hook(bool exact) : exact_(exact) {}

  std::string name() const override { return exact_ ? "bf16:exact" : "bf16"; }

  void lay_out(std::span<const SlotSpec> slots, const BucketPlan& plan, comm::ProcessGroup& group) override {
    if (arena_ == nullptr) {
      arena_ = group.allocate(std::max(plan.bytes / 2, comm::kArenaAlignment));
      ranks_ = group.size();
      on_cpu_ = group.device().kind == DeviceKind::kCpu;
    }
    layout_.set(slots, plan);
  }

  comm::Work start(const GradBucket& bucket, comm::ProcessGroup& group) override {
    if (ranks_ == 1) return {};  // nothing is sent
    const auto from = HookLayout::floats_of(bucket);
    if (on_cpu_)
      narrow(from.data(), 1.0f, halves_of(bucket), from.size());
    else
      narrow_on_device(from.data(), halves_of(bucket), from.size(), group.producer_stream());
    return group.all_reduce(region_of(bucket), comm::ReduceOp::kSum, static_cast<std::int32_t>(bucket.index),
                            exact_ ? comm::Rounding::kOnce : comm::Rounding::kPerHost);
  }

  void finish(const GradBucket& bucket, StreamView stream) override {
    if (ranks_ == 1) return;
    const auto to = HookLayout::floats_of(bucket);
    if (on_cpu_)
      widen(halves_of(bucket), 1.0f, to.data(), to.size());
    else
      widen_on_device(halves_of(bucket), to.data(), to.size(), stream);
  }

  Memory memory(std::span<const SlotSpec> slots, int) const override { return {.held = bytes_of_halves(slots)}; }
  std::optional<double> bytes_sent(std::size_t index, int ranks) const override {
    return layout_.bytes_sent_as_halves(index, ranks);
  }

 private:
  comm::Region region_of(const GradBucket& bucket) const { return layout_.region_in(*arena_, bucket, DType::kBF16); }
  BFloat16* halves_of(const GradBucket& bucket) const { return reinterpret_cast<BFloat16*>(region_of(bucket).data()); }

  bool exact_;
  int ranks_ = 1;
  bool on_cpu_ = true;
  HookLayout layout_;
  std::unique_ptr<comm::Arena> arena_;
};

std::shared_ptr<CommHook> make_bf16(const std::string& argument) {
  if (!argument.empty() && argument != "exact")
    throw UsageError(fmt::format("communication hook bf16 takes :exact, not :{}", argument),
                     "give bf16, or bf16:exact, with which sums between hosts are rounded once");
  return std::make_shared<Bf16Hook>(!argument.empty());
}

}  // namespace

const CommHookFamily& bf16_hook_family() {
  static const CommHookFamily family{
      .name = "bf16", .argument = "[:exact]", .help = "half of the bytes", .on_gpus = true, .make = make_bf16};
  return family;
}

}  // namespace lockstep::ddp
