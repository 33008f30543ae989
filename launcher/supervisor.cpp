#include "launcher/supervisor.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {
namespace {

// Until the end of another rank shows, where ranks are stranded.
constexpr auto kAllStrandWithin = std::chrono::seconds(1);
// What limits a process's time of the CPU (cpulimit) stops it fifty times a second: a line for the first of so long.
constexpr auto kStopsApart = std::chrono::seconds(10);
// A lost wrapper may be due to mpirun's death, which shows a moment later.
constexpr auto kMomentForMpirun = Millis(100);
// From SIGKILL to the end of a program.
constexpr auto kKillTakes = Millis(300);
// Connections that are still open after mpirun has ended: the wrappers die with it.
constexpr auto kDrainTakes = Millis(300);
// Helpers on other hosts clean up and go; what they still have to say comes over the network, however slowly.
constexpr auto kHelpersEnd = std::chrono::seconds(4);
// Signals that come closer together are one request to stop.
constexpr auto kOneRequest = std::chrono::seconds(1);
// Of the grace that a rank is given, what is left to it whatever it has just said.
constexpr auto kLeastGrace = std::chrono::seconds(1);
// Until a user who has asked for a stop wants to know why nothing happens.
constexpr auto kNoticeAfter = std::chrono::seconds(1);
// What the console still takes after a stop, from a reader that is slow or does not read at all.
constexpr auto kLastOutput = std::chrono::seconds(1);
// The starter's own end after all programs have ended well.
constexpr auto kStarterEnds = std::chrono::seconds(10);
constexpr std::size_t kConsoleBacklogBytes = 4 << 20;
// While a job ends nothing holds its ranks back, and one that writes on and on must not fill the memory.
constexpr std::size_t kEndingBacklogBytes = 64 << 20;

}  // namespace

Supervisor::Supervisor(AuthenticatedListener listener, JobProcesses processes, int ranks,
                       std::optional<double> grace_seconds, Console& console, RankLogs& logs, SignalQueue& signals,
                       RemoteHosts& hosts, std::string own_host)
    : listener_(std::move(listener)),
      processes_(std::move(processes)),
      status_(ranks, grace_seconds),
      survivors_(ranks),
      console_(console),
      logs_(logs),
      signals_(signals),
      hosts_(hosts),
      own_host_(std::move(own_host)),
      reports_(static_cast<std::size_t>(ranks)),
      flights_(static_cast<std::size_t>(ranks)),
      host_of_(static_cast<std::size_t>(ranks)) {
  for (int rank = 0; rank < ranks; ++rank) reports_[static_cast<std::size_t>(rank)].rank = rank;
}

void Supervisor::run() {
  while (!done()) {
    wait_and_serve();
    advance();
  }
  // What wrappers had sent before they died is still in the sockets.
  for (auto& connection : connections_) close(connection);
  note_lost_wrappers();
  hosts_.end_attempt();
  for (const auto& report : reports_) console_.finish(report.rank);
  flush_console();
}

JobReport Supervisor::report() const {
  JobReport job;
  job.ranks = reports_;
  job.lost_hosts = lost_hosts_;
  job.daemon = daemon_end_;
  job.started_at = started_at_;
  job.over_mpirun = processes_.are_mpirun();
  job.mpirun = processes_.exit_status();
  job.mpirun_killed_by_us = processes_.were_killed();
  job.host = host_name();
  job.interrupted_by = interrupted_by_;
  job.stop_asked = stop_asked_;
  job.growing = growing_;
  job.progress = progress_;
  job.failed_at = std::min(ending_since_, Clock::now());
  return job;
}

void Supervisor::wait_and_serve() {
  // A console that takes nothing holds the ranks back, as a pipe would; but not once the job is to end.
  const bool hold_back =
      phase_ == Phase::kRunning && !starter_ended_ && console_.backlog_bytes() > kConsoleBacklogBytes;
  std::vector<pollfd> entries = {{signals_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
  const std::size_t first_queue = entries.size();
  for (const auto& queue : console_.queues()) entries.push_back({queue.size() > 0 ? queue.fd() : -1, POLLOUT, 0});
  const std::size_t first_connection = entries.size();
  for (const auto& connection : connections_) {
    const bool writes = connection.channel && connection.channel->pending_bytes() > 0;
    const int events = (hold_back ? 0 : POLLIN) | (writes ? POLLOUT : 0);
    entries.push_back({events != 0 ? connection.fd() : -1, static_cast<short>(events), 0});
  }
  const std::size_t first_host = entries.size();
  hosts_.add_entries(entries, !hold_back);

  int timeout_ms = -1;
  auto next = std::min({phase_until_, drain_until_, notice_at_});
  if (const auto look = hosts_.look_after(); look != Clock::duration::max()) next = std::min(next, Clock::now() + look);
  if (next != Clock::time_point::max())
    timeout_ms = static_cast<int>(std::max<std::int64_t>(0, std::chrono::ceil<Millis>(next - Clock::now()).count()));
  if (::poll(entries.data(), entries.size(), timeout_ms) < 0) {
    check_system(errno == EINTR, "waiting for the ranks");
    return;
  }
  const auto now = Clock::now();

  std::size_t index = first_queue;
  for (auto& queue : console_.queues())
    if (entries[index++].revents != 0) queue.write_some();
  look_at_reader();
  index = first_connection;
  for (auto& connection : connections_)
    if (entries[index++].revents != 0) serve(connection);
  if (phase_ != Phase::kRunning && console_.backlog_bytes() > kEndingBacklogBytes)
    unread_bytes_ += console_.queues().front().drop();
  hosts_.serve(std::span(entries).subspan(first_host),
               [this](std::size_t host, const HostMessage& message) { serve_host(host, message); });
  lose_hosts();
  if (starter_ended_ && !hosts_.all_concluded())
    drain_until_ = std::max(drain_until_, hosts_.last_heard() + kHelpersEnd);
  for (auto& connection : connections_)
    if (connection.link && !connection.closed() && hosts_.finished(connection.link->host)) close(connection);
  std::erase_if(connections_, [](const Connection& connection) { return connection.closed(); });
  if (entries[1].revents != 0) accept_ranks();
  if (entries[0].revents != 0) take_signals();
  looked_at_ = now;
}

void Supervisor::serve(Connection& connection) {
  Channel& channel = *connection.channel;
  channel.flush();
  const auto received = channel.receive();
  while (const auto message = channel.next()) handle(connection, *message);
  if (received == Channel::Received::kGone) close(connection);
}

void Supervisor::send(Connection& connection, const Message& message) {
  if (connection.channel) {
    connection.channel->send(message);
  } else {
    hosts_.send(connection.link->host, ToRank{connection.link->id, encode(message)});
  }
}

void Supervisor::close(Connection& connection) {
  if (connection.channel) {
    while (connection.channel->receive() == Channel::Received::kBytes)
      while (const auto message = connection.channel->next()) handle(connection, *message);
    connection.channel->close();
  } else {
    connection.link->closed = true;
  }
  if (connection.starts || connection.spare) return;
  if (connection.rank < 0) return begin_ending();  // died before it could say which rank it is
  auto& report = reports_[static_cast<std::size_t>(connection.rank)];
  console_.finish(connection.rank);
  if (report.ended()) return;
  lose(report, Clock::now(), looked_at_);
  begin_ending();
}

void Supervisor::let_go(Connection& connection) {
  if (connection.link && !connection.closed()) hosts_.send(connection.link->host, CloseConnection{connection.link->id});
  close(connection);
}

void Supervisor::lose(RankReport& report, Clock::time_point ended_at, Clock::time_point there_at) {
  report.lost = true;
  report.stop_requested = report.stop_requested || last_signal_ != 0;
  report.ended_at = ended_at;
  report.there_at = there_at;
  status_.remove(report.rank);
}

void Supervisor::greet(Connection& connection, const Hello& hello) {
  if (hello.rank == kSpare && start_spare_) {
    connection.spare = hello;
    if (last_signal_ != 0) send(connection, Signal{last_signal_});
    return;
  }
  if (hello.rank < 0 || hello.rank >= static_cast<int>(reports_.size()))
    throw MpiError(fmt::format("a rank {} was started in a job of {}", hello.rank, reports_.size()),
                   "check that mpirun is Open MPI's");
  connection.rank = hello.rank;
  auto& report = reports_[static_cast<std::size_t>(hello.rank)];
  report.seen = true;
  report.pid = hello.pid;
  report.host = !own_host_.empty() ? own_host_ : hello.host;
  if (connection.link) {
    host_of_[static_cast<std::size_t>(hello.rank)] = connection.link->host;
    report.host = hosts_.name(connection.link->host);
  }
  if (!own_host_.empty()) console_.set_host(hello.rank, report.host);
  if (last_signal_ != 0) send(connection, Signal{last_signal_});
}

void Supervisor::handle(Connection& connection, const Message& message) {
  if (const auto* hello = std::get_if<Hello>(&message)) return greet(connection, *hello);
  if (connection.spare) return hear_spare(connection, message);
  if (const auto* start = std::get_if<StartDaemon>(&message)) return start_daemon(connection, *start);
  if (connection.rank < 0) throw MpiError("a rank's first message is not its greeting");
  auto& report = reports_[static_cast<std::size_t>(connection.rank)];
  std::visit(Overloaded{
                 [&](const Output& output) {
                   const auto failure = logs_.add(report.rank, output.stream, output.bytes);
                   console_.add(report.rank, output.stream, output.bytes);
                   if (!failure.empty()) console_.say(failure);
                 },
                 [&](const StopNotice& notice) {
                   report.stop_requested =
                       report.stop_requested || !report.ended();  // mpirun signals wrappers of ended ranks, too
                   begin_ending();
                   mpirun_ends_job_ = mpirun_ends_job_ || notice.signal_number == SIGCONT;
                   if (phase_ > Phase::kPatience) hold_mpirun();
                 },
                 [&](const Ended& ended) {
                   report.exit_status = ended.exit_status;
                   report.stop_requested = ended.stop_requested;
                   report.memory_kills = ended.memory_kills;
                   report.ended_at = connection.link ? hosts_.to_local(connection.link->host, ended.at) : ended.at;
                   console_.finish(report.rank);
                   status_.remove(report.rank);
                   if (report.failed()) begin_ending();
                   renew_grace();
                 },
                 [&](const Status& status) { take_status(report.rank, status.report); },
                 [&](const Flight& flight) {
                   flights_[static_cast<std::size_t>(report.rank)] = {.bytes = flight.bytes, .at_ns = flight.at_ns};
                 },
                 [](const auto&) {},
             },
             message);
}

void Supervisor::accept_ranks() {
  while (UniqueFd socket = accept_from(listener_)) connections_.emplace_back(std::move(socket));
  while (const auto complaint = listener_.next_complaint()) console_.say("warning: " + *complaint);
}

void Supervisor::take_signals() {
  while (const auto signal = signals_.next()) {
    if (signal->number == SIGCHLD) {
      collect_processes();
    } else if (signal->number == SIGTSTP) {
      hosts_.pause();
      ::raise(SIGSTOP);
      hosts_.resume();
    } else if (signal->number == SIGUSR1 || signal->number == SIGUSR2) {
      for (auto& connection : connections_) send(connection, Signal{signal->number});
    } else {
      take_stop(signal->number);
    }
  }
}

void Supervisor::take_stop(int number) {
  stop_asked_ = true;
  if (flushing_ || (phase_ != Phase::kRunning && Clock::now() - ending_since_ > kOneRequest)) {
    hurry_ = true;
    return;
  }
  // What ranks end of that have got the same signal, perhaps a moment earlier, is this request too.
  if (interrupted_by_ != 0 || !stop_requested()) return;
  interrupted_by_ = number;
  if (phase_ == Phase::kRunning || phase_ == Phase::kPatience) begin_grace(number == SIGPIPE ? SIGTERM : number);
}

/// A program alone would end by SIGPIPE; the ranks may save their work first.
void Supervisor::look_at_reader() {
  if (reader_gone_ || console_.queues().front().error() != EPIPE) return;
  reader_gone_ = true;
  if (phase_ != Phase::kRunning || all_programs_ended()) return;
  take_stop(SIGPIPE);
}

void Supervisor::take_status(int rank, const StatusReport& report) {
  status_.add(rank, report);
  take_progress(report);
  survivors_.add(rank, report);
  if (report.kind == StatusReport::Kind::kStranded) begin_ending();
  if (report.kind == StatusReport::Kind::kProgress) keep_spare();
  auto& known = reports_[static_cast<std::size_t>(rank)];
  known.missing = status_.missing(rank);
  // A stop request lets all of them run again.
  if (last_signal_ == 0) known.stopped_by = status_.stopped_by(rank);
  known.had_usage_error = status_.had_usage_error(rank);
  known.computes_wrongly = known.computes_wrongly || report.kind == StatusReport::Kind::kComputesWrongly;
  if (report.kind == StatusReport::Kind::kDataOnStdout) console_.set_plain(rank);
  if (report.kind == StatusReport::Kind::kUsageError) {
    const std::string line = fmt::format("error: {}\n", report.text);
    logs_.add(rank, 2, line);
    if (status_.is_new_usage_error(report.text)) console_.add(rank, 2, line);
  }
  if (report.kind == StatusReport::Kind::kStopped && phase_ == Phase::kRunning &&
      Clock::now() >= say_stop_again_[rank]) {
    say_stop_again_[rank] = Clock::now() + kStopsApart;
    console_.say(
        fmt::format("rank {} of {} (host {}, pid {}) was stopped by {}, and the others wait for it → kill "
                    "-CONT {} resumes it",
                    rank, reports_.size(), known.host, known.pid, signal_name(report.number), known.pid));
  }
  renew_grace();
  if (phase_ == Phase::kGrace && !noticed_.empty()) say_what_is_waited_for();
}

/// A rank that is later than others, or its message, takes nothing back.
void Supervisor::take_progress(const StatusReport& report) {
  switch (report.kind) {
    case StatusReport::Kind::kProgress:
      if ((!progress_.step || survivors_.is_first(report.step)) && on_first_step_) on_first_step_(report.step);
      progress_.step = std::max(progress_.step.value_or(0), report.step);
      break;
    case StatusReport::Kind::kCheckpointed:
      if (report.step <= progress_.checkpoint.value_or(-1)) break;
      progress_.checkpoint = report.step;
      progress_.checkpointed_at = Clock::now();
      if (on_checkpoint_ && on_checkpoint_(report.step)) begin_growing();
      break;
    case StatusReport::Kind::kDone: progress_.done = true; break;
    default: break;
  }
}

/// What is not saved by now is little.
void Supervisor::begin_growing() {
  if (phase_ != Phase::kRunning || all_programs_ended()) return;
  growing_ = true;
  begin_grace(SIGTERM);
}

/// Whether the job ends because somebody wants it to, and not because a rank failed.
bool Supervisor::stop_requested() const {
  if (interrupted_by_ != 0 || (growing_ && lost_hosts_.empty())) return true;
  if (!lost_hosts_.empty()) return false;
  return std::ranges::none_of(reports_, [](const RankReport& report) {
    return report.lost || (report.failed() && !report.stop_requested && !ended_on_request(*report.exit_status));
  });
}

void Supervisor::begin_grace(int signal_number) {
  signal_all(signal_number);
  hold_mpirun();
  grace_since_ = Clock::now();
  notice_at_ = grace_since_ + kNoticeAfter;
  enter(Phase::kGrace, status_.grace(stop_requested()));
}

void Supervisor::say_what_is_waited_for() {
  notice_at_ = Clock::time_point::max();
  const std::string what = status_.waited_for(stop_requested());
  if (what.empty() || what == noticed_) return;
  noticed_ = what;
  console_.say(fmt::format("waiting for {}, for up to {:.0f} s; Ctrl-C or another SIGTERM ends them at once", what,
                           std::chrono::duration<double>(phase_until_ - grace_since_).count()));
}

/// When a rank has said something or ended. Who has just saved something still has to end.
void Supervisor::renew_grace() {
  if (phase_ != Phase::kGrace) return;
  const auto all = grace_since_ + status_.grace(stop_requested());
  phase_until_ = all > phase_until_ ? all : std::max(all, std::min(phase_until_, Clock::now() + kLeastGrace));
}

/// The grace is over, or the user does not wait for its end.
void Supervisor::end_grace() {
  const std::string what = status_.waited_for(stop_requested());
  if (!what.empty())
    console_.say(fmt::format("no longer waiting for {}: what is not saved by now is lost{}", what,
                             hurry_ ? ""
                                    : fmt::format(", {:.3g} s after the request to end → --grace-seconds waits longer",
                                                  seconds_between(grace_since_, Clock::now()))));
  signal_all(SIGKILL);
  enter(Phase::kKilling, kKillTakes);
}

void Supervisor::collect_processes() {
  if (starter_ended_) return;
  processes_.collect();
  // One that had not greeted has no connection whose end would show this.
  if (!processes_.failed_wrappers().empty()) begin_ending();
  if (!processes_.all_ended()) return;
  starter_ended_ = true;
  drain_until_ = Clock::now() + (hosts_.any_takes_part() ? kHelpersEnd : kDrainTakes);
  hosts_.conclude();
}

/// Wrappers that ended before they could greet: which ranks they were for is known where the launcher has started them.
void Supervisor::note_lost_wrappers() {
  for (const auto& failed : processes_.failed_wrappers()) {
    auto& report = reports_[static_cast<std::size_t>(failed.rank)];
    if (report.seen) continue;
    report.seen = report.lost = true;
    report.pid = failed.pid;
    report.host = failed.host ? hosts_.name(*failed.host) : !own_host_.empty() ? own_host_ : host_name();
    report.ended_at = failed.at;
    report.there_at = started_at_;
  }
}

void Supervisor::enter(Phase phase, Clock::duration lasts) {
  if (phase_ == Phase::kRunning) ending_since_ = Clock::now();
  if (phase != Phase::kGrace) notice_at_ = Clock::time_point::max();
  phase_ = phase;
  phase_until_ = Clock::now() + lasts;
}

void Supervisor::begin_ending() {
  if (phase_ != Phase::kRunning) return;
  if (replace_ && survivors_.may_rejoin() && lost_hosts_.empty())
    enter(Phase::kStranded, kAllStrandWithin);
  else
    enter(Phase::kPatience, kPatience);
}

void Supervisor::advance() {
  Phase before;
  do {
    before = phase_;
    take_step();
  } while (phase_ != before);
}

/// See Note [How a job ends].
void Supervisor::take_step() {
  const bool expired = Clock::now() >= phase_until_;
  const bool all_ended = all_programs_ended();
  switch (phase_) {
    case Phase::kRunning:
      if (Connection* const idle = all_ended ? spare() : nullptr; idle != nullptr) idle->channel->close();
      // Only mpirun still runs, or wrappers, and they end by themselves.
      if (all_ended && phase_until_ == Clock::time_point::max()) phase_until_ = Clock::now() + kStarterEnds;
      if (expired) kill_starter();
      break;
    case Phase::kStranded: look_at_survivors(); break;
    case Phase::kPatience:
      if (all_ended) {
        const bool lost = std::any_of(reports_.begin(), reports_.end(), [](const auto& report) { return report.lost; });
        enter(Phase::kKilling, lost ? kMomentForMpirun : Clock::duration::zero());
      } else if (hurry_) {
        signal_all(SIGKILL);
        enter(Phase::kKilling, kKillTakes);
      } else if (expired && hosts_.any_overdue()) {
        enter(Phase::kPatience, kPatience);
      } else if (expired) {
        begin_grace(SIGTERM);
      }
      break;
    case Phase::kGrace:
      if (all_ended) {
        kill_starter();
      } else if (expired || hurry_) {
        end_grace();
      } else if (Clock::now() >= notice_at_) {
        say_what_is_waited_for();
      }
      break;
    case Phase::kKilling:
      if (expired || (all_ended && last_signal_ == SIGKILL)) kill_starter();
      break;
    case Phase::kStarterKilled: break;
  }
}

bool Supervisor::all_programs_ended() const {
  // A rank that has not been seen by then need not start any more.
  return std::all_of(reports_.begin(), reports_.end(), [&](const RankReport& report) {
    return report.ended() || (!report.seen && phase_ > Phase::kPatience);
  });
}

void Supervisor::signal_all(int number) {
  last_signal_ = number;
  for (auto& connection : connections_) send(connection, Signal{number});
}

/// Stopped, it and its daemons cannot cut the grace short. Not before, because a rank in MPI_Abort still talks to it.
void Supervisor::hold_mpirun() {
  if (!mpirun_ends_job_ || starter_ended_) return;
  processes_.hold();
  hosts_.send_all(Hold{});
}

void Supervisor::kill_starter() {
  phase_ = Phase::kStarterKilled;
  phase_until_ = Clock::time_point::max();
  collect_processes();
  if (starter_ended_) return;
  processes_.kill();
  if (!processes_.are_mpirun()) hosts_.send_all(EndRanks{});
}

/// A reader of stdout that takes nothing must not hold back messages on stderr. False if it has been tried, or both are
/// the same.
bool Supervisor::drop_stdout() {
  if (console_.queues().size() < 2 || console_.queues().front().size() == 0) return false;
  say_unread(console_.queues().front().drop());
  return true;
}

void Supervisor::say_unread(std::size_t bytes) {
  if (bytes > 0) console_.say(fmt::format("{} of output were not read", human_bytes(static_cast<double>(bytes))));
}

void Supervisor::flush_console() {
  phase_ = Phase::kStarterKilled;
  flushing_ = true;
  say_unread(std::exchange(unread_bytes_, 0));
  const auto give_up_at = Clock::now() + kLastOutput;
  while (console_.backlog_bytes() > 0) {
    const bool stopped = interrupted_by_ != 0 || hurry_;
    if (stopped && Clock::now() >= give_up_at && !drop_stdout()) return;
    std::vector<pollfd> entries = {{signals_.fd(), POLLIN, 0}};
    for (const auto& queue : console_.queues()) entries.push_back({queue.size() > 0 ? queue.fd() : -1, POLLOUT, 0});
    // As long as the reader lets us wait, unless the user does not want to wait.
    const int timeout_ms = stopped ? static_cast<int>(std::chrono::duration_cast<Millis>(kPatience).count()) : -1;
    const int ready = ::poll(entries.data(), entries.size(), timeout_ms);
    if (ready == 0 && !drop_stdout()) return;
    if (ready <= 0) continue;
    if (entries[0].revents != 0) take_signals();
    std::size_t index = 1;
    for (auto& queue : console_.queues())
      if (entries[index++].revents != 0) queue.write_some();
  }
}

}  // namespace lockstep::launcher
