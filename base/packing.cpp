#include "base/packing.h"

#include <fmt/format.h>

namespace lockstep {

Packer& Packer::number(std::uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) bytes_.push_back(static_cast<char>((value >> shift) & 0xffu));
  return *this;
}

Packer& Packer::text(std::string_view value) {
  number(static_cast<std::uint32_t>(value.size()));
  bytes_.append(value);
  return *this;
}

std::uint32_t Unpacker::number() {
  if (rest_.size() < 4) throw Malformed("a frame that is too short");
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i)
    value |= static_cast<std::uint32_t>(static_cast<unsigned char>(rest_[i])) << (8 * i);
  rest_.remove_prefix(4);
  return value;
}

std::string Unpacker::text(std::size_t most_bytes) {
  const std::size_t length = number();
  if (length > most_bytes)
    throw Malformed(fmt::format("a text of {} bytes, where {} are possible", length, most_bytes));
  if (length > rest_.size()) throw Malformed("a frame that is too short");
  std::string value(rest_.substr(0, length));
  rest_.remove_prefix(length);
  return value;
}

void Unpacker::end() const {
  if (!rest_.empty()) throw Malformed("a frame that is too long");
}

}  // namespace lockstep
