// The launcher's connection to its helper on another host.
#pragma once

#include <poll.h>

#include <optional>
#include <span>
#include <string>

#include "launcher/hosts/byte_pipe.h"
#include "launcher/hosts/greeting.h"
#include "launcher/hosts/host_list.h"
#include "launcher/hosts/protocol.h"
#include "launcher/hosts/remote_agent.h"
#include "launcher/process.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// Note [Helpers on other hosts]
/// On every other host of a job runs `lockstep _host`, started by the launcher through ssh and connected with it by
/// ssh's pipes: no port to listen at, and a way for the job's secret that nobody else reads. It does there what the
/// launcher does on its own host: makes the job's directories and the process that will remove them, starts the
/// wrappers of ranks, takes their connections and passes their messages on, and starts Open MPI's daemon where mpirun
/// starts the ranks (`lockstep _rsh` in the place of ssh). So all processes of the job on that host are its
/// descendants, or carry the job's mark.
///   The two exchange a ping and a pong every second. When the connection ends, whoever ended it, or when one of them
/// has heard nothing for the time that the user allows, the helper ends its part of the job, and the launcher takes
/// the host for lost. A shorter outage of a link costs nothing: TCP sends lost data again.
///
/// One link starts one remote agent, in the constructor, and ends it in the destructor. Not thread-safe.
class HostLink {
 public:
  /// `self`: path of the running binary, which is expected at the same place there.
  HostLink(HostSpec host, const RemoteAgent& agent, const std::string& self);
  ~HostLink();
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;

  const HostSpec& host() const { return host_; }
  HostSpec& host() { return host_; }
  const std::string& name() const { return host_.name; }

  static constexpr std::size_t kPollEntries = 3;
  /// What to wait for; with `listen` false nothing is read from the host, and its silence means nothing.
  void fill(std::span<pollfd, kPollEntries> entries, bool listen);
  /// Reads and writes what poll() allows.
  void serve(std::span<const pollfd, kPollEntries> entries);
  /// What the host has said when it was ready.
  Ready ready;

  /// Sends a ping where one is due.
  void ping();

  const std::optional<Greeting>& greeting() const { return greeting_; }
  std::optional<HostMessage> next();
  void send(const HostMessage& message) { pipe_.send(encode_host(message)); }
  std::size_t pending_bytes() const { return pipe_.pending_bytes(); }

  /// When the host was last heard of.
  Clock::time_point last_heard() const { return last_heard_; }
  /// How long nothing came, as far as this process ran.
  Clock::duration silence() const { return RunningClock::now() - silent_since_; }
  void forgive_silence() { silent_since_ = RunningClock::now(); }
  /// The connection has ended, and all that came over it has been handed out.
  bool gone() const { return pipe_.in() < 0; }
  /// How the remote agent ended; nothing while it runs.
  std::optional<ExitStatus> agent_exit_status();
  /// Why the agent ended before the host greeted.
  std::string explain_failure();
  /// What the agent has said on stderr: its last line.
  std::string last_words() const { return last_line(said_); }
  /// Ends the agent, and with it the connection, at once.
  void cut();

  /// What a reading of the helper's steady clock is on this host's.
  Clock::time_point to_local(Clock::time_point there) const { return there - clock_ahead_; }

 private:
  void take_text(std::string_view bytes);
  void take_pong(const Pong& pong);

  HostSpec host_;
  std::string agent_name_, program_;
  pid_t agent_ = -1;
  std::optional<ExitStatus> exit_status_;
  BytePipe pipe_;
  BytePipe errors_;
  std::string said_;
  std::string text_;  // before the greeting is complete
  std::optional<Greeting> greeting_;
  HostDecoder decoder_;
  Clock::time_point last_heard_ = Clock::now();
  RunningClock::time_point silent_since_ = RunningClock::now();
  Clock::time_point next_ping_ = Clock::now();
  Clock::duration clock_ahead_{};  // the helper's clock, of this host's
  Clock::duration best_round_trip_ = Clock::duration::max();
  Clock::time_point clock_read_at_{};
};

}  // namespace lockstep::launcher
