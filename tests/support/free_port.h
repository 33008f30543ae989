// A place to listen at.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include "base/error.h"
#include "base/unique_fd.h"

namespace lockstep::testing {

/// A port on 127.0.0.1 at which nobody listened just now.
inline int free_port() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  LOCKSTEP_ASSERT(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  LOCKSTEP_ASSERT(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  return ntohs(address.sin_port);
}

}  // namespace lockstep::testing
