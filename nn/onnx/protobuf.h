// Protocol buffers' wire format, as much of it as an ONNX file needs:
// https://protobuf.dev/programming-guides/encoding
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::nn::onnx {

/// A message under construction: fields are appended in the order of the calls, whose numbers are those of the schema.
class Message {
 public:
  /// int32, int64, enum.
  void number(int field, std::int64_t value);
  /// float.
  void real(int field, float value);
  /// string, bytes.
  void text(int field, std::string_view value);
  void message(int field, const Message& value) { text(field, value.bytes_); }
  /// The beginning of a field of string, bytes or a message, whose `bytes` bytes are written elsewhere.
  void begin_bytes(int field, std::uint64_t bytes);

  const std::string& bytes() const { return bytes_; }

 private:
  void varint(std::uint64_t value);

  std::string bytes_;
};

}  // namespace lockstep::nn::onnx
