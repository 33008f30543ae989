// Matrices of gradients travel as products of two with few columns.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/text.h"
#include "ddp/hooks/compression.h"
#include "ddp/hooks/hook_layout.h"
#include "lockstep/ddp/comm_hook.h"

namespace lockstep::ddp {
namespace {

constexpr std::int64_t kMostRank = 1024;
// A matrix is compressed where that saves this factor at least, as PyTorch's hook has it.
constexpr std::size_t kLeastSaving = 2;

/// Note [PowerSGD]
/// Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019),
/// algorithms 1 and 2, of sums instead of means. Of each matrix, M being this rank's gradient and what it still owes:
///   P = M Q, summed over the ranks, then orthonormalised by each of them to the same bits;
///   Q = Mᵀ P, this rank's; M - P Qᵀ is what it owes from now on (error feedback);
///   Q is summed over the ranks, P Qᵀ is the result, and the next step begins with this Q, orthonormalised (warm
///   start).
/// So over all steps nothing is lost: results and debts together are the sum of all gradients.
///
/// A matrix has the slot's first dimension as rows. Other slots, and matrices too small to gain by it, are summed as
/// they are, in one collective with the bucket's P. The second collective of all buckets is issued when the first
/// bucket is finished: in the order of the buckets, each as soon as its P is there.
class PowerSgdHook final : public CommHook {
 public:
  explicit PowerSgdHook(std::size_t rank) : rank_(rank) {}

  std::string name() const override { return fmt::format("powersgd:{}", rank_); }

  void check(const comm::ProcessGroup& group) const override { check_on_cpu(*this, group); }

  void lay_out(std::span<const SlotSpec> slots, const BucketPlan& plan, comm::ProcessGroup& group) override {
    if (arena_ == nullptr) {
      group_ = &group;
      allocate(slots, group);
    }
    layout_.set(slots, plan);
    place_buckets();
  }

  comm::Work start(const GradBucket& bucket, comm::ProcessGroup& group) override {
    for (const std::size_t slot : bucket.slots) {
      if (!compressed(slot)) continue;
      const auto m = layout_.values_of(bucket, slot);
      const auto owed = owed_.of(slot);
      for (std::size_t i = 0; i < m.size(); ++i) m[i] += owed[i];
    }
    Stage& stage = stages_[bucket.index];
    stage.bucket = bucket;
    if (group.size() == 1) return {};  // nothing is sent, and nothing is owed afterwards
    if (!stage.compresses) return send(bucket.gradients, bucket.index);
    for (const std::size_t slot : bucket.slots) {
      const auto m = layout_.values_of(bucket, slot);
      float* const to = first_of(slot);
      if (!compressed(slot)) {
        std::ranges::copy(m, to);
        continue;
      }
      const auto q = warm_.of(slot);
      orthonormalize(q.data(), rank_, shapes_[slot].columns, Dependent::kRandom, slot * kMostRank);
      times(shapes_[slot], m.data(), q.data(), to);
    }
    return send(stage.first, bucket.index);
  }

  void finish(const GradBucket& bucket, StreamView stream) override {
    if (group_->size() == 1) {
      for (const std::size_t slot : bucket.slots) std::ranges::fill(owed_.of(slot), 0.0f);
      return;
    }
    if (bucket.index == 0) start_second_stages(stream);
    const Stage& stage = stages_[bucket.index];
    if (!stage.compresses) return;
    stage.second_work.wait(stream);
    for (const std::size_t slot : bucket.slots) {
      const auto m = layout_.values_of(bucket, slot);
      const float* const first = first_of(slot);
      if (!compressed(slot)) {
        std::copy_n(first, m.size(), m.begin());
        continue;
      }
      const float* const q = second_of(slot);
      std::copy_n(q, warm_.of(slot).size(), warm_.of(slot).begin());
      expand(shapes_[slot], first, q, m.data());
    }
  }

  void drop(const GradBucket& bucket, std::span<const std::size_t> slots) override {
    owe_again(layout_, bucket, slots, group_->size(), owed_);
  }

  std::vector<State> state() override {
    return {{.name = "error", .values = owed_.all(), .of_rank = true}, {.name = "q", .values = warm_.all()}};
  }

  Memory memory(std::span<const SlotSpec> slots, int ranks) const override {
    std::uint64_t owed = 0, warm = 0, sent = 0;
    for (const SlotSpec& slot : slots) {
      const LowRank shape = shape_of(slot);
      owed += shape.rank > 0 ? slot.count : 0;
      warm += shape.rank * shape.columns;
      sent += shape.rank > 0 ? shape.rank * (shape.rows + shape.columns) : slot.count;
    }
    return {.held = (owed + warm + sent) * sizeof(float),
            .saved = (owed * static_cast<std::uint64_t>(ranks) + warm) * sizeof(float)};
  }

  std::optional<double> bytes_sent(std::size_t index, int ranks) const override {
    if (index >= stages_.size()) return std::nullopt;
    const Stage& stage = stages_[index];
    const double bytes = stage.compresses ? static_cast<double>(stage.first.bytes() + stage.second.bytes())
                                          : static_cast<double>(layout_.plan().buckets[index].bytes);
    return bytes_sent_by_all_reduce(bytes, ranks);
  }

 private:
  /// A bucket of this step.
  struct Stage {
    GradBucket bucket;
    bool compresses = false;     // any of its slots
    comm::Region first, second;  // P and what is not compressed; Q
    comm::Work first_work, second_work;
  };

  LowRank shape_of(const SlotSpec& slot) const {
    LowRank shape{.rows = slot.rows, .columns = slot.rows > 0 ? slot.count / slot.rows : 0, .rank = rank_};
    if (slot.rows <= 1 || slot.count <= kLeastSaving * rank_ * (shape.rows + shape.columns)) shape.rank = 0;
    return shape;
  }
  bool compressed(std::size_t slot) const { return shapes_[slot].rank > 0; }
  std::size_t floats_of_first(std::size_t slot, std::size_t count) const {
    return padded(compressed(slot) ? shapes_[slot].rank * shapes_[slot].rows : count);
  }
  std::size_t floats_of_second(std::size_t slot) const { return padded(shapes_[slot].rank * shapes_[slot].columns); }
  static std::size_t padded(std::size_t floats) { return comm::align_up(floats * sizeof(float)) / sizeof(float); }

  void allocate(std::span<const SlotSpec> slots, comm::ProcessGroup& group) {
    for (const SlotSpec& slot : slots) shapes_.push_back(shape_of(slot));
    owed_.allocate(slots.size(), [&](std::size_t slot) { return compressed(slot) ? slots[slot].count : 0; });
    warm_.allocate(slots.size(), [&](std::size_t slot) { return shapes_[slot].rank * shapes_[slot].columns; });
    first_begin_.resize(slots.size());
    second_begin_.resize(slots.size());
    std::size_t floats = 0;
    for (std::size_t slot = 0; slot < slots.size(); ++slot)
      floats += floats_of_first(slot, slots[slot].count) + floats_of_second(slot);
    arena_ = group.allocate(std::max(floats * sizeof(float), comm::kArenaAlignment));
  }

  /// What each bucket sends lies together.
  void place_buckets() {
    const auto& buckets = layout_.plan().buckets;
    stages_.assign(buckets.size(), {});
    std::size_t at = 0;
    const auto place = [&](const Bucket& bucket, std::vector<std::size_t>& begins, auto floats_of) {
      const std::size_t begin = at;
      for (const std::size_t slot : bucket.slots) {
        begins[slot] = at;
        at += floats_of(slot);
      }
      return comm::Region{
          .arena = arena_.get(), .offset_bytes = begin * sizeof(float), .count = at - begin, .dtype = DType::kF32};
    };
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      Stage& stage = stages_[b];
      stage.compresses = std::ranges::any_of(buckets[b].slots, [&](std::size_t slot) { return compressed(slot); });
      if (!stage.compresses) continue;
      stage.first = place(buckets[b], first_begin_,
                          [&](std::size_t slot) { return floats_of_first(slot, layout_.slots()[slot].count); });
      stage.second = place(buckets[b], second_begin_, [&](std::size_t slot) { return floats_of_second(slot); });
    }
    std::memset(arena_->data(), 0, arena_->bytes());  // what was a number may be padding now
  }

  float* first_of(std::size_t slot) const { return floats() + first_begin_[slot]; }
  float* second_of(std::size_t slot) const { return floats() + second_begin_[slot]; }
  float* floats() const { return reinterpret_cast<float*>(arena_->data()); }

  comm::Work send(const comm::Region& region, std::size_t bucket) {
    return stages_[bucket].first_work =
               group_->all_reduce(region, comm::ReduceOp::kSum, static_cast<std::int32_t>(bucket));
  }

  void start_second_stages(StreamView stream) {
    for (Stage& stage : stages_) {
      if (!stage.compresses) continue;
      stage.first_work.wait(stream);
      for (const std::size_t slot : stage.bucket.slots) {
        if (!compressed(slot)) continue;
        const LowRank& shape = shapes_[slot];
        const auto m = layout_.values_of(stage.bucket, slot);
        float* const p = first_of(slot);
        float* const q = second_of(slot);
        orthonormalize(p, rank_, shape.rows, Dependent::kZero, 0);
        transposed_times(shape, m.data(), p, q);
        residual(shape, m.data(), p, q, owed_.of(slot).data());
        group_->poll();
      }
      stage.second_work =
          group_->all_reduce(stage.second, comm::ReduceOp::kSum, static_cast<std::int32_t>(stage.bucket.index));
    }
  }

  std::size_t rank_;
  HookLayout layout_;
  comm::ProcessGroup* group_ = nullptr;
  std::vector<LowRank> shapes_;                          // by slot; rank 0: it is not compressed
  SlotMemory owed_, warm_;                               // what this rank has not sent yet; Q
  std::vector<std::size_t> first_begin_, second_begin_;  // by slot, in floats
  std::unique_ptr<comm::Arena> arena_;
  std::vector<Stage> stages_;  // by bucket
};

std::shared_ptr<CommHook> make_powersgd(const std::string& argument) {
  const auto rank = parse_int(argument);
  if (!rank || *rank < 1 || *rank > kMostRank)
    throw UsageError(argument.empty() ? std::string("communication hook powersgd without a rank")
                                      : fmt::format("communication hook powersgd with rank {}", argument),
                     fmt::format("give powersgd:R with R from 1 to {}, powersgd:4 for example", kMostRank));
  return std::make_shared<PowerSgdHook>(static_cast<std::size_t>(*rank));
}

}  // namespace

const CommHookFamily& powersgd_hook_family() {
  static const CommHookFamily family{.name = "powersgd",
                                     .argument = ":R",
                                     .help = "products of R columns, with error feedback",
                                     .make = make_powersgd};
  return family;
}

}  // namespace lockstep::ddp
