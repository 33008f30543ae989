// What the ranks and the store's server say to each other over a stream socket.
//
// A connection begins with Note [Handshake], then has frames: u32 length of kind and body, u32 CRC-32C of length, kind
// and body, u8 kind, body (base/codec.h). Where the job encrypts, with two frames of Note [Encryption] for each: u32
// length of kind and body, with its tag; kind and body, with theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/codec.h"
#include "base/handshake.h"
#include "base/scope.h"
#include "comm/store.h"

namespace lockstep::comm {

enum class FrameKind : std::uint8_t {
  // A rank to the server.
  kSet = 2,        // SetValue
  kAwait,          // AwaitValues: replaces the rank's last one
  kAskAttendance,  // nothing
  kGiveUp,         // GivenUp: this rank ends because of that
  kLeave,          // nothing
  // The server to a rank.
  kValue = 67,  // FoundValue, when it is set
  kAnswered,    // Answered: values that are set by now have been sent
  kAttendance,  // Attendances
  kPeerGaveUp,  // GivenUp
  kPeerGone,    // PeerGone
  kGoodbye,     // nothing: after kLeave; to rank 0 when all others have left, too. After kGiveUp: nobody has done so
                // before
};

struct SetValue {
  static constexpr auto kKind = FrameKind::kSet;
  std::string key, value;

  void fields(auto& io) { io(bounded(key, Store::kMostKeyBytes), bounded(value, Store::kMostValueBytes)); }
};
struct AwaitValues {
  static constexpr auto kKind = FrameKind::kAwait;
  std::uint32_t number = 0;
  std::vector<std::string> keys;

  void fields(auto& io) { io(number, bounded(keys, Store::kMostKeyBytes)); }
};
/// The value of the key at `index` of the AwaitValues with that number.
struct FoundValue {
  static constexpr auto kKind = FrameKind::kValue;
  std::uint32_t number = 0, index = 0;
  std::string value;

  void fields(auto& io) { io(number, index, bounded(value, Store::kMostValueBytes)); }
};
struct Answered {
  static constexpr auto kKind = FrameKind::kAnswered;
  std::uint32_t number = 0;

  void fields(auto& io) { io(number); }
};
struct GivenUp {
  std::uint32_t code = 0;  // is_failure()
  std::string why;

  void fields(auto& io) { io(code, bounded(why, Store::kMostValueBytes + Store::kMostKeyBytes)); }
};
struct RankAttendance {
  enum class State : std::uint32_t { kAbsent, kHere, kGone };
  State state = State::kAbsent;
  std::string host;

  void fields(auto& io) { io(state, bounded(host, Store::kMostKeyBytes)); }
};
struct Attendances {
  static constexpr auto kKind = FrameKind::kAttendance;
  std::vector<RankAttendance> ranks;

  void fields(auto& io) { io(ranks); }
};
struct PeerGone {
  static constexpr auto kKind = FrameKind::kPeerGone;
  std::string what;

  void fields(auto& io) { io(bounded(what, 8 * Store::kMostKeyBytes)); }
};

/// What ranks and rank 0 say of themselves in their handshake.
struct StoreIdentity {
  std::uint32_t size = 0, rank = 0, pid = 0;
  std::string host, job;

  void fields(auto& io) {
    io(size, rank, pid, bounded(host, Store::kMostKeyBytes), bounded(job, Store::kMostKeyBytes));
  }
};
struct StoreAnswer {
  std::uint32_t come_again = 0;  // else 0: the job whose server this is has ended for this rank: connect anew
  std::string host;              // of rank 0

  void fields(auto& io) { io(come_again, bounded(host, Store::kMostKeyBytes)); }
};

struct Frame {
  FrameKind kind;
  std::string body;

  /// Throws Malformed.
  template <class Message>
  Message as() const {
    return unpack<Message>(body);
  }
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
  void send(FrameKind kind, std::string_view body = {});
  template <class Message>
  void send(const Message& message) {
    send(Message::kKind, pack(message));
  }
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
