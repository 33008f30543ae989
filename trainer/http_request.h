// What a client of the status server asks for.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep::trainer {

/// Note [Requests]
/// Of HTTP/1.1 (RFC 9110, RFC 9112) a server needs little if each connection has one request without a body: the first
/// line and one header, Authorization. Lines may end with \n alone. Everything else is read over, but nothing that
/// could be understood in two ways is taken.

inline constexpr std::size_t kMostRequestBytes = 8192;

struct HttpRequest {
  /// 200: it is whole. 0: it is not yet; more bytes are to come. Else the answer's status: 400 (no request), 431
  /// (longer than kMostRequestBytes), 505 (another version than HTTP/1).
  int status = 0;
  std::string method, path;   // "GET", "/metrics"; the path without what follows '?'
  std::string authorization;  // the header's value; empty: there is none
};

/// Of all bytes that a client has sent so far.
HttpRequest parse_http_request(std::string_view bytes);

}  // namespace lockstep::trainer
