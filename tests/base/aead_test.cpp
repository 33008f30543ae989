// Frames that are encrypted, and what becomes of those that somebody has touched.
#include "base/aead.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/base/job_secret.h"

namespace lockstep {
namespace {

const std::string& key() {
  static const std::string key(Aead::kKeyBytes, 'k');
  return key;
}

Aead sealing(std::uint64_t frames_per_key = Aead::kFramesPerKey) { return {Aead::Use::kSeals, key(), frames_per_key}; }
Aead opening(std::uint64_t frames_per_key = Aead::kFramesPerKey) { return {Aead::Use::kOpens, key(), frames_per_key}; }

// The Galois/Counter Mode paper's vectors (McGrew and Viega), those of 256-bit keys and a nonce of zeros.
TEST(Aead, IsAes256Gcm) {
  const auto hex = [](const std::string& bytes) {
    std::string text;
    for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
    return text;
  };
  const std::string zeros(Aead::kKeyBytes, '\0');
  EXPECT_EQ(hex(Aead(Aead::Use::kSeals, zeros).seal_whole("")), "530f8afbc74536b9a963b4f1c4cb738b");
  EXPECT_EQ(hex(Aead(Aead::Use::kSeals, zeros).seal_whole(std::string(16, '\0'))),
            "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919");
}

TEST(Aead, FramesOfAnySizeRoundTrip) {
  Aead out = sealing(), in = opening();
  for (const std::size_t size : {0u, 1u, 15u, 16u, 17u, 96u, (1u << 20) + 3u}) {
    const std::string plain = random_bytes(size);
    const std::string sealed = out.seal_whole(plain);
    ASSERT_EQ(sealed.size(), size + Aead::kTagBytes);
    if (size >= 15) {
      EXPECT_NE(sealed.substr(0, size), plain);
    }
    EXPECT_EQ(in.open_whole(sealed), plain) << size;
  }
}

// As links do it: the sender in pieces of one size, the receiver as bytes come, in place.
TEST(Aead, ChunkingDoesNotMatter) {
  const std::string plain = random_bytes((1 << 20) + 3);
  const std::string whole = sealing().seal_whole(plain);
  for (const std::size_t piece : {1u, 17u, 4'095u, 65'536u}) {
    const auto in_pieces = [&](Aead& cipher, std::string& bytes) {
      cipher.begin();
      for (std::size_t at = 0; at < plain.size(); at += piece) {
        auto* const here = reinterpret_cast<std::byte*>(bytes.data() + at);
        cipher.process({here, std::min(piece, plain.size() - at)}, here);
      }
    };
    Aead out = sealing(), in = opening();
    std::string bytes = plain;
    in_pieces(out, bytes);
    std::byte tag[Aead::kTagBytes];
    out.seal(tag);
    EXPECT_EQ(bytes, whole.substr(0, plain.size())) << piece;
    EXPECT_EQ(std::memcmp(tag, whole.data() + plain.size(), sizeof tag), 0) << piece;
    in_pieces(in, bytes);
    EXPECT_TRUE(in.open(tag)) << piece;
    EXPECT_EQ(bytes, plain) << piece;
  }
}

TEST(Aead, AnyBitFlipIsDetected) {
  for (const std::size_t size : {0u, 1u, 15u, 16u, 17u, 40u}) {
    const std::string sealed = sealing().seal_whole(std::string(size, 'x'));
    for (std::size_t bit = 0; bit < sealed.size() * 8; ++bit) {
      std::string altered = sealed;
      altered[bit / 8] = static_cast<char>(altered[bit / 8] ^ (1 << bit % 8));
      EXPECT_FALSE(opening().open_whole(altered)) << "bit " << bit << " of " << size << " bytes";
    }
  }
}

TEST(Aead, ReplayedSwappedOrDroppedFramesAreDetected) {
  Aead out = sealing();
  const std::string first = out.seal_whole("the same"), second = out.seal_whole("the same");
  EXPECT_NE(first, second);
  const auto opens = [](const std::vector<std::string>& frames) {
    Aead in = opening();
    for (const std::string& frame : frames)
      if (!in.open_whole(frame)) return false;
    return true;
  };
  EXPECT_TRUE(opens({first, second}));
  EXPECT_FALSE(opens({first, first}));
  EXPECT_FALSE(opens({second}));
  EXPECT_FALSE(opens({second, first}));
  // Another key's, of the same place.
  EXPECT_FALSE(opens({Aead(Aead::Use::kSeals, std::string(Aead::kKeyBytes, 'o')).seal_whole("the same")}));
}

// What the same key would make of the first frame's nonce is not sent a second time.
TEST(Aead, KeysChangeOnBothSides) {
  Aead out = sealing(3), in = opening(3), never = opening();
  std::vector<std::string> seen;
  for (int i = 0; i < 10; ++i) {
    const std::string sealed = out.seal_whole("the same");
    EXPECT_EQ(std::count(seen.begin(), seen.end(), sealed), 0) << i;
    seen.push_back(sealed);
    EXPECT_EQ(in.open_whole(sealed), "the same") << i;
    EXPECT_EQ(never.open_whole(sealed).has_value(), i < 3) << i;
  }
}

}  // namespace
}  // namespace lockstep
