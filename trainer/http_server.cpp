#include "trainer/http_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/network.h"
#include "base/signals.h"
#include "base/text.h"
#include "lockstep/base/job_secret.h"

namespace lockstep::trainer {
namespace {

constexpr auto kAcceptPause = std::chrono::milliseconds(200);
constexpr auto kFarewell = std::chrono::seconds(1);
constexpr std::size_t kMostIgnored = std::size_t{64} << 10;

const char* reason_of(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 431: return "Request Header Fields Too Large";
    case 503: return "Service Unavailable";
    case 505: return "HTTP Version Not Supported";
    default: return "Error";
  }
}

std::string text_of(const HttpAnswer& answer) {
  return fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{}Connection: close\r\n\r\n{}",
                     answer.status, reason_of(answer.status), answer.type, answer.body.size(), answer.header,
                     answer.body);
}

bool has_token(std::string_view authorization, std::string_view token) {
  constexpr std::size_t kScheme = std::string_view("bearer ").size();
  return lower_case(std::string(authorization.substr(0, kScheme))) == "bearer " &&
         equal_in_constant_time(trim(authorization.substr(kScheme)), token);
}

}  // namespace

HttpServer::HttpServer(UniqueFd listener, std::string token, std::function<HttpAnswer(const HttpRequest&)> answer)
    : listener_(std::move(listener)),
      wakeup_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      token_(std::move(token)),
      answer_(std::move(answer)) {
  if (!wakeup_) throw DeviceError(fmt::format("making an event descriptor: {}", errno_text(errno)), "raise ulimit -n");
  thread_ = start_thread([this] { run(); });
}

HttpServer::~HttpServer() {
  ends_ = true;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wakeup_.get(), &one, sizeof one);
  thread_.join();
}

void HttpServer::run() {
  try {
    while (!ends_) wait_and_serve();
  } catch (const std::exception& error) {
    log_warn("the status server has ended: {}; training continues without it", error.what());
  }
  connections_.clear();
  listener_.reset();
}

void HttpServer::wait_and_serve() {
  const auto now = Clock::now();
  const bool accepts = now >= accept_again_;
  Clock::time_point until = accepts ? Clock::time_point::max() : accept_again_;
  std::vector<pollfd> entries = {{wakeup_.get(), POLLIN, 0}, {accepts ? listener_.get() : -1, POLLIN, 0}};
  for (const Connection& connection : connections_) {
    entries.push_back({connection.socket.get(), static_cast<short>(connection.answers ? POLLOUT : POLLIN), 0});
    until = std::min(until, connection.until);
  }
  int timeout_ms = -1;
  if (until != Clock::time_point::max())
    timeout_ms = static_cast<int>(std::chrono::ceil<Millis>(std::max(until - now, Clock::duration::zero())).count());
  if (::poll(entries.data(), entries.size(), timeout_ms) < 0) return;
  std::size_t at = 2;
  for (Connection& connection : connections_) {
    if (entries[at++].revents != 0) advance(connection);
    if (Clock::now() >= connection.until) connection.gone = true;
  }
  connections_.remove_if([](const Connection& connection) { return connection.gone; });
  if (entries[1].revents != 0) accept_some();
}

void HttpServer::accept_some() {
  const auto now = Clock::now();
  if (now - second_begins_ >= std::chrono::seconds(1)) {
    second_begins_ = now;
    accepted_ = 0;
  }
  for (;;) {
    if (accepted_ == kMostPerSecond) {
      accept_again_ = second_begins_ + std::chrono::seconds(1);
      return;
    }
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno != EAGAIN && errno != EINTR) accept_again_ = now + kAcceptPause;  // no descriptor is left
      return;
    }
    ++accepted_;
    if (connections_.size() == kMostConnections) make_room();
    connections_.push_back({.socket = std::move(socket), .until = now + kPatience});
    advance(connections_.back());
    if (connections_.back().gone) connections_.pop_back();
  }
}

/// The one that has been silent for longest goes; where none is silent, the oldest.
void HttpServer::make_room() {
  const auto silent = std::ranges::find_if(connections_, [](const Connection& connection) {
    return connection.bytes.empty() && !has_bytes(connection.socket);
  });
  connections_.erase(silent != connections_.end() ? silent : connections_.begin());
}

void HttpServer::advance(Connection& connection) {
  if (!connection.answers) read(connection);
  if (connection.answers) write(connection);
}

void HttpServer::read(Connection& connection) {
  std::array<char, 4096> bytes;
  const ssize_t got = ::recv(connection.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    connection.gone = true;
    return;
  }
  if (connection.ends) {
    connection.ignored += static_cast<std::size_t>(got);
    connection.gone = connection.ignored > kMostIgnored;
    return;
  }
  connection.bytes.append(bytes.data(), static_cast<std::size_t>(got));
  const HttpRequest request = parse_http_request(connection.bytes);
  if (request.status == 0) return;
  connection.bytes = text_of(answer_to(request));
  connection.answers = true;
  connection.until = Clock::now() + kPatience;
}

void HttpServer::write(Connection& connection) {
  const auto rest = std::string_view(connection.bytes).substr(connection.sent);
  const ssize_t sent = ::send(connection.socket.get(), rest.data(), rest.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0) {
    connection.gone = errno != EAGAIN && errno != EINTR;
    return;
  }
  connection.sent += static_cast<std::size_t>(sent);
  if (connection.sent < connection.bytes.size()) return;
  // Closed at once, with bytes that nobody has read, the connection would be reset, and the answer lost.
  ::shutdown(connection.socket.get(), SHUT_WR);
  connection.answers = false;
  connection.ends = true;
  connection.until = Clock::now() + kFarewell;
}

HttpAnswer HttpServer::answer_to(const HttpRequest& request) const {
  if (request.status != 200) return {.status = request.status, .body = fmt::format("{}\n", reason_of(request.status))};
  if (!token_.empty() && !has_token(request.authorization, token_))
    return {.status = 401,
            .body = "send the header Authorization: Bearer TOKEN\n",
            .header = "WWW-Authenticate: Bearer\r\n"};
  if (token_.empty() && !is_address_or_localhost(request.host))
    return {.status = 403, .body = "without a token it answers those who ask for an address, or localhost\n"};
  return answer_(request);
}

}  // namespace lockstep::trainer
