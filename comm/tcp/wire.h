// What the ranks and the store's server say to each other over a stream socket.
//
// A connection begins with Note [Handshake], then has frames: u32 length of kind and body, u32 CRC-32C of length, kind
// and body, u8 kind, body (base/packing.h). Where the job encrypts, with two frames of Note [Encryption] for each: u32
// length of kind and body, with its tag; kind and body, with theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/handshake.h"
#include "base/packing.h"
#include "base/unique_fd.h"

namespace lockstep::comm {

enum class FrameKind : std::uint8_t {
  // A rank to the server.
  kSet = 2,  // text key, text value
  kAwait,    // u32 number, u32 count, text key…: replaces the rank's last kAwait
  kAskAttendance,
  kGiveUp,  // u32 exit code (is_failure()), text: this rank ends because of that
  kLeave,
  // The server to a rank.
  kValue = 67,  // u32 number and u32 index of the key in kAwait, text value; when it is set
  kAnswered,    // u32 number: values that are set by now have been sent
  kAttendance,  // u32 count, (u32 0: absent, 1: here, 2: gone; text host)…
  kPeerGaveUp,  // u32 exit code, text
  kPeerGone,    // text
  kGoodbye,     // after kLeave; to rank 0 when all others have left, too. After kGiveUp: nobody has done so before
};

/// What ranks and rank 0 say of themselves in their handshake.
struct StoreIdentity {
  std::uint32_t size = 0, rank = 0, pid = 0;
  std::string host, job;

  std::string encode() const;
  /// Throws Malformed.
  static StoreIdentity decode(std::string_view bytes);
};
struct StoreAnswer {
  bool come_again = false;  // the job whose server this is has ended for this rank: connect anew
  std::string host;         // of rank 0

  std::string encode() const;
  static StoreAnswer decode(std::string_view bytes);
};

struct Frame {
  FrameKind kind;
  std::string body;
};

/// One end of a connection. Never blocks: what the socket does not take waits in memory. Not thread-safe.
class Wire {
 public:
  Wire(UniqueFd socket, Handshake handshake) : socket_(std::move(socket)), handshake_(std::move(handshake)) {}

  int fd() const { return socket_.get(); }
  const UniqueFd& socket() const { return socket_; }
  void close() { socket_.reset(); }

  /// Until it is done there is nothing else to be said or read; `advance` takes it further.
  Handshake& handshake() { return handshake_; }
  const Handshake& handshake() const { return handshake_; }
  Handshake::State advance() { return handshake_.advance(fd()); }

  /// Queues and sends as much as goes. After the peer has gone frames are dropped.
  void send(FrameKind kind, const Packer& body = {});
  void flush();
  bool has_unsent() const { return handshake_.has_unsent() || unsent_begin_ < unsent_.size(); }

  /// Reads some of what has arrived. kGone: the peer has gone, and all that it sent has been read.
  enum class Received { kBytes, kNothing, kGone };
  Received receive();
  /// Takes bytes as if they had arrived: for tests.
  void feed(std::string_view bytes) { arrived_.append(bytes); }
  /// The next frame that has arrived whole. Throws Malformed: a frame of more than `most_bytes`, or one that is not
  /// what was sent.
  std::optional<Frame> next(std::size_t most_bytes);

 private:
  SessionCiphers& ciphers();
  std::optional<std::string> next_in_clear(std::size_t most_bytes);
  std::optional<std::string> next_sealed(std::size_t most_bytes);
  std::string_view arrived() const { return std::string_view(arrived_).substr(arrived_begin_); }
  void drop(std::size_t bytes);

  UniqueFd socket_;
  Handshake handshake_;
  std::optional<SessionCiphers> ciphers_;
  std::optional<std::size_t> length_;  // of an encrypted frame whose content has not arrived
  std::string arrived_;
  std::size_t arrived_begin_ = 0;  // of what next() has not handed out
  std::string unsent_;
  std::size_t unsent_begin_ = 0;
};

}  // namespace lockstep::comm
