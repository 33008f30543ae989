#include "lockstep/sampler/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"

namespace lockstep::sampler {

namespace {

std::uint64_t ceil_div(std::uint64_t a, std::uint64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

bool has_step(const SamplerConfig& config, std::uint64_t end, std::uint64_t cursor) {
  return cursor < end && (config.tail != Tail::kDrop || end - cursor >= config.global_batch);
}

// What `rank` has of the shares, which there are.
Slice share_of(const SamplerConfig& config, int rank) {
  const auto own = config.shares.begin() + rank;
  return {std::accumulate(config.shares.begin(), own, std::uint64_t{0}), *own};
}

// The shards of a rank.
Slice run_of(const SamplerConfig& config, int rank, int world_size) {
  if (!config.shares.empty()) return share_of(config, rank);
  return slice_of(config.shards, static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(world_size));
}

// Of the `count` places of a step.
Slice local_slice(const SamplerConfig& config, std::uint64_t count, int rank, int world_size) {
  const auto part = static_cast<std::uint64_t>(rank), parts = static_cast<std::uint64_t>(world_size);
  if (config.shards == 0 && !config.shares.empty()) {
    const Slice share = share_of(config, rank);
    return slice_between(count, share.begin, share.end(), share_of(config, world_size - 1).end());
  }
  if (config.shards > 0) {
    const Slice run = run_of(config, rank, world_size);
    const std::uint64_t begin = shard_of(config, count, run.begin).begin;
    return {begin, shard_of(config, count, run.end() - 1).end() - begin};
  }
  if (config.order != Order::kColumns) return slice_of(count, part, parts);
  const Slice columns = slice_of(config.global_batch, part, parts);
  const std::uint64_t begin = std::min(columns.begin, count);
  return {begin, std::min(columns.end(), count) - begin};
}

// Whose number an epoch's padding depends on.
std::uint64_t parts_of(const SamplerConfig& config, int world_size) {
  return config.shards > 0 ? config.shards : static_cast<std::uint64_t>(world_size);
}

// The sample at `position` of an epoch (Note [Columns]).
std::uint64_t sample_of_column(const SamplerConfig& config, std::uint64_t position) {
  const std::uint64_t column = position % config.global_batch, turn = position / config.global_batch;
  const std::uint64_t each = config.length / config.global_batch;
  const std::uint64_t longer = config.tail == Tail::kDrop ? 0 : config.length % config.global_batch;
  return column * each + std::min(column, longer) + turn;
}

void check_shares(const SamplerConfig& config, int world_size) {
  const auto shares = [&] { return fmt::format("shares {} of a step", fmt::join(config.shares, ", ")); };
  if (config.shares.size() != static_cast<std::size_t>(world_size) || std::ranges::count(config.shares, 0u) > 0)
    throw UsageError(fmt::format("{} for {} ranks", shares(), world_size), "give each rank one, of 1 or more");
  const std::uint64_t sum = share_of(config, world_size - 1).end();
  if (config.shards > 0 && sum != config.shards)
    throw UsageError(fmt::format("{} in {} shards", shares(), config.shards), "let them be all shards together");
  if (sum > std::numeric_limits<std::uint32_t>::max())
    throw UsageError(shares(), "let them be less than 2^32 together");
  if (config.order == Order::kColumns)
    throw UsageError(fmt::format("{} whose places read consecutive samples", shares()), "leave one of the two out");
  if (config.shards == 0 && config.tail == Tail::kPad)
    throw UsageError(fmt::format("{}, and the tail 'pad', which makes them equal", shares()),
                     "use --tail exact or drop");
}

}  // namespace

void check(const SamplerConfig& config, int rank, int world_size) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw UsageError(fmt::format("rank {} of a world of {}", rank, world_size),
                     "ranks count from 0 to the world size less one");
  }
  if (config.length == 0) throw IoError("empty data set: it has 0 samples", "give data with at least one sample");
  // Half of the range remains for padding, so that no position overflows.
  if (config.length > std::numeric_limits<std::uint64_t>::max() / 2) {
    throw UsageError(fmt::format("a data set of {} samples", config.length), "at most 2^63 - 1 can be numbered");
  }
  if (config.global_batch == 0) throw UsageError("a global batch of 0 samples", "give 1 or more");
  if (config.shards > 0) {
    if (config.shards < static_cast<std::uint64_t>(world_size))
      throw UsageError(fmt::format("{} shards for {} ranks", config.shards, world_size),
                       fmt::format("give at least {} shards, or start at most {} ranks", world_size, config.shards));
    if (config.shards > config.global_batch)
      throw UsageError(fmt::format("{} shards of a global batch of {}", config.shards, config.global_batch),
                       "give at most as many shards as samples");
    if (config.order == Order::kColumns)
      throw UsageError("shards of steps whose places read consecutive samples", "leave one of the two out");
  }
  if (!config.shares.empty()) check_shares(config, world_size);
  const std::uint64_t parts = parts_of(config, world_size);
  if (config.tail == Tail::kPad && config.global_batch % parts != 0) {
    throw UsageError(fmt::format("the tail 'pad' cannot make {} {} equal with a global batch of {}", parts,
                                 config.shards > 0 ? "shards" : "ranks", config.global_batch),
                     fmt::format("use --tail exact, or a global batch that is a multiple of {}", parts));
  }
  if (config.tail == Tail::kPad && config.order == Order::kColumns) {
    throw UsageError(
        "the tail 'pad' repeats samples of an epoch's beginning, and each place of a batch reads "
        "consecutive ones",
        "use --tail exact or drop");
  }
  if (config.tail == Tail::kDrop && config.global_batch > config.length) {
    throw UsageError(fmt::format("the tail 'drop' leaves no step: {} samples do not fill a global batch of {}",
                                 config.length, config.global_batch),
                     fmt::format("use --tail exact, or a global batch of at most {}", config.length));
  }
}

std::uint64_t epoch_end(const SamplerConfig& config, int world_size) {
  const std::uint64_t parts = parts_of(config, world_size);
  return config.tail == Tail::kPad ? parts * ceil_div(config.length, parts) : config.length;
}

SamplerState normalized(const SamplerConfig& config, const SamplerState& state, int world_size) {
  return has_step(config, epoch_end(config, world_size), state.cursor) ? state : SamplerState{state.epoch + 1, 0};
}

StepPlan plan_step(const SamplerConfig& config, const SamplerState& state, int rank, int world_size) {
  check(config, rank, world_size);
  const std::uint64_t end = epoch_end(config, world_size);
  if (!has_step(config, end, state.cursor))
    throw UsageError(fmt::format("no step begins at position {} of an epoch of {}", state.cursor, end),
                     "plan from what normalized() returns");
  StepPlan plan;
  plan.epoch = state.epoch;
  plan.step_in_epoch = state.cursor / config.global_batch;
  plan.global_begin = state.cursor;
  plan.global_count = std::min(config.global_batch, end - state.cursor);
  const Slice local = local_slice(config, plan.global_count, rank, world_size);
  plan.local_begin = plan.global_begin + local.begin;
  plan.local_count = local.count;
  plan.last_of_epoch = !has_step(config, end, plan.global_begin + plan.global_count);
  return plan;
}

DistributedSampler::DistributedSampler(const SamplerConfig& config, int rank, int world_size)
    : config_(config), rank_(rank), world_size_(world_size) {
  check(config, rank, world_size);
  if (config_.order == Order::kShuffled) order_.emplace(config_.length, config_.seed, state_.epoch);
}

std::uint64_t DistributedSampler::steps_per_epoch() const {
  const std::uint64_t end = epoch_end(config_, world_size_);
  return config_.tail == Tail::kDrop ? end / config_.global_batch : ceil_div(end, config_.global_batch);
}

std::uint64_t DistributedSampler::max_local_count() const {
  const std::uint64_t largest_step = config_.order == Order::kColumns
                                         ? config_.global_batch
                                         : std::min(config_.global_batch, epoch_end(config_, world_size_));
  const auto ranks = static_cast<std::uint64_t>(world_size_);
  if (config_.shards > 0)
    return std::min(largest_step, run_of(config_, rank_, world_size_).count * ceil_div(largest_step, config_.shards));
  if (config_.shares.empty()) return ceil_div(largest_step, ranks);
  return std::min(largest_step, local_slice(config_, largest_step, rank_, world_size_).count + 1);
}

StepPlan DistributedSampler::plan() const { return plan_step(config_, state_, rank_, world_size_); }

void DistributedSampler::indices(const StepPlan& plan, std::span<std::uint64_t> out) const {
  if (out.size() != plan.local_count)
    throw UsageError(fmt::format("{} places for the {} samples of a step", out.size(), plan.local_count),
                     "give as many places as StepPlan::local_count says");
  // Positions past the length exist with Tail::kPad alone and wrap round, several times if the world is larger.
  auto position = [&](std::size_t i) { return (plan.local_begin + i) % config_.length; };
  if (config_.order == Order::kColumns) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = sample_of_column(config_, plan.local_begin + i);
  } else if (config_.order == Order::kSequential) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = position(i);
  } else if (plan.epoch == state_.epoch) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = (*order_)(position(i));
  } else {
    const Permutation order(config_.length, config_.seed, plan.epoch);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = order(position(i));
  }
}

void DistributedSampler::advance() { move_to({state_.epoch, state_.cursor + plan().global_count}); }

void DistributedSampler::restore(const SamplerState& state) {
  // With Tail::kPad a cursor may lie in the padding of a larger world.
  if (config_.tail != Tail::kPad && state.cursor > config_.length) {
    throw UsageError(
        fmt::format("the sampler's position {} lies beyond the data set's {} samples", state.cursor, config_.length),
        "resume with the data that the run started with");
  }
  move_to(state);
}

void DistributedSampler::move_to(const SamplerState& state) {
  const std::uint64_t epoch_before = state_.epoch;
  state_ = normalized(config_, state, world_size_);
  if (config_.order == Order::kShuffled && state_.epoch != epoch_before) order_->restart(config_.seed, state_.epoch);
}

}  // namespace lockstep::sampler
