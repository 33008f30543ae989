#include "comm/tcp/wire.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <span>

#include "base/hash.h"

namespace lockstep::comm {
namespace {

constexpr std::size_t kLengthBytes = 4;
constexpr std::size_t kHeaderBytes = 8;

/// Of a frame without its checksum: `length` before what `rest` has.
std::uint32_t checksum_of(std::string_view length, std::string_view rest) {
  return crc32c(std::as_bytes(std::span(rest)), crc32c(std::as_bytes(std::span(length))));
}

void check_length(std::size_t length, std::size_t most_bytes) {
  if (length == 0 || length > most_bytes)
    throw Malformed(fmt::format("a frame of {} bytes, where {} are possible", length, most_bytes));
}

}  // namespace

void Wire::send(FrameKind kind, std::string_view body) {
  const std::string length = Packer().number(static_cast<std::uint32_t>(body.size() + 1)).bytes();
  std::string rest(1, static_cast<char>(kind));
  rest += body;
  if (handshake_.encrypts()) {
    unsent_ += ciphers().out.seal_whole(length);
    unsent_ += ciphers().out.seal_whole(rest);
  } else {
    unsent_ += length;
    unsent_ += Packer().number(checksum_of(length, rest)).bytes();
    unsent_ += rest;
  }
  flush();
}

SessionCiphers& Wire::ciphers() {
  if (!ciphers_) ciphers_.emplace(handshake_.take_ciphers());
  return *ciphers_;
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
  const auto content = handshake_.encrypts() ? next_sealed(most_bytes) : next_in_clear(most_bytes);
  if (!content) return std::nullopt;
  return Frame{static_cast<FrameKind>((*content)[0]), content->substr(1)};
}

std::optional<std::string> Wire::next_sealed(std::size_t most_bytes) {
  const auto open = [&](std::size_t bytes) {
    auto plain = ciphers().in.open_whole(arrived().substr(0, bytes + Aead::kTagBytes));
    if (!plain)
      throw Malformed(
          "a frame was altered on its way, or comes from somebody else: it is not encrypted as it has to be");
    drop(bytes + Aead::kTagBytes);
    return *std::move(plain);
  };
  if (!length_) {
    if (arrived().size() < kLengthBytes + Aead::kTagBytes) return std::nullopt;
    length_ = Unpacker(open(kLengthBytes)).number();
    check_length(*length_, most_bytes);
  }
  if (arrived().size() < *length_ + Aead::kTagBytes) return std::nullopt;
  return open(*std::exchange(length_, std::nullopt));
}

std::optional<std::string> Wire::next_in_clear(std::size_t most_bytes) {
  const std::string_view rest = arrived();
  if (rest.size() < kHeaderBytes) return std::nullopt;
  Unpacker header(rest);
  const std::size_t length = header.number();
  check_length(length, most_bytes);
  if (rest.size() - kHeaderBytes < length) return std::nullopt;
  const std::string_view content = rest.substr(kHeaderBytes, length);
  if (header.number() != checksum_of(rest.substr(0, kLengthBytes), content))
    throw Malformed(fmt::format("a frame of {} bytes has been altered on its way: its checksum is wrong", length));
  std::string copy(content);
  drop(kHeaderBytes + length);
  return copy;
}

void Wire::drop(std::size_t bytes) {
  arrived_begin_ += bytes;
  // Move what is left to the front, which costs less than has been taken since the last time.
  if (arrived_begin_ * 2 >= arrived_.size()) {
    arrived_.erase(0, arrived_begin_);
    arrived_begin_ = 0;
  }
}

}  // namespace lockstep::comm
