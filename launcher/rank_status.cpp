#include "launcher/rank_status.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"

namespace lockstep::launcher {

std::string ranks_text(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  if (ranks.size() > 2 && ranks.back() - ranks.front() == static_cast<int>(ranks.size()) - 1)
    return fmt::format("ranks {} to {}", ranks.front(), ranks.back());
  constexpr std::size_t kNamed = 8;
  std::vector<std::string> names;
  for (const int rank : ranks) names.push_back(std::to_string(rank));
  if (names.size() > kNamed) names = {names.begin(), names.begin() + kNamed - 1};
  const std::string last =
      names.size() < ranks.size() ? fmt::format("{} more", ranks.size() - names.size()) : std::move(names.back());
  if (names.size() == ranks.size()) names.pop_back();
  return fmt::format("ranks {} and {}", join(names, ", "), last);
}

RankStatus::RankStatus(int ranks, std::optional<double> grace_seconds)
    : ranks_(static_cast<std::size_t>(ranks)), grace_seconds_(grace_seconds) {}

void RankStatus::add(int rank, const StatusReport& report) {
  One& one = ranks_[static_cast<std::size_t>(rank)];
  switch (report.kind) {
    case StatusReport::Kind::kDefersStops:
      one.defers_stops = true;
      one.step_seconds = std::max(0.0, report.seconds);
      break;
    case StatusReport::Kind::kSaving: one.saving = report.text.empty() ? "a file" : report.text; break;
    case StatusReport::Kind::kSaved: one.saving.clear(); break;
    case StatusReport::Kind::kMissingRanks:
      for (const int missing : report.ranks)
        if (missing >= 0 && missing < static_cast<int>(ranks_.size()) && missing != rank)
          one.missing.push_back(missing);
      break;
    case StatusReport::Kind::kUsageError: one.had_usage_error = true; break;
    case StatusReport::Kind::kStopped: one.stopped_by = report.number; break;
    case StatusReport::Kind::kContinued:
      // mpirun resumes the ranks of a job that it ends. Whom others have waited for in vain by then was stopped.
      if (!was_waited_for(rank)) one.stopped_by = 0;
      break;
    case StatusReport::Kind::kDataOnStdout:
    case StatusReport::Kind::kProgress:
    case StatusReport::Kind::kCheckpointed:
    case StatusReport::Kind::kDone:
    case StatusReport::Kind::kRejoins:
    case StatusReport::Kind::kStranded:
    case StatusReport::Kind::kComputesWrongly: break;
  }
}

bool RankStatus::was_waited_for(int rank) const {
  return std::ranges::any_of(
      ranks_, [rank](const One& other) { return std::ranges::find(other.missing, rank) != other.missing.end(); });
}

void RankStatus::replace(const std::vector<int>& lost) {
  for (One& one : ranks_) one.missing.clear();
  for (const int rank : lost) ranks_[static_cast<std::size_t>(rank)] = {};
}

void RankStatus::remove(int rank) {
  One& one = ranks_[static_cast<std::size_t>(rank)];
  one.defers_stops = false;
  one.saving.clear();
}

bool RankStatus::anyone_saves(bool requested) const {
  return std::ranges::any_of(ranks_,
                             [&](const One& one) { return !one.saving.empty() || (requested && one.defers_stops); });
}

Clock::duration RankStatus::grace(bool requested) const {
  if (grace_seconds_) return duration_of(*grace_seconds_);
  if (!anyone_saves(requested)) return duration_of(kGraceSeconds);
  double step_seconds = 0;
  if (requested)
    for (const auto& one : ranks_)
      if (one.defers_stops) step_seconds = std::max(step_seconds, one.step_seconds);
  return duration_of(kSavingGraceSeconds + 2 * step_seconds);
}

std::string RankStatus::waited_for(bool requested) const {
  std::vector<int> in_step;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].saving.empty()) return fmt::format("rank {} to write {}", rank, ranks_[rank].saving);
    if (requested && ranks_[rank].defers_stops) in_step.push_back(static_cast<int>(rank));
  }
  if (in_step.empty()) return {};
  return fmt::format("{} to finish {} and save a checkpoint", ranks_text(in_step),
                     in_step.size() == 1 ? "its step" : "their steps");
}

}  // namespace lockstep::launcher
