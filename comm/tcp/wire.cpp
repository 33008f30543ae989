#include "comm/tcp/wire.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <span>

#include "base/crc32c.h"

namespace lockstep::comm {
namespace {

constexpr std::size_t kLengthBytes = 4;
constexpr std::size_t kHeaderBytes = 8;
constexpr std::size_t kMostNameBytes = 256;  // of hosts and jobs

/// Of a frame without its checksum: `length` before what `rest` has.
std::uint32_t checksum_of(std::string_view length, std::string_view rest) {
  return crc32c(std::as_bytes(std::span(rest)), crc32c(std::as_bytes(std::span(length))));
}

std::string bounded(const std::string& name) { return name.substr(0, kMostNameBytes); }

}  // namespace

std::string StoreIdentity::encode() const {
  return Packer().number(size).number(rank).number(pid).text(bounded(host)).text(bounded(job)).bytes();
}

StoreIdentity StoreIdentity::decode(std::string_view bytes) {
  Unpacker body(bytes);
  StoreIdentity identity;
  identity.size = body.number();
  identity.rank = body.number();
  identity.pid = body.number();
  identity.host = body.text(kMostNameBytes);
  identity.job = body.text(kMostNameBytes);
  body.end();
  return identity;
}

std::string StoreAnswer::encode() const { return Packer().number(come_again ? 1 : 0).text(bounded(host)).bytes(); }

StoreAnswer StoreAnswer::decode(std::string_view bytes) {
  Unpacker body(bytes);
  StoreAnswer answer;
  answer.come_again = body.number() != 0;
  answer.host = body.text(kMostNameBytes);
  body.end();
  return answer;
}

void Wire::send(FrameKind kind, const Packer& body) {
  const std::string length = Packer().number(static_cast<std::uint32_t>(body.bytes().size() + 1)).bytes();
  std::string rest(1, static_cast<char>(kind));
  rest += body.bytes();
  unsent_ += length;
  unsent_ += Packer().number(checksum_of(length, rest)).bytes();
  unsent_ += rest;
  flush();
}

void Wire::flush() {
  handshake_.flush(fd());
  if (handshake_.has_unsent()) return;
  while (unsent_begin_ < unsent_.size()) {
    const ssize_t sent =
        ::send(fd(), unsent_.data() + unsent_begin_, unsent_.size() - unsent_begin_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    // Gone: receive() will say so, once what had been sent before has been read.
    unsent_begin_ = sent < 0 ? unsent_.size() : unsent_begin_ + static_cast<std::size_t>(sent);
  }
  if (unsent_begin_ * 2 < unsent_.size()) return;
  unsent_.erase(0, unsent_begin_);
  unsent_begin_ = 0;
}

Wire::Received Wire::receive() {
  std::array<char, 1 << 14> chunk;
  const ssize_t got = ::recv(fd(), chunk.data(), chunk.size(), MSG_DONTWAIT);
  if (got > 0) {
    arrived_.append(chunk.data(), static_cast<std::size_t>(got));
    return Received::kBytes;
  }
  if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return Received::kNothing;
  return Received::kGone;
}

std::optional<Frame> Wire::next(std::size_t most_bytes) {
  const std::string_view rest = std::string_view(arrived_).substr(arrived_begin_);
  if (rest.size() < kHeaderBytes) return std::nullopt;
  Unpacker header(rest);
  const std::size_t length = header.number();
  if (length == 0 || length > most_bytes)
    throw Malformed(fmt::format("a frame of {} bytes, where {} are possible", length, most_bytes));
  if (rest.size() - kHeaderBytes < length) return std::nullopt;
  const std::string_view content = rest.substr(kHeaderBytes, length);
  if (header.number() != checksum_of(rest.substr(0, kLengthBytes), content))
    throw Malformed(fmt::format("a frame of {} bytes has been altered on its way: its checksum is wrong", length));
  Frame frame{static_cast<FrameKind>(content[0]), std::string(content.substr(1))};
  arrived_begin_ += kHeaderBytes + length;
  // Move what is left to the front, which costs less than has been taken since the last time.
  if (arrived_begin_ * 2 >= arrived_.size()) {
    arrived_.erase(0, arrived_begin_);
    arrived_begin_ = 0;
  }
  return frame;
}

}  // namespace lockstep::comm
