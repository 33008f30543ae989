#include "base/aead.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "lockstep/base/job_secret.h"

namespace lockstep {
namespace {

constexpr std::size_t kGcmNonceBytes = 12;
// OpenSSL counts in int.
constexpr std::size_t kMostBytesACall = std::size_t{1} << 30;

const unsigned char* octets(const void* bytes) { return static_cast<const unsigned char*>(bytes); }

void check(bool well) {
  if (well) return;
  std::array<char, 256> text{};
  ERR_error_string_n(ERR_get_error(), text.data(), text.size());
  throw DeviceError(fmt::format("AES-256-GCM of OpenSSL: {}", text.data()),
                    "look at the OpenSSL of this host and its configuration (openssl.cnf), or leave --encrypt out");
}

}  // namespace

void Aead::Free::operator()(evp_cipher_ctx_st* context) const { EVP_CIPHER_CTX_free(context); }

Aead::Aead(Use use, std::string_view key, std::uint64_t frames_per_key)
    : use_(use), key_(key), frames_per_key_(frames_per_key), context_(EVP_CIPHER_CTX_new()) {
  LOCKSTEP_ASSERT(key.size() == kKeyBytes && frames_per_key > 0);
  check(context_ != nullptr);
  set_key();
}

void Aead::set_key() {
  check(EVP_CipherInit_ex(context_.get(), EVP_aes_256_gcm(), nullptr, octets(key_.data()), nullptr,
                          use_ == Use::kSeals ? 1 : 0) == 1);
  frames_ = 0;
}

void Aead::begin() {
  if (frames_ == frames_per_key_) {
    std::string next = JobSecret::of_text(key_).sign("lockstep next key");
    OPENSSL_cleanse(key_.data(), key_.size());
    key_ = std::move(next);
    set_key();
  }
  std::array<unsigned char, kGcmNonceBytes> nonce{};
  for (std::size_t i = 0; i < sizeof frames_; ++i)
    nonce[kGcmNonceBytes - 1 - i] = static_cast<unsigned char>(frames_ >> (8 * i));
  ++frames_;
  check(EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1);
}

void Aead::process(std::span<const std::byte> in, std::byte* out) {
  while (!in.empty()) {
    const auto part = in.first(std::min(in.size(), kMostBytesACall));
    int written = 0;
    check(EVP_CipherUpdate(context_.get(), reinterpret_cast<unsigned char*>(out), &written, octets(part.data()),
                           static_cast<int>(part.size())) == 1);
    LOCKSTEP_ASSERT(static_cast<std::size_t>(written) == part.size());
    in = in.subspan(part.size());
    out += part.size();
  }
}

void Aead::seal(std::byte* tag) {
  LOCKSTEP_ASSERT(use_ == Use::kSeals);
  std::array<unsigned char, kTagBytes> rest{};  // GCM has none
  int written = 0;
  check(EVP_CipherFinal_ex(context_.get(), rest.data(), &written) == 1 && written == 0);
  check(EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, kTagBytes, tag) == 1);
}

bool Aead::open(const std::byte* tag) {
  LOCKSTEP_ASSERT(use_ == Use::kOpens);
  std::array<std::byte, kTagBytes> expected{};
  std::copy_n(tag, kTagBytes, expected.data());
  check(EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, kTagBytes, expected.data()) == 1);
  std::array<unsigned char, kTagBytes> rest{};
  int written = 0;
  if (EVP_CipherFinal_ex(context_.get(), rest.data(), &written) == 1) return true;
  ERR_clear_error();
  return false;
}

std::string Aead::seal_whole(std::string_view plain) {
  std::string sealed(plain.size() + kTagBytes, '\0');
  auto* const out = reinterpret_cast<std::byte*>(sealed.data());
  begin();
  process(std::as_bytes(std::span(plain)), out);
  seal(out + plain.size());
  return sealed;
}

std::optional<std::string> Aead::open_whole(std::string_view sealed) {
  LOCKSTEP_ASSERT(sealed.size() >= kTagBytes);
  const auto bytes = std::as_bytes(std::span(sealed));
  std::string plain(sealed.size() - kTagBytes, '\0');
  begin();
  process(bytes.first(plain.size()), reinterpret_cast<std::byte*>(plain.data()));
  if (!open(bytes.data() + plain.size())) return std::nullopt;
  return plain;
}

}  // namespace lockstep
