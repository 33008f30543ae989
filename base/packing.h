// Bodies of messages between processes: numbers are little-endian, a text is its u32 length and its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace lockstep {

/// Bytes that the other side cannot have meant.
class Malformed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A body in the making.
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
  bool at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

}  // namespace lockstep
