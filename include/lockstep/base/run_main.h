// The main() of a program whose ranks belong together, and its messages to people: warnings of the library, and more
// from lockstep's own programs.
#pragma once

#include <functional>
#include <string_view>
#include <type_traits>

namespace lockstep {

namespace detail {
int run_main(const std::function<int()>& program);
}

/// Runs `program`, which may return an exit code, and returns that: `int main() { return lockstep::run_main(train); }`.
/// What it throws becomes one line on standard error, "what → remedy", and the process ends with Error::code(), or with
/// ExitCode::kInternal for other exceptions. It ends at once, without handlers of exit(): they might wait for ranks
/// that are gone. Errors that another rank has reported (PeerError) print nothing.
template <class F>
int run_main(F&& program) {
  return detail::run_main([&]() -> int {
    if constexpr (std::is_void_v<std::invoke_result_t<F&>>) {
      program();
      return 0;
    } else {
      return program();
    }
  });
}

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
