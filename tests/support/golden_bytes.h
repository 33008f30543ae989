// Bytes of messages, in hexadecimal, as earlier versions send them.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace lockstep::testing {

inline std::string hex_of(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

inline std::string bytes_of_hex(std::string_view text) {
  std::string bytes;
  for (std::size_t at = 0; at < text.size(); at += 2)
    bytes.push_back(static_cast<char>(std::stoi(std::string(text.substr(at, 2)), nullptr, 16)));
  return bytes;
}

/// `encode` gives `golden` of `message`, and of what `decode` makes of `golden`.
template <class Message, class Encode, class Decode>
void expect_golden(const char* golden, const Message& message, Encode&& encode, Decode&& decode) {
  EXPECT_EQ(hex_of(encode(message)), golden);
  EXPECT_EQ(hex_of(encode(decode(bytes_of_hex(golden)))), golden);
}

}  // namespace lockstep::testing
