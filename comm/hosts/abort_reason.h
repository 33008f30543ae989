// Why a group has ended, as its ranks tell each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::comm {

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
