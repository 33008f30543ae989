// The hosts of a job, over all its attempts.
#pragma once

#include <poll.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/hosts/greeting.h"
#include "launcher/hosts/host_link.h"
#include "launcher/hosts/remote_agent.h"
#include "launcher/root_cause.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// Note [Hosts that come and go]
/// A host has a helper (Note [Helpers on other hosts]) from when it answers until it is lost, over all attempts that it
/// takes part in or not; each of these begins with a JobSetup and ends with Conclude and Concluded. A host that is away
/// is called again: at once, so that it can take part in the next attempt, and after two failures in a row (it was
/// lost, or did not answer a call) without a checkpoint between them in pauses that double, up to a minute. A job with
/// fewer ranks than it should have takes up hosts that have answered after its next checkpoint (Supervisor).
///   A host that is silent ends its part of the job before the launcher takes it for lost, so that no two attempts
///   write
/// checkpoints at the same time.
///
/// Owns the links. Hosts are known by their index; this host is one of them where it is named, and has no link. Not
/// thread-safe.
class RemoteHosts {
 public:
  using Handler = std::function<void(std::size_t host, const HostMessage& message)>;

  /// Of a job on this host alone.
  RemoteHosts() = default;
  struct Setup {
    std::optional<RemoteAgent> agent;  // none where all hosts are this one
    std::string self;                  // path of the running binary
    Greeting own;                      // this host's
    Clock::duration silence;           // without a word after which a host is lost
  };
  /// `is_own`: which of `hosts` are this one. Calls all others.
  RemoteHosts(const std::vector<HostSpec>& hosts, const std::vector<bool>& is_own, Setup setup);
  /// From now on hosts that are away are called again.
  void keep_calling() { keeps_calling_ = true; }

  std::size_t size() const { return hosts_.size(); }
  const HostSpec& spec(std::size_t host) const { return hosts_[host].spec; }
  const std::string& name(std::size_t host) const { return hosts_[host].spec.name; }
  bool is_own(std::size_t host) const { return hosts_[host].state == State::kOwn; }
  const Greeting& greeting(std::size_t host) const { return hosts_[host].greeting; }
  const Greeting& own_greeting() const { return setup_.own; }
  std::optional<std::size_t> find(const std::string& mpirun_name) const;

  /// It is this host, or it has answered and may take part.
  bool is_there(std::size_t host) const;
  /// It is being called, and has not answered yet.
  bool is_called(std::size_t host) const { return hosts_[host].state == State::kCalled; }
  /// It is away, is called at once, and has failed but once: worth a moment's wait.
  bool is_probed(std::size_t host) const {
    const Host& one = hosts_[host];
    return keeps_calling_ && one.failures < 2 && (one.state == State::kAway || one.state == State::kCalled);
  }
  /// Why it is not there, for people; empty where nothing is known.
  const std::string& problem(std::size_t host) const { return hosts_[host].problem; }
  /// It takes no part in this job any more.
  void dismiss(std::size_t host, std::string problem = {});

  /// The host is to take part in the next attempt: sends `setup`. What it answers is handed out by serve().
  void begin(std::size_t host, const JobSetup& setup);
  void set_ready(std::size_t host, const Ready& ready) { hosts_[host].ready = ready; }
  const Ready& ready(std::size_t host) const { return hosts_[host].ready; }
  /// Another one than this host takes part.
  bool any_takes_part() const;
  /// The host cannot be used now. Counts as a failure.
  void fail(std::size_t host, std::string problem);
  /// The same for one whose ranks fail: it is cut off, and called again only after a pause.
  void leave_out(std::size_t host, std::string problem);
  /// There was a checkpoint: those that take part have not failed.
  void forget_failures();

  /// Appends what poll() is to wait for. With `listen` false the ranks' hosts are held back.
  void add_entries(std::vector<pollfd>& entries, bool listen);
  /// Serves entries from `first`, and hands out what has come from those that take part. A host that says what no
  /// helper says is cut off.
  void serve(std::span<const pollfd> entries, const Handler& handle);
  /// Sends pings and calls hosts where that is due. How long poll() may wait until the next look.
  Clock::duration look_after();
  /// Hosts that took part and have been lost since the last call. What they have said before has been handed out.
  std::vector<LostHost> take_lost();

  /// The ranks' clock on that host, on this one's.
  Clock::time_point to_local(std::size_t host, Clock::time_point there) const;
  void send(std::size_t host, const HostMessage& message);
  /// To all that take part.
  void send_all(const HostMessage& message);
  /// The user stops this process and resumes it later: no host counts as lost meanwhile.
  void pause();
  void resume();
  /// A host has missed a pong or two: who waits a little longer knows whether it is lost.
  bool any_overdue() const;
  /// Notifies those that take part that the attempt has ended; they clean up, and say so.
  void conclude();
  /// After conclude(): the host has, or has gone.
  bool finished(std::size_t host) const { return concluding_ && !takes_part(host); }
  bool all_concluded() const { return !any_takes_part(); }
  /// When the last word came from one that takes part.
  Clock::time_point last_heard() const;
  /// Cuts off those that have not concluded.
  void end_attempt();
  /// The job has ended: says so to all, and waits a moment for the ends of the helpers.
  void finish();

 private:
  enum class State {
    kOwn,
    kAway,
    kCalled,     // the agent runs, and has not brought a greeting yet
    kIdle,       // it takes no part in this attempt
    kTakesPart,  // in it
    kDismissed,
  };
  struct Host {
    HostSpec spec;
    State state = State::kAway;
    std::unique_ptr<HostLink> link = {};
    Greeting greeting = {};
    Ready ready = {};
    std::string problem = {};
    int failures = 0;
    Clock::time_point called_at = {}, call_at = {};
  };

  bool takes_part(std::size_t host) const { return hosts_[host].state == State::kTakesPart; }
  void call(Host& host);
  void look_at_call(Host& host);
  void exclude_host(Host& host, std::string problem);
  bool is_silent(const Host& host) const { return host.link->silence() > setup_.silence; }

  Setup setup_ = {};
  std::vector<Host> hosts_;
  bool keeps_calling_ = false, concluding_ = false;
};

}  // namespace lockstep::launcher
