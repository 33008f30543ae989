#include "comm/hosts/link.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

namespace lockstep::comm {
namespace {

// Whatever else may be, a peer's kernel gives a sign at least so often: the longest that TCP waits between two probes.
constexpr auto kLongestProbe = std::chrono::seconds(120);

}  // namespace

Link::Link(UniqueFd socket, int host, int rank, std::optional<SessionCiphers> ciphers)
    : socket_(std::move(socket)), host_(host), rank_(rank) {
  if (ciphers) sealing_ = std::make_unique<Sealing>(Sealing{.ciphers = *std::move(ciphers)});
}

void Link::begin(const MessageHeader& header, const std::byte* payload) {
  out_ = header;
  payload_ = payload;
  sent_ = 0;
  idle_ = false;
  if (sealing_ != nullptr) {
    sealing_->sealed = 0;
    sealing_->has_header = false;
    return;
  }
  out_.payload_crc = crc32c({payload, out_.bytes});
  out_.header_crc = out_.own_crc();
}

bool Link::send_some() {
  if (!sending()) return false;
  if (sealing_ != nullptr) return send_sealed();
  std::array<iovec, 2> parts{};
  std::size_t count = 0;
  if (sent_ < kHeaderBytes) parts[count++] = {reinterpret_cast<std::byte*>(&out_) + sent_, kHeaderBytes - sent_};
  const std::size_t done = sent_ < kHeaderBytes ? 0 : sent_ - kHeaderBytes;
  const std::size_t offered = kHeaderBytes + out_.bytes - sent_;
  if (out_.bytes > done) parts[count++] = {const_cast<std::byte*>(payload_) + done, out_.bytes - done};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  full_ = sent < 0 ? errno == EAGAIN || errno == EWOULDBLOCK : static_cast<std::size_t>(sent) < offered;
  if (sent < 0) {
    note_send_error();
    return false;
  }
  sent_ += static_cast<std::size_t>(sent);
  idle_ = sent_ == kHeaderBytes + out_.bytes;
  return true;
}

bool Link::send_sealed() {
  Sealing& sealing = *sealing_;
  bool moved = false;
  do {
    if (sealing.begin == sealing.end) stage();
    const std::size_t offered = sealing.end - sealing.begin;
    const ssize_t sent =
        ::send(socket_.get(), sealing.staging.data() + sealing.begin, offered, MSG_NOSIGNAL | MSG_DONTWAIT);
    full_ = sent < 0 ? errno == EAGAIN || errno == EWOULDBLOCK : static_cast<std::size_t>(sent) < offered;
    if (sent < 0) {
      note_send_error();
      return moved;
    }
    sealing.begin += static_cast<std::size_t>(sent);
    moved = true;
    idle_ = sealing.begin == sealing.end && sealing.sealed == out_.bytes;
  } while (!idle_ && !full_);
  return moved;
}

/// It does not take the link down: what the peer had said before comes first.
void Link::note_send_error() {
  if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) send_error_ = errno;
}

/// Encrypts what comes next of the message, with the tags that belong to it.
void Link::stage() {
  Sealing& sealing = *sealing_;
  Aead& cipher = sealing.ciphers.out;
  std::byte* to = sealing.staging.data();
  if (!std::exchange(sealing.has_header, true)) {
    cipher.begin();
    cipher.process(std::as_bytes(std::span(&out_, 1)), to);
    cipher.seal(to + kHeaderBytes);
    to += kHeaderBytes + Aead::kTagBytes;
    if (out_.bytes > 0) cipher.begin();
  }
  if (const std::size_t piece = std::min(out_.bytes - sealing.sealed, Sealing::kCacheBlockBytes); piece > 0) {
    cipher.process({payload_ + sealing.sealed, piece}, to);
    sealing.sealed += piece;
    to += piece;
    if (sealing.sealed == out_.bytes) {
      cipher.seal(to);
      to += Aead::kTagBytes;
    }
  }
  sealing.begin = 0;
  sealing.end = static_cast<std::size_t>(to - sealing.staging.data());
}

bool Link::receive_some(Sink& sink) {
  if (down_ || altered_) return false;
  if (held_ && !offer_room(sink)) return false;
  std::array<iovec, 2> parts{};
  std::size_t count = 0;
  const std::size_t tag = sealing_ != nullptr ? Aead::kTagBytes : 0;
  const std::size_t before_header = in_payload_ ? tag : 0, header_end = before_header + kHeaderBytes + tag;
  if (in_payload_) parts[count++] = {room_, left_};
  parts[count++] = {next_.data() + next_bytes_, header_end - next_bytes_};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  const ssize_t received = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
  if (received < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (received <= 0) {
    down_ = true;
    error_ = received < 0 ? errno : 0;
    return true;
  }
  auto got = static_cast<std::size_t>(received);
  if (in_payload_) {
    const std::size_t of_payload = got < left_ ? got : left_;
    if (sealing_ != nullptr)
      sealing_->ciphers.in.process({room_, of_payload}, room_);
    else
      crc_ = crc32c({room_, of_payload}, crc_);
    room_ += of_payload;
    left_ -= of_payload;
    got -= of_payload;
  }
  next_bytes_ += got;
  if (in_payload_ && left_ == 0 && next_bytes_ >= before_header) end_message(sink);
  if (!in_payload_ && next_bytes_ == kHeaderBytes + tag) take_header(sink);
  return true;
}

void Link::take_header(Sink& sink) {
  MessageHeader header;
  next_bytes_ = 0;
  bool right = false;
  if (sealing_ != nullptr) {
    Aead& cipher = sealing_->ciphers.in;
    cipher.begin();
    cipher.process(std::span(next_).first(kHeaderBytes), reinterpret_cast<std::byte*>(&header));
    right = cipher.open(next_.data() + kHeaderBytes);
  } else {
    std::memcpy(&header, next_.data(), kHeaderBytes);
    right = header.header_crc == header.own_crc();
  }
  if (!right) {
    altered_ = true;
    sink.altered(*this, Part::kHeader, header);
  }
  in_ = header;
  heard_ = true;
  held_ = true;
  offer_room(sink);
}

bool Link::offer_room(Sink& sink) {
  room_ = sink.room_for(*this, in_);
  held_ = room_ == nullptr;
  if (held_) return false;
  left_ = in_.bytes;
  crc_ = 0;
  in_payload_ = true;
  if (left_ == 0)
    end_message(sink);
  else if (sealing_ != nullptr)
    sealing_->ciphers.in.begin();
  return true;
}

void Link::end_message(Sink& sink) {
  in_payload_ = false;
  bool right = true;
  if (sealing_ == nullptr) {
    right = crc_ == in_.payload_crc;
  } else if (in_.bytes > 0) {
    right = sealing_->ciphers.in.open(next_.data());
    next_bytes_ -= Aead::kTagBytes;
    std::memmove(next_.data(), next_.data() + Aead::kTagBytes, next_bytes_);
  }
  if (!right) {
    altered_ = true;
    sink.altered(*this, Part::kPayload, in_);
  }
  sink.arrived(*this, in_);
}

void Link::discard_incoming() {
  std::array<std::byte, 1 << 14> dropped;
  for (int turn = 0; turn < 64 && !down_; ++turn) {
    const ssize_t got = ::recv(socket_.get(), dropped.data(), dropped.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) take_down();
  }
}

bool Link::is_delivered() const {
  int bytes = 0;
  return ::ioctl(socket_.get(), SIOCOUTQ, &bytes) != 0 || bytes == 0;
}

Clock::duration Link::silence(Clock::time_point now, Clock::duration patience) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (down_ || ::getsockopt(fd(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  const auto last_word = now - std::chrono::milliseconds(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
  const bool unanswered = (info.tcpi_unacked > 0 && info.tcpi_retransmits > 0) || info.tcpi_probes > 0;
  if (!unanswered || last_word > silent_since_) silent_since_ = now;
  if (now - silent_since_ >= patience) return now - silent_since_;
  if (now - last_word >= patience + kLongestProbe) return now - last_word;
  return {};
}

void Link::take_down() {
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  down_ = true;
  error_ = error;
}

}  // namespace lockstep::comm
