// What a client of the status server asks for.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep::trainer {

/// Note [Requests]
/// Of HTTP/1.1 (RFC 9110, RFC 9112) a server needs little if each connection has one request without a body: the first
/// line and two headers, Authorization and Host. Lines may end with \n alone. Everything else is read over, but nothing
/// that could be understood in two ways is taken.

inline constexpr std::size_t kMostRequestBytes = 8192;

struct HttpRequest {
  /// 200: it is whole. 0: it is not yet; more bytes are to come. Else the answer's status: 400 (no request), 431
  /// (longer than kMostRequestBytes), 505 (another version than HTTP/1).
  int status = 0;
  std::string method, path;   // "GET", "/metrics"; the path without what follows '?'
  std::string authorization;  // the header's value; empty: there is none
  std::string host;           // likewise: "127.0.0.1:8000"
};

/// Of all bytes that a client has sent so far.
HttpRequest parse_http_request(std::string_view bytes);

/// Whether a Host header, which may be empty, is an IP address or localhost, with a port or without. Browsers send the
/// name in a page's address. If an attacker has made a name of theirs resolve to this host ("DNS rebinding"), their
/// page may read answers from loopback, and only this header differs from an honest request.
bool is_address_or_localhost(std::string_view host);

}  // namespace lockstep::trainer
