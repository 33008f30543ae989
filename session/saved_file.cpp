#include "session/saved_file.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

#include "base/text.h"

namespace lockstep::session {

SavedFile saved_file(const std::string& path, Clock::time_point begun) {
  std::error_code unreadable;
  const std::uintmax_t bytes = std::filesystem::file_size(path, unreadable);
  return {.path = path, .bytes = unreadable ? 0 : bytes, .seconds = seconds_between(begun, Clock::now())};
}

std::string describe(const SavedFile& file) {
  return fmt::format("saved {}: {} in {:.2f} s", printable(file.path), human_bytes(static_cast<double>(file.bytes)),
                     file.seconds);
}

}  // namespace lockstep::session
