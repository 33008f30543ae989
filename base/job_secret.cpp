#include "lockstep/base/job_secret.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <array>
#include <cerrno>
#include <utility>

#include "base/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kSecretBytes = 16;
constexpr std::size_t kLeastCharacters = 16;
constexpr std::size_t kMostCharacters = 1024;

}  // namespace

JobSecret JobSecret::random() {
  std::string text;
  for (const char byte : random_bytes(kSecretBytes)) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return of_text(std::move(text));
}

JobSecret JobSecret::from(const EnvLookup& lookup) {
  auto text = lookup(kJobSecretVariable);
  if (!text) return {};
  if (text->size() < kLeastCharacters || text->size() > kMostCharacters)
    throw UsageError(fmt::format("{} in the environment has {} characters, where {} to {} are possible",
                                 kJobSecretVariable, text->size(), kLeastCharacters, kMostCharacters),
                     "make one with `openssl rand -hex 16` and give it to all ranks, or unset it");
  return of_text(*std::move(text));
}

JobSecret JobSecret::of_text(std::string text) {
  JobSecret secret;
  secret.text_ = std::move(text);
  return secret;
}

std::string JobSecret::sign(std::string_view message) const {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int length = 0;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(message.data());
  LOCKSTEP_ASSERT(HMAC(EVP_sha256(), text_.data(), static_cast<int>(text_.size()), bytes, message.size(), digest.data(),
                       &length) != nullptr);
  return {reinterpret_cast<const char*>(digest.data()), length};
}

std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  for (std::size_t got = 0; got < count;) {
    const ssize_t more = ::getrandom(bytes.data() + got, count - got, 0);
    if (more > 0)
      got += static_cast<std::size_t>(more);
    else if (errno != EINTR)
      throw DeviceError("the system has no random numbers: " + errno_text(errno), "look at this host's kernel");
  }
  return bytes;
}

bool operator==(const JobSecret& a, const JobSecret& b) { return equal_in_constant_time(a.text_, b.text_); }

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace lockstep
