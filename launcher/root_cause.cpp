#include "launcher/root_cause.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "launcher/host_needs.h"
#include "launcher/rank_status.h"

namespace lockstep::launcher {
namespace {

constexpr auto kTooCloseToCall = Millis(20);
// Nothing that a peer does ends a rank by SIGKILL, so it is a cause even where a busy machine was late to see it.
constexpr auto kTooCloseToAKill = Millis(250);

bool blames_a_peer(const RankReport& report) {
  return report.exit_status && report.exit_status->how == ExitStatus::How::kExited &&
         (report.exit_status->value == static_cast<int>(ExitCode::kDevice) ||
          report.exit_status->value == static_cast<int>(ExitCode::kTimeout));
}

bool was_killed(const RankReport& report) {
  return report.lost || *report.exit_status == ExitStatus{ExitStatus::How::kSignalled, SIGKILL};
}

/// A program that fails at what its peers do may say so with 1, too: MPI's own errors end with it.
bool may_be_an_effect(const RankReport& report) {
  return blames_a_peer(report) ||
         report.exit_status == ExitStatus{ExitStatus::How::kExited, static_cast<int>(ExitCode::kInternal)};
}

bool is_sudden(const RankReport& report) {
  return report.lost || report.exit_status->how == ExitStatus::How::kSignalled;
}

/// Whether it has waited for others in vain. What a rank that was stopped says when it has been resumed counts for
/// nothing: they had waited for it by then.
bool waited(const RankReport& report) { return !report.missing.empty() && report.stopped_by == 0; }

/// Among those whom `named` has waited for in vain: one that failed by itself, or else one that says nothing of waiting
/// for others. nullptr if there is none.
const RankReport* most_suspect(const RankReport& named, std::span<const RankReport> ranks) {
  const RankReport* suspect = nullptr;
  for (const int rank : named.missing) {
    const RankReport& report = ranks[static_cast<std::size_t>(rank)];
    if (report.failed() && !report.stop_requested && is_sudden(report)) return &report;
    if (suspect == nullptr || (waited(*suspect) && !waited(report))) suspect = &report;
  }
  return suspect;
}

/// The end of the chain of ranks that have waited for one another, from `first` on, and who has waited for it
/// (`witness`). `first` itself, without a witness, where nobody is named or the chain is a circle.
const RankReport* blamed_by(const RankReport* first, std::span<const RankReport> ranks, const RankReport*& witness) {
  witness = nullptr;
  const RankReport* here = first;
  // A rank that got the reason from another rank names nobody: that other one does.
  if (!waited(*first))
    for (const auto& report : ranks)
      if (waited(report) && !report.stop_requested && report.exit_status == first->exit_status &&
          (here == first || report.ended_at < here->ended_at))
        here = &report;
  for (std::size_t links = 0; links < ranks.size() && waited(*here); ++links) {
    witness = here;
    here = most_suspect(*here, ranks);
  }
  if (witness == nullptr || waited(*here)) {
    witness = nullptr;
    return first;
  }
  return here;
}

const RankReport* first_failure(std::span<const RankReport> ranks) {
  std::vector<const RankReport*> failed;
  for (const auto& report : ranks)
    if (report.failed()) failed.push_back(&report);
  if (failed.empty()) return nullptr;
  const auto order = [](const RankReport* a, const RankReport* b) {
    return a->stop_requested != b->stop_requested ? !a->stop_requested : a->ended_at < b->ended_at;
  };
  const RankReport* first = *std::min_element(failed.begin(), failed.end(), order);
  if (!may_be_an_effect(*first)) return first;
  const auto has_caused_it = [&](const RankReport* other) {
    // A launcher that was stopped, or had no core, has noticed late that a wrapper ended.
    const auto later = (other->lost ? other->there_at : other->ended_at) - first->ended_at;
    return other->stop_requested == first->stop_requested &&
           ((was_killed(*other) && later < kTooCloseToAKill) ||
            (is_sudden(*other) && blames_a_peer(*first) && later < kTooCloseToCall));
  };
  const auto cause = std::ranges::find_if(failed, has_caused_it);
  return cause != failed.end() ? *cause : first;
}

bool for_lack_of_memory(const RankReport& report) { return was_killed(report) && report.memory_kills > 0; }

/// What a rank that SIGKILL has ended needs.
std::string remedy_of_killed(const RankReport& report) {
  if (for_lack_of_memory(report))
    return " → use a smaller batch or model, or fewer ranks on that host, or raise the memory limit of its container "
           "or "
           "job";
  if (report.memory_kills == 0 && !report.lost)
    return " → somebody sent it: the kernel has ended no process of that host for lack of memory meanwhile";
  return " → if nobody killed it, the kernel may have: look for \"out of memory\" in dmesg";
}

/// "rank 1 of 4 (host a, pid 7) failed first: what it did → what to do", the remedy only where there is one.
std::string describe(const RankReport& report, const JobReport& job) {
  const std::string who = fmt::format("rank {} of {} (host {}", report.rank, job.ranks.size(), report.host);
  if (report.exit_status && report.exit_status->how == ExitStatus::How::kNotStarted)
    return fmt::format("{}) cannot start {}: {} → check the program's path{}", who, job.program,
                       errno_text(report.exit_status->value),
                       report.exit_status->value == EACCES ? " and that it is executable" : "");
  if (report.given_up)
    return fmt::format(
        "{}, pid {}) held up the others: they waited for it in vain, and it was ended {:.1f} s after the start → look "
        "at "
        "its log; if it was only slow, raise --timeout-seconds",
        who, report.pid, seconds_between(job.started_at, report.ended_at));
  std::string how;
  if (report.lost) {
    how = "was lost, the wrapper that watches its program was killed";
  } else if (report.exit_status->how == ExitStatus::How::kExited) {
    how = fmt::format("exited with code {}", report.exit_status->value);
  } else {
    how = fmt::format("was ended by {}", signal_name(report.exit_status->value));
    if (for_lack_of_memory(report))
      how += fmt::format(", while its host's kernel ended {} process{} for lack of memory", report.memory_kills,
                         report.memory_kills == 1 ? "" : "es");
  }
  return fmt::format("{}, pid {}) {}: it {}, {:.1f} s after the start{}", who, report.pid,
                     report.computes_wrongly ? "has computed wrongly" : "failed first", how,
                     seconds_between(job.started_at, report.ended_at),
                     was_killed(report) ? remedy_of_killed(report) : "");
}

/// A rank that others have waited for in vain, and that had not failed by then.
std::string describe_missing(const RankReport& report, const RankReport& witness, const RankReport& first,
                             const JobReport& job) {
  return fmt::format(
      "rank {} of {} (host {}, pid {}) held up the others: rank {} waited for it in vain, and the job ended {:.1f} s "
      "after the start with code {} → {}",
      report.rank, job.ranks.size(), report.host, report.pid, witness.rank,
      seconds_between(job.started_at, first.ended_at), first.exit_status->exit_code(),
      report.stopped_by != 0
          ? fmt::format("it was stopped by {}; kill -CONT would have resumed it", signal_name(report.stopped_by))
          : std::string("look at its log; if it was only slow, raise --timeout-seconds"));
}

/// mpirun knows how the wrapper ended, unless the launcher ended mpirun before it could say so.
int code_of_lost_wrapper(const JobReport& job) {
  const int code = job.mpirun.exit_code();
  return (job.over_mpirun && job.mpirun_killed_by_us) || code == 0 ? 128 + SIGKILL : code;
}

RootCause interrupted(const JobReport& job) {
  // Ranks that save a checkpoint when asked to stop say so with their exit code.
  constexpr int kCheckpointed = static_cast<int>(ExitCode::kCheckpointed);
  const bool checkpointed = std::any_of(job.ranks.begin(), job.ranks.end(), [](const RankReport& report) {
    return report.exit_status == ExitStatus{ExitStatus::How::kExited, kCheckpointed};
  });
  RootCause root_cause;
  if (job.interrupted_by == SIGPIPE) {
    root_cause.exit_code = 128 + SIGPIPE;
    root_cause.line = fmt::format("{}{}", kNoReader, checkpointed ? "; a checkpoint was saved" : "");
    return root_cause;
  }
  root_cause.exit_code = checkpointed ? kCheckpointed : 128 + job.interrupted_by;
  root_cause.line =
      fmt::format("stopped by {}{}", job.interrupted_by == SIGINT ? "Ctrl-C" : signal_name(job.interrupted_by),
                  checkpointed ? " after saving a checkpoint" : "");
  return root_cause;
}

RootCause mpirun_failed(const JobReport& job, const std::string& what) {
  RootCause root_cause;
  root_cause.exit_code = static_cast<int>(ExitCode::kDevice);
  root_cause.line = what;
  root_cause.show_mpirun = job.mpirun.how == ExitStatus::How::kExited;
  return root_cause;
}

std::vector<std::string> names_of_unseen(std::span<const RankReport> ranks) {
  std::vector<std::string> names;
  for (const auto& report : ranks)
    if (!report.seen) names.push_back(std::to_string(report.rank));
  return names;
}

/// mpirun ends a job when a wrapper dies before it has reported; its rank is among those that never did.
RootCause never_started(const JobReport& job, const std::vector<std::string>& unseen) {
  RootCause root_cause;
  root_cause.exit_code = code_of_lost_wrapper(job);
  root_cause.show_mpirun = true;
  root_cause.line = fmt::format("rank {} of {} never started: {} wrapper was killed or failed", join(unseen, " or "),
                                job.ranks.size(), unseen.size() == 1 ? "its" : "a");
  return root_cause;
}

RootCause host_lost(const LostHost& host, const JobReport& job) {
  const std::string who = host.ranks.empty() ? fmt::format("host {}", host.name)
                                             : fmt::format("host {} ({})", host.name, ranks_text(host.ranks));
  RootCause root_cause;
  root_cause.exit_code = static_cast<int>(ExitCode::kDevice);
  const double at = seconds_between(job.started_at, host.last_heard);
  root_cause.line = host.silent
                        ? fmt::format(
                              "{} was lost: it was last heard from {:.1f} s after the start → look whether it runs "
                              "and its network works; --host-timeout-seconds says how long to wait",
                              who, at)
                        : fmt::format(
                              "{} was lost: the connection to it ended {:.1f} s after the start ({}) → look whether it "
                              "runs, and for what ended sshd's session or lockstep there",
                              who, at, host.why);
  return root_cause;
}

}  // namespace

bool ended_on_request(ExitStatus exit_status) {
  const int code = exit_status.exit_code();
  constexpr int kStops[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1};
  return code == static_cast<int>(ExitCode::kCheckpointed) ||
         std::ranges::any_of(kStops, [&](int number) { return code == 128 + number; });
}

namespace {

/// Of a job in which no rank failed by itself and that mpirun, or a daemon of it, may have ended; nothing if not.
std::optional<RootCause> ended_by_mpirun(const JobReport& job) {
  if (job.daemon)
    return mpirun_failed(job, fmt::format("Open MPI's daemon on host {}, which holds its ranks, was ended by {}",
                                          job.daemon->host, signal_name(job.daemon->signal_number)));
  if (job.over_mpirun && !job.mpirun_killed_by_us && job.mpirun.how == ExitStatus::How::kSignalled)
    return mpirun_failed(
        job,
        fmt::format("mpirun, which holds the ranks together, was ended by {}{}", signal_name(job.mpirun.value),
                    job.mpirun.value == SIGABRT && is_too_long_for_open_mpi(job.host)
                        ? fmt::format(": Open MPI 4 takes names of hosts of at most 56 characters, and this one's has "
                                      "{} → shorten it (hostname NAME), or leave --mpi out",
                                      job.host.size())
                        : ""));
  return std::nullopt;
}

}  // namespace

RootCause find_root_cause(const JobReport& job) {
  if (job.interrupted_by != 0) return interrupted(job);
  const auto wrong = std::ranges::find_if(
      job.ranks, [](const RankReport& report) { return report.computes_wrongly && report.failed(); });
  if (wrong != job.ranks.end())
    return {.exit_code = wrong->lost ? code_of_lost_wrapper(job) : wrong->exit_status->exit_code(),
            .line = describe(*wrong, job),
            .rank = wrong->rank,
            .computes_wrongly = true};

  const RankReport* first = first_failure(job.ranks);
  const bool explained = first != nullptr && !first->stop_requested && !first->lost;
  const auto lost_host = std::ranges::min_element(job.lost_hosts, {}, &LostHost::last_heard);
  if (lost_host != job.lost_hosts.end() && !(explained && first->ended_at < lost_host->last_heard))
    return host_lost(*lost_host, job);
  if (!explained)
    if (const auto cause = ended_by_mpirun(job)) return *cause;
  if (first == nullptr || first->stop_requested) {
    const auto unseen = names_of_unseen(job.ranks);
    if (job.over_mpirun && unseen.size() == job.ranks.size() && !job.mpirun_killed_by_us)
      return mpirun_failed(
          job, fmt::format("mpirun ended with code {} before any rank had started", job.mpirun.exit_code()));
    if (!unseen.empty()) return never_started(job, unseen);
  }
  if (first == nullptr) return {};
  RootCause root_cause;
  if (explained &&
      *first->exit_status == ExitStatus{ExitStatus::How::kExited, static_cast<int>(ExitCode::kCheckpointed)}) {
    root_cause.exit_code = static_cast<int>(ExitCode::kCheckpointed);
    root_cause.line = "stopped on request, after saving a checkpoint";
    return root_cause;
  }
  if (explained && *first->exit_status == ExitStatus{ExitStatus::How::kExited, static_cast<int>(ExitCode::kUsage)} &&
      std::ranges::any_of(job.ranks, &RankReport::had_usage_error)) {
    root_cause.exit_code = static_cast<int>(ExitCode::kUsage);
    return root_cause;  // the user has read it
  }
  if (explained && blames_a_peer(*first)) {
    const RankReport* witness = nullptr;
    const RankReport* const cause = blamed_by(first, job.ranks, witness);
    // One for which the others gave up waiting, and which then found them gone, has not failed by itself.
    const bool came_late = first->exit_status->value == static_cast<int>(ExitCode::kTimeout) && blames_a_peer(*cause);
    const bool was_stopped = cause->stopped_by != 0 && blames_a_peer(*cause);
    if (witness != nullptr &&
        (was_stopped || (cause != first && (!cause->failed() || cause->stop_requested || came_late)))) {
      root_cause.exit_code = first->exit_status->exit_code();
      root_cause.rank = cause->rank;
      root_cause.line = describe_missing(*cause, *witness, *first, job);
      return root_cause;
    }
    first = cause;
  }
  root_cause.exit_code = first->given_up ? static_cast<int>(ExitCode::kTimeout)
                         : first->lost   ? code_of_lost_wrapper(job)
                                         : first->exit_status->exit_code();
  root_cause.rank = first->rank;
  root_cause.show_mpirun = !explained;
  root_cause.line = describe(*first, job);
  const auto gone = std::find_if(job.ranks.begin(), job.ranks.end(), [](const auto& report) {
    return report.exit_status && !report.failed() && !report.stop_requested;
  });
  if (job.over_mpirun && first->stop_requested && gone != job.ranks.end()) {
    root_cause.rank = gone->rank;
    root_cause.line = fmt::format(
        "mpirun ended the job: rank {} of {} (host {}, pid {}) had exited with code 0 while others "
        "still ran → every rank that calls MPI_Init must call MPI_Finalize",
        gone->rank, job.ranks.size(), gone->host, gone->pid);
  }
  return root_cause;
}

}  // namespace lockstep::launcher
