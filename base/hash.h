// Hashes: of a table's keys, a fast one of much memory, SHA-256 (OpenSSL's libcrypto underneath), and a checksum of
// messages and files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

/// One to one in `hash` and in `word`: whatever differed before, or differs now, still does. Fibonacci hashing (Knuth,
/// The Art of Computer Programming, volume 3, section 6.4), and a shift that brings the upper half down.
constexpr std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) {
  const std::uint64_t product = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
  return product ^ (product >> 32);
}

/// Of keys that are arrays of numbers, such as sizes: std::unordered_map<std::array<std::int64_t, 20>, Value,
/// NumbersHash>.
struct NumbersHash {
  constexpr std::size_t operator()(std::span<const std::int64_t> numbers) const {
    std::uint64_t hash = numbers.size();
    for (const std::int64_t number : numbers) hash = mixed(hash, static_cast<std::uint64_t>(number));
    return hash;
  }
};

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

/// CRC-32C (Castagnoli; RFC 3720, appendix B.4): finds accidents on the way from one place to another. It is no
/// protection against whoever alters bytes on purpose.
///
/// Of `bytes` after others whose CRC is `before`; 0: there were none. So bytes may come in pieces:
/// crc32c(b, crc32c(a)) is that of a and b together. Any alignment; thread-safe.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);

/// How it is computed, which crc32c() chooses at run time: the last of these that the CPU has. All give the same.
enum class Crc32cMethod : std::uint8_t {
  kTables,      // any CPU
  kThreeWays,   // SSE4.2's instruction on three streams at once, put together with PCLMULQDQ
  kWideFolding  // VPCLMULQDQ on AVX-512: 256 bytes at a time
};
bool crc32c_has(Crc32cMethod method);
/// With one that this CPU has.
std::uint32_t crc32c_by(Crc32cMethod method, std::span<const std::byte> bytes, std::uint32_t before = 0);

}  // namespace lockstep
