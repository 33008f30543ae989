#include "launcher/channel.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <type_traits>

#include "base/error.h"

namespace lockstep::launcher {
namespace {

constexpr std::size_t kHeaderBytes = 5;  // u32 length, u8 kind
constexpr std::string_view kUnixScheme = "unix:";

class Writer {
 public:
  template <class T>
  Writer& put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& put_text(std::string_view text) {
    bytes_.append(text);
    return *this;
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
  T take() {
    if (bytes_.size() < sizeof(T)) throw MpiError("a message between the launcher and a rank is cut short");
    T value;
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_.remove_prefix(sizeof value);
    return value;
  }
  std::string rest() { return std::string(bytes_); }

 private:
  std::string_view bytes_;
};

std::string body_of(const Hello& m) { return Writer().put(m.rank).put(m.pid).put_text(m.host).take(); }
std::string body_of(const Output& m) { return Writer().put(m.stream).put_text(m.bytes).take(); }
std::string body_of(const Told& m) { return Writer().put(m.signal_number).take(); }
std::string body_of(const Signal& m) { return Writer().put(m.signal_number).take(); }
std::string body_of(const Ended& m) {
  const std::int64_t at_ns = std::chrono::nanoseconds(m.at.time_since_epoch()).count();
  return Writer().put(m.ending.how).put<std::int32_t>(m.ending.value).put(m.told).put(at_ns).take();
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
    case 2: return Told{reader.take<std::int32_t>()};
    case 3: {
      const auto how = reader.take<Ending::How>();
      const auto value = reader.take<std::int32_t>();
      const auto told = reader.take<bool>();
      return Ended{{how, value}, told, Clock::time_point(std::chrono::nanoseconds(reader.take<std::int64_t>()))};
    }
    case 4: return Signal{reader.take<std::int32_t>()};
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
  const std::string body = std::visit([](const auto& m) { return body_of(m); }, message);
  LOCKSTEP_ASSERT(body.size() <= kMaxFrameBytes, "frame of {} bytes", body.size());
  return Writer()
      .put(static_cast<std::uint32_t>(body.size()))
      .put(static_cast<std::uint8_t>(message.index()))
      .put_text(body)
      .take();
}

std::optional<Message> Decoder::next() {
  const std::string_view waiting = std::string_view(buffer_).substr(start_);
  const auto wait_for_more = [&]() -> std::optional<Message> {
    buffer_.erase(0, start_);
    start_ = 0;
    return std::nullopt;
  };
  if (waiting.size() < kHeaderBytes) return wait_for_more();
  Reader header(waiting);
  const std::size_t length = header.take<std::uint32_t>();
  const std::size_t kind = header.take<std::uint8_t>();
  if (length > kMaxFrameBytes)
    throw MpiError(fmt::format("message of {} bytes between the launcher and a rank", length));
  if (waiting.size() < kHeaderBytes + length) return wait_for_more();
  start_ += kHeaderBytes + length;
  return parse(kind, waiting.substr(kHeaderBytes, length));
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

UniqueFd connect_to(const std::string& address_text) {
  if (!address_text.starts_with(kUnixScheme))
    throw DeviceError("unknown launcher address " + address_text, "start the ranks with `lockstep launch`");
  UniqueFd socket = new_socket();
  const sockaddr_un address = unix_address(address_text.substr(kUnixScheme.size()));
  check_system(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0,
               "connecting to the launcher at " + address_text);
  return socket;
}

}  // namespace lockstep::launcher
