#include "launcher/restart_policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "base/error.h"
#include "base/status_report.h"
#include "launcher/process.h"

namespace lockstep::launcher {

std::string permanence_of(int exit_code) {
  switch (exit_code) {
    case static_cast<int>(ExitCode::kUsage): return "wrong usage";
    case static_cast<int>(ExitCode::kData): return "bad or missing input data";
    case static_cast<int>(ExitCode::kCheckpoint): return "a checkpoint that cannot be used";
    case static_cast<int>(ExitCode::kDiverged): return "training that diverged";
    case kNotExecutable:
    case kNotFound: return "a program that cannot be started";
    default: break;
  }
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1})
    if (exit_code == 128 + number) return fmt::format("a rank that {} asked to end", signal_name(number));
  return {};
}

namespace {

/// Whether `value` is further than `best`, which it then becomes.
bool advance(std::optional<std::int64_t>& best, const std::optional<std::int64_t>& value) {
  if (!value || (best && *value <= *best)) return false;
  best = value;
  return true;
}

}  // namespace

bool RestartPolicy::is_progress(const JobProgress& progress) const {
  auto step = furthest_step_, checkpoint = newest_checkpoint_;
  return advance(step, progress.step) || advance(checkpoint, progress.checkpoint);
}

bool RestartPolicy::continue_after(std::int64_t step) {
  if (restarts_ == max_restarts_) return false;
  ++restarts_;
  ++attempt_;
  continued_ = true;
  advance(furthest_step_, std::optional(step));
  return true;
}

RestartDecision RestartPolicy::plan_after(const AttemptEnd& end) {
  RestartDecision decision;
  if (max_restarts_ == 0 || end.exit_code == 0 || end.requested ||
      (!end.growing && end.exit_code == static_cast<int>(ExitCode::kCheckpointed)))
    return decision;
  if (end.progress.done) {
    decision.why_not = "not restarted: the ranks had reported that their work was done";
    return decision;
  }
  const auto resume = [&] {
    ++attempt_;
    decision.restart = true;
    decision.ranks = ranks_;
    decision.from_step = newest_checkpoint();
    decision.lost_steps = std::max<std::int64_t>(0, end.progress.step.value_or(0) - decision.from_step);
    return decision;
  };
  if (end.growing) {
    failures_without_checkpoint_ = 0;
    advance(newest_checkpoint_, end.progress.checkpoint);
    advance(furthest_step_, end.progress.step);
    return resume();
  }
  if (const auto permanence = permanence_of(end.exit_code); !permanence.empty()) {
    decision.why_not = fmt::format("not restarted: exit code {} is for {}", end.exit_code, permanence);
    return decision;
  }
  if (restarts_ == max_restarts_) {
    decision.why_not = fmt::format("not restarted: --max-restarts {} allows no more", max_restarts_);
    return decision;
  }

  const bool checkpointed = advance(newest_checkpoint_, end.progress.checkpoint);
  const bool advanced = advance(furthest_step_, end.progress.step) || checkpointed;
  failures_without_checkpoint_ = checkpointed ? 0 : failures_without_checkpoint_ + 1;
  const bool continued = std::exchange(continued_, false);
  const int ranks = end.ranks > 0 ? std::min(end.ranks, ranks_) : ranks_;
  if (failures_without_checkpoint_ >= 2 && ranks > min_ranks_ && !end.hosts_change) {
    ranks_ = ranks - 1;
  } else if (!advanced && attempt_ > 0 && !end.hosts_change && !continued) {
    decision.why_not = fmt::format(
        "not restarted: no further step and no newer checkpoint was reported since the failure before → look at the "
        "failures; programs report both through {}",
        kStatusFdVariable);
    return decision;
  }
  ++restarts_;
  if (failures_without_checkpoint_ > 0) {
    const int doublings = std::min(failures_without_checkpoint_ - 1, 16);
    decision.pause = std::min<Clock::duration>(kFirstPause * (1 << doublings), kLongestPause);
  }
  return resume();
}

}  // namespace lockstep::launcher
