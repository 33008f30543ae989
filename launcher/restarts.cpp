#include "launcher/restarts.h"

#include <poll.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "base/error.h"
#include "launcher/restart_policy.h"

namespace lockstep::launcher {
namespace {

/// The job's exit code, where its output could be written; else what became of that.
int with_lost_output(int exit_code, Console& console) {
  // The programs may have ended before it was noticed that nobody reads what they wrote.
  if (exit_code == 0 && console.queues().front().error() == EPIPE) {
    console.say(kNoReader);
    exit_code = 128 + SIGPIPE;
  }
  for (const auto& queue : console.queues()) {
    if (queue.error() == 0 || queue.error() == EPIPE) continue;
    console.say(fmt::format("output was lost: {}", errno_text(queue.error())));
    if (exit_code == 0) exit_code = static_cast<int>(ExitCode::kData);
  }
  return exit_code;
}

void explain(const AttemptResult& result, const RankLogs& logs, Console& console) {
  const RootCause& root_cause = result.root_cause;
  if (root_cause.line.empty()) return;
  console.say(root_cause.line);
  for (const auto& line : result.flight_lines) console.say(line);
  if (root_cause.rank) {
    const auto lines = logs.last_lines(*root_cause.rank);
    if (!lines.empty()) console.say(fmt::format("the last lines of rank {}:", *root_cause.rank));
    for (const auto& line : lines) console.say("  | " + line);
    if (const auto path = logs.path(*root_cause.rank); !path.empty()) console.say("its log is " + path);
  }
  for (const auto& line : result.starter_lines) console.say(line);
}

/// The signal with which the user ends the job within `pause`; 0 if none comes.
int wait_for_stop(SignalQueue& signals, Clock::duration pause) {
  const auto until = Clock::now() + pause;
  for (;;) {
    while (const auto signal = signals.next())
      if (signal->number == SIGINT || signal->number == SIGTERM || signal->number == SIGHUP ||
          signal->number == SIGQUIT)
        return signal->number;
    const auto left = std::chrono::ceil<Millis>(until - Clock::now()).count();
    if (left <= 0) return 0;
    pollfd entry = {signals.fd(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(left));
  }
}

std::string counted(std::int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

/// The cause without what could be done about it.
std::string cause_of(const AttemptResult& result) {
  const std::string& line = result.root_cause.line;
  return line.empty() ? fmt::format("exit code {}", result.root_cause.exit_code) : line.substr(0, line.find(" → "));
}

class Attempts {
 public:
  Attempts(LaunchOptions& options, Console& console, RankLogs& logs, SignalQueue& signals, RestartHistory& history)
      : options_(options),
        console_(console),
        logs_(logs),
        signals_(signals),
        history_(history),
        policy_(options.max_restarts, options.ranks, options.min_ranks.value_or(options.ranks)) {}

  int run(const HostFacts& facts, GatheredHosts gathered) {
    note("start", {{"ranks", options_.ranks}, {"program", options_.program[0]}});
    for (;;) {
      HostFacts own = facts;
      own.attempt = policy_.attempt();
      logs_.start_attempt();
      run_attempt({options_, console_, logs_, signals_, [this](std::int64_t step) { note_first_step(step); }},
                  std::move(own), std::move(gathered), [this](const AttemptResult& result) { conclude(result); });
      if (!decision_.restart) break;
      if (const int signal = wait_for_stop(signals_, decision_.pause); signal != 0) {
        console_.say(fmt::format("stopped by {} before restart {}", signal == SIGINT ? "Ctrl-C" : signal_name(signal),
                                 policy_.attempt()));
        exit_code_ = 128 + signal;
        break;
      }
      options_.ranks = decision_.ranks;
    }
    note("end", {{"attempt", policy_.attempt()}, {"exit_code", exit_code_}});
    return exit_code_;
  }

 private:
  void note(const char* event, std::initializer_list<std::pair<const char*, JsonText>> more) {
    if (const auto failure = history_.add(event, more); !failure.empty()) console_.say(failure);
  }

  void note_first_step(std::int64_t step) {
    if (policy_.attempt() == 0) return;
    note("resumed",
         {{"attempt", policy_.attempt()}, {"step", step}, {"down_seconds", seconds_between(failed_at_, Clock::now())}});
  }

  /// The reader of standard output has gone: nobody would read what another attempt writes.
  bool reader_gone() { return console_.queues().front().error() == EPIPE; }

  void conclude(const AttemptResult& result) {
    const int code = result.root_cause.exit_code;
    decision_ = policy_.plan_after(
        {.exit_code = code, .requested = result.requested || reader_gone(), .progress = result.progress});
    failed_at_ = result.failed_at;
    if (decision_.restart) return announce_restart(result);
    explain(result, logs_, console_);
    if (!decision_.why_not.empty()) console_.say(decision_.why_not);
    exit_code_ = with_lost_output(code, console_);
  }

  void announce_restart(const AttemptResult& result) {
    const auto saved_at = std::max(result.started_at, result.progress.checkpointed_at);
    const double lost_seconds = seconds_between(saved_at, Clock::now());
    const double pause_seconds = std::chrono::duration<double>(decision_.pause).count();
    const std::string from = decision_.from_step > 0 ? fmt::format("the checkpoint of step {}", decision_.from_step)
                                                     : std::string("the start");
    console_.say(fmt::format("restart {} of {}{}: {}; from {} on {}, {} and {:.1f} s are lost", policy_.attempt(),
                             policy_.max_restarts(), pause_seconds > 0 ? fmt::format(" in {} s", pause_seconds) : "",
                             cause_of(result), from, counted(decision_.ranks, "rank"),
                             counted(decision_.lost_steps, "step"), lost_seconds));
    for (const auto& lines : {result.flight_lines, result.starter_lines})
      for (const auto& line : lines) console_.say(line);
    note("restart", {{"attempt", policy_.attempt()},
                     {"cause", cause_of(result)},
                     {"exit_code", result.root_cause.exit_code},
                     {"rank", result.root_cause.rank},
                     {"ranks", decision_.ranks},
                     {"from_step", decision_.from_step},
                     {"lost_steps", decision_.lost_steps},
                     {"lost_seconds", lost_seconds},
                     {"pause_seconds", pause_seconds}});
  }

  LaunchOptions& options_;
  Console& console_;
  RankLogs& logs_;
  SignalQueue& signals_;
  RestartHistory& history_;
  RestartPolicy policy_;
  RestartDecision decision_;
  Clock::time_point failed_at_;
  int exit_code_ = 0;
};

}  // namespace

int run_attempts(LaunchOptions& options, const HostFacts& facts, GatheredHosts gathered, Console& console,
                 RankLogs& logs, SignalQueue& signals, RestartHistory& history) {
  return Attempts(options, console, logs, signals, history).run(facts, std::move(gathered));
}

}  // namespace lockstep::launcher
