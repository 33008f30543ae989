// The other hosts of a running job, as the supervisor sees them.
#pragma once

#include <poll.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/hosts/host_link.h"
#include "launcher/root_cause.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// Owns the links. Hosts are known by their index. Not thread-safe.
class RemoteHosts {
 public:
  using Handler = std::function<void(std::size_t host, const HostMessage& message)>;

  RemoteHosts() = default;
  /// `silence`: without a word after which a host is lost.
  RemoteHosts(std::vector<std::unique_ptr<HostLink>> links, Clock::duration silence);

  bool empty() const { return links_.empty(); }
  std::size_t size() const { return links_.size(); }
  const std::string& name(std::size_t host) const { return links_[host]->name(); }
  std::optional<std::size_t> find(const std::string& mpirun_name) const;

  /// Appends what poll() is to wait for. With `listen` false the ranks' hosts are held back.
  void add_entries(std::vector<pollfd>& entries, bool listen);
  /// Serves entries from `first`, and hands out what has come. A host that says what no helper says is cut off.
  void serve(std::span<const pollfd> entries, const Handler& handle);
  /// Sends pings where they are due. How long poll() may wait until the next look.
  Clock::duration look_after();
  /// Hosts that have been lost since the last call. What they have said before has been handed out.
  std::vector<LostHost> take_lost();

  /// The ranks' clock on that host, on this one's.
  Clock::time_point to_local(std::size_t host, Clock::time_point there) const { return links_[host]->to_local(there); }
  void send(std::size_t host, const HostMessage& message) { links_[host]->send(message); }
  void send_all(const HostMessage& message);
  /// The user stops this process and resumes it later: no host counts as lost meanwhile.
  void pause();
  void resume();
  /// A host has missed a pong or two: who waits a little longer knows whether it is lost.
  bool any_overdue() const;
  /// Notifies all that the job has ended; they clean up and end.
  void finish();
  /// After finish(): the host has gone, in order or not.
  bool finished(std::size_t host) const { return finishing_ && links_[host]->gone(); }
  bool all_gone() const;
  /// When the last word came from one that has not gone.
  Clock::time_point last_heard() const;

 private:
  std::vector<std::unique_ptr<HostLink>> links_;
  std::vector<bool> lost_;
  std::vector<std::string> nonsense_;  // why a host was cut off
  Clock::duration silence_{};
  bool finishing_ = false;
};

}  // namespace lockstep::launcher
