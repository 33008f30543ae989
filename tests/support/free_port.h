// A place to listen at.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/scope.h"

namespace lockstep::testing {

/// A port on 127.0.0.1 without a listener at the moment. No other test gets it while this process lives: a socket with
/// the port's name (support/job.py has the same) marks it as taken. Without the mark another test could take the port
/// before the listener starts. Lower than the ports of connections.
inline int free_port() {
  static auto& claims = *new std::vector<UniqueFd>();
  std::random_device random;
  std::uniform_int_distribution<int> ports(10000, 19999);
  for (int tries = 0; tries < 1000; ++tries) {
    const int port = ports(random);
    UniqueFd claim(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const std::string text = "lockstep tests' port " + std::to_string(port);
    std::memcpy(name.sun_path + 1, text.data(), text.size());  // abstract: no file
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<in_port_t>(port));
    if (::bind(claim.get(), reinterpret_cast<sockaddr*>(&name), length) != 0 ||
        ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
      continue;
    claims.push_back(std::move(claim));
    return port;
  }
  throw DeviceError("no port from 10000 to 19999 is free", "end what holds them");
}

}  // namespace lockstep::testing
