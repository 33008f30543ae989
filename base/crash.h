// What a process leaves when it crashes: the signal and a backtrace.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

namespace lockstep {

// The first line begins and ends with these, those of the frames begin with the third.
inline constexpr std::string_view kCrashedBy = "crashed by ", kBacktraceFollows = ", in:", kFrameIndent = "    ";

/// SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT print one line and a backtrace to stderr before they end the process as
/// they would have: with the same signal, and with a core file where there is one. A signal for which the program has a
/// handler of its own, or that it ignores, is left alone. The handler runs on the alternate stacks of threads that
/// have one (base/signals.h), as the calling thread does from now on, so that a stack overflow there is seen.
/// Idempotent.
void install_crash_handlers() noexcept;

/// Where the handler notes the crash besides: words of a mapped file, and a descriptor open at the end of it, to which
/// the backtrace is written. All must stay for as long as the process lives.
struct CrashRecord {
  std::atomic<std::int32_t>* signal = nullptr;
  std::atomic<std::uint64_t>* fault_address = nullptr;
  int fd = -1;
  int pid = 0;  // the process whose it is: what it has forked has none
};
void record_crashes_in(const CrashRecord& record) noexcept;

}  // namespace lockstep
