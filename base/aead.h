// Authenticated encryption of one direction of a connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

struct evp_cipher_ctx_st;

namespace lockstep {

/// Note [Encryption]
/// AES-256-GCM (OpenSSL's) turns a frame of any length into as many bytes and a tag of 16. Whoever does not have the
/// key can neither read a frame nor make one, nor alter, drop, repeat or reorder any: a frame's nonce is its number on
/// the connection, which both sides count and nobody sends, so the first one that is not the next one has a wrong tag.
///   A key is one connection's and one direction's (Handshake::take_ciphers), so no nonce is ever used twice with it.
/// After kFramesPerKey frames both sides replace the key by its HMAC-SHA-256. So no key encrypts so much that
/// statistics could distinguish its output from random bytes, and a key that leaks later decrypts no earlier frame.

/// Seals frames in their order, or opens them in the same order. A frame is begin(), process() for as many pieces as
/// there are, and seal() or open(). Nothing may be made of what process() gives before open() says that it is right.
/// Allocates nothing but in its constructor and when the key changes. Not thread-safe.
class Aead {
 public:
  enum class Use : std::uint8_t { kSeals, kOpens };
  static constexpr std::size_t kKeyBytes = 32;
  static constexpr std::size_t kTagBytes = 16;
  static constexpr std::uint64_t kFramesPerKey = std::uint64_t{1} << 22;

  Aead(Use use, std::string_view key, std::uint64_t frames_per_key = kFramesPerKey);

  void begin();
  /// `out` has as many bytes; it is `in`, or does not overlap it.
  void process(std::span<const std::byte> in, std::byte* out);
  /// The end of a frame of one that seals.
  void seal(std::byte* tag);
  /// The end of a frame of one that opens: whether it is the one that was sealed, and the next one. After one that is
  /// not, nothing more can be opened.
  bool open(const std::byte* tag);

  /// A whole frame: the bytes and the tag after them.
  std::string seal_whole(std::string_view plain);
  /// Nothing where it is wrong.
  std::optional<std::string> open_whole(std::string_view sealed);

 private:
  struct Free {
    void operator()(evp_cipher_ctx_st* context) const;
  };
  void set_key();

  Use use_;
  std::string key_;
  std::uint64_t frames_per_key_;
  std::uint64_t frames_ = 0;  // of this key
  std::unique_ptr<evp_cipher_ctx_st, Free> context_;
};

}  // namespace lockstep
