#include "trainer/step_shares.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "comm/agree.h"
#include "ddp/shard_sums.h"
#include "trainer/bad_batches.h"
#include "trainer/build.h"

namespace lockstep::trainer {
namespace {

constexpr std::size_t kMostShares = 250;  // each is a tree of the group's, of which it has few more

/// Of any run of a tree that begins and ends anywhere, at least as many as its sums take.
std::size_t most_places(const comm::ReductionTree& tree) {
  // Two for each level of nodes, and the leaf that is being computed.
  std::size_t levels = 1;
  for (std::size_t leaves = 1; leaves < tree.leaves(); leaves *= 2) ++levels;
  return std::min(2 * levels, tree.leaves());
}

}  // namespace

StepShares::StepShares(const TrainConfig& config, session::Session& session)
    : config_(config), group_(*session.group), gradients_(session.gradients()), backend_(*session.backend) {
  if (config_.shards > 0) tree_ = &gradients_.define_tree(static_cast<std::size_t>(config_.shards));
  const BalanceSetting setting = parse_balance(config_.balance);
  const auto take_cores = [&](std::int64_t most) {
    if (tree_ != nullptr && session.device.kind == DeviceKind::kCpu)
      at_once_ = static_cast<int>(std::clamp<std::int64_t>(session.cores / session.threads, 1, most));
  };
  if (tree_ != nullptr) take_cores(tree_->run_of(gradients_.rank()).count);
  if (!setting.on()) return;
  const auto ranks = static_cast<std::size_t>(group_.size());
  comm::run_collectively(group_, [&] {
    if (!setting.automatic && setting.speeds.size() != ranks)
      throw UsageError(fmt::format("--balance with {} speeds for {} ranks", setting.speeds.size(), ranks),
                       "give one for each rank, or auto");
    if (setting.automatic && session.device.kind != DeviceKind::kCpu)
      throw UsageError("--balance auto on a GPU, whose host does not see for how long it computes",
                       "say how fast the ranks are: --balance speeds:2,1");
  });
  const std::int64_t parts = tree_ != nullptr ? config_.shards : global_batch_of(config_, group_.size());
  if (ranks == 1 || parts <= group_.size()) {
    if (group_.rank() == 0)
      log_warn("--balance has nothing to share out: a step of {} {} on {} ranks", parts,
               tree_ != nullptr ? "shards" : "samples", ranks);
    return;
  }
  if (setting.automatic) take_cores(parts - group_.size() + 1);
  std::vector<int> at_once;
  for (const auto each : group_.all_gather_numbers(at_once_)) at_once.push_back(static_cast<int>(each));
  balance_.emplace(static_cast<std::uint32_t>(parts), std::move(at_once), tree_);
  follows_ = setting.automatic;
  if (setting.automatic) return;
  first_ = balance_->take_speeds(setting.speeds);
  take_shares();
  if (tree_ != nullptr) take_cores(tree_->run_of(gradients_.rank()).count);
}

void StepShares::take_shares() {
  if (tree_ != nullptr) tree_ = &gradients_.define_tree(tree_->leaves(), balance_->shares());
}

void StepShares::open(std::shared_ptr<const data::Dataset> dataset) {
  dataset_ = std::move(dataset);
  make_sampler();
}

void StepShares::start() {
  loader_.reset();
  loader_.emplace(dataset_, *sampler_,
                  data::LoaderOptions{.workers = config_.workers,
                                      .memory = backend_.staging_memory(),
                                      .keeps_going = parse_bad_batch(config_.on_bad_batch).most > 0});
}

const data::Batch& StepShares::next() {
  backend_.finish_inputs();
  return loader_->next();
}

// Its ranks are the runs, which follow the hosts; without shards the ranks themselves.
sampler::DistributedSampler StepShares::sampler_of(int position) const {
  std::vector<std::uint32_t> shares;
  if (balance_) shares = balance_->shares();
  if (balance_ && tree_ != nullptr) shares = in_runs<std::uint32_t>(*tree_, balance_->shares());
  return trainer::make_sampler(config_, dataset_->size(), position, group_.size(), std::move(shares));
}

void StepShares::make_sampler() {
  sampler_.emplace(sampler_of(tree_ != nullptr ? tree_->position_of(gradients_.rank()) : group_.rank()));
}

MemoryPlan StepShares::memory_plan(std::size_t devices) const {
  const std::size_t of_audits = config_.audit > 0 ? 2 : 0;  // a copy's gradients, and the parameters of before
  return {.samples = most_at_once(),
          .smallest = smallest_pass(config_, *sampler_, devices),
          .devices = devices,
          .passes = static_cast<std::size_t>(at_once_),
          .gradients = places() + of_audits,
          .updates = config_.zero > 0 ? static_cast<std::size_t>(group_.size()) : 1,
          .workers = config_.workers,
          .batch = static_cast<std::int64_t>(sampler_->max_local_count()),
          .ranks = group_.size()};
}

std::size_t StepShares::places() const {
  if (tree_ == nullptr) return 1;
  const auto at_once = static_cast<std::size_t>(at_once_);
  const std::size_t own = ddp::ShardSums(*tree_, gradients_.rank(), at_once).places();
  return follows_ ? std::max(own, std::min(most_places(*tree_) + at_once - 1, tree_->leaves())) : own;
}

std::int64_t StepShares::samples_at_once() const {
  const sampler::SamplerConfig& order = sampler_->config();
  std::uint64_t samples = order.global_batch, parts = order.shards;
  if (parts == 0) {
    samples = std::min(samples, sampler::epoch_end(order, group_.size()));
    parts = static_cast<std::uint64_t>(std::int64_t{group_.size()} * config_.accumulate);
  }
  return static_cast<std::int64_t>(std::max<std::uint64_t>(1, (samples + parts - 1) / parts));
}

// Of this rank with the shares of now, or equal ones.
std::int64_t StepShares::most_at_once() const {
  if (tree_ != nullptr) return samples_at_once();
  const auto own = static_cast<std::int64_t>(sampler_->max_local_count()), parts = std::int64_t{config_.accumulate};
  return std::max(samples_at_once(), (own + parts - 1) / parts);
}

std::optional<BalanceReport> StepShares::follow(std::span<const StepTimes> window, std::int64_t step,
                                                std::int64_t steps_left, const sampler::SamplerState& position) {
  if (!follows_ || window.empty()) return std::nullopt;
  auto found = balance_->follow(window, step, steps_left);
  if (!found) return found;
  if (tree_ != nullptr) taken_.insert(found->shares);
  if (taken_.size() == kMostShares) {
    follows_ = false;
    if (group_.rank() == 0) log_info("--balance auto has taken {} different shares, and keeps these", kMostShares);
  }
  take_shares();
  make_sampler();
  sampler_->restore(position);
  backend_.finish_inputs();
  comm::run_collectively(group_, [&] { start(); });
  return found;
}

void StepShares::change_took(double seconds) {
  const auto all = group_.all_gather_numbers(static_cast<std::int64_t>(1e9 * seconds));
  balance_->change_took(1e-9 * static_cast<double>(std::ranges::max(all)));
}

std::string describe(const BalanceReport& report, bool of_shards) {
  std::string text = fmt::format("{} of a step: {}", of_shards ? "shards" : "samples", fmt::join(report.shares, ", "));
  if (report.own_ms.empty()) return text;
  return text + fmt::format("; ranks took {:.1f} ms for theirs, and should all be done in {:.1f} ms now",
                            fmt::join(report.own_ms, ", "), report.expected_ms);
}

}  // namespace lockstep::trainer
