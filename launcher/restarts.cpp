#include "launcher/restarts.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <ctime>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "launcher/rank_status.h"
#include "launcher/restart_policy.h"

namespace lockstep::launcher {
namespace {

std::string utc_now() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm parts = {};
  ::gmtime_r(&seconds, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", parts.tm_year + 1900, parts.tm_mon + 1,
                     parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec, ms);
}

/// The job's exit code if its output could be written; else the code of that failure.
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

std::string counted(std::int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

/// What is wrong without what could be done about it.
std::string cut(const std::string& line) { return line.substr(0, line.find(" → ")); }

std::string cause_of(const AttemptResult& result) {
  const std::string& line = result.root_cause.line;
  return line.empty() ? fmt::format("exit code {}", result.root_cause.exit_code) : cut(line);
}

/// For the launcher's own last lines, where the reader is slow.
constexpr auto kLastWordsTake = std::chrono::seconds(1);
/// How long a host that has just been lost is waited for before the job restarts without it.
constexpr auto kProbeTakes = std::chrono::seconds(2);

class Attempts {
 public:
  Attempts(LaunchOptions& options, const HostFacts& facts, const JobParts& parts)
      : options_(options),
        facts_(facts),
        hosts_(parts.hosts),
        console_(parts.console),
        logs_(parts.logs),
        signals_(parts.signals),
        history_(parts.history),
        policy_(options.max_restarts, options.ranks, options.min_ranks.value_or(options.ranks)) {}

  int run(GatheredHosts gathered) {
    note("start", {{"ranks", options_.ranks}, {"program", options_.program[0]}});
    warned_ = gathered.warnings;
    for (;;) {
      facts_.attempt = policy_.attempt();
      facts_.checkpoint_step = policy_.newest_checkpoint();
      logs_.start_attempt();
      placed_ = gathered;
      run_attempt({options_, console_, logs_, signals_, hosts_, [this](std::int64_t step) { note_first_step(step); },
                   [this](std::int64_t step) { return grows_at(step); },
                   [this](const Loss& loss, HostFacts& facts) { return continues(loss, facts); }},
                  facts_, gathered, [this](const AttemptResult& result) { conclude(result); });
      if (!decision_.restart) break;
      const auto until = Clock::now() + decision_.pause;
      stopped_by_ = stopped_by_ != 0 ? stopped_by_ : serve_until(until, [] { return false; });
      gathered = gather();
      if (stopped_by_ != 0) {
        console_.say(fmt::format("stopped by {} before restart {}",
                                 stopped_by_ == SIGINT ? "Ctrl-C" : signal_name(stopped_by_), policy_.restarts()));
        exit_code_ = 128 + stopped_by_;
        break;
      }
      if (options_.ranks == 0) break;
    }
    note("end", {{"attempt", policy_.attempt()}, {"exit_code", exit_code_}});
    // What was said after the last attempt's end.
    serve_until(Clock::now() + kLastWordsTake, [this] { return console_.backlog_bytes() == 0; });
    hosts_.finish();
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

  /// See Note [Survivors].
  bool continues(const Loss& loss, HostFacts& facts) {
    if (!policy_.continue_after(loss.step)) return false;
    failed_at_ = loss.since;
    const std::string who =
        loss.ranks.empty() ? "all ranks connecting again" : ranks_text(loss.ranks) + " started again";
    facts_.attempt = facts.attempt = policy_.attempt();
    facts_.restart_cause = facts.restart_cause =
        loss.cause.line.empty() ? "the ranks have lost each other" : cut(loss.cause.line);
    console_.say(fmt::format("restart {} of {} in place: {}; the job continues after step {} with {}",
                             policy_.restarts(), policy_.max_restarts(), facts.restart_cause, loss.step, who));
    note("replace", {{"attempt", policy_.attempt()},
                     {"cause", facts.restart_cause},
                     {"exit_code", loss.cause.exit_code},
                     {"rank", loss.cause.rank},
                     {"replaced", loss.ranks},
                     {"ranks", options_.ranks},
                     {"after_step", loss.step}});
    return true;
  }

  /// A resuming program reports the checkpoint it resumes from; that does not count as a newer one.
  bool grows_at(std::int64_t step) {
    if (step <= policy_.newest_checkpoint()) return false;
    hosts_.forget_failures();
    return ranks_there() > options_.ranks;
  }

  /// Serves the hosts, and the console's reader, until `settled` or that time. The signal that has ended the job, or 0.
  int serve_until(Clock::time_point until, FunctionRef<bool()> settled) {
    return serve_hosts(hosts_, until, signals_, [&] {
      for (auto& queue : console_.queues()) queue.write_some();
      return settled();
    });
  }

  /// How many the next attempt could have now.
  int ranks_there() const {
    return options_.hosts.empty() ? policy_.ranks() : std::min(policy_.ranks(), slots_of(hosts_, options_));
  }

  /// Probes hosts that have been lost for the first time in a row: they may be back, or nothing but the connection had
  /// ended.
  void probe() {
    stopped_by_ = serve_until(Clock::now() + kProbeTakes, [&] {
      for (std::size_t i = 0; i < hosts_.size(); ++i)
        if (hosts_.is_probed(i)) return false;
      return true;
    });
  }

  /// The host of a rank, if it could be left out: it is not this one, and the others will do.
  std::optional<std::size_t> host_to_leave_out(std::optional<int> rank) const {
    for (std::size_t i = 0, first = 0; rank && i < placed_.hosts.size(); ++i) {
      first += static_cast<std::size_t>(placed_.ranks_on[i]);
      const std::size_t host = placed_.hosts[i];
      if (std::cmp_greater_equal(*rank, first)) continue;
      const bool others_do = slots_of(hosts_, options_) - slots_of(hosts_, options_, host) >= policy_.min_ranks();
      return !hosts_.is_own(host) && hosts_.is_there(host) && others_do ? std::optional(host) : std::nullopt;
    }
    return std::nullopt;
  }

  /// A host whose ranks were the cause of failures without progress between them, be it for its network, its memory or
  /// its devices, is one that has failed.
  bool leave_out_culprit(const AttemptResult& result) {
    if (policy_.attempt() == 0 || result.host_lost || policy_.is_progress(result.progress)) return false;
    const auto host = host_to_leave_out(result.root_cause.rank);
    if (!host) return false;
    console_.say(fmt::format("host {} is left out for now: its ranks were the cause of a failure without progress",
                             hosts_.name(*host)));
    hosts_.leave_out(*host, "its ranks failed");
    return true;
  }

  /// A host that computes wrongly is not used any more.
  bool leave_out_faulty(const RootCause& cause) {
    if (!cause.computes_wrongly || options_.hosts.empty()) return false;
    const auto host = host_to_leave_out(cause.rank);
    if (!host) {
      console_.say(fmt::format(
          "rank {}, which has computed wrongly, starts again on the same host: it is the launcher's own, or the others "
          "have too few slots → --min-ranks",
          *cause.rank));
      return false;
    }
    console_.say(fmt::format("host {} is left out from now on: rank {} has computed wrongly there", hosts_.name(*host),
                             *cause.rank));
    hosts_.dismiss(*host, "a rank has computed wrongly there");
    return true;
  }

  /// "host b: it fell silent; host c: …", of those that are not there.
  std::string away() const {
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < hosts_.size(); ++i)
      if (!hosts_.is_there(i) && !hosts_.problem(i).empty())
        texts.push_back(fmt::format("host {}: {}", hosts_.name(i), cut(hosts_.problem(i))));
    return join(texts, "; ");
  }

  /// The hosts of the next attempt; waits for them where there are too few, and says so. options_.ranks is 0 where that
  /// was in vain.
  GatheredHosts gather() {
    options_.ranks = policy_.ranks();
    if (options_.hosts.empty() || stopped_by_ != 0) return {};
    const double seconds = options_.host_return_seconds.value_or(kHostReturnSeconds);
    const auto give_up_at = Clock::now() + duration_of(seconds);
    for (bool told = false;;) {
      GatheredHosts gathered = gather_again(hosts_, options_, policy_.ranks(), policy_.min_ranks(), signals_);
      options_.ranks = gathered.ranks;
      if (gathered.exit_code != 0) stopped_by_ = gathered.exit_code - 128;
      if (gathered.ranks > 0 || stopped_by_ != 0) {
        say_change(gathered);
        return gathered;
      }
      const std::string too_few = fmt::format("the hosts that answer have {}, and the job needs {} at least ({})",
                                              counted(slots_of(hosts_, options_), "slot"), policy_.min_ranks(), away());
      if (Clock::now() >= give_up_at) {
        console_.say(
            fmt::format("not restarted: {} → look at the hosts; --min-ranks restarts with fewer, and "
                        "--host-return-seconds waits longer",
                        too_few));
        return gathered;
      }
      if (!std::exchange(told, true))
        console_.say(fmt::format("waiting for hosts, for up to {} s: {}", seconds, too_few));
      stopped_by_ = serve_until(give_up_at, [&] { return slots_of(hosts_, options_) >= policy_.min_ranks(); });
      if (stopped_by_ != 0) return gathered;
    }
  }

  void say_change(const GatheredHosts& gathered) {
    for (const auto& warning : gathered.warnings)
      if (std::ranges::find(warned_, warning) == warned_.end()) {
        console_.say(warning);
        warned_.push_back(warning);
      }
    if (gathered.ranks > 0 && gathered.ranks != announced_ranks_)
      console_.say(fmt::format("the job continues on {}", counted(gathered.ranks, "rank")));
  }

  /// The reader of standard output has gone: nobody would read what another attempt writes.
  bool reader_gone() { return console_.queues().front().error() == EPIPE; }

  void conclude(const AttemptResult& result) {
    const int code = result.root_cause.exit_code;
    failed_at_ = result.failed_at;
    const bool final = options_.max_restarts == 0 || code == 0 || result.requested || reader_gone();
    const bool left_out =
        !final && !result.growing && (leave_out_faulty(result.root_cause) || leave_out_culprit(result));
    if (!final) probe();
    decision_ =
        policy_.plan_after({.exit_code = code,
                            .requested = result.requested || reader_gone(),
                            .progress = result.progress,
                            .ranks = options_.ranks,
                            .growing = result.growing && code != 0 && !result.progress.done,
                            .hosts_change = (result.host_lost || left_out) && ranks_there() >= policy_.min_ranks()});
    if (decision_.restart) return announce(result);
    explain(result, logs_, console_);
    if (!decision_.why_not.empty()) console_.say(decision_.why_not);
    exit_code_ = with_lost_output(code, console_);
  }

  void announce(const AttemptResult& result) {
    facts_.restart_cause = result.growing ? "hosts have returned" : cause_of(result);
    exit_code_ = result.root_cause.exit_code;  // should the hosts not return
    const auto saved_at = std::max(result.started_at, result.progress.checkpointed_at);
    const double lost_seconds = seconds_between(saved_at, Clock::now());
    const double pause_seconds = std::chrono::duration<double>(decision_.pause).count();
    announced_ranks_ = std::max(ranks_there(), policy_.min_ranks());
    const std::string from = fmt::format(
        "from {} on {}, {} and {:.1f} s are lost",
        decision_.from_step > 0 ? fmt::format("the checkpoint of step {}", decision_.from_step) : "the start",
        counted(announced_ranks_, "rank"), counted(decision_.lost_steps, "step"), lost_seconds);
    if (result.growing) {
      console_.say(fmt::format("the job grows: hosts have returned; {}", from));
    } else {
      console_.say(fmt::format("restart {} of {}{}: {}; {}", policy_.restarts(), policy_.max_restarts(),
                               pause_seconds > 0 ? fmt::format(" in {} s", pause_seconds) : "", facts_.restart_cause,
                               from));
      for (const auto& lines : {result.flight_lines, result.starter_lines})
        for (const auto& line : lines) console_.say(line);
    }
    note(result.growing ? "grow" : "restart", {{"attempt", policy_.attempt()},
                                               {"cause", facts_.restart_cause},
                                               {"exit_code", result.root_cause.exit_code},
                                               {"rank", result.growing ? std::nullopt : result.root_cause.rank},
                                               {"ranks", announced_ranks_},
                                               {"from_step", decision_.from_step},
                                               {"lost_steps", decision_.lost_steps},
                                               {"lost_seconds", lost_seconds},
                                               {"pause_seconds", pause_seconds}});
  }

  LaunchOptions& options_;
  HostFacts facts_;
  RemoteHosts& hosts_;
  Console& console_;
  RankLogs& logs_;
  SignalQueue& signals_;
  RestartHistory& history_;
  RestartPolicy policy_;
  RestartDecision decision_;
  GatheredHosts placed_;  // of the attempt that runs, or has ended
  Clock::time_point failed_at_;
  int announced_ranks_ = 0;
  std::vector<std::string> warned_;  // of hosts, once for the job
  int stopped_by_ = 0;               // the user's signal between attempts
  int exit_code_ = 0;
};

}  // namespace

RestartHistory::RestartHistory(const std::string& directory) : path_(directory + "/restarts.jsonl") {
  file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!file_)
    throw IoError(fmt::format("--log-dir: cannot write {}: {}", path_, errno_text(errno)), "choose another directory");
}

std::string RestartHistory::add(const char* event, std::initializer_list<std::pair<const char*, JsonText>> more) {
  if (!file_) return {};
  JsonObject object({{"event", event}, {"time", utc_now()}});
  for (const auto& [name, value] : more) object.add(name, value);
  const std::string line = object.text() + "\n";
  // One write, so that another launcher that appends to the same file cuts no line.
  if (::write(file_.get(), line.data(), line.size()) == static_cast<ssize_t>(line.size())) return {};
  const int error = errno;
  file_.reset();
  return fmt::format("cannot write {}: {}; the job continues without it", path_, errno_text(error));
}

int run_attempts(LaunchOptions& options, const HostFacts& facts, GatheredHosts first, const JobParts& parts) {
  return Attempts(options, facts, parts).run(std::move(first));
}

}  // namespace lockstep::launcher
