// Messages of lockstep to people: warnings of the library, and more from lockstep's own programs.
#pragma once

#include <functional>
#include <string_view>

namespace lockstep {

enum class LogLevel : int { kDebug, kInfo, kWarn, kError };

/// Of the process: lines below it are left out. kWarn where nobody has chosen; run_main(), open_session() and train()
/// choose kInfo then. Joining a job as another rank than 0 sets it to kWarn.
void set_log_level(LogLevel level);

/// Takes lines in place of stderr: one line each, without an end, the rank or "warning: ". It is called on the thread
/// that has something to say, by one thread at a time; it must not throw, nor call lockstep.
using LogReceiver = std::function<void(LogLevel level, std::string_view line)>;
/// From now on. An empty one: stderr. Reports of crashes always go to stderr.
void set_log_receiver(LogReceiver receiver);

}  // namespace lockstep
