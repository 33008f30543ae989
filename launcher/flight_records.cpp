#include "launcher/flight_records.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>

#include "base/crash.h"
#include "base/error.h"
#include "base/text.h"
#include "launcher/rank_status.h"

namespace lockstep::launcher {
namespace {

constexpr std::size_t kMostGroups = 4;  // of ranks that wait in the same way

std::string flight_dir_of(const std::string& log_dir) { return log_dir + "/flight"; }

void decode(RankFlight& flight, const std::string& name) {
  try {
    flight.snapshot = flight::decode(flight.bytes, name);
  } catch (const IoError&) {
    flight.bytes.clear();  // whatever it is, it is no record
  }
}

std::string last_operation(const flight::Snapshot& snapshot) {
  const auto* const last = snapshot.last();
  if (last == nullptr || snapshot.waits_since != 0) return {};
  return fmt::format("; the last operation it issued is {}, {}", flight::describe(*last),
                     last->completed_ns != 0 ? "complete" : "not complete");
}

/// Whether a record says more than that the program has begun, or has found a mistake before its first step.
bool says_something(const flight::Snapshot& snapshot, int exit_code) {
  if (snapshot.waits_since != 0 || snapshot.signal != 0 || snapshot.step > 0) return true;
  constexpr int kMistakes[] = {static_cast<int>(ExitCode::kUsage), static_cast<int>(ExitCode::kData),
                               static_cast<int>(ExitCode::kCheckpoint)};
  return snapshot.phase != flight::Phase::kStarting && std::ranges::find(kMistakes, exit_code) == std::end(kMistakes);
}

/// Ranks that wait in the same operation for the same ones.
struct Waiting {
  std::string operation;  // empty: it is not known
  std::vector<int> missing;
  std::vector<int> ranks;
  double seconds = 0;  // the longest
};

/// Whom a rank waits for in `pending`: as it has said, or else the culprit, if that has not come to the operation.
std::vector<int> missing_of(const flight::Snapshot& waiting, const flight::RecordedOperation* pending,
                            const flight::Snapshot* culprit) {
  if (!waiting.missing.empty() || pending == nullptr || culprit == nullptr) return waiting.missing;
  const auto has_come = [&](const flight::RecordedOperation& each) {
    return each.group == pending->group && each.sequence >= pending->sequence;
  };
  if (pending->sequence == 0 || std::ranges::any_of(culprit->operations, has_come)) return {};
  return {culprit->rank};
}

std::vector<Waiting> who_waits(const std::vector<RankFlight>& flights, const flight::Snapshot* culprit) {
  std::vector<Waiting> groups;
  for (const auto& flight : flights) {
    if (!flight.snapshot || flight.snapshot->waits_since == 0 ||
        (culprit != nullptr && flight.snapshot->rank == culprit->rank))
      continue;
    const auto* const pending = flight.snapshot->pending();
    const std::string operation = pending != nullptr ? flight::describe(*pending) : std::string();
    const std::vector<int> missing = missing_of(*flight.snapshot, pending, culprit);
    auto group = std::ranges::find_if(
        groups, [&](const Waiting& each) { return each.operation == operation && each.missing == missing; });
    if (group == groups.end()) group = groups.insert(groups.end(), {operation, missing, {}, 0});
    group->ranks.push_back(flight.snapshot->rank);
    group->seconds = std::max(
        group->seconds, 1e-9 * (static_cast<double>(flight.at_ns) - static_cast<double>(flight.snapshot->waits_since)));
  }
  // Those who name the culprit first.
  std::ranges::stable_sort(groups, std::ranges::greater(), [&](const Waiting& each) {
    return culprit != nullptr && std::ranges::find(each.missing, culprit->rank) != each.missing.end();
  });
  return groups;
}

}  // namespace

void gather_flights(std::span<const RankReport> ranks, const std::string& directory, std::vector<RankFlight>& flights) {
  flights.resize(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    RankFlight& flight = flights[r];
    const std::string path = flight::path_of(directory, static_cast<int>(r));
    if (flight.bytes.empty() && !directory.empty()) {
      try {
        flight.bytes = flight::read_bytes(path);
      } catch (const IoError&) {
        continue;
      }
      const auto at = ranks[r].ended() ? ranks[r].ended_at : Clock::now();
      flight.at_ns = std::chrono::nanoseconds(at.time_since_epoch()).count();
    }
    decode(flight, path);
    // A directory that the user has named may hold another job's.
    if (flight.snapshot &&
        (flight.snapshot->rank != static_cast<int>(r) || flight.snapshot->world_size != static_cast<int>(ranks.size())))
      flight = {};
  }
}

std::string keep_flights(const std::vector<RankFlight>& flights, const std::string& log_dir) {
  if (std::ranges::all_of(flights, [](const RankFlight& each) { return each.bytes.empty(); })) return {};
  const std::string directory = flight_dir_of(log_dir);
  std::error_code error;
  std::filesystem::create_directory(directory, error);
  for (std::size_t r = 0; r < flights.size() && !error; ++r) {
    if (flights[r].bytes.empty()) continue;
    std::ofstream file(flight::path_of(directory, static_cast<int>(r)), std::ios::binary | std::ios::trunc);
    file << flights[r].bytes << std::flush;
    if (!file) error = std::error_code(errno != 0 ? errno : EIO, std::generic_category());
  }
  return error ? fmt::format("the flight records are not kept in {}: {}", directory, error.message()) : std::string();
}

void remove_flights(const std::string& log_dir) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(flight_dir_of(log_dir), ignored))
    if (entry.path().filename().string().starts_with("rank-")) std::filesystem::remove(entry.path(), ignored);
}

std::vector<std::string> describe_flights(const JobReport& job, const RootCause& root_cause,
                                          const std::vector<RankFlight>& flights,
                                          const std::vector<std::string>& last_lines) {
  if (job.interrupted_by != 0 || root_cause.line.empty() ||
      root_cause.exit_code == static_cast<int>(ExitCode::kCheckpointed))
    return {};
  std::vector<std::string> lines;
  const flight::Snapshot* culprit = nullptr;
  if (root_cause.rank && static_cast<std::size_t>(*root_cause.rank) < flights.size()) {
    const RankFlight& flight = flights[static_cast<std::size_t>(*root_cause.rank)];
    if (flight.snapshot && says_something(*flight.snapshot, root_cause.exit_code)) {
      culprit = &*flight.snapshot;
      lines.push_back(fmt::format("rank {} was {}{}", culprit->rank, flight::describe_state(*culprit, flight.at_ns),
                                  last_operation(*culprit)));
    }
  }
  const auto groups = who_waits(flights, culprit);
  for (std::size_t i = 0; i < std::min(groups.size(), kMostGroups); ++i) {
    const Waiting& group = groups[i];
    lines.push_back(fmt::format("{} {} waiting{}{} for {:.1f} s", ranks_text(group.ranks),
                                group.ranks.size() == 1 ? "was" : "were",
                                group.missing.empty() ? "" : " for " + ranks_text(group.missing),
                                group.operation.empty() ? "" : " in " + group.operation, std::max(0.0, group.seconds)));
  }
  if (groups.size() > kMostGroups)
    lines.push_back(fmt::format("and {} more ranks were waiting, each in its own way", groups.size() - kMostGroups));
  if (culprit != nullptr && culprit->signal != 0 && !culprit->backtrace.empty() &&
      std::ranges::none_of(last_lines, [](const auto& line) { return line.find(kCrashedBy) != line.npos; })) {
    lines.push_back(fmt::format("rank {} crashed by {} in:", culprit->rank, signal_name(culprit->signal)));
    for (const auto& frame : culprit->backtrace) lines.push_back("  | " + frame);
  }
  return lines;
}

}  // namespace lockstep::launcher
