#include "launcher/survivors.h"

#include <algorithm>

#include "launcher/restart_policy.h"

namespace lockstep::launcher {

void Survivors::add(int rank, const StatusReport& report) {
  One& one = ranks_[static_cast<std::size_t>(rank)];
  switch (report.kind) {
    case StatusReport::Kind::kRejoins: one.rejoins = one.has_state = true; break;
    case StatusReport::Kind::kStranded:
      one.stranded_after = report.step;
      one.has_state = report.step >= 0;
      break;
    case StatusReport::Kind::kProgress:
      if (report.step > from_) tries_ = 0;
      break;
    default: break;
  }
}

bool Survivors::may_rejoin() const { return tries_ < kMostTries && std::ranges::all_of(ranks_, &One::rejoins); }

Survivors::Outlook Survivors::outlook(std::span<const RankReport> reports) const {
  bool waits = false, has_state = false;
  for (const RankReport& report : reports) {
    if (!report.ended()) {
      has_state = has_state || ranks_[static_cast<std::size_t>(report.rank)].has_state;
      waits = waits || !is_stranded(report.rank);
      continue;
    }
    const bool repeats = report.exit_status && !permanence_of(report.exit_status->exit_code()).empty();
    if (!report.failed() || report.stop_requested || repeats) return Outlook::kHopeless;
  }
  if (!has_state) return Outlook::kHopeless;
  return waits ? Outlook::kWaits : Outlook::kReady;
}

std::int64_t Survivors::step(std::span<const RankReport> reports) const {
  std::int64_t furthest = -1;
  for (const RankReport& report : reports)
    if (!report.ended())
      furthest = std::max(furthest, ranks_[static_cast<std::size_t>(report.rank)].stranded_after.value_or(-1));
  return furthest;
}

void Survivors::replace(const std::vector<int>& lost, std::int64_t step) {
  from_ = step;
  ++tries_;
  for (One& one : ranks_) one.stranded_after.reset();
  for (const int rank : lost) ranks_[static_cast<std::size_t>(rank)].has_state = false;
}

}  // namespace lockstep::launcher
