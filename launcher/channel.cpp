#include "launcher/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace lockstep::launcher {
namespace {

constexpr std::string_view kUnixScheme = "unix:";
// The launcher may be stopped (Ctrl-Z) just now.
constexpr auto kAnswerWithin = std::chrono::seconds(300);
constexpr auto kLookEvery = Millis(1000);
constexpr int kMostAttempts = 20;

sockaddr_un unix_address(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    throw DeviceError(fmt::format("socket path {} is longer than {} bytes", path, sizeof address.sun_path - 1),
                      "set TMPDIR to a shorter path");
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

UniqueFd new_socket() {
  UniqueFd made(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  check_system(bool(made), "making a socket");
  return made;
}

}  // namespace

Channel::Channel(UniqueFd socket) : socket_(std::move(socket)) {
  ::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
}

void Channel::send(const Message& message) {
  out_ += encode(message);
  flush();
}

void Channel::flush() {
  while (out_start_ < out_.size()) {
    const ssize_t sent = ::send(socket_.get(), out_.data() + out_start_, out_.size() - out_start_, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      out_.erase(0, out_start_);
      out_start_ = 0;
      return;
    }
    if (sent < 0) break;  // the peer has gone, which receive() reports
    out_start_ += static_cast<std::size_t>(sent);
  }
  out_.clear();
  out_start_ = 0;
}

Channel::Received Channel::receive() {
  char chunk[64 * 1024];
  for (;;) {
    const ssize_t got = ::recv(socket_.get(), chunk, sizeof chunk, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Received::kNothing;
    if (got <= 0) return Received::kGone;
    decoder_.feed({chunk, static_cast<std::size_t>(got)});
    return Received::kBytes;
  }
}

UniqueFd listen_at(const std::string& path) {
  UniqueFd listener = new_socket();
  const sockaddr_un address = unix_address(path);
  check_system(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
                   ::listen(listener.get(), SOMAXCONN) == 0,
               "listening at " + path);
  ::fcntl(listener.get(), F_SETFL, O_NONBLOCK);
  return listener;
}

namespace {

/// A launcher that closes the connection without a word is called again: it had too many callers, or the handshake took
/// this process, on a busy machine, too long.
UniqueFd connect_to(const std::string& address_text, const JobSecret& secret, int attempts) {
  if (!address_text.starts_with(kUnixScheme))
    throw DeviceError("unknown launcher address " + address_text, "start the ranks with `lockstep launch`");
  UniqueFd socket = new_socket();
  const sockaddr_un address = unix_address(address_text.substr(kUnixScheme.size()));
  check_system(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0,
               "connecting to the launcher at " + address_text);
  Handshake handshake = Handshake::call(Handshake::Port::kLauncher, secret, {});
  const auto deadline = Deadline::after(kAnswerWithin);
  while (handshake.advance(socket.get()) == Handshake::State::kInProgress && !deadline.expired()) {
    pollfd look = {socket.get(), POLLIN, 0};
    ::poll(&look, 1, static_cast<int>(kLookEvery.count()));
  }
  if (handshake.state() == Handshake::State::kDone) return socket;
  const std::string why = handshake.why().empty() ? "it says nothing" : handshake.why();
  if (handshake.failure() == Handshake::Failure::kGone && attempts > 1)
    return connect_to(address_text, secret, attempts - 1);
  throw DeviceError(fmt::format("the launcher at {} does not let this process in: {}", address_text, why),
                    "start the ranks with `lockstep launch`");
}

}  // namespace

UniqueFd connect_to(const std::string& address, const JobSecret& secret) {
  return connect_to(address, secret, kMostAttempts);
}

AuthenticatedListener listen_for_job(const std::string& path, const JobSecret& secret, int ranks) {
  std::vector<UniqueFd> listeners;
  listeners.push_back(listen_at(path));
  return {std::move(listeners),
          {.port = Handshake::Port::kLauncher,
           .secret = secret,
           .expected = static_cast<std::size_t>(ranks),
           .to = " to the launcher's socket"}};
}

UniqueFd accept_from(AuthenticatedListener& listener) {
  auto caller = listener.next();
  if (!caller) return {};
  caller->handshake.accept({});
  caller->handshake.flush(caller->socket.get());
  return std::move(caller->socket);
}

}  // namespace lockstep::launcher
