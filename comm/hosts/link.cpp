#include "comm/hosts/link.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

namespace lockstep::comm {

void Link::begin(const MessageHeader& header, const std::byte* payload) {
  out_ = header;
  out_.payload_crc = crc32c({payload, out_.bytes});
  out_.header_crc = out_.own_crc();
  payload_ = payload;
  sent_ = 0;
  idle_ = false;
}

bool Link::send_some() {
  constexpr std::size_t kHeader = sizeof(MessageHeader);
  if (!sending()) return false;
  std::array<iovec, 2> parts{};
  std::size_t count = 0;
  if (sent_ < kHeader) parts[count++] = {reinterpret_cast<std::byte*>(&out_) + sent_, kHeader - sent_};
  const std::size_t done = sent_ < kHeader ? 0 : sent_ - kHeader;
  const std::size_t offered = kHeader + out_.bytes - sent_;
  if (out_.bytes > done) parts[count++] = {const_cast<std::byte*>(payload_) + done, out_.bytes - done};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  full_ = sent < 0 ? errno == EAGAIN || errno == EWOULDBLOCK : static_cast<std::size_t>(sent) < offered;
  // What is wrong with the connection shows in what it gives: what the peer had said before comes first.
  if (sent < 0) return false;
  sent_ += static_cast<std::size_t>(sent);
  if (!sending()) idle_ = true;
  return true;
}

bool Link::receive_some(Sink& sink) {
  if (down_ || altered_) return false;
  if (held_ && !offer_room(sink)) return false;
  std::array<iovec, 2> parts{};
  std::size_t count = 0;
  if (in_payload_) parts[count++] = {room_, left_};
  parts[count++] = {next_.data() + next_bytes_, next_.size() - next_bytes_};
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
    crc_ = crc32c({room_, of_payload}, crc_);
    room_ += of_payload;
    left_ -= of_payload;
    got -= of_payload;
    if (left_ == 0) end_message(sink);
  }
  next_bytes_ += got;
  if (!in_payload_ && next_bytes_ == next_.size()) take_header(sink);
  return true;
}

void Link::take_header(Sink& sink) {
  MessageHeader header;
  std::memcpy(&header, next_.data(), next_.size());
  next_bytes_ = 0;
  if (header.header_crc != header.own_crc()) {
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
  if (left_ == 0) end_message(sink);
  return true;
}

void Link::end_message(Sink& sink) {
  in_payload_ = false;
  if (crc_ != in_.payload_crc) {
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

void Link::take_down() {
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  down_ = true;
  error_ = error;
}

}  // namespace lockstep::comm
