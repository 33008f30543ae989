#include "comm/store.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "comm/flight.h"
#include "comm/stall.h"

namespace lockstep::comm {
namespace {

std::string key_of(const std::string& name, int rank) { return fmt::format("{}/{}", name, rank); }

void check_key(const std::string& key) {
  if (key.empty() || key.size() > Store::kMostKeyBytes)
    throw UsageError(fmt::format("a key of {} bytes, where 1 to {} are possible", key.size(), Store::kMostKeyBytes));
}

}  // namespace

std::vector<int> JobRanks::of(std::vector<int> ranks) const {
  for (int& rank : ranks) rank = of(rank);
  return ranks;
}

std::string JobRanks::text(int rank, const std::string& details) const {
  if (are_all()) return fmt::format("rank {} ({})", rank, details);
  return fmt::format("rank {} ({}, rank {} of its subgroup)", of(rank), details, rank);
}

void Store::set(const std::string& key, std::string_view value) {
  check_key(key);
  if (value.size() > kMostValueBytes)
    throw UsageError(fmt::format("{} bytes under key '{}', where {} are possible", value.size(), key, kMostValueBytes));
  do_set(key, value);
}

std::vector<std::optional<std::string>> Store::try_get(std::span<const std::string> keys, Deadline deadline) {
  for (const std::string& key : keys) check_key(key);
  if (keys.size() > kMostKeys) throw UsageError(fmt::format("{} keys, where {} are possible", keys.size(), kMostKeys));
  return do_get(keys, deadline);
}

std::vector<std::string> Store::await(std::span<const std::string> keys, Deadline deadline,
                                      FunctionRef<std::string(const Values&)> doing,
                                      FunctionRef<bool(const Values&)> speaks,
                                      FunctionRef<std::vector<int>(const Values&)> missing) {
  const auto begin = Clock::now();
  for (auto pause = stall_warning();; pause *= 2) {
    const auto next = Deadline::after(begin + pause - Clock::now());
    const bool last = pause == Clock::duration::zero() || next.when() >= deadline.when();
    auto values = try_get(keys, last ? deadline : next);
    if (std::ranges::all_of(values, [](const auto& value) { return value.has_value(); })) {
      std::vector<std::string> texts;
      for (auto& value : values) texts.push_back(*std::move(value));
      return texts;
    }
    const double waited = seconds_between(begin, Clock::now());
    if (last) time_out(doing(values), waited, missing(values));
    if (speaks(values)) maybe_warn_of_stall(doing(values), waited, missing(values));
  }
}

std::vector<std::string> Store::await(std::span<const std::string> keys, Deadline deadline) {
  const auto doing = [&](const Values& values) {
    std::vector<std::string> unset;
    for (std::size_t i = 0; i < keys.size(); ++i)
      if (!values[i]) unset.push_back(fmt::format("'{}'", keys[i]));
    return "getting " + first_names(unset, 4, ", ");
  };
  return await(
      keys, deadline, doing, [](const Values&) { return true; }, [](const Values&) { return std::vector<int>(); });
}

std::string Store::get(const std::string& key, Deadline deadline) { return await({&key, 1}, deadline).front(); }

void Store::wait(std::span<const std::string> keys, Deadline deadline) { await(keys, deadline); }

void Store::barrier(const std::string& name, Deadline deadline) { all_gather_text(name, {}, deadline); }

std::vector<std::string> Store::all_gather_text(const std::string& name, std::string_view mine, Deadline deadline) {
  set(key_of(name, rank_), mine);
  std::vector<std::string> keys;
  for (int r = 0; r < size_; ++r) keys.push_back(key_of(name, r));
  const auto unset = [](const Values& values) {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < values.size(); ++r)
      if (!values[r]) ranks.push_back(static_cast<int>(r));
    return ranks;
  };
  // The lowest of those who wait; of those whom rank 0 does not answer, the next.
  const auto speaks = [&](const Values& values) {
    if (!values[static_cast<std::size_t>(rank_)]) return rank_ == 1;
    return std::ranges::none_of(std::span(values).first(static_cast<std::size_t>(rank_)),
                                [](const auto& value) { return value.has_value(); });
  };
  return await(
      keys, deadline, [&](const Values&) { return name; }, speaks, unset);
}

std::string Store::broadcast_text(const std::string& name, std::string_view mine, int root, Deadline deadline) {
  check_usage(root >= 0 && root < size_, "a broadcast names a root outside the world");
  const std::vector<std::string> keys = {key_of(name, root)};
  if (rank_ == root) {
    set(keys[0], mine);
    return std::string(mine);
  }
  return await(
             keys, deadline, [&](const Values&) { return name; },
             [&](const Values&) { return rank_ == (root == 0 ? 1 : 0); },
             [&](const Values&) { return std::vector<int>{root}; })
      .front();
}

Store::Absent Store::describe_absent(std::vector<int> missing) {
  const auto present = attendance();
  // Rank 0 keeps it: where it does not say what this rank itself has set, nothing is known of the others either.
  if (present[static_cast<std::size_t>(rank_)].host == kUnknownHost ||
      std::ranges::find(missing, rank_) != missing.end())
    missing = {0};
  if (missing.empty())
    for (int r = 0; r < size_; ++r)
      if (!present[static_cast<std::size_t>(r)].joined) missing.push_back(r);
  Absent absent;
  std::vector<std::string> names;
  for (const int rank : missing) {
    const Attendance& one = present[static_cast<std::size_t>(rank)];
    names.push_back(!one.joined                ? fmt::format("rank {}, which has not joined", job_ranks_.of(rank))
                    : one.host == kUnknownHost ? fmt::format("rank {}, which does not answer", job_ranks_.of(rank))
                                               : job_ranks_.text(rank, "host " + one.host));
  }
  absent.names = first_names(names);
  absent.ranks = job_ranks_.of(missing);
  if (!missing.empty()) {
    absent.first = absent.ranks.front();
    absent.never_joined = !present[static_cast<std::size_t>(missing.front())].joined;
  }
  return absent;
}

void Store::maybe_warn_of_stall(const std::string& doing, double waited_seconds, std::vector<int> missing) {
  const Absent absent = describe_absent(std::move(missing));
  if (absent.first >= 0) warn_of_stall(doing, waited_seconds, absent.names);
}

void Store::time_out(const std::string& doing, double waited_seconds, std::vector<int> missing) {
  const Absent absent = describe_absent(std::move(missing));
  std::string remedy = "all ranks have joined: look at the log of the one that should set it";
  if (absent.first >= 0)
    remedy = absent.never_joined
                 ? fmt::format("start rank {} with the same {}, or look at its log; --timeout-seconds waits longer",
                               absent.first, joined_by())
                 : fmt::format("look at the log of rank {}; if it is only slow, raise --timeout-seconds", absent.first);
  const TimeoutError error(fmt::format("{} timed out after {:.3g} s{}{}", doing, waited_seconds,
                                       absent.names.empty() ? "" : " waiting for ", absent.names),
                           remedy);
  give_up_on(absent.ranks);
  give_up(error);
  throw error;
}

}  // namespace lockstep::comm
