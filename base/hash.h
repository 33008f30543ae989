// Hashes: a fast one of much memory, and SHA-256 (OpenSSL's libcrypto underneath).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

/// 64 bits that differ, but for rare accidents, where two runs of bytes do: any change within one aligned word always
/// shows. Reads about as fast as memory gives. Against faults, not against attackers; another value on another version.
class Hash64 {
 public:
  void update(std::span<const std::byte> bytes);
  std::uint64_t finish();

 private:
  static constexpr std::size_t kLanes = 8;
  static constexpr std::size_t kBlockBytes = kLanes * sizeof(std::uint64_t);
  using Lanes = std::array<std::uint64_t, kLanes>;

  static void mix(Lanes& lanes, const std::byte* blocks, std::size_t count);

  Lanes lanes_ = {1, 2, 3, 4, 5, 6, 7, 8};
  std::array<std::byte, kBlockBytes> rest_{};  // of a block that is not full
  std::size_t rest_bytes_ = 0;
  std::uint64_t total_bytes_ = 0;
};

/// Move-only; not thread-safe.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(std::span<const std::byte> bytes);
  void update(std::string_view text);
  /// 64 lower-case hexadecimal digits; the object cannot be used afterwards.
  std::string finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
