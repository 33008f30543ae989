#include "launcher/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/handshake.h"
#include "launcher/frame.h"

namespace lockstep::launcher {
namespace {

constexpr std::string_view kUnixScheme = "unix:";
// The launcher may be stopped (Ctrl-Z) just now.
constexpr auto kAnswerWithin = std::chrono::seconds(300);
constexpr auto kLookEvery = Millis(1000);
constexpr int kMostAttempts = 20;

std::string body_of(const Hello& m) { return Writer().put(m.rank).put(m.pid).put_text(m.host).take(); }
std::string body_of(const Output& m) { return Writer().put(m.stream).put_text(m.bytes).take(); }
std::string body_of(const StopNotice& m) { return Writer().put(m.signal_number).take(); }
std::string body_of(const StartDaemon& m) { return Writer().put_sized(m.host).put_text(m.command).take(); }
std::string body_of(const Signal& m) { return Writer().put(m.signal_number).take(); }
std::string body_of(const Status& m) { return encode_status(m.report); }
std::string body_of(const Flight& m) { return Writer().put(m.at_ns).put_text(m.bytes).take(); }
std::string body_of(const Ended& m) {
  const std::int64_t at_ns = std::chrono::nanoseconds(m.at.time_since_epoch()).count();
  return Writer()
      .put(m.exit_status.how)
      .put<std::int32_t>(m.exit_status.value)
      .put(m.stop_requested)
      .put(at_ns)
      .put(m.memory_kills)
      .take();
}

Message parse(std::size_t kind, std::string_view body) {
  Reader reader(body);
  switch (kind) {
    case 0: {
      const auto rank = reader.take<std::int32_t>();
      const auto pid = reader.take<std::int32_t>();
      return Hello{rank, pid, reader.rest()};
    }
    case 1: {
      const auto stream = reader.take<std::uint8_t>();
      return Output{stream, reader.rest()};
    }
    case 2: return StopNotice{reader.take<std::int32_t>()};
    case 3: {
      const auto how = reader.take<ExitStatus::How>();
      const auto value = reader.take<std::int32_t>();
      const auto stop_requested = reader.take<bool>();
      const auto at_ns = reader.take<std::int64_t>();
      return Ended{{how, value},
                   stop_requested,
                   Clock::time_point(std::chrono::nanoseconds(at_ns)),
                   reader.take<std::int64_t>()};
    }
    case 4: return Signal{reader.take<std::int32_t>()};
    case 5: {
      auto host = reader.take_sized();
      return StartDaemon{std::move(host), reader.rest()};
    }
    case 6: {
      auto report = decode_status(body);
      if (!report) throw MpiError("a rank's status that cannot be read");
      return Status{std::move(*report)};
    }
    case 7: {
      const auto at_ns = reader.take<std::int64_t>();
      return Flight{at_ns, reader.rest()};
    }
    default: throw MpiError(fmt::format("message of unknown kind {} between the launcher and a rank", kind));
  }
}

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

std::string encode(const Message& message) {
  return frame(message.index(), std::visit([](const auto& m) { return body_of(m); }, message));
}

std::optional<Message> Decoder::next() {
  const auto frame = frames_.next();
  if (!frame) return std::nullopt;
  return parse(frame->kind, frame->body);
}

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

}  // namespace lockstep::launcher
