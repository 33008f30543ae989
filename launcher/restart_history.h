// What became of a job's attempts, in a file of the launcher's own: metrics are cut back to the checkpoint on resume.
#pragma once

#include <string>

#include "base/json.h"
#include "base/scope.h"

namespace lockstep::launcher {

/// One JSON object per line, appended: a job that is submitted again continues its file. Not thread-safe.
class RestartHistory {
 public:
  /// Keeps nothing.
  RestartHistory() = default;
  /// DIRECTORY/restarts.jsonl, in a directory that exists. Throws IoError where it cannot be written.
  explicit RestartHistory(const std::string& directory);

  /// Adds `{"event":EVENT,"time":…}` with the members of `more`; the time is UTC, as 2026-01-31T12:00:00.123Z. Returns
  /// an error for the user, once, if that fails.
  std::string add(const char* event, std::initializer_list<std::pair<const char*, JsonText>> more);

 private:
  std::string path_;
  UniqueFd file_;
};

}  // namespace lockstep::launcher
