// How two processes of a job find out that both belong to it, before either reads anything else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/aead.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/job_secret.h"

namespace lockstep {

/// Counts up whenever what ranks and launcher say to each other changes. Hello's first field and kRefused never do.
inline constexpr std::uint32_t kProtocolVersion = 4;

/// What one side of a connection encrypts with, and what it decrypts with.
struct SessionCiphers {
  Aead out, in;
};

/// Note [Handshake]
/// Every connection of a job begins with it, at whichever port:
///   caller    "lockstep", kHello:      u32 version, text nonce
///   listener  "lockstep", kChallenge:  text nonce
///   caller                kProve:      text identity, u32 1 where it encrypts, else 0, text proof
///   listener              kWelcome:    text answer, text proof        or kRefused: text, why
/// in frames: u32 length of the rest, u8 kind, body (base/codec.h). Nonces are 32 random bytes of either side's, new
/// for every connection, so what somebody has overheard proves nothing later. A proof is HMAC-SHA-256, with the job's
/// secret, of everything that this side relies on: the port, the side, the version, whether this connection is to be
/// encrypted, both nonces, and identity and answer, which mean something to the port only (job, rank, world size;
/// docs/security.md). The listener looks at the identity once the proof is found right, and the caller at nothing
/// before the listener's is.
///   Both sides encrypt, or neither does: the listener refuses a caller that differs, and says so. As the proofs say
/// which it is, nobody in between can talk them out of it. The keys (Note [Encryption]) are HMAC-SHA-256, with the
/// secret, of what the proofs are of, under another label and for each direction.
///   Frames have a largest size, which is known before they are read. A listener allows two seconds for a handshake
/// (kHandshakeWithin), or more where it may not be looking. It closes strangers that take longer, or that exceed its
/// limit.
class Handshake {
 public:
  /// Says what a proof is for: one that was made for a port is worth nothing at another.
  enum class Port : std::uint8_t { kStore = 1, kData = 2, kLauncher = 3 };
  enum class State : std::uint8_t {
    kInProgress,
    kAsked,   // a listener: the caller's proof is right; accept() or refuse()
    kDone,    // a listener's answer may still have to be flushed; a caller has proofs from both sides
    kFailed,  // failure() and why() say what went wrong; a listener's refusal may still have to be flushed
  };
  enum class Failure : std::uint8_t {
    kNone,
    kMalformed,  // the other side does not speak the protocol
    kVersion,    // it speaks another version
    kSecret,     // its proof is wrong
    kRefused,    // it refuses this side, or accept() was not what followed kAsked
    kGone,       // it has closed the connection
  };

  static constexpr std::size_t kMostIdentityBytes = 1024;
  static constexpr std::size_t kMostAnswerBytes = 1024;

  /// Who encrypts has a secret.
  static Handshake call(Port port, JobSecret secret, std::string identity, bool encrypts = false);
  static Handshake listen(Port port, JobSecret secret, bool encrypts = false);

  /// Sends and reads what goes without blocking, nothing beyond the handshake's last byte.
  State advance(int socket);
  /// Sends what goes of an answer or a refusal.
  void flush(int socket);
  bool has_unsent() const { return !unsent_.empty(); }

  /// advance() in parts: how many bytes it would read next, and what it does with them.
  std::size_t wanted() const;
  State feed(std::string_view bytes);

  State state() const { return state_; }
  Failure failure() const { return failure_; }
  /// "it does not speak lockstep's protocol", without control characters.
  const std::string& why() const { return why_; }
  /// A listener's, from kAsked on.
  const std::string& identity() const { return identity_; }
  /// A caller's, when done.
  const std::string& answer() const { return answer_; }
  /// Whether the other side has said anything.
  bool has_heard() const { return heard_; }

  bool encrypts() const { return encrypts_; }
  /// Of one that encrypts and is done: for all that follows on this connection. Once, for keys start with frame 0.
  SessionCiphers take_ciphers();

  void accept(std::string_view answer);
  void refuse(std::string_view why);

 private:
  Handshake(Port port, JobSecret secret, bool calls, std::string identity, bool encrypts);

  void take_frame();
  void send_frame(int kind, std::string_view body);
  void fail(Failure failure, std::string why);
  std::string proof(bool callers, bool encrypts) const;
  std::string signed_by_secret(std::string_view label, bool callers, bool encrypts, bool with_answer) const;
  std::string secret_mismatch() const;

  Port port_;
  bool calls_;
  bool encrypts_;
  bool took_ciphers_ = false;
  JobSecret secret_;
  std::string identity_, answer_;
  std::string own_nonce_, other_nonce_;
  State state_ = State::kInProgress;
  Failure failure_ = Failure::kNone;
  std::string why_;
  std::string arrived_;  // of the frame that is being read
  std::string unsent_;
  bool spoke_ = false;    // this side's magic is on its way
  bool greeted_ = false;  // the other side's has been read
  bool heard_ = false;
};

/// What a listener gives a caller for the whole of it.
inline constexpr auto kHandshakeWithin = std::chrono::seconds(2);

}  // namespace lockstep
