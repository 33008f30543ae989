// What the ranks and the store's server say to each other over a stream socket.
//
// Each side begins with kMagic and goes on with frames: u32 length of the rest, u8 kind, body. Numbers are
// little-endian; a text is its u32 length and its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/unique_fd.h"

namespace lockstep::comm {

inline constexpr std::string_view kMagic = "lockstep";
/// Counts up whenever frames change. Hello's first field and kRefused never do.
inline constexpr std::uint32_t kProtocolVersion = 1;

enum class FrameKind : std::uint8_t {
  // A rank to the server.
  kHello = 1,  // u32 version, u32 world size, u32 rank, u32 pid, text host, text job
  kSet,        // text key, text value
  kAwait,      // u32 number, u32 count, text key…: replaces the rank's last kAwait
  kRollCall,
  kGiveUp,  // u32 exit code, text: this rank ends because of that
  kLeave,
  // The server to a rank.
  kWelcome = 64,
  kRefused,     // text
  kComeAgain,   // the job whose server this is has ended for this rank: connect anew
  kValue,       // u32 number and u32 index of the key in kAwait, text value; when it is set
  kAnswered,    // u32 number: values that are set by now have been sent
  kAttendance,  // u32 count, (u32 0: absent, 1: here, 2: gone; text host)…
  kPeerGaveUp,  // u32 exit code, text
  kPeerGone,    // text
  kGoodbye,     // after kLeave; to rank 0 when all others have left, too. After kGiveUp: nobody has done so before
};

/// Bytes that the other side cannot have meant.
class Malformed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A frame's body in the making.
class Packer {
 public:
  Packer& number(std::uint32_t value);
  Packer& text(std::string_view value);
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

/// Takes a body apart; throws Malformed where it is too short, and in end() where it is too long.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : rest_(bytes) {}
  std::uint32_t number();
  /// Also Malformed: longer than `most_bytes`.
  std::string text(std::size_t most_bytes);
  void end() const;

 private:
  std::string_view rest_;
};

struct Frame {
  FrameKind kind;
  std::string body;
};

/// One end of a connection; sends its magic by itself. Never blocks: what the socket does not take waits in memory. Not
/// thread-safe.
class Wire {
 public:
  explicit Wire(UniqueFd socket);

  int fd() const { return socket_.get(); }
  const UniqueFd& socket() const { return socket_; }

  /// Queues and sends as much as goes. After the peer has gone frames are dropped.
  void send(FrameKind kind, const Packer& body = {});
  void flush();
  bool has_unsent() const { return unsent_begin_ < unsent_.size(); }

  /// Reads some of what has arrived. kGone: the peer has gone, and all that it sent has been read.
  enum class Received { kBytes, kNothing, kGone };
  Received receive();
  /// The next frame that has arrived whole. Throws Malformed: not lockstep's protocol, or a frame of more than
  /// `most_bytes`.
  std::optional<Frame> next(std::size_t most_bytes);

 private:
  UniqueFd socket_;
  std::string arrived_;
  std::size_t arrived_begin_ = 0;  // of what next() has not handed out
  bool greeted_ = false;           // the peer's magic has been read
  std::string unsent_;
  std::size_t unsent_begin_ = 0;
};

}  // namespace lockstep::comm
