// Messages between the ranks of different hosts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/hash.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {

enum class MessageKind : std::uint8_t {
  kReduceScatter = 1,  // a chunk of the receiver's part
  kAllGather,          // a chunk of the sender's part, final
  kNotice,             // the sender waits in this operation; i32 ranks that it waits for
  kAbort,              // the sender ends because of that: u8 AbortReason::Kind, text
  kPair,               // bytes of a send, on a connection of its own (Note [Pairs]); its operation is none
};

/// Note [Checksums]
/// TCP's checksum is 16 bits of ones' complement: it misses what swaps words or what a network card or a tunnel alters
/// before it computes the sum anew, and then replicas differ unnoticed. So every message has two CRC-32Cs: of its
/// payload, and of its header, which has the first. A header is checked before any of its fields is believed, a payload
/// before anything is made of it: until then it lies where its final bytes belong or in a block of its own, and no
/// operation is complete. Both ends compute them while the bytes are in the cache, the sender before its system call
/// and the receiver after each of its own. They are no protection against whoever alters bytes on purpose. Where a job
/// encrypts (Note [Encryption]) tags take their place, which are, and both fields are 0.

/// Precedes every payload: its kind, and all that the ranks must agree on about its operation. So the first message
/// shows which ranks are out of step. In the byte order of the machine.
struct MessageHeader {
  std::uint32_t magic = kMagic;
  MessageKind kind = MessageKind::kReduceScatter;
  std::uint8_t reserved[3] = {};
  std::uint32_t chunk = 0;  // the channel's chunks of a part are counted from 0
  std::uint32_t bytes = 0;  // of the payload
  OpDescriptor op;
  std::uint32_t payload_crc = 0;
  std::uint32_t header_crc = 0;  // of all that is before it

  static constexpr std::uint32_t kMagic = 0x334d534c;  // "LSM3"

  /// What header_crc has to be.
  std::uint32_t own_crc() const {
    return crc32c(std::as_bytes(std::span(this, 1)).first(sizeof(MessageHeader) - sizeof header_crc));
  }
};
static_assert(sizeof(MessageHeader) == 104 && std::has_unique_object_representations_v<MessageHeader>);

inline MessageHeader header_for(const OpDescriptor& op, MessageKind kind) {
  MessageHeader header;
  header.kind = kind;
  header.op = op;
  return header;
}

struct AbortReason {
  enum class Kind : std::uint8_t { kOutOfStep = 1, kDevice, kTimeout };
  static constexpr std::size_t kMostBytes = 1024;

  Kind kind = Kind::kDevice;
  std::string what;
  std::string remedy;

  /// At most kMostBytes; texts that are too long are cut.
  std::string encode() const;
  /// Nothing for what is none.
  static std::optional<AbortReason> decode(std::string_view bytes);
  /// Of what this rank fails with, if it is of interest to others.
  static std::optional<AbortReason> of(const std::exception_ptr& failure);
  /// Throws what whoever has come to it has thrown.
  [[noreturn]] void raise() const;
};

}  // namespace lockstep::comm
