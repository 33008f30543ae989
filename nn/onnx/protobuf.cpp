#include "nn/onnx/protobuf.h"

#include <bit>

namespace lockstep::nn::onnx {
namespace {

enum class Wire : std::uint8_t { kVarint = 0, kBytes = 2, kFixed32 = 5 };

constexpr std::uint64_t tag(int field, Wire wire) {
  return static_cast<std::uint64_t>(field) << 3 | static_cast<std::uint64_t>(wire);
}

}  // namespace

void Message::varint(std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>((value & 0x7f) | 0x80);
  bytes_ += static_cast<char>(value);
}

void Message::number(int field, std::int64_t value) {
  varint(tag(field, Wire::kVarint));
  varint(static_cast<std::uint64_t>(value));
}

void Message::real(int field, float value) {
  varint(tag(field, Wire::kFixed32));
  const auto bits = std::bit_cast<std::uint32_t>(value);
  for (int shift = 0; shift < 32; shift += 8) bytes_ += static_cast<char>(bits >> shift & 0xff);
}

void Message::text(int field, std::string_view value) {
  begin_bytes(field, value.size());
  bytes_ += value;
}

void Message::begin_bytes(int field, std::uint64_t bytes) {
  varint(tag(field, Wire::kBytes));
  varint(bytes);
}

}  // namespace lockstep::nn::onnx
