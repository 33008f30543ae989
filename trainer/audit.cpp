#include "trainer/audit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/splitmix.h"
#include "base/status_report.h"
#include "comm/agree.h"
#include "session/opening.h"

namespace lockstep::trainer {
namespace {

constexpr const char* kRemedy =
    "test that machine's memory and processors, or leave it out of the hosts; --resume auto resumes from the last "
    "checkpoint";

/// The run `by` after run `position`, around.
int after(int position, int by, int runs) { return (position + by) % runs; }

int rank_at(const comm::ReductionTree& tree, int position) { return tree.order()[static_cast<std::size_t>(position)]; }

}  // namespace

Audit::Audit(double share, session::Session& session, parallel::DistributedDataParallel& ddp, StepShares& shares)
    : group_(*session.group),
      backend_(*session.backend),
      ddp_(ddp),
      shares_(shares),
      every_(static_cast<std::int64_t>(std::ceil(1 / share))) {
  comm::run_collectively(group_, [&] {
    if (backend_.device().kind != DeviceKind::kCpu)
      throw UsageError("--audit on a GPU, whose gradients stay there", "leave it out, or use --device cpu");
    copy_ = ddp_.copy_of_module(backend_);
  });
  if (group_.size() == 1) {
    log_warn("--audit compares ranks, and there is one: nothing is audited");
    return;
  }
  on_ = true;
  tape_.emplace(backend_);
  for (const auto& [name, parameter] : ddp_.parameters())
    before_.push_back(backend_.empty(parameter->value().shape(), parameter->value().dtype()));
  places_ = group_.all_gather_text(session::place_of_process());
}

bool Audit::due(std::int64_t step, bool checkpoint) const {
  const std::int64_t window = (step - 1) / every_, place = (step - 1) % every_;
  return on_ &&
         (checkpoint || static_cast<std::uint64_t>(place) == SplitMix64::word(static_cast<std::uint64_t>(window), 0) %
                                                                 static_cast<std::uint64_t>(every_));
}

void Audit::begin(std::int64_t step, const data::Batch& batch, const sampler::SamplerState& position,
                  TrainingStep& training) {
  step_ = step;
  position_ = position;
  ddp_.wait_for_parameters();
  for (std::size_t i = 0; i < before_.size(); ++i)
    backend_.pointwise().copy(ddp_.parameters()[i].parameter->value(), before_[i]);
  training.expect(batch);
  const comm::ReductionTree& tree = *shares_.tree();
  const int next = after(tree.position_of(ddp_.group().rank()), 1, tree.ranks());
  comm::run_collectively(group_, [&] { audited_ = compute(next, tree.run_of(rank_at(tree, next)), training); });
  ddp_.hash_shards(true);
}

// Hashes of some shards of that run.
std::vector<std::uint64_t> Audit::compute(int position, const comm::TreeNode& shards, TrainingStep& training) {
  sampler::DistributedSampler sampler = shares_.sampler_of(position);
  sampler.restore(position_);
  data::Loader loader(shares_.dataset(), sampler, {.workers = 0, .memory = backend_.staging_memory()});
  const data::Batch& batch = loader.next();
  copy_->take_modes(ddp_.module());
  for (const auto& [name, parameter] : copy_->named_parameters()) parameter->changed();
  return training.hash_shards(*step_, batch, shards, *copy_, *tape_);
}

bool Audit::end(TrainingStep& training) {
  if (!step_) return false;
  ddp_.hash_shards(false);
  if (const auto found = compare()) accuse(*found, training);
  ++count_;
  verified_ = *std::exchange(step_, std::nullopt);
  return true;
}

std::optional<Audit::Difference> Audit::compare() const {
  std::vector<std::uint64_t> mine(ddp_.shard_hashes().begin(), ddp_.shard_hashes().end());
  mine.insert(mine.end(), audited_.begin(), audited_.end());
  const auto all = group_.all_gather_objects(std::as_bytes(std::span(mine)));
  const comm::ReductionTree& tree = *shares_.tree();
  const auto hash_of = [&](int position, std::size_t place) {
    std::uint64_t hash = 0;
    std::memcpy(&hash, all[static_cast<std::size_t>(rank_at(tree, position))].data() + place * sizeof hash,
                sizeof hash);
    return hash;
  };
  for (int position = 0; position < tree.ranks(); ++position) {
    const int auditor = after(position, tree.ranks() - 1, tree.ranks());
    const auto run_of = [&](int of) { return tree.run_of(rank_at(tree, of)); };
    for (std::size_t place = 0; place < run_of(position).count; ++place) {
      const Difference found = {.position = position,
                                .place = place,
                                .owners = hash_of(position, place),
                                .auditors = hash_of(auditor, run_of(auditor).count + place)};
      if (found.owners != found.auditors) return found;
    }
  }
  return std::nullopt;
}

std::string Audit::where(int rank) const {
  return fmt::format("rank {} ({})", rank, places_[static_cast<std::size_t>(rank)]);
}

void Audit::accuse(const Difference& found, TrainingStep& training) {
  const comm::ReductionTree& tree = *shares_.tree();
  const int runs = tree.ranks(), me = ddp_.group().rank();
  const int owner = rank_at(tree, found.position), auditor = rank_at(tree, after(found.position, runs - 1, runs));
  const int third = rank_at(tree, after(found.position, 1, runs));  // of two ranks the auditor
  const auto shard = tree.run_of(owner).first + static_cast<std::uint32_t>(found.place);

  std::uint64_t again = 0;
  ddp_.wait_for_parameters();
  for (std::size_t i = 0; i < before_.size(); ++i)
    backend_.pointwise().copy(before_[i], ddp_.parameters()[i].parameter->value());
  comm::run_collectively(group_, [&] {
    if (me == third || (runs == 2 && me == owner))
      again = compute(found.position, {.first = shard, .count = 1}, training).front();
  });
  const auto all = group_.all_gather_numbers(static_cast<std::int64_t>(again));
  const auto hash_of = [&](int rank) { return static_cast<std::uint64_t>(all[static_cast<std::size_t>(rank)]); };
  std::optional<int> culprit;
  if (runs > 2) {
    if (hash_of(third) == found.owners) culprit = auditor;
    if (hash_of(third) == found.auditors) culprit = owner;
  } else {
    if (hash_of(owner) == found.auditors) culprit = owner;
    if (hash_of(auditor) == found.owners) culprit = auditor;
  }
  const std::string verified = verified_ > 0 ? fmt::format("; all was right at step {}", verified_) : "";
  if (!culprit)
    throw OutOfStepError(fmt::format("step {}: {} and {} have computed different gradients of shard {}{}", *step_,
                                     where(owner), where(auditor), shard, verified),
                         kRemedy);
  comm::run_collectively(group_, [&] {
    if (group_.rank() != *culprit) return;
    report_status({.kind = StatusReport::Kind::kComputesWrongly});
    const int right = *culprit == owner ? auditor : owner;
    const std::string other = runs > 2
                                  ? fmt::format("ranks {} and {} do", std::min(right, third), std::max(right, third))
                                  : "it does the second time";
    throw DeviceError(fmt::format("step {}: {} has computed other gradients of shard {} than {}: its memory or a "
                                  "processor is at fault{}",
                                  *step_, where(*culprit), shard, other, verified),
                      kRemedy);
  });
  LOCKSTEP_ASSERT(false, "rank {} has not thrown", *culprit);
}

}  // namespace lockstep::trainer
