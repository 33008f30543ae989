// What the ranks of different hosts say to each other.
#pragma once

#include <cstdint>
#include <type_traits>

#include "comm/op.h"

namespace lockstep::comm {

enum class MessageKind : std::uint8_t {
  kContribute = 1,  // a chunk of the receiver's part
  kPublish,         // a chunk of the sender's part, final
  kNotice,          // the sender waits in this operation; i32 ranks that it waits for
  kVerdict,         // the sender ends because of that: u8 Verdict::Kind, text
};

/// In front of every payload: what it is, and all that the ranks must agree on about its operation, so that ranks out
/// of step are found by the first message, and named. In the byte order of the machine; a group with several finds out
/// by kHeaderMagic.
struct MessageHeader {
  std::uint32_t magic = kMagic;
  MessageKind kind = MessageKind::kContribute;
  std::uint8_t reserved[3] = {};
  std::uint32_t chunk = 0;  // the lane's chunks of a part are counted from 0
  std::uint32_t bytes = 0;  // of the payload
  std::uint64_t place = 0;  // the group's operations, its own ones too, are counted from 1
  std::uint64_t history = 0;
  OpSignature op;
  std::uint32_t more_reserved = 0;
  std::uint32_t unused = 0;

  static constexpr std::uint32_t kMagic = 0x324d534c;  // "LSM2"
};
static_assert(sizeof(MessageHeader) == 96 && std::has_unique_object_representations_v<MessageHeader>);

inline MessageHeader header_for(const Op& op, std::uint64_t place, MessageKind kind) {
  MessageHeader header;
  header.kind = kind;
  header.place = place;
  header.history = op.history;
  header.op = signature_of(op);
  return header;
}

}  // namespace lockstep::comm
