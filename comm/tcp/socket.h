// Stream sockets over IPv4 and IPv6.
#pragma once

#include <string>
#include <vector>

#include "base/scope.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {

/// "host:29500", "[::1]:29500".
std::string text_of(const Rendezvous& rendezvous);

/// Where rank 0 listens, at `port`. Without `listen`: at all addresses of `host`. Throws UsageError when that is no
/// address of this machine (a name that only a router or service knows), when it is loopback by a name that should mean
/// more (Debian's 127.0.1.1) though other hosts are to come to it (`several_hosts`), when a name does not resolve, or
/// when the port is taken or reserved; DeviceError for other failures. Resolving a name blocks as long as the system's
/// resolver does.
std::vector<UniqueFd> listen_at(const Rendezvous& rendezvous, bool several_hosts);
/// Whether only this machine reaches these.
bool are_loopback(const std::vector<UniqueFd>& listeners);

/// Tries the addresses of `rendezvous` again and again, with growing pauses, until one accepts. Throws UsageError when
/// the name does not resolve, TimeoutError when nobody accepts before `deadline`. With `speaks` a long wait is
/// mentioned (comm/wait.h).
UniqueFd connect_to(const Rendezvous& rendezvous, Deadline deadline, bool speaks = false);

/// What every connection gets: small messages leave at once, and a host that dies without a word is noticed.
void set_up(const UniqueFd& socket);

}  // namespace lockstep::comm
