#include "comm/store.h"

#include <algorithm>
#include <utility>

#include "base/status_report.h"
#include "base/text.h"

namespace lockstep::comm {
namespace {

std::string key_of(const std::string& name, int rank) { return fmt::format("{}/{}", name, rank); }

void check_key(const std::string& key) {
  if (key.empty() || key.size() > Store::kMostKeyBytes)
    throw UsageError(fmt::format("a key of {} bytes, where 1 to {} are possible", key.size(), Store::kMostKeyBytes));
}

std::string keys_text(const std::vector<std::string>& keys) {
  constexpr std::size_t kNamed = 4;
  std::vector<std::string> named(keys.begin(),
                                 keys.begin() + static_cast<std::ptrdiff_t>(std::min(kNamed, keys.size())));
  if (keys.size() > kNamed) named.push_back(fmt::format("{} more", keys.size() - kNamed));
  return join(named, ", ");
}

}  // namespace

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

std::string Store::get(const std::string& key, Deadline deadline) {
  const auto begin = Clock::now();
  auto values = try_get(std::span(&key, 1), deadline);
  if (!values[0]) time_out(fmt::format("getting '{}'", key), seconds_between(begin, Clock::now()), {});
  return *std::move(values[0]);
}

void Store::wait(std::span<const std::string> keys, Deadline deadline) {
  const auto begin = Clock::now();
  const auto values = try_get(keys, deadline);
  std::vector<std::string> unset;
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (!values[i]) unset.push_back(fmt::format("'{}'", keys[i]));
  if (!unset.empty()) time_out(fmt::format("getting {}", keys_text(unset)), seconds_between(begin, Clock::now()), {});
}

void Store::barrier(const std::string& name, Deadline deadline) { all_gather_text(name, {}, deadline); }

std::vector<std::string> Store::all_gather_text(const std::string& name, std::string_view mine, Deadline deadline) {
  const auto begin = Clock::now();
  set(key_of(name, rank_), mine);
  std::vector<std::string> keys;
  for (int r = 0; r < size_; ++r) keys.push_back(key_of(name, r));
  std::vector<std::string> texts;
  std::vector<int> missing;
  for (auto& value : try_get(keys, deadline)) {
    if (!value) missing.push_back(static_cast<int>(texts.size()));
    texts.push_back(std::move(value).value_or(std::string()));
  }
  if (!missing.empty()) time_out(name, seconds_between(begin, Clock::now()), missing);
  return texts;
}

std::string Store::broadcast_text(const std::string& name, std::string_view mine, int root, Deadline deadline) {
  check_usage(root >= 0 && root < size_, "a broadcast names a root outside the world");
  const auto begin = Clock::now();
  const std::string key = key_of(name, root);
  if (rank_ == root) {
    set(key, mine);
    return std::string(mine);
  }
  auto values = try_get(std::span(&key, 1), deadline);
  if (!values[0]) time_out(name, seconds_between(begin, Clock::now()), {root});
  return *std::move(values[0]);
}

void Store::time_out(const std::string& doing, double waited_seconds, std::vector<int> missing) {
  const auto present = roll_call();
  if (missing.empty())
    for (int r = 0; r < size_; ++r)
      if (!present[static_cast<std::size_t>(r)].joined) missing.push_back(r);

  constexpr std::size_t kNamed = 8;
  std::vector<std::string> names;
  bool never_joined = false;
  for (std::size_t i = 0; i < std::min(missing.size(), kNamed); ++i) {
    const Attendance& one = present[static_cast<std::size_t>(missing[i])];
    never_joined = never_joined || (i == 0 && !one.joined);
    names.push_back(one.joined ? fmt::format("rank {} (host {})", missing[i], one.host)
                               : fmt::format("rank {}, which has not joined", missing[i]));
  }
  if (missing.size() > kNamed) names.push_back(fmt::format("{} more", missing.size() - kNamed));
  std::string remedy = "all ranks have joined: look at the log of the one that should set it";
  if (!missing.empty())
    remedy = never_joined ? fmt::format(
                                "start rank {} with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or look at "
                                "its log; --timeout-seconds waits longer",
                                missing.front())
                          : fmt::format("look at the log of rank {}; if it is only slow, raise --timeout-seconds",
                                        missing.front());
  const TimeoutError error(fmt::format("{} timed out after {:.3g} s{}{}", doing, waited_seconds,
                                       names.empty() ? "" : " waiting for ", join(names, "; ")),
                           remedy);
  report_missing_ranks(missing);
  give_up(error);
  throw error;
}

}  // namespace lockstep::comm
