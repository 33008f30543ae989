#include "comm/hosts/message.h"

#include "base/error.h"
#include "base/text.h"

namespace lockstep::comm {

std::string AbortReason::encode() const {
  constexpr std::size_t kMostRemedy = 200;
  const std::string last = std::string(utf8_prefix(remedy, kMostRemedy));
  std::string bytes(1, static_cast<char>(kind));
  bytes += utf8_prefix(what, kMostBytes - 2 - last.size());
  return bytes + '\n' + last;
}

std::optional<AbortReason> AbortReason::decode(std::string_view bytes) {
  const auto end = bytes.find('\n');
  if (bytes.empty() || end == std::string_view::npos || end == 0) return std::nullopt;
  const auto kind = static_cast<Kind>(bytes[0]);
  if (kind < Kind::kOutOfStep || kind > Kind::kTimeout) return std::nullopt;
  return AbortReason{kind, std::string(bytes.substr(1, end - 1)), std::string(bytes.substr(end + 1))};
}

std::optional<AbortReason> AbortReason::of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const OutOfStepError& error) {
    return AbortReason{Kind::kOutOfStep, error.what(), error.remedy()};
  } catch (const DeviceError& error) {
    return AbortReason{Kind::kDevice, error.what(), error.remedy()};
  } catch (const TimeoutError& error) {
    return AbortReason{Kind::kTimeout, error.what(), error.remedy()};
  } catch (...) {
    return std::nullopt;
  }
}

void AbortReason::raise() const {
  switch (kind) {
    case Kind::kOutOfStep: throw OutOfStepError(what, remedy);
    case Kind::kTimeout: throw TimeoutError(what, remedy);
    case Kind::kDevice: break;
  }
  throw DeviceError(what, remedy);
}

}  // namespace lockstep::comm
