// Buckets travel as f16, half of f32's bytes, scaled so that they fit.
#include <algorithm>
#include <bit>
#include <cmath>

#include "base/error.h"
#include "base/log.h"
#include "ddp/hooks/compression.h"
#include "ddp/hooks/hook_layout.h"
#include "lockstep/ddp/comm_hook.h"

namespace lockstep::ddp {
namespace {

/// Note [Scales of f16]
/// f16 has 10 bits of mantissa, and magnitudes from 6e-8 to 65504. Each slot is multiplied by a power of two before it
/// is rounded, and divided by it afterwards, so that the largest element of its last sum would come to 65536 >>
/// headroom at most: what all ranks know without a collective, for all of them have that sum. A slot grows to
/// 2^headroom times its last size (or ranks may have gradients so much larger than their sum) before anything
/// overflows.
///
/// Where something does, the bucket's sum has an infinity or a NaN, on all ranks alike: then all of them send the
/// bucket a second time, in f32, from the gradients, which are still there. So an infinity in the result was one in the
/// gradients. Other slots that overflowed get more headroom. Buckets of which no slot has had a gradient yet travel in
/// f32.
class Fp16HostHook final : public CommHook {
 public:
  std::string name() const override { return "fp16"; }

  void lay_out(std::span<const SlotSpec> slots, const BucketPlan& plan, comm::ProcessGroup& group) override {
    if (arena_ == nullptr) {
      arena_ = group.allocate(std::max(plan.bytes / 2, comm::kArenaAlignment));
      group_ = &group;
      largest_.assign(slots.size(), 0.0f);
      headroom_.assign(slots.size(), kLeastHeadroom);
      scales_.assign(slots.size(), 0.0f);
    }
    layout_.set(slots, plan);
    in_f32_.assign(plan.buckets.size(), false);
  }

  comm::Work start(const GradBucket& bucket, comm::ProcessGroup& group) override {
    if (group.size() == 1) return {};
    in_f32_[bucket.index] = !set_scales(bucket);
    if (in_f32_[bucket.index]) return send_f32(bucket);
    for (const std::size_t slot : bucket.slots) {
      const auto from = layout_.values_of(bucket, slot);
      narrow(from.data(), scales_[slot], halves_of(bucket, slot), from.size());
    }
    return group.all_reduce(layout_.region_in(*arena_, bucket, DType::kF16), comm::ReduceOp::kSum,
                            static_cast<std::int32_t>(bucket.index), comm::Rounding::kPerHost);
  }

  void finish(const GradBucket& bucket, StreamView stream) override {
    if (group_->size() == 1) return;
    const bool again = !in_f32_[bucket.index] && overflowed(bucket);
    if (again) {
      send_f32(bucket).wait(stream);
    } else if (!in_f32_[bucket.index]) {
      for (const std::size_t slot : bucket.slots) {
        const auto to = layout_.values_of(bucket, slot);
        widen(halves_of(bucket, slot), 1.0f / scales_[slot], to.data(), to.size());
      }
    }
    for (const std::size_t slot : bucket.slots) {
      const auto sums = layout_.values_of(bucket, slot);
      const float largest = largest_magnitude(sums.data(), sums.size());
      if (!std::isfinite(largest)) continue;
      if (largest > 0) largest_[slot] = largest;
      if (again && !fits(bucket, slot)) headroom_[slot] = std::min(headroom_[slot] + kMoreHeadroom, kMostHeadroom);
    }
  }

  std::vector<State> state() override {
    return {{.name = "largest", .values = largest_}, {.name = "headroom", .values = headroom_}};
  }
  std::optional<double> bytes_sent(std::size_t index, int ranks) const override {
    return layout_.bytes_sent_as_halves(index, ranks);
  }
  std::int64_t fallbacks() const override { return fallbacks_; }

 private:
  static constexpr float kLeastHeadroom = 6, kMoreHeadroom = 4, kMostHeadroom = 22;

  /// Of the bucket's slots. Those that never had a gradient take that of the largest. False: none had one.
  bool set_scales(const GradBucket& bucket) {
    float largest = 0, headroom = kLeastHeadroom;
    for (const std::size_t slot : bucket.slots) {
      largest = std::max(largest, largest_[slot]);
      headroom = std::max(headroom, headroom_[slot]);
    }
    if (largest == 0) return false;
    for (const std::size_t slot : bucket.slots)
      scales_[slot] = largest_[slot] > 0 ? scale_of(largest_[slot], headroom_[slot]) : scale_of(largest, headroom);
    return true;
  }

  /// A power of two whose inverse is a normal number too.
  static float scale_of(float largest, float headroom) {
    int exponent = 0;
    std::frexp(largest, &exponent);  // below 2^exponent
    return std::ldexp(1.0f, std::clamp(16 - static_cast<int>(headroom) - exponent, -120, 120));
  }

  bool fits(const GradBucket& bucket, std::size_t slot) const {
    return all_finite(halves_of(bucket, slot), layout_.slots()[slot].count);
  }

  bool overflowed(const GradBucket& bucket) {
    const auto slot = std::ranges::find_if(bucket.slots, [&](std::size_t one) { return !fits(bucket, one); });
    if (slot == bucket.slots.end()) return false;
    if (fallbacks_++ == 0 && group_->rank() == 0)
      log_warn(
          "fp16: the gradients of {} do not fit in step {}: the bucket is sent again in f32; more such are counted",
          layout_.slots()[*slot].name, bucket.step);
    return true;
  }

  comm::Work send_f32(const GradBucket& bucket) {
    return group_->all_reduce(bucket.gradients, comm::ReduceOp::kSum, static_cast<std::int32_t>(bucket.index));
  }

  Float16* halves_of(const GradBucket& bucket, std::size_t slot) const {
    return reinterpret_cast<Float16*>(layout_.region_in(*arena_, bucket, DType::kF16).data()) + layout_.begin_of(slot);
  }

  HookLayout layout_;
  comm::ProcessGroup* group_ = nullptr;
  std::unique_ptr<comm::Arena> arena_;
  // By slot: the largest magnitude of its last sum that was not zero; by how many powers of two it may grow.
  std::vector<float> largest_, headroom_;
  std::vector<float> scales_;  // by slot, of this step
  std::vector<bool> in_f32_;   // by bucket, of this step
  std::int64_t fallbacks_ = 0;
};

/// Note [Scales of f16 on a GPU]
/// The host looks at nothing there, and a captured step cannot send a bucket twice. So ranks first compare the largest
/// magnitude that each has in the bucket, an allreduce of 4 bytes, and scale by a power of two with which the sum of so
/// large ones fits: nothing overflows, and nothing is kept from step to step. The computation's stream comes after that
/// collective.
class Fp16DeviceHook final : public CommHook {
 public:
  std::string name() const override { return "fp16"; }

  void lay_out(std::span<const SlotSpec> slots, const BucketPlan& plan, comm::ProcessGroup& group) override {
    if (arena_ == nullptr) {
      arena_ = group.allocate(std::max(plan.bytes / 2, comm::kArenaAlignment));
      largest_ = group.allocate(std::max<std::size_t>(slots.size(), 1) * comm::kArenaAlignment);  // of the most buckets
      ranks_ = group.size();
      log2_ranks_ = std::bit_width(static_cast<unsigned>(ranks_ - 1));
      stream_ = group.producer_stream();
    }
    layout_.set(slots, plan);
  }

  comm::Work start(const GradBucket& bucket, comm::ProcessGroup& group) override {
    if (ranks_ == 1) return {};  // nothing is sent
    const auto number = static_cast<std::int32_t>(bucket.index);
    const auto from = HookLayout::floats_of(bucket);
    const comm::Region largest{.arena = largest_.get(),
                               .offset_bytes = bucket.index * comm::kArenaAlignment,
                               .count = 1,
                               .dtype = DType::kI32};
    group.zero(largest);
    largest_on_device(from.data(), largest_of(bucket), from.size(), stream_);
    group.all_reduce(largest, comm::ReduceOp::kMax, number).wait(stream_);
    narrow_on_device(from.data(), largest_of(bucket), log2_ranks_, halves_of(bucket), from.size(), stream_);
    return group.all_reduce(layout_.region_in(*arena_, bucket, DType::kF16), comm::ReduceOp::kSum, number);
  }

  void finish(const GradBucket& bucket, StreamView stream) override {
    if (ranks_ == 1) return;
    const auto to = HookLayout::floats_of(bucket);
    widen_on_device(halves_of(bucket), largest_of(bucket), log2_ranks_, to.data(), to.size(), stream);
  }

  std::optional<double> bytes_sent(std::size_t index, int ranks) const override {
    return layout_.bytes_sent_as_halves(index, ranks, sizeof(std::int32_t));
  }

 private:
  Float16* halves_of(const GradBucket& bucket) const {
    return reinterpret_cast<Float16*>(layout_.region_in(*arena_, bucket, DType::kF16).data());
  }
  std::int32_t* largest_of(const GradBucket& bucket) const {
    return largest_->view<std::int32_t>(bucket.index * comm::kArenaAlignment, 1).data();
  }

  int ranks_ = 1, log2_ranks_ = 0;
  StreamView stream_;
  HookLayout layout_;
  std::unique_ptr<comm::Arena> arena_, largest_;  // halves; by bucket, the bits of the largest magnitude of all ranks
};

/// The one that the group's device has use for, which is known when it is registered.
class Fp16Hook final : public CommHook {
 public:
  std::string name() const override { return "fp16"; }
  void lay_out(std::span<const SlotSpec> slots, const BucketPlan& plan, comm::ProcessGroup& group) override {
    if (hook_ == nullptr && group.device().kind == DeviceKind::kCpu)
      hook_ = std::make_unique<Fp16HostHook>();
    else if (hook_ == nullptr)
      hook_ = std::make_unique<Fp16DeviceHook>();
    hook_->lay_out(slots, plan, group);
  }
  comm::Work start(const GradBucket& bucket, comm::ProcessGroup& group) override { return hook_->start(bucket, group); }
  void finish(const GradBucket& bucket, StreamView stream) override { hook_->finish(bucket, stream); }
  std::vector<State> state() override { return hook_ == nullptr ? std::vector<State>() : hook_->state(); }
  Memory memory(std::span<const SlotSpec> slots, int) const override {
    return {.held = bytes_of_halves(slots), .saved = slots.size() * 2 * sizeof(float)};
  }
  std::optional<double> bytes_sent(std::size_t index, int ranks) const override {
    return hook_ == nullptr ? std::nullopt : hook_->bytes_sent(index, ranks);
  }
  std::int64_t fallbacks() const override { return hook_ == nullptr ? 0 : hook_->fallbacks(); }

 private:
  std::unique_ptr<CommHook> hook_;
};

std::shared_ptr<CommHook> make_fp16(const std::string& argument) {
  if (!argument.empty())
    throw UsageError(fmt::format("communication hook fp16 takes no :{}", argument), "give fp16 alone");
  return std::make_shared<Fp16Hook>();
}

}  // namespace

const CommHookFamily& fp16_hook_family() {
  static const CommHookFamily family{
      .name = "fp16", .argument = "", .help = "half of the bytes, scaled", .on_gpus = true, .make = make_fp16};
  return family;
}

}  // namespace lockstep::ddp
