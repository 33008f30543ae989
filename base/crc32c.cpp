#include "base/hash.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep {
namespace {

// Polynomials are reflected: the highest power of x is the lowest bit, as the instruction has them. CRCs in here are
// the register's, without the inversion before and after.
constexpr std::uint32_t kPolynomial = 0x82f63b78;

constexpr std::uint32_t times_x(std::uint32_t value) { return (value >> 1) ^ ((value & 1u) != 0 ? kPolynomial : 0); }

std::uint64_t word_at(const std::byte* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// ---- Any CPU: eight tables, eight bytes at a time ----

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    tables[0][byte] = value;
  }
  for (std::size_t t = 1; t < tables.size(); ++t)
    for (std::size_t byte = 0; byte < 256; ++byte)
      tables[t][byte] = (tables[t - 1][byte] >> 8) ^ tables[0][tables[t - 1][byte] & 0xffu];
  return tables;
}
constexpr Tables kTables = make_tables();

std::uint32_t by_tables(std::uint32_t crc, const std::byte* bytes, std::size_t count) {
  const auto byte_at = [&](std::size_t i) { return static_cast<std::uint32_t>(bytes[i]); };
  for (; count >= 8; bytes += 8, count -= 8) {
    const std::uint32_t low = crc ^ (byte_at(0) | byte_at(1) << 8 | byte_at(2) << 16 | byte_at(3) << 24);
    crc = kTables[7][low & 0xffu] ^ kTables[6][(low >> 8) & 0xffu] ^ kTables[5][(low >> 16) & 0xffu] ^
          kTables[4][low >> 24] ^ kTables[3][byte_at(4)] ^ kTables[2][byte_at(5)] ^ kTables[1][byte_at(6)] ^
          kTables[0][byte_at(7)];
  }
  for (; count > 0; ++bytes, --count) crc = (crc >> 8) ^ kTables[0][(crc ^ byte_at(0)) & 0xffu];
  return crc;
}

#if defined(__x86_64__)

/// x to the power of `n`, modulo the polynomial.
constexpr std::uint32_t power_of_x(int n) {
  std::uint32_t value = 0x80000000;
  for (int i = 0; i < n; ++i) value = times_x(value);
  return value;
}

// ---- SSE4.2 ----

#define LOCKSTEP_CRC_SSE42 gnu::target("sse4.2,pclmul")
#define LOCKSTEP_CRC_AVX512 gnu::target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq")

[[LOCKSTEP_CRC_SSE42]] std::uint32_t one_way(std::uint32_t crc, const std::byte* bytes, std::size_t count) {
  std::uint64_t wide = crc;
  for (; count >= 8; bytes += 8, count -= 8) wide = _mm_crc32_u64(wide, word_at(bytes));
  crc = static_cast<std::uint32_t>(wide);
  for (; count > 0; ++bytes, --count) crc = _mm_crc32_u8(crc, static_cast<unsigned char>(*bytes));
  return crc;
}

/// As far as three streams of kBytes go: the instruction takes three cycles, and one can start in each. The first two
/// streams' CRCs are moved over what follows them, which is to be multiplied by x^(8 bytes). The product of two
/// reflected polynomials is one bit too low, and reducing it multiplies by x^32: both are taken off the factor.
template <int kBytes>
[[LOCKSTEP_CRC_SSE42]] void three_ways(std::uint32_t& crc, const std::byte*& bytes, std::size_t& count) {
  static_assert(kBytes % 8 == 0);
  constexpr std::uint32_t kOverTwo = power_of_x(8 * 2 * kBytes - 33), kOverOne = power_of_x(8 * kBytes - 33);
  const __m128i factors = _mm_set_epi64x(kOverOne, kOverTwo);
  for (; count >= 3 * kBytes; bytes += 3 * kBytes, count -= 3 * kBytes) {
    std::uint64_t a = crc, b = 0, c = 0;
    for (int i = 0; i < kBytes; i += 8) {
      a = _mm_crc32_u64(a, word_at(bytes + i));
      b = _mm_crc32_u64(b, word_at(bytes + kBytes + i));
      c = _mm_crc32_u64(c, word_at(bytes + 2 * kBytes + i));
    }
    const __m128i products =
        _mm_xor_si128(_mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(a)), factors, 0x00),
                      _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(b)), factors, 0x10));
    const auto product = static_cast<std::uint64_t>(_mm_cvtsi128_si64(products));
    crc = static_cast<std::uint32_t>(c ^ _mm_crc32_u64(0, product));
  }
}

[[LOCKSTEP_CRC_SSE42]] std::uint32_t by_three_ways(std::uint32_t crc, const std::byte* bytes, std::size_t count) {
  three_ways<1024>(crc, bytes, count);
  three_ways<128>(crc, bytes, count);
  return one_way(crc, bytes, count);
}

// ---- AVX-512 ----

// A folded 128 bits are multiplied by x^bits, each half by itself, and so still stand for the bytes that they were.
constexpr std::uint32_t low_factor(int bits) { return power_of_x(bits + 31); }
constexpr std::uint32_t high_factor(int bits) { return power_of_x(bits - 33); }

/// Four times 128 bits moved on by `kBits`, onto `next`.
template <int kBits>
[[LOCKSTEP_CRC_AVX512]] inline __m512i fold(__m512i value, __m512i next) {
  constexpr long long kLow = low_factor(kBits), kHigh = high_factor(kBits);
  const __m512i factors = _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
  return _mm512_xor_si512(next, _mm512_xor_si512(_mm512_clmulepi64_epi128(value, factors, 0x00),
                                                 _mm512_clmulepi64_epi128(value, factors, 0x11)));
}

template <int kBits>
[[LOCKSTEP_CRC_AVX512]] inline __m128i fold(__m128i value, __m128i next) {
  const __m128i factors = _mm_set_epi64x(high_factor(kBits), low_factor(kBits));
  return _mm_xor_si128(
      next, _mm_xor_si128(_mm_clmulepi64_si128(value, factors, 0x00), _mm_clmulepi64_si128(value, factors, 0x11)));
}

[[LOCKSTEP_CRC_AVX512]] inline __m512i load(const std::byte* from) { return _mm512_loadu_si512(from); }

[[LOCKSTEP_CRC_AVX512]] std::uint32_t by_wide_folding(std::uint32_t crc, const std::byte* bytes, std::size_t count) {
  constexpr std::size_t kBlock = 256;
  if (count < 2 * kBlock) return by_three_ways(crc, bytes, count);
  __m512i a = _mm512_xor_si512(load(bytes), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  __m512i b = load(bytes + 64), c = load(bytes + 128), d = load(bytes + 192);
  for (bytes += kBlock, count -= kBlock; count >= kBlock; bytes += kBlock, count -= kBlock) {
    a = fold<2048>(a, load(bytes));
    b = fold<2048>(b, load(bytes + 64));
    c = fold<2048>(c, load(bytes + 128));
    d = fold<2048>(d, load(bytes + 192));
  }
  const __m512i sum = fold<512>(fold<512>(fold<512>(a, b), c), d);
  alignas(64) std::array<std::byte, 64> quarters;
  _mm512_store_si512(quarters.data(), sum);
  const auto quarter = reinterpret_cast<const __m128i*>(quarters.data());
  const __m128i one = fold<128>(fold<128>(fold<128>(quarter[0], quarter[1]), quarter[2]), quarter[3]);
  std::uint64_t wide = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_extract_epi64(one, 0)));
  wide = _mm_crc32_u64(wide, static_cast<std::uint64_t>(_mm_extract_epi64(one, 1)));
  return one_way(static_cast<std::uint32_t>(wide), bytes, count);
}

#endif

using Compute = std::uint32_t (*)(std::uint32_t, const std::byte*, std::size_t);

Compute function_of(Crc32cMethod method) {
#if defined(__x86_64__)
  if (method == Crc32cMethod::kWideFolding) return by_wide_folding;
  if (method == Crc32cMethod::kThreeWays) return by_three_ways;
#else
  static_cast<void>(method);
#endif
  return by_tables;
}

Compute best() {
  for (const Crc32cMethod method : {Crc32cMethod::kWideFolding, Crc32cMethod::kThreeWays})
    if (crc32c_has(method)) return function_of(method);
  return by_tables;
}

std::uint32_t run(Compute compute, std::span<const std::byte> bytes, std::uint32_t before) {
  return ~compute(~before, bytes.data(), bytes.size());
}

}  // namespace

bool crc32c_has(Crc32cMethod method) {
  if (method == Crc32cMethod::kTables) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool sse42 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
  if (method == Crc32cMethod::kThreeWays) return sse42;
  return sse42 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("vpclmulqdq");
#else
  return false;
#endif
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) {
  static const Compute compute = best();
  return run(compute, bytes, before);
}

std::uint32_t crc32c_by(Crc32cMethod method, std::span<const std::byte> bytes, std::uint32_t before) {
  return run(function_of(method), bytes, before);
}

}  // namespace lockstep
