#include "comm/tcp/wire.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace lockstep::comm {
namespace {

constexpr std::size_t kHeaderBytes = 4;

void append_number(std::string& bytes, std::uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>((value >> shift) & 0xffu));
}

std::uint32_t number_at(std::string_view bytes) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i)
    value |= static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return value;
}

}  // namespace

Packer& Packer::number(std::uint32_t value) {
  append_number(bytes_, value);
  return *this;
}

Packer& Packer::text(std::string_view value) {
  append_number(bytes_, static_cast<std::uint32_t>(value.size()));
  bytes_.append(value);
  return *this;
}

std::uint32_t Unpacker::number() {
  if (rest_.size() < 4) throw Malformed("a frame that is too short");
  const std::uint32_t value = number_at(rest_);
  rest_.remove_prefix(4);
  return value;
}

std::string Unpacker::text(std::size_t most_bytes) {
  const std::size_t length = number();
  if (length > most_bytes)
    throw Malformed(fmt::format("a text of {} bytes, where {} are possible", length, most_bytes));
  if (length > rest_.size()) throw Malformed("a frame that is too short");
  std::string value(rest_.substr(0, length));
  rest_.remove_prefix(length);
  return value;
}

void Unpacker::end() const {
  if (!rest_.empty()) throw Malformed("a frame that is too long");
}

Wire::Wire(UniqueFd socket) : socket_(std::move(socket)), unsent_(kMagic) {}

void Wire::send(FrameKind kind, const Packer& body) {
  append_number(unsent_, static_cast<std::uint32_t>(body.bytes().size() + 1));
  unsent_.push_back(static_cast<char>(kind));
  unsent_.append(body.bytes());
  flush();
}

void Wire::flush() {
  while (has_unsent()) {
    const ssize_t sent = ::send(socket_.get(), unsent_.data() + unsent_begin_, unsent_.size() - unsent_begin_,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
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
  const ssize_t got = ::recv(socket_.get(), chunk.data(), chunk.size(), MSG_DONTWAIT);
  if (got > 0) {
    arrived_.append(chunk.data(), static_cast<std::size_t>(got));
    return Received::kBytes;
  }
  if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return Received::kNothing;
  return Received::kGone;
}

std::optional<Frame> Wire::next(std::size_t most_bytes) {
  std::string_view rest = std::string_view(arrived_).substr(arrived_begin_);
  if (!greeted_) {
    const std::size_t there = std::min(rest.size(), kMagic.size());
    if (rest.substr(0, there) != kMagic.substr(0, there)) throw Malformed("it does not speak lockstep's protocol");
    if (there < kMagic.size()) return std::nullopt;
    greeted_ = true;
    arrived_begin_ += kMagic.size();
    rest.remove_prefix(kMagic.size());
  }
  if (rest.size() < kHeaderBytes) return std::nullopt;
  const std::size_t length = number_at(rest);
  if (length == 0 || length > most_bytes)
    throw Malformed(fmt::format("a frame of {} bytes, where {} are possible", length, most_bytes));
  if (rest.size() - kHeaderBytes < length) return std::nullopt;
  Frame frame{static_cast<FrameKind>(rest[kHeaderBytes]), std::string(rest.substr(kHeaderBytes + 1, length - 1))};
  arrived_begin_ += kHeaderBytes + length;
  // Move what is left to the front, which costs less than has been taken since the last time.
  if (arrived_begin_ * 2 >= arrived_.size()) {
    arrived_.erase(0, arrived_begin_);
    arrived_begin_ = 0;
  }
  return frame;
}

}  // namespace lockstep::comm
