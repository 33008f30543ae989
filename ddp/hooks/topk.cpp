// Of each bucket the largest elements travel.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/text.h"
#include "ddp/hooks/hook_layout.h"
#include "lockstep/ddp/comm_hook.h"

namespace lockstep::ddp {
namespace {

/// Note [Top-k]
/// Of each bucket, a rank sends the P percent of its elements that have the largest magnitudes, with their places; the
/// others are added to its next gradients (error feedback: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression",
/// 2018, without that paper's momentum correction). Ranks choose other elements: an allgather, after which each of them
/// adds what all have sent, in rank order, to the same bits.
///
/// Results and debts together are the sum of all gradients, without any rounding but that of the sums themselves.
class TopKHook final : public CommHook {
 public:
  explicit TopKHook(double percent) : percent_(percent) {}

  std::string name() const override { return fmt::format("topk:{}", percent_); }

  void check(const comm::ProcessGroup& group) const override { check_on_cpu(*this, group); }

  void lay_out(std::span<const SlotSpec> slots, const BucketPlan& plan, comm::ProcessGroup& group) override {
    if (arena_ == nullptr) {
      group_ = &group;
      owed_.allocate(slots.size(), [&](std::size_t slot) { return slots[slot].count; });
      arena_ = group.allocate(std::max(most_part_bytes(slots), comm::kArenaAlignment) *
                              static_cast<std::size_t>(group.size()));
    }
    layout_.set(slots, plan);
    std::memset(arena_->data(), 0, arena_->bytes());  // what was a value may be an index now
    places_.clear();
    std::size_t at = 0;
    for (const Bucket& bucket : plan.buckets) {
      std::size_t count = 0, most = 0;
      for (const std::size_t slot : bucket.slots) {
        count += slots[slot].count;
        most += chosen_of(slots[slot].count);
      }
      const std::size_t chosen = std::min(chosen_of(count), most);
      places_.push_back({at, chosen});
      at += part_bytes(chosen) * static_cast<std::size_t>(group.size());
    }
  }

  comm::Work start(const GradBucket& bucket, comm::ProcessGroup& group) override {
    for (const std::size_t slot : bucket.slots) {
      const auto values = layout_.values_of(bucket, slot);
      const auto owed = owed_.of(slot);
      for (std::size_t i = 0; i < owed.size(); ++i) owed[i] = values[i] += owed[i];
    }
    if (group.size() == 1) return {};  // nothing is sent, and nothing is owed afterwards
    choose(bucket);
    const Place& place = places_[bucket.index];
    return group.all_gather({.arena = arena_.get(),
                             .offset_bytes = place.begin_bytes,
                             .count = part_bytes(place.chosen) * static_cast<std::size_t>(group.size()),
                             .dtype = DType::kU8});
  }

  void finish(const GradBucket& bucket, StreamView) override {
    if (group_->size() == 1) {
      for (const std::size_t slot : bucket.slots) std::ranges::fill(owed_.of(slot), 0.0f);
      return;
    }
    const auto sums = HookLayout::floats_of(bucket);
    std::ranges::fill(sums, 0.0f);
    const std::size_t chosen = places_[bucket.index].chosen;
    for (int rank = 0; rank < group_->size(); ++rank) {
      const auto [values, indices] = part_of(bucket.index, rank);
      for (std::size_t i = 0; i < chosen; ++i) {
        LOCKSTEP_ASSERT(indices[i] < sums.size(), "rank {} sent element {} of a bucket of {}", rank, indices[i],
                        sums.size());
        sums[indices[i]] += values[i];
      }
    }
  }

  void drop(const GradBucket& bucket, std::span<const std::size_t> slots) override {
    owe_again(layout_, bucket, slots, group_->size(), owed_);
  }

  std::vector<State> state() override { return {{.name = "error", .values = owed_.all(), .of_rank = true}}; }

  Memory memory(std::span<const SlotSpec> slots, int ranks) const override {
    std::uint64_t owed = 0;
    for (const SlotSpec& slot : slots) owed += slot.count * sizeof(float);
    const auto n = static_cast<std::uint64_t>(ranks);
    return {.held = owed + most_part_bytes(slots) * n, .saved = owed * n};
  }

  std::optional<double> bytes_sent(std::size_t index, int ranks) const override {
    if (index >= places_.size()) return std::nullopt;
    return bytes_sent_by_all_gather(static_cast<double>(part_bytes(places_[index].chosen)) * ranks, ranks);
  }

 private:
  /// What all ranks send of a bucket.
  struct Place {
    std::size_t begin_bytes = 0;
    std::size_t chosen = 0;  // elements that each rank sends
  };

  std::size_t chosen_of(std::size_t count) const {
    const double wanted = std::ceil(percent_ * static_cast<double>(count) / 100);
    return std::clamp<std::size_t>(static_cast<std::size_t>(wanted), std::min<std::size_t>(1, count), count);
  }
  /// A rank's part: values, then indices.
  static std::size_t part_bytes(std::size_t chosen) {
    return comm::align_up(chosen * (sizeof(float) + sizeof(std::uint32_t)));
  }
  /// Of all buckets: each slot may be one of its own.
  std::size_t most_part_bytes(std::span<const SlotSpec> slots) const {
    std::size_t most = 0;
    for (const SlotSpec& slot : slots) most += part_bytes(chosen_of(slot.count));
    return most;
  }
  struct Part {
    std::span<float> values;
    std::span<std::uint32_t> indices;
  };
  Part part_of(std::size_t index, int rank) const {
    const Place& place = places_[index];
    const std::size_t at = place.begin_bytes + static_cast<std::size_t>(rank) * part_bytes(place.chosen);
    return {arena_->view<float>(at, place.chosen),
            arena_->view<std::uint32_t>(at + place.chosen * sizeof(float), place.chosen)};
  }

  static std::uint32_t magnitude_of(float value) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    return bits & 0x7fffffffu;
  }

  /// The magnitude of the `chosen`-th largest element, and how many of that magnitude are among the chosen ones. In two
  /// passes: by the upper halves of the bits, which are ordered as magnitudes are, then by the lower ones.
  std::pair<std::uint32_t, std::size_t> threshold_of(const GradBucket& bucket, std::size_t chosen) {
    constexpr std::uint32_t kLow = 0xffff;
    counts_.assign(std::size_t{1} << 16, 0);
    const auto each = [&](const auto& visit) {
      for (const std::size_t slot : bucket.slots)
        for (const float value : layout_.values_of(bucket, slot)) visit(magnitude_of(value));
    };
    // The bin in which the last chosen one is, and how many of it are.
    const auto bin_of_last = [&](std::size_t wanted) {
      std::uint32_t bin = kLow;
      while (counts_[bin] < wanted) wanted -= counts_[bin--];
      return std::pair{bin, wanted};
    };
    each([&](std::uint32_t magnitude) { ++counts_[magnitude >> 16]; });
    const auto [high, of_bin] = bin_of_last(chosen);
    std::ranges::fill(counts_, 0u);
    each([&](std::uint32_t magnitude) {
      if (magnitude >> 16 == high) ++counts_[magnitude & kLow];
    });
    const auto [low, equal] = bin_of_last(of_bin);
    return {high << 16 | low, equal};
  }

  /// Of equal ones the first.
  void choose(const GradBucket& bucket) {
    const auto [values, indices] = part_of(bucket.index, group_->rank());
    if (values.empty()) return;
    auto [threshold, equal] = threshold_of(bucket, values.size());
    std::size_t at = 0;
    for (const std::size_t slot : bucket.slots) {
      const auto gradient = layout_.values_of(bucket, slot);
      const auto owed = owed_.of(slot);
      const std::size_t begin = layout_.begin_of(slot);
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        const std::uint32_t magnitude = magnitude_of(gradient[i]);
        if (magnitude < threshold || (magnitude == threshold && equal == 0)) continue;
        if (magnitude == threshold) --equal;
        values[at] = gradient[i];
        indices[at++] = static_cast<std::uint32_t>(begin + i);
        owed[i] = 0;
      }
    }
    LOCKSTEP_ASSERT(at == values.size(), "{} of {} elements chosen", at, values.size());
  }

  double percent_;
  HookLayout layout_;
  comm::ProcessGroup* group_ = nullptr;
  SlotMemory owed_;  // what this rank has not sent yet
  std::unique_ptr<comm::Arena> arena_;
  std::vector<Place> places_;          // by bucket
  std::vector<std::uint32_t> counts_;  // of elements by bits of their magnitudes
};

std::shared_ptr<CommHook> make_topk(const std::string& argument) {
  const auto percent = parse_double(argument);
  if (!percent || !(*percent > 0 && *percent <= 100))
    throw UsageError(argument.empty() ? std::string("communication hook topk without a share")
                                      : fmt::format("communication hook topk with a share of {}", argument),
                     "give topk:P with P percent of each bucket, above 0 and up to 100: topk:1 for example");
  return std::make_shared<TopKHook>(*percent);
}

}  // namespace

const CommHookFamily& topk_hook_family() {
  static const CommHookFamily family{
      .name = "topk", .argument = ":P", .help = "the largest P percent, with error feedback", .make = make_topk};
  return family;
}

}  // namespace lockstep::ddp
