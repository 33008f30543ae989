// Connections between hosts in the making.
#pragma once

#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/handshake.h"
#include "base/unique_fd.h"
#include "comm/hosts/interfaces.h"
#include "comm/hosts/link.h"
#include "comm/shm/peers.h"

namespace lockstep::comm {

/// Where a rank listens.
struct CallAddress {
  std::string host;  // "10.0.0.1"
  int port = 0;
};

/// One rank's connections with those of its channel (Note [Between hosts]). Not thread-safe.
class Calls {
 public:
  /// `patience` is how long a peer may be silent before keepalive gives the connection up.
  Calls(int rank, const Peers& peers, Clock::duration patience);
  ~Calls();
  Calls(Calls&&) = delete;

  /// Listens at each of these addresses, at a free port; where, for the others. Throws DeviceError where none will do.
  std::vector<CallAddress> listen(const std::vector<InterfaceAddress>& addresses);
  /// There is to be a connection to `rank`, which listens there. Lower ranks are called, higher ones call.
  void expect(int rank, std::vector<CallAddress> addresses);
  /// Makes them all, with those who know `secret` and encrypt, or do not, as this rank does; in the order of expect().
  /// Nobody listens afterwards. Throws DeviceError naming a rank that cannot be reached, or has not called, before
  /// `deadline`.
  std::vector<Link> connect(const JobSecret& secret, bool encrypts, Deadline deadline);

 private:
  struct Contact;
  struct Visitor;

  void call(Contact& contact);
  void go_on(Contact& contact);
  void hang_up(Contact& contact, const std::string& why);
  void accept(const UniqueFd& listener);
  void make_room();
  /// Whether the visitor is done with: taken, or turned away.
  bool hear(Visitor& visitor);
  /// Whether it is one of those that are to call; its refusal is on its way otherwise.
  bool take(Visitor& visitor);
  void turn_away(const Visitor& visitor, const std::string& why);
  void set_up(const UniqueFd& socket) const;
  void wait(Deadline deadline);
  [[noreturn]] void give_up(double waited_seconds) const;

  const int rank_;
  const Peers& peers_;
  const Clock::duration patience_;
  std::vector<UniqueFd> listeners_;
  std::string listens_at_;
  std::vector<Contact> contacts_;
  std::vector<Visitor> visitors_;
  JobSecret secret_;
  bool encrypts_ = false;
  int turned_away_ = 0;
};

}  // namespace lockstep::comm
