#include "trainer/stragglers.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <type_traits>

#include "base/flight_record.h"
#include "base/statistics.h"
#include "lockstep/base/env.h"

namespace lockstep::trainer {
namespace {

constexpr double kLeastShare = 0.25;  // of a step that a straggler costs
constexpr double kLeastLostNs = 50e6;
constexpr double kLinkShare = 0.5;
constexpr double kLinkFactor = 1.5;
constexpr std::int64_t kWarmUpSteps = 5;
constexpr std::int64_t kWindow = 20;
constexpr std::size_t kMostFound = 8;

static_assert(std::is_trivially_copyable_v<StepTimes> && sizeof(StepTimes) == kStepTimesNumbers * sizeof(double));

/// Of what `of` says of all ranks but `rank`.
template <class Of>
double median_of_others(std::size_t ranks, std::size_t rank, Of&& of) {
  std::vector<double> values;
  for (std::size_t r = 0; r < ranks; ++r)
    if (r != rank) values.push_back(of(r));
  return median(std::move(values));
}

/// Milliseconds of a number of ns.
std::string ms(double ns) { return fmt::format("{:.{}f} ms", ns * 1e-6, ns < 10e6 ? 1 : 0); }

/// All that is compared, per step.
struct PerStep {
  double data = 0, compute = 0, wait = 0, delayed = 0;
  double late = 0;  // of `delayed`, what came after a wait was over: the rank was woken, and had no processor
  double lost = 0;  // of `delayed`, what made its step longer
  double own() const { return data + compute + late; }
};

std::vector<PerStep> per_step(std::span<const StepTimes> ranks) {
  double samples = 0;
  for (const auto& each : ranks) samples += each.samples / static_cast<double>(ranks.size());
  std::vector<PerStep> made;
  for (const auto& each : ranks) {
    const double steps = std::max(1.0, each.steps);
    // Who has more samples than the others takes longer, and is not slow.
    const double share = each.samples > samples && samples > 0 ? samples / each.samples : 1.0;
    made.push_back({.data = each.data_ns / steps,
                    .compute = share * each.compute_ns / steps,
                    .wait = each.wait_ns / steps,
                    .delayed = share * each.delayed_ns / steps});
  }
  // The kernel counts all delays together. Within its computation a rank has lost no more than it took longer than
  // another one, and for what it was late after a wait all others have waited; a delay amid a wait costs nobody.
  const double least = std::ranges::min(made, {}, &PerStep::compute).compute;
  for (std::size_t r = 0; r < made.size(); ++r) {
    double most = made[r].wait;
    for (std::size_t other = 0; other < made.size(); ++other)
      if (other != r) most = std::min(most, made[other].wait);
    const double longer = made[r].compute - least;
    made[r].late = std::clamp(made[r].delayed - longer, 0.0, most);
    made[r].lost = std::min(made[r].delayed, longer + made[r].late);
  }
  return made;
}

std::optional<Straggler> slow_rank(std::span<const PerStep> ranks, std::span<const std::string> hosts) {
  const auto slowest = static_cast<std::size_t>(std::ranges::max_element(ranks, {}, &PerStep::own) - ranks.begin());
  const PerStep& its = ranks[slowest];
  const auto others = [&](auto member) {
    return median_of_others(ranks.size(), slowest, [&](std::size_t r) { return std::invoke(member, ranks[r]); });
  };
  const double excess = its.own() - others(&PerStep::own);
  const double step = its.own() + its.wait - its.late;
  if (excess <= 0 || excess < kLeastShare * step) return std::nullopt;
  Straggler straggler{.rank = static_cast<int>(slowest), .lost_ns = excess};
  const std::string who = fmt::format("rank {} (host {}) holds the others up", slowest, hosts[slowest]);
  if (const double data = others(&PerStep::data); its.data - data >= excess / 2) {
    straggler.by = SlowBy::kData;
    straggler.text =
        fmt::format("{}: it waits {} per step for its data, the others {} → give it more --workers, or a faster disk",
                    who, ms(its.data), ms(data));
    return straggler;
  }
  const double compute = others(&PerStep::compute), lost = its.lost - others(&PerStep::lost);
  const std::string computes =
      fmt::format("{}: it computes {} per step, the others {}", who, ms(its.compute + its.late), ms(compute));
  if (lost >= excess / 3) {
    straggler.by = SlowBy::kNeighbour;
    straggler.text = fmt::format("{}, and for {} of that it waits for a processor → other programs run on its cores",
                                 computes, ms(its.lost));
  } else {
    straggler.text = fmt::format(
        "{}, on a processor of its own → that one is slower or throttled, or shares its memory with a busy neighbour",
        computes);
  }
  return straggler;
}

/// By host: how long bytes were on their way on its links, in either direction, per step.
std::map<std::string, double> busy_by_host(std::span<const StepTimes> ranks, std::span<const std::string> hosts) {
  std::map<std::string, double> busy;
  for (const auto& host : hosts) busy.emplace(host, 0);
  for (std::size_t r = 0; r < ranks.size(); ++r)
    for (const auto& peer : ranks[r].peers) {
      if (peer.rank < 0 || peer.rank >= static_cast<double>(hosts.size())) continue;
      const double ns = peer.ns / std::max(1.0, ranks[r].steps);
      busy[hosts[r]] += ns;
      busy[hosts[static_cast<std::size_t>(peer.rank)]] += ns;
    }
  return busy;
}

std::optional<Straggler> slow_link(std::span<const StepTimes> times, std::span<const PerStep> ranks,
                                   std::span<const std::string> hosts) {
  const PerStep& least = *std::ranges::min_element(ranks, {}, &PerStep::wait);
  const double step = least.data + least.compute + least.wait;
  if (least.wait <= 0 || least.wait < kLinkShare * step) return std::nullopt;
  const auto busy = busy_by_host(times, hosts);
  if (busy.size() < 2) return std::nullopt;
  const auto slowest = std::ranges::max_element(busy, {}, [](const auto& each) { return each.second; });
  if (slowest->second <= 0) return std::nullopt;
  const auto first_rank_on = [&](const std::string& host) {
    return static_cast<int>(std::ranges::find(hosts, host) - hosts.begin());
  };
  Straggler straggler{.by = SlowBy::kLink, .lost_ns = least.wait};
  std::string which;
  if (busy.size() == 2) {
    straggler.rank = 0;
    const auto other = std::ranges::find_if(hosts, [&](const std::string& host) { return host != hosts[0]; });
    which = fmt::format("the link between host {} and host {}", hosts[0], *other);
  } else {
    std::vector<double> others;
    for (const auto& [host, ns] : busy)
      if (host != slowest->first) others.push_back(ns);
    if (slowest->second < kLinkFactor * median(std::move(others))) return std::nullopt;
    straggler.rank = first_rank_on(slowest->first);
    which = fmt::format("the link of host {}", slowest->first);
  }
  straggler.text = fmt::format(
      "{} holds the ranks up: of {} per step each waits {} or more for data that is on its way → look at that network, "
      "or send less (--comm-hook, --accumulate)",
      which, ms(step), ms(least.wait));
  return straggler;
}

double double_of(Clock::duration time) { return std::chrono::duration<double, std::nano>(time).count(); }

/// How long this thread could have run, and had no processor, in ns; 0 where the kernel does not say.
double delayed_ns() {
  std::ifstream file("/proc/thread-self/schedstat");
  double ran = 0, delayed = 0;
  return file >> ran >> delayed ? delayed : 0;
}

}  // namespace

std::optional<Straggler> find_straggler(std::span<const StepTimes> ranks, std::span<const std::string> hosts) {
  if (ranks.size() < 2) return std::nullopt;
  const auto compared = per_step(ranks);
  auto found = slow_rank(compared, hosts);
  if (!found) found = slow_link(ranks, compared, hosts);
  if (found) found->lost_ns *= std::max(1.0, ranks[0].steps);
  return found;
}

bool Straggler::is_same_place(const Straggler& other) const {
  return (by == SlowBy::kLink) == (other.by == SlowBy::kLink) && rank == other.rank;
}

bool Straggler::is_same(const Straggler& other) const {
  const auto phase = [](SlowBy each) { return each == SlowBy::kNeighbour ? SlowBy::kComputing : each; };
  return phase(by) == phase(other.by) && rank == other.rank;
}

void StragglerWatch::data_took(Clock::duration time) { times_.data_ns += last_data_ns_ = double_of(time); }

void StragglerWatch::forget_data() { times_.data_ns -= std::exchange(last_data_ns_, 0); }

StragglerWatch::StragglerWatch(comm::ProcessGroup& group, bool on_device) : group_(group), on_device_(on_device) {
  hosts_ = group_.all_gather_text(host_name());
  all_.resize(static_cast<std::size_t>(group_.size()));
  totals_.resize(all_.size());
  peers_before_.resize(all_.size());
}

void StragglerWatch::begin_step() { waited_before_ = flight::waited_ns(); }

std::optional<Straggler> StragglerWatch::end_step(Clock::duration step_time, std::uint64_t samples) {
  const double wait = static_cast<double>(flight::waited_ns() - waited_before_);
  times_.steps += 1;
  times_.samples += static_cast<double>(samples);
  if (!on_device_) {
    times_.wait_ns += wait;
    times_.compute_ns += std::max(0.0, double_of(step_time) - wait);
  } else {
    times_.wait_ns += double_of(step_time);  // all of it counts as the step
  }
  ++steps_;
  if (steps_ == kWarmUpSteps) begin_window();
  ended_ = steps_ == kWindow / 2 || steps_ % kWindow == 0;
  if (!ended_) return std::nullopt;
  if (group_.size() == 1) all_.front() = times_;
  auto found = group_.size() > 1 ? exchange() : std::nullopt;
  for (std::size_t rank = 0; rank < all_.size(); ++rank) {
    totals_[rank].steps += all_[rank].steps;
    totals_[rank].data_ns += all_[rank].data_ns;
    totals_[rank].compute_ns += all_[rank].compute_ns;
    totals_[rank].wait_ns += all_[rank].wait_ns;
  }
  begin_window();
  return found;
}

std::vector<RankTimes> StragglerWatch::means() const {
  std::vector<RankTimes> means;
  for (const auto& total : totals_) {
    if (total.steps == 0) return {};
    const auto mean = [&](double ns) { return 1e-6 * ns / total.steps; };
    // Of a device's step the host only sees its length.
    means.push_back({.data = mean(total.data_ns),
                     .compute = on_device_ ? std::numeric_limits<double>::quiet_NaN() : mean(total.compute_ns),
                     .wait = on_device_ ? 0 : mean(total.wait_ns)});
  }
  return means;
}

void StragglerWatch::begin_window() {
  times_ = {};
  last_data_ns_ = 0;
  delayed_before_ = delayed_ns();
  for (const auto& peer : group_.sending_times())
    peers_before_[static_cast<std::size_t>(peer.rank)] = double_of(peer.time);
}

std::optional<Straggler> StragglerWatch::exchange() {
  times_.delayed_ns = delayed_ns() - delayed_before_;
  std::vector<StepTimes::Peer> peers;
  for (const auto& peer : group_.sending_times())
    peers.push_back({.rank = static_cast<double>(peer.rank),
                     .ns = double_of(peer.time) - peers_before_[static_cast<std::size_t>(peer.rank)]});
  std::ranges::sort(peers, std::ranges::greater(), &StepTimes::Peer::ns);
  std::copy_n(peers.begin(), std::min(peers.size(), times_.peers.size()), times_.peers.begin());
  const auto numbers_of = [](std::span<StepTimes> times) {
    return std::span(reinterpret_cast<double*>(times.data()), times.size() * kStepTimesNumbers);
  };
  group_.all_gather<double>(numbers_of({&times_, 1}), numbers_of(all_));

  // Every rank could, and one says it.
  if (group_.rank() != 0) return std::nullopt;
  auto shown = find_straggler(all_, hosts_);
  const bool again = shown && suspect_ && shown->is_same_place(*suspect_);
  if (again) shown->lost_ns += suspect_->lost_ns;
  suspect_ = shown;
  if (!again || shown->lost_ns < kLeastLostNs) return std::nullopt;
  const auto is_known = [&](const Straggler& each) { return each.is_same(*shown); };
  if (found_.size() == kMostFound || std::ranges::any_of(found_, is_known)) return std::nullopt;
  found_.push_back(*shown);
  return shown;
}

}  // namespace lockstep::trainer
