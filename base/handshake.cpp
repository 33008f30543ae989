#include "base/handshake.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/codec.h"
#include "base/error.h"

namespace lockstep {
namespace {

// As in the first version, whose store understands hellos and refusals of all others.
constexpr int kHello = 1;
constexpr int kChallenge = 32;
constexpr int kProve = 33;
constexpr int kWelcome = 34;
constexpr int kRefused = 65;

constexpr std::string_view kMagic = "lockstep";
constexpr std::size_t kHeaderBytes = 4;
constexpr std::size_t kNonceBytes = 32;
constexpr std::size_t kProofBytes = 32;
constexpr std::size_t kMostWhyBytes = 2048;
// Of the first version, too, whose hellos have names of job and host.
constexpr std::size_t kMostHelloBytes = 1024;
constexpr std::size_t kMostProveBytes = 1 + 4 + Handshake::kMostIdentityBytes + 4 + 4 + kProofBytes;
constexpr std::size_t kMostAnswerFrame =
    std::max(1 + 4 + Handshake::kMostAnswerBytes + 4 + kProofBytes, 1 + 4 + kMostWhyBytes);

std::string nonce_of(Unpacker& body) {
  std::string nonce = body.text(kNonceBytes);
  body.end();
  if (nonce.size() != kNonceBytes) throw Malformed("a nonce of another size");
  return nonce;
}

std::string printable(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
  return text;
}

}  // namespace

Handshake::Handshake(Port port, JobSecret secret, bool calls, std::string identity, bool encrypts)
    : port_(port),
      calls_(calls),
      encrypts_(encrypts),
      secret_(std::move(secret)),
      identity_(std::move(identity)),
      own_nonce_(random_bytes(kNonceBytes)) {
  LOCKSTEP_ASSERT(identity_.size() <= kMostIdentityBytes);
  LOCKSTEP_ASSERT(!encrypts_ || !secret_.empty(), "keys that everybody knows");
  if (calls_) send_frame(kHello, Packer().number(kProtocolVersion).text(own_nonce_).bytes());
}

Handshake Handshake::call(Port port, JobSecret secret, std::string identity, bool encrypts) {
  return {port, std::move(secret), true, std::move(identity), encrypts};
}

Handshake Handshake::listen(Port port, JobSecret secret, bool encrypts) {
  return {port, std::move(secret), false, {}, encrypts};
}

void Handshake::send_frame(int kind, std::string_view body) {
  // A listener too says nothing before it is spoken to.
  if (!std::exchange(spoke_, true)) unsent_ = kMagic;
  unsent_ += Packer().number(static_cast<std::uint32_t>(body.size() + 1)).bytes();
  unsent_.push_back(static_cast<char>(kind));
  unsent_.append(body);
}

void Handshake::fail(Failure failure, std::string why) {
  state_ = State::kFailed;
  failure_ = failure;
  why_ = printable(std::move(why));
}

std::size_t Handshake::wanted() const {
  if (state_ != State::kInProgress) return 0;
  if (!greeted_) return kMagic.size() - arrived_.size();
  if (arrived_.size() < kHeaderBytes) return kHeaderBytes - arrived_.size();
  return kHeaderBytes + Unpacker(arrived_).number() - arrived_.size();
}

Handshake::State Handshake::feed(std::string_view bytes) {
  heard_ = heard_ || !bytes.empty();
  while (!bytes.empty() && state_ == State::kInProgress) {
    const std::string_view part = bytes.substr(0, wanted());
    bytes.remove_prefix(part.size());
    arrived_.append(part);
    if (!greeted_) {
      if (!kMagic.starts_with(arrived_))
        fail(Failure::kMalformed, "it does not speak lockstep's protocol");
      else if (arrived_.size() == kMagic.size())
        greeted_ = true, arrived_.clear();
      continue;
    }
    if (arrived_.size() < kHeaderBytes) continue;
    const std::size_t length = Unpacker(arrived_).number();
    std::size_t most = kMostAnswerFrame;
    if (!calls_) most = other_nonce_.empty() ? kMostHelloBytes : kMostProveBytes;
    if (length == 0 || length > most) {
      fail(Failure::kMalformed, fmt::format("a hello of {} bytes, where {} are possible", length, most));
    } else if (arrived_.size() == kHeaderBytes + length) {
      take_frame();
      arrived_.clear();
    }
  }
  return state_;
}

void Handshake::take_frame() {
  const int kind = static_cast<unsigned char>(arrived_[kHeaderBytes]);
  Unpacker body(std::string_view(arrived_).substr(kHeaderBytes + 1));
  try {
    if (!calls_ && other_nonce_.empty() && kind == kHello) {
      if (const std::uint32_t version = body.number(); version != kProtocolVersion) {
        refuse(
            fmt::format("it speaks version {} of the protocol, and this side version {}", version, kProtocolVersion));
        failure_ = Failure::kVersion;
        return;
      }
      other_nonce_ = nonce_of(body);
      return send_frame(kChallenge, Packer().text(own_nonce_).bytes());
    }
    if (!calls_ && !other_nonce_.empty() && kind == kProve) {
      identity_ = body.text(kMostIdentityBytes);
      const bool encrypts = body.number() != 0;
      const std::string proof_of_caller = body.text(kProofBytes);
      body.end();
      const bool knows = equal_in_constant_time(proof_of_caller, proof(true, encrypts));
      if (knows && encrypts == encrypts_) {
        state_ = State::kAsked;
        return;
      }
      identity_.clear();
      if (knows)
        return refuse(encrypts_ ? "it runs without --encrypt, and the others with it"
                                : "it runs with --encrypt, and the others without it");
      refuse(secret_mismatch());
      failure_ = Failure::kSecret;
      return;
    }
    if (calls_ && other_nonce_.empty() && kind == kChallenge) {
      other_nonce_ = nonce_of(body);
      return send_frame(kProve,
                        Packer().text(identity_).number(encrypts_ ? 1 : 0).text(proof(true, encrypts_)).bytes());
    }
    if (calls_ && !other_nonce_.empty() && kind == kWelcome) {
      answer_ = body.text(kMostAnswerBytes);
      const std::string proof_of_listener = body.text(kProofBytes);
      body.end();
      if (equal_in_constant_time(proof_of_listener, proof(false, encrypts_))) {
        state_ = State::kDone;
        return;
      }
      answer_.clear();
      return fail(Failure::kSecret, secret_mismatch());
    }
    if (calls_ && kind == kRefused) return fail(Failure::kRefused, body.text(kMostWhyBytes));
    fail(Failure::kMalformed, calls_ ? "no answer to a hello" : "it does not say hello");
  } catch (const Malformed& error) {
    fail(Failure::kMalformed, error.what());
  }
}

std::string Handshake::proof(bool callers, bool encrypts) const {
  return signed_by_secret("lockstep handshake", callers, encrypts, !callers);
}

SessionCiphers Handshake::take_ciphers() {
  LOCKSTEP_ASSERT(state_ == State::kDone && encrypts_ && !took_ciphers_);
  took_ciphers_ = true;
  const std::string callers = signed_by_secret("lockstep session key", true, true, true);
  const std::string listeners = signed_by_secret("lockstep session key", false, true, true);
  return {Aead(Aead::Use::kSeals, calls_ ? callers : listeners), Aead(Aead::Use::kOpens, calls_ ? listeners : callers)};
}

std::string Handshake::signed_by_secret(std::string_view label, bool callers, bool encrypts, bool with_answer) const {
  const std::string& callers_nonce = calls_ ? own_nonce_ : other_nonce_;
  const std::string& listeners_nonce = calls_ ? other_nonce_ : own_nonce_;
  Packer message;
  message.text(label)
      .number(static_cast<std::uint32_t>(port_))
      .number(callers ? 0 : 1)
      .number(kProtocolVersion)
      .number(encrypts ? 1 : 0)
      .text(callers_nonce)
      .text(listeners_nonce)
      .text(identity_);
  if (with_answer) message.text(answer_);
  return secret_.sign(message.bytes());
}

std::string Handshake::secret_mismatch() const {
  return secret_.empty() ? fmt::format("it has a secret ({}), and this side has none", kJobSecretVariable)
                         : fmt::format("it does not know this job's secret ({})", kJobSecretVariable);
}

void Handshake::accept(std::string_view answer) {
  LOCKSTEP_ASSERT(state_ == State::kAsked && answer.size() <= kMostAnswerBytes);
  answer_ = answer;
  send_frame(kWelcome, Packer().text(answer_).text(proof(false, encrypts_)).bytes());
  state_ = State::kDone;
}

void Handshake::refuse(std::string_view why) {
  send_frame(kRefused, Packer().text(why.substr(0, kMostWhyBytes)).bytes());
  fail(Failure::kRefused, std::string(why));
}

void Handshake::flush(int socket) {
  while (!unsent_.empty()) {
    const ssize_t sent = ::send(socket, unsent_.data(), unsent_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    // Gone: reading will say so, once what had been sent before has been read.
    unsent_.erase(0, sent < 0 ? unsent_.size() : static_cast<std::size_t>(sent));
  }
}

Handshake::State Handshake::advance(int socket) {
  flush(socket);
  std::array<char, 1 << 12> chunk;
  while (state_ == State::kInProgress) {
    const ssize_t got = ::recv(socket, chunk.data(), std::min(wanted(), chunk.size()), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (got <= 0)
      fail(Failure::kGone, got < 0 ? errno_text(errno) : "it has closed the connection");
    else
      feed({chunk.data(), static_cast<std::size_t>(got)});
    flush(socket);
  }
  return state_;
}

}  // namespace lockstep
