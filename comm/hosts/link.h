// A connection between two hosts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/handshake.h"
#include "base/scope.h"
#include "comm/hosts/message.h"
#include "lockstep/base/deadline.h"

namespace lockstep::comm {

/// Sends and receives messages over a stream socket, one at a time each way, and never blocks. Nothing that has been
/// altered on the way reaches the sink (Note [Checksums]). With ciphers everything is encrypted: a header with its tag,
/// then the payload with its own, if there are bytes of it (Note [Encryption]). Not thread-safe.
class Link {
 public:
  enum class Part : std::uint8_t { kHeader, kPayload };

  /// Where what arrives goes.
  class Sink {
   public:
    virtual ~Sink() = default;
    /// Memory for the payload of a message, which may be empty; nullptr: not now, ask again later.
    virtual std::byte* room_for(Link& link, const MessageHeader& header) = 0;
    /// All of it is there. May throw.
    virtual void arrived(Link& link, const MessageHeader& header) = 0;
    /// The received bytes differ from the sent ones; `header` means nothing where it is the header. Throws. Nothing
    /// more is received afterwards.
    [[noreturn]] virtual void altered(Link& link, Part part, const MessageHeader& header) = 0;
  };

  /// `socket` does not block; `host` and `rank` are whose end the other one is.
  Link(UniqueFd socket, int host, int rank, std::optional<SessionCiphers> ciphers = {});

  int host() const { return host_; }
  int rank() const { return rank_; }
  int fd() const { return socket_.get(); }
  bool encrypts() const { return sealing_ != nullptr; }

  /// Whether a message is being sent, whose payload has to stay.
  bool sending() const { return !idle_; }
  /// Starts one, and seals it: there is none.
  void begin(const MessageHeader& header, const std::byte* payload);
  /// Sends as much of it as goes; whether anything went.
  bool send_some();
  /// The socket took less than it was offered: poll(2) reports when it takes more.
  bool is_full() const { return full_; }

  /// Takes some of what has arrived; whether there was anything.
  bool receive_some(Sink& sink);
  /// A message has arrived for which there is no memory yet: nothing after it can be read.
  bool is_held() const { return held_; }

  /// Drops what has arrived, of a group that has ended. The peer can continue to send until it reads the reason.
  /// Closing a socket with unread bytes would discard what is still to be delivered.
  void discard_incoming();
  /// Whether the peer's kernel has all that was sent.
  bool is_delivered() const;

  /// Whether nothing will come any more: the peer has ended, or the connection is lost.
  bool is_down() const { return down_; }
  /// poll(2) says so of a link that is held.
  void take_down();
  /// Why nothing can be sent any more, as errno says; 0: something can, as far as is known. What the peer had sent
  /// before can still be read.
  int send_error() const { return send_error_; }
  /// What has happened to it, as errno says; 0: the peer has closed it.
  int error() const { return error_ != 0 ? error_ : send_error_; }
  /// For how long questions have remained unanswered, where that is `patience` or more; else zero. To be called several
  /// times in that time. What has been sent is sent again and again; or nothing can be sent, because the way is gone,
  /// and TCP only probes; or keepalive does. TCP itself would retry for a quarter of an hour. A peer that only does not
  /// read acknowledges or answers probes.
  Clock::duration silence(Clock::time_point now, Clock::duration patience);

  /// The header that has arrived last, if any.
  bool has_heard() const { return heard_; }
  const MessageHeader& last_heard() const { return in_; }

 private:
  static constexpr std::size_t kHeaderBytes = sizeof(MessageHeader);

  /// What a link that encrypts has beside.
  struct Sealing {
    /// The cipher is ahead of the socket by so much of a payload: what it writes is still in the cache when it is sent.
    static constexpr std::size_t kCacheBlockBytes = 64 << 10;

    SessionCiphers ciphers;
    std::array<std::byte, kHeaderBytes + Aead::kTagBytes + kCacheBlockBytes + Aead::kTagBytes> staging{};
    std::size_t begin = 0, end = 0;  // of what is staged and not sent
    std::size_t sealed = 0;          // of the payload
    bool has_header = false;         // it is staged, or sent
  };

  bool send_sealed();
  void note_send_error();
  void stage();
  void take_header(Sink& sink);
  bool offer_room(Sink& sink);
  void end_message(Sink& sink);

  UniqueFd socket_;
  int host_;
  int rank_;

  MessageHeader out_;
  const std::byte* payload_ = nullptr;
  std::size_t sent_ = 0;  // of header and payload, in clear
  bool idle_ = true;
  bool full_ = false;

  // The header that is arriving; with encryption, after the tag of the payload before it.
  std::array<std::byte, kHeaderBytes + 2 * Aead::kTagBytes> next_{};
  std::size_t next_bytes_ = 0;
  MessageHeader in_;  // of the payload that is arriving, or of the last one
  std::byte* room_ = nullptr;
  std::size_t left_ = 0;   // of the payload
  std::uint32_t crc_ = 0;  // of the payload that is here
  bool in_payload_ = false;
  bool altered_ = false;
  bool held_ = false;
  bool heard_ = false;
  bool down_ = false;
  int error_ = 0;
  int send_error_ = 0;
  Clock::time_point silent_since_{};
  std::unique_ptr<Sealing> sealing_;
};

}  // namespace lockstep::comm
