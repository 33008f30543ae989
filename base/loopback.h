// The network within this host.
#pragma once

#include <sys/socket.h>

#include <optional>
#include <string>

namespace lockstep {

/// 127.0.0.0/8, or ::1.
bool is_loopback(const sockaddr& address);

/// Why nobody reaches `address` ("127.0.0.1", "::1", or a name of one) on this host, as errno has it: no device, or no
/// route, of which a network namespace begins with none. Nothing: it can be reached, or is no loopback address. Sends
/// nothing.
std::optional<std::string> loopback_problem(const std::string& address);

/// "127.0.0.1", or "::1" where there is IPv6 alone. Throws DeviceError with what to do where there is neither.
std::string loopback_address();

}  // namespace lockstep
