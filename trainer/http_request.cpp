#include "trainer/http_request.h"

#include <algorithm>
#include <cctype>

#include "base/network.h"
#include "base/text.h"

namespace lockstep::trainer {
namespace {

/// RFC 9110, section 5.6.2.
bool is_token(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
  });
}

bool is_visible(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return c > ' ' && c < 0x7f; });
}

/// Takes the first line off `bytes`, without its end. False: there is no whole one.
bool next_line(std::string_view& bytes, std::string_view& line) {
  const std::size_t end = bytes.find('\n');
  if (end == std::string_view::npos) return false;
  line = bytes.substr(0, end);
  if (line.ends_with('\r')) line.remove_suffix(1);
  bytes.remove_prefix(end + 1);
  return true;
}

/// The status of a first line that is whole.
int read_request_line(std::string_view line, HttpRequest& request) {
  const std::size_t target = line.find(' '), version = line.rfind(' ');
  if (target == std::string_view::npos || version == target) return 400;
  const std::string_view path = line.substr(target + 1, version - target - 1), protocol = line.substr(version + 1);
  request.method = line.substr(0, target);
  request.path = path.substr(0, path.find('?'));
  if (!is_token(request.method) || !is_visible(path) || !path.starts_with('/') || !protocol.starts_with("HTTP/"))
    return 400;
  return protocol == "HTTP/1.1" || protocol == "HTTP/1.0" ? 200 : 505;
}

int read_header(std::string_view line, HttpRequest& request) {
  const std::size_t colon = line.find(':');
  if (colon == std::string_view::npos || !is_token(line.substr(0, colon))) return 400;
  const std::string_view value = trim(line.substr(colon + 1));
  if (std::ranges::any_of(value, [](char c) { return std::iscntrl(static_cast<unsigned char>(c)) != 0 && c != '\t'; }))
    return 400;
  const std::string name = lower_case(std::string(line.substr(0, colon)));
  std::string* const taken = name == "authorization" ? &request.authorization
                             : name == "host"        ? &request.host
                                                     : nullptr;
  if (taken == nullptr) return 200;
  if ((value.empty() && taken == &request.authorization) || !taken->empty()) return 400;
  *taken = value;
  return 200;
}

}  // namespace

HttpRequest parse_http_request(std::string_view bytes) {
  HttpRequest request;
  const bool too_long = bytes.size() > kMostRequestBytes;
  bytes = bytes.substr(0, kMostRequestBytes);
  std::string_view line;
  const auto ended = [&](int status) {
    request.status = status;
    return request;
  };
  if (!next_line(bytes, line)) return ended(too_long ? 431 : 0);
  if (const int status = read_request_line(line, request); status != 200) return ended(status);
  while (next_line(bytes, line)) {
    if (line.empty()) return ended(200);
    if (const int status = read_header(line, request); status != 200) return ended(status);
  }
  return ended(too_long ? 431 : 0);
}

bool is_address_or_localhost(std::string_view host) {
  if (host.starts_with('[')) {
    const std::size_t end = host.find(']');
    return end != std::string_view::npos && parse_address(std::string(host.substr(1, end - 1)), 0).has_value();
  }
  const std::string name = lower_case(std::string(host.substr(0, host.find(':'))));
  return host.empty() || name == "localhost" || parse_address(name, 0).has_value();
}

}  // namespace lockstep::trainer
