#include "base/hash.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"

namespace lockstep {

// Eight chains of multiplications, which do not wait for each other.
void Hash64::mix(Lanes& lanes, const std::byte* blocks, std::size_t count) {
  Lanes local = lanes;
  for (; count > 0; --count, blocks += kBlockBytes) {
    Lanes words;
    std::memcpy(words.data(), blocks, kBlockBytes);
    for (std::size_t i = 0; i < kLanes; ++i) local[i] = mixed(local[i], words[i]);
  }
  lanes = local;
}

void Hash64::update(std::span<const std::byte> bytes) {
  total_bytes_ += bytes.size();
  if (rest_bytes_ > 0) {
    const std::size_t n = std::min(bytes.size(), kBlockBytes - rest_bytes_);
    std::copy_n(bytes.begin(), n, rest_.begin() + static_cast<std::ptrdiff_t>(rest_bytes_));
    rest_bytes_ += n;
    bytes = bytes.subspan(n);
    if (rest_bytes_ < kBlockBytes) return;
    mix(lanes_, rest_.data(), 1);
    rest_bytes_ = 0;
  }
  const std::size_t blocks = bytes.size() / kBlockBytes;
  mix(lanes_, bytes.data(), blocks);
  bytes = bytes.subspan(blocks * kBlockBytes);
  std::ranges::copy(bytes, rest_.begin());
  rest_bytes_ = bytes.size();
}

std::uint64_t Hash64::finish() {
  std::fill(rest_.begin() + static_cast<std::ptrdiff_t>(rest_bytes_), rest_.end(), std::byte{0});
  mix(lanes_, rest_.data(), 1);
  std::uint64_t hash = total_bytes_;
  for (const std::uint64_t lane : lanes_) hash = mixed(hash, lane);
  return hash;
}

struct Sha256::Impl {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~Impl() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : impl_(std::make_unique<Impl>()) {
  LOCKSTEP_ASSERT(impl_->context != nullptr && EVP_DigestInit_ex(impl_->context, EVP_sha256(), nullptr) == 1);
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(std::span<const std::byte> bytes) {
  LOCKSTEP_ASSERT(EVP_DigestUpdate(impl_->context, bytes.data(), bytes.size()) == 1);
}

void Sha256::update(std::string_view text) { update(std::as_bytes(std::span(text.data(), text.size()))); }

std::string Sha256::finish() {
  std::array<unsigned char, 32> digest{};
  LOCKSTEP_ASSERT(EVP_DigestFinal_ex(impl_->context, digest.data(), nullptr) == 1);
  std::string text;
  for (const unsigned char byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace lockstep
