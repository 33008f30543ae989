// Log lines on stderr, one line each: "[rank 1 host a] text". Thread-safe.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <string>
#include <string_view>

#include "lockstep/base/run_main.h"

namespace lockstep {

/// Who this process is, for the prefix. With world_size 1 lines carry no prefix.
void set_log_identity(int rank, int world_size, std::string host);

/// set_log_level() where nobody has called it.
void choose_log_level(LogLevel level);
bool log_enabled(LogLevel level);

/// Runs before each line is written: the progress bar clears itself there. nullptr removes it.
void set_log_hook(void (*before_line)());

/// Gets each warning too, on the thread that logs it; it may not log. Empty removes it.
void set_warning_observer(std::function<void(std::string_view text)> observer);

void log_text(LogLevel level, std::string_view text);

template <class... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(LogLevel::kDebug)) log_text(LogLevel::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(LogLevel::kInfo)) log_text(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_warn(fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(LogLevel::kWarn)) log_text(LogLevel::kWarn, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(LogLevel::kError)) log_text(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace lockstep
