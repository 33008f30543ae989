#include "ddp/bucket_tuner.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "base/error.h"
#include "base/statistics.h"
#include "base/text.h"

namespace lockstep::ddp {
namespace {

constexpr std::size_t kBlock = 4;       // steps, of which the first does not count
constexpr std::size_t kLastRounds = 3;  // of the last two sizes
constexpr double kWorthwhile = 0.99;

}  // namespace

BucketTuner::BucketTuner(const std::vector<std::size_t>& sizes, std::size_t preferred)
    : preferred_(preferred), measured_(sizes.size()), left_(sizes.size()) {
  LOCKSTEP_ASSERT(!sizes.empty(), "no sizes to choose from");
  for (const std::size_t bytes : sizes) trials_.push_back({.bucket_bytes = bytes, .step_seconds = 0});
  std::iota(left_.begin(), left_.end(), std::size_t{0});
}

bool BucketTuner::add_step(double seconds) {
  LOCKSTEP_ASSERT(!done(), "a step after the choice");
  ++steps_;
  if (in_block_ > 0) measured_[left_[at_]].push_back(seconds);
  if (++in_block_ < kBlock) return false;
  in_block_ = 0;
  at_ = (at_ + 1) % left_.size();
  return at_ == 0;
}

std::vector<double> BucketTuner::medians() const {
  std::vector<double> medians;
  for (const std::size_t trial : left_) medians.push_back(median(measured_[trial]));
  return medians;
}

void BucketTuner::settle(std::span<const double> slowest) {
  LOCKSTEP_ASSERT(slowest.size() == left_.size() && at_ == 0, "times of {} sizes, of which {} are left", slowest.size(),
                  left_.size());
  for (std::size_t i = 0; i < slowest.size(); ++i) trials_[left_[i]].step_seconds = slowest[i];
  std::ranges::stable_sort(left_, {}, [this](std::size_t trial) { return trials_[trial].step_seconds; });
  const bool last = left_.size() <= 2;
  if (last && ++last_rounds_ < kLastRounds) return;
  const std::size_t kept = (left_.size() + 1) / 2;
  const auto preferred =
      std::ranges::find(left_, preferred_, [this](std::size_t trial) { return trials_[trial].bucket_bytes; });
  if (preferred != left_.end()) {  // it stays to the end, and wins unless another is worthwhile
    const bool wins = trials_[left_.front()].step_seconds > kWorthwhile * trials_[*preferred].step_seconds;
    const auto last_kept = left_.begin() + static_cast<std::ptrdiff_t>(kept) - 1;
    if (preferred > last_kept && (!last || wins)) std::iter_swap(last_kept, preferred);
  }
  left_.resize(kept);
}

std::string describe(const BucketChoice& choice) {
  const auto size_text = [](std::size_t bytes) { return human_bytes(static_cast<double>(bytes)); };
  std::string text = fmt::format("buckets of {}", size_text(choice.bucket_bytes));
  if (choice.trials.empty()) return text + ", as the run that is resumed has chosen";
  if (choice.trials.size() == 1) return text + ": no other size gives other buckets here";
  std::string others;
  for (const auto& trial : choice.trials) {
    if (trial.bucket_bytes == choice.bucket_bytes)
      text += fmt::format(", with which a step takes {:.3g} ms", 1e3 * trial.step_seconds);
    else
      others += fmt::format("{}{}: {:.3g}", others.empty() ? "" : ", ", size_text(trial.bucket_bytes),
                            1e3 * trial.step_seconds);
  }
  return fmt::format("{} ({}), chosen in {} steps", text, others, choice.steps);
}

std::vector<std::size_t> sizes_to_try(std::span<const SlotSpec> slots, std::span<const std::size_t> order,
                                      const BucketLimits& limits) {
  const auto plan_with = [&](std::size_t bytes) {
    BucketLimits tried = limits;
    tried.bucket_bytes = bytes;
    return plan_buckets(slots, order, tried);
  };
  const std::size_t all = std::max(plan_with(limits.bucket_bytes).bytes, std::size_t{1} << 20);
  std::vector<std::size_t> wanted = {limits.bucket_bytes, all};
  for (std::size_t bytes = std::size_t{1} << 20; bytes < all; bytes *= 2) wanted.push_back(bytes);
  std::ranges::sort(wanted);
  // Of sizes with the same buckets, the preferred one stays, or else the smallest.
  std::vector<std::size_t> sizes;
  std::vector<std::vector<std::size_t>> seen;  // slot_bucket
  for (const std::size_t bytes : wanted) {
    auto buckets = plan_with(bytes).slot_bucket;
    const auto same = std::ranges::find(seen, buckets);
    if (same == seen.end()) {
      seen.push_back(std::move(buckets));
      sizes.push_back(bytes);
    } else if (bytes == limits.bucket_bytes) {
      sizes[static_cast<std::size_t>(same - seen.begin())] = bytes;
    }
  }
  return sizes;
}

}  // namespace lockstep::ddp
