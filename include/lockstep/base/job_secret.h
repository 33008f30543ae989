// The secret that only the processes of one job know.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "lockstep/base/env.h"

namespace lockstep {

/// The variable in which processes of a job find its secret. It goes into the environment of children and through
/// channels of lockstep's own, never onto a command line, and never through other programs' messages.
inline constexpr const char* kJobSecretVariable = "LOCKSTEP_JOB_SECRET";

/// A key that proofs are made with (base/handshake.h). The empty one is that of a job without a secret: its proofs show
/// only that the other side has none either.
class JobSecret {
 public:
  JobSecret() = default;
  /// 128 bits of random_bytes(), as 32 hexadecimal digits.
  static JobSecret random();
  /// kJobSecretVariable; the empty secret where it is not set. Throws UsageError, without the value, for fewer than 16
  /// characters or more than 1024: an empty value too is a mistake, not a wish to have none.
  static JobSecret from(const EnvLookup& lookup);
  /// Any text: nothing checks it.
  static JobSecret of_text(std::string text);

  bool empty() const { return text_.empty(); }
  /// For children's environments and for channels; nothing else shows it.
  const std::string& text() const { return text_; }
  /// HMAC-SHA-256 (RFC 2104) of `message`, 32 bytes.
  std::string sign(std::string_view message) const;
  /// A secret for one purpose, derived from this one; this one cannot be derived from it.
  JobSecret derive(std::string_view purpose) const { return of_text(sign(purpose)); }

  friend bool operator==(const JobSecret& a, const JobSecret& b);

 private:
  std::string text_;
};

/// From the system's generator. Throws DeviceError where it has none.
std::string random_bytes(std::size_t count);
/// Of two of one length: takes as long whether or not, and wherever, they differ.
bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace lockstep
