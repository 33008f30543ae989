#include "base/hash.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "base/splitmix.h"

namespace lockstep {
namespace {

constexpr std::array kMethods = {Crc32cMethod::kTables, Crc32cMethod::kThreeWays, Crc32cMethod::kWideFolding};

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

/// Bit by bit, as the definition has it.
std::uint32_t reference(std::span<const std::byte> bytes) {
  std::uint32_t crc = ~0u;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
  }
  return ~crc;
}

std::vector<std::byte> some_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(SplitMix64::word(1, i));
  return bytes;
}

class Crc32cMethods : public ::testing::TestWithParam<Crc32cMethod> {
 protected:
  void SetUp() override {
    if (!crc32c_has(GetParam())) GTEST_SKIP() << "this CPU lacks it";
  }
  static std::uint32_t of(std::span<const std::byte> bytes, std::uint32_t before = 0) {
    return crc32c_by(GetParam(), bytes, before);
  }
};

// RFC 3720, appendix B.4, and the usual check value.
TEST_P(Crc32cMethods, KnownValues) {
  EXPECT_EQ(of({}), 0u);
  EXPECT_EQ(of(bytes_of("123456789")), 0xe3069283u);
  EXPECT_EQ(of(bytes_of("The quick brown fox jumps over the lazy dog")), 0x22620404u);
  std::array<std::byte, 32> bytes{};
  EXPECT_EQ(of(bytes), 0x8a9136aau);
  bytes.fill(std::byte{0xff});
  EXPECT_EQ(of(bytes), 0x62a8ab43u);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  EXPECT_EQ(of(bytes), 0x46dd794eu);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(31 - i);
  EXPECT_EQ(of(bytes), 0x113fdb5cu);
}

TEST_P(Crc32cMethods, AnySizeAtAnyAlignment) {
  const auto bytes = some_bytes(9000);
  for (std::size_t size = 0; size <= 1100; ++size) {
    const std::size_t at = size % 67;
    ASSERT_EQ(of(std::span(bytes).subspan(at, size)), reference(std::span(bytes).subspan(at, size))) << size;
  }
  for (const std::size_t size : {3071u, 3072u, 3073u, 3456u, 4095u, 6144u, 6529u, 8191u, 8900u})
    for (std::size_t at = 0; at < 66; ++at)
      ASSERT_EQ(of(std::span(bytes).subspan(at, size)), reference(std::span(bytes).subspan(at, size)))
          << size << " at " << at;
}

TEST_P(Crc32cMethods, ChunkingDoesNotMatter) {
  const auto bytes = some_bytes(5000);
  const std::uint32_t whole = reference(bytes);
  for (const std::size_t piece : {1u, 7u, 64u, 511u, 512u, 513u, 1300u, 4999u}) {
    std::uint32_t crc = 0;
    for (std::size_t at = 0; at < bytes.size(); at += piece)
      crc = of(std::span(bytes).subspan(at, std::min(piece, bytes.size() - at)), crc);
    EXPECT_EQ(crc, whole) << piece;
  }
}

TEST_P(Crc32cMethods, AnyBitFlipIsDetected) {
  auto bytes = some_bytes(700);
  const std::uint32_t before = of(bytes);
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    ASSERT_NE(of(bytes), before) << bit;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }
}

std::string name_of(const ::testing::TestParamInfo<Crc32cMethod>& one) {
  constexpr std::array kNames = {"Tables", "ThreeWays", "WideFolding"};
  return kNames[static_cast<std::size_t>(one.param)];
}
INSTANTIATE_TEST_SUITE_P(Methods, Crc32cMethods, ::testing::ValuesIn(kMethods), name_of);

TEST(Crc32c, AllMethodsAgree) {
  const auto bytes = some_bytes(4321);
  EXPECT_EQ(crc32c(bytes), reference(bytes));
  EXPECT_EQ(crc32c(std::span(bytes).subspan(1000), crc32c(std::span(bytes).first(1000))), reference(bytes));
}

}  // namespace
}  // namespace lockstep
