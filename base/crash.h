// What a process leaves when it crashes: the signal and a backtrace, with names for its addresses.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

// The first line begins and ends with these, those of the frames begin with the third.
inline constexpr std::string_view kCrashedBy = "crashed by ", kBacktraceFollows = ", in:", kFrameIndent = "    ";

/// SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT print one line, the program's build and a backtrace to stderr before
/// they end the process as they would have: with the same signal, and with a core file where there is one. A signal for
/// which the program has a handler of its own, or that it ignores, is left alone. The handler runs on the alternate
/// stacks of threads that have one (base/signals.h), as the calling thread does from now on, so that a stack overflow
/// there is seen. Idempotent.
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

/// What symbol tables and debug information know of an address.
struct Symbol {
  std::string name;          // of the function, mangled; empty: not known
  std::uintptr_t begin = 0;  // its address; 0: not known
  std::string line;          // "FILE:LINE"; empty: not known
};

/// By libbacktrace, which comes with GCC; nothing in a build without it.
Symbol symbol_at(std::uintptr_t address);

/// As C++ writes it; `name` itself where it is none of C++'s.
std::string demangled(const char* name);

/// A line for each of them, "    FUNCTION+0x1f at FILE:LINE in BINARY(+0x1234)", with as much of it as symbol tables
/// and debug information say; BINARY(+OFFSET) is what addr2line takes. The first address is where a thread stopped, the
/// others are those to which calls return. Takes memory and reads files: not for signal handlers.
std::string named_frames(std::span<void* const> addresses);

}  // namespace lockstep
