// Watches a running job until every rank, and what has started them, have ended, and ends it when it must.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "base/authenticated_listener.h"
#include "launcher/channel.h"
#include "launcher/console.h"
#include "launcher/flight_records.h"
#include "launcher/hosts/remote_hosts.h"
#include "launcher/job_processes.h"
#include "launcher/rank_log.h"
#include "launcher/rank_status.h"
#include "launcher/root_cause.h"
#include "launcher/survivors.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// Note [How a job ends]
/// The launcher ends the ranks. Where mpirun is between, it only starts them: it would wait whole seconds and could not
/// say who failed first. The wrapper of a rank that failed stays alive until its connection closes, so mpirun does not
/// notice.
///   0. A rank fails that others may outlive: they get time to say so, and 1 begins only if the job cannot continue
///      with them (Note [Survivors]).
///   1. A rank fails: the others get kPatience to see it themselves and say so, or to start at all.
///   2. They get SIGTERM (or the user's signal) and time to end, more of it if they save a checkpoint (RankStatus).
///   3. They get SIGKILL.
///   4. When the last program has ended mpirun is killed; the wrappers go with it, and the reaper cleans up. Wrappers
///      that the launcher has started itself are killed in its place.
/// On other hosts the helpers pass on what is said to the wrappers, kill those in 4, and end what is left when the
/// attempt has ended. To grow, a job begins at 2 by itself, as if asked to end. While
/// one of them is overdue, 1 lasts until it has answered or is lost: what ranks elsewhere die of may be just that.
/// A Ctrl-C goes to 3 at once when the job has been ending for more than a second: `timeout` and schedulers send a
/// signal to the launcher and to its group, or to all processes of the job, and mean one request. Where mpirun itself
/// begins to end the job (a wrapper was killed, a rank left without MPI_Finalize, somebody sent it SIGTERM), the
/// wrappers say so and the same steps are taken. When the reader of stdout has gone the job ends as if asked to.
///
/// One thread, one poll() loop. The objects passed in must outlive it.
class Supervisor {
 public:
  /// `own_host`: what the user calls this host, if the job names hosts; empty otherwise.
  Supervisor(AuthenticatedListener listener, JobProcesses processes, int ranks, std::optional<double> grace_seconds,
             Console& console, RankLogs& logs, SignalQueue& signals, RemoteHosts& hosts, std::string own_host);

  /// Has `handle` called with the first step that a rank reports complete, and with the first one after ranks have been
  /// replaced. Before run().
  void on_first_step(std::function<void(std::int64_t step)> handle) { on_first_step_ = std::move(handle); }
  /// Has `handle` called with each newer checkpoint that a rank reports; if it says so, all ranks are asked to end,
  /// since the job is to continue from there with more of them. Before run().
  void on_checkpoint(std::function<bool(std::int64_t step)> handle) { on_checkpoint_ = std::move(handle); }
  /// Ranks may outlive others (Note [Survivors]): `replace` starts ranks in the lost ones' places, or says with nothing
  /// that the job is to end; `start_spare` starts a spare and returns its process. Before run().
  void on_survivors(std::function<std::optional<Replacements>(const Loss&)> replace,
                    std::function<pid_t()> start_spare) {
    replace_ = std::move(replace);
    start_spare_ = std::move(start_spare);
  }
  /// Has `handle` called with what those write that start ranks on other hosts, or are their wrappers. Before run().
  void on_starter_output(std::function<void(std::string_view bytes)> handle) { on_starter_output_ = std::move(handle); }
  /// Returns when everything has ended (at most the grace and about half a second after the first failure) and all
  /// output that somebody takes is written.
  void run();
  /// Views this object. `program` is left to the caller.
  JobReport report() const;
  /// The flight records that the wrappers of ranks that failed have sent, one for each rank.
  std::vector<RankFlight> take_flights() { return std::move(flights_); }
  /// Writes what the console still holds, for as long as somebody reads it; after a stop for a second at most.
  void flush_console();

 private:
  /// What a helper passes on from one wrapper.
  struct RemoteWire {
    std::size_t host;
    std::uint32_t id;
    Decoder decoder = {};
    bool closed = false;
  };
  /// A wrapper on this host, or a `_rsh` that mpirun has started; with `link` a wrapper on another host.
  struct Connection {
    explicit Connection(UniqueFd socket) : channel(std::move(socket)) {}
    explicit Connection(RemoteWire wire) : link(std::move(wire)) {}
    std::optional<Channel> channel;
    std::optional<RemoteWire> link;
    int rank = -1;                      // until Hello; of a spare, until it has one
    std::optional<Hello> spare;         // what a spare has said of itself
    bool waits = false;                 // a spare: for a place
    std::optional<std::size_t> starts;  // a `_rsh`: the host whose daemon it stands for
    int fd() const { return channel ? channel->fd() : -1; }
    bool closed() const { return channel ? channel->fd() < 0 : link->closed; }
  };
  static constexpr Clock::duration kPatience = std::chrono::milliseconds(100);
  static constexpr int kMostEndedSpares = 3;
  enum class Phase { kRunning, kStranded, kPatience, kGrace, kKilling, kStarterKilled };

  bool done() const {
    return starter_ended_ && ((connections_.empty() && hosts_.all_concluded()) || Clock::now() >= drain_until_);
  }
  void wait_and_serve();
  void serve(Connection& connection);
  void handle(Connection& connection, const Message& message);
  void greet(Connection& connection, const Hello& hello);
  void start_daemon(Connection& connection, const StartDaemon& start);
  void send(Connection& connection, const Message& message);
  void close(Connection& connection);
  /// Its wrapper ends then, wherever it is.
  void let_go(Connection& connection);
  /// Its wrapper has ended without a word of its program.
  void lose(RankReport& report, Clock::time_point ended_at, Clock::time_point there_at);
  void serve_host(std::size_t host, const HostMessage& message);
  void lose_hosts();
  void accept_ranks();
  void take_signals();
  void take_stop(int number);
  void take_status(int rank, const StatusReport& report);
  void take_progress(const StatusReport& report);
  void look_at_reader();
  void collect_processes();
  void note_lost_wrappers();
  void enter(Phase phase, Clock::duration lasts);
  void begin_ending();
  void look_at_survivors();
  bool replace_ranks();
  void hear_spare(Connection& connection, const Message& message);
  void keep_spare();
  Connection* spare();
  void begin_grace(int signal_number);
  void begin_growing();
  void end_grace();
  void renew_grace();
  bool stop_requested() const;
  void say_what_is_waited_for();
  void advance();
  void take_step();
  void signal_all(int number);
  void hold_mpirun();
  void kill_starter();
  bool all_programs_ended() const;
  bool drop_stdout();
  void say_unread(std::size_t bytes);

  AuthenticatedListener listener_;
  JobProcesses processes_;  // what has started the ranks: the starter
  RankStatus status_;
  Survivors survivors_;
  Console& console_;
  RankLogs& logs_;
  SignalQueue& signals_;
  RemoteHosts& hosts_;
  std::string own_host_;

  Clock::time_point started_at_ = Clock::now();
  Clock::time_point looked_at_ = started_at_;  // at the connections, last time
  std::list<Connection> connections_;
  std::vector<RankReport> reports_;
  std::vector<RankFlight> flights_;
  std::vector<std::optional<std::size_t>> host_of_;  // a rank's, if it is not this one
  std::vector<LostHost> lost_hosts_;
  std::optional<DaemonEnd> daemon_end_;
  Phase phase_ = Phase::kRunning;
  Clock::time_point phase_until_ = Clock::time_point::max();
  Clock::time_point drain_until_ = Clock::time_point::max();
  Clock::time_point ending_since_ = Clock::time_point::max();
  Clock::time_point grace_since_, notice_at_ = Clock::time_point::max();
  std::string noticed_;  // what the launcher waits for, as it was last shown
  int last_signal_ = 0;  // sent to all ranks; one that starts late gets it too
  int interrupted_by_ = 0;
  bool stop_asked_ = false;
  bool growing_ = false;  // ended, so far, for the sake of more ranks
  JobProgress progress_;
  std::function<void(std::int64_t step)> on_first_step_;
  std::function<bool(std::int64_t step)> on_checkpoint_;
  std::function<void(std::string_view bytes)> on_starter_output_;
  std::function<std::optional<Replacements>(const Loss&)> replace_;
  std::function<pid_t()> start_spare_;
  int ended_spares_ = 0;                             // in a row
  bool hurry_ = false;                               // the user asked again
  bool flushing_ = false;                            // a signal can only end the wait for the console
  std::map<int, Clock::time_point> say_stop_again_;  // by rank: not before
  bool reader_gone_ = false;
  std::size_t unread_bytes_ = 0;  // of output, dropped while the job ends
  bool starter_ended_ = false;
  bool mpirun_ends_job_ = false;
};

}  // namespace lockstep::launcher
