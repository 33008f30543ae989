// CRC-32C (Castagnoli; RFC 3720, appendix B.4): finds accidents on the way from one place to another. It is no
// protection against whoever alters bytes on purpose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep {

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
