// What the functions that replace the C library's in a simulated process have in common (world.h: Note [Simulation]).
#pragma once

#include <dlfcn.h>
#include <netinet/in.h>
#include <poll.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "world.h"

namespace lockstep::simulation {

inline World* world = nullptr;
// 0: this thread is none of the simulation's, or no longer.
inline thread_local std::uint32_t self __attribute__((tls_model("initial-exec"))) = 0;
inline std::uint32_t own_process = 0;

/// The C library's function of that name.
template <class Function>
Function* real(Function*& found, const char* name) {
  if (found == nullptr) found = reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
  return found;
}
#define REAL(name)                                                     \
  ([] {                                                                \
    static std::remove_reference_t<decltype(::name)>* found = nullptr; \
    return real(found, #name);                                         \
  }())

inline bool simulated() { return self != 0; }
inline Task& task() { return world->tasks[self]; }

inline void note(const char* call) { std::strncpy(task().doing, call, sizeof task().doing - 1); }

// Waits.

/// Lets others run, if it is drawn: at calls that do not wait.
inline void maybe_pass(const char* call) {
  note(call);
  if (world->turns >= world->next_fault || world->draw_fraction() < world->switches) world->pass(self);
}

/// Until somebody wakes `key`, or `deadline`: then false.
inline bool wait_for(const void* key, std::uint64_t deadline, const char* call) {
  note(call);
  task().state = TaskState::kWaits;
  task().key = key;
  task().deadline = deadline;
  task().woken = 0;
  world->pass(self);
  task().deadline = kNever;
  task().key = nullptr;
  return task().woken != 0;
}

/// Of this process's threads that wait for `key`: one of them, drawn, or all.
inline void wake(const void* key, bool all) {
  std::uint32_t found[kMostTasks], count = 0;
  for (std::uint32_t i = 1; i < world->task_count; ++i) {
    const Task& one = world->tasks[i];
    if (one.process == own_process && one.state == TaskState::kWaits && one.key == key) found[count++] = i;
  }
  if (count == 0) return;
  const std::uint32_t first = all ? 0 : static_cast<std::uint32_t>(world->draw_below(count));
  for (std::uint32_t i = first; i < (all ? count : first + 1); ++i) {
    world->tasks[found[i]].state = TaskState::kRuns;
    world->tasks[found[i]].woken = 1;
    world->tasks[found[i]].key = nullptr;
  }
  world->quiet = false;
}

/// Until look() finds something, or `deadline`: then false.
template <class Look>
inline bool look_until(std::uint64_t deadline, const char* call, Look&& look) {
  for (;;) {
    task().seen = world->changes;
    if (look()) {
      world->quiet = false;
      return true;
    }
    if (world->now >= deadline) return false;
    note(call);
    task().state = TaskState::kLooks;
    task().deadline = deadline;
    world->pass(self);
    task().deadline = kNever;
  }
}

inline std::uint64_t ns_of(const timespec& time) {
  if (time.tv_sec < 0) return 0;
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}
inline timespec timespec_of(std::uint64_t ns) {
  return {.tv_sec = static_cast<time_t>(ns / 1'000'000'000), .tv_nsec = static_cast<long>(ns % 1'000'000'000)};
}
inline bool is_wall(clockid_t clock) {
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}
/// What a clock says when the simulated one begins.
inline std::uint64_t base_of(clockid_t clock) {
  constexpr std::uint64_t kSecond = 1'000'000'000;
  return is_wall(clock) ? kEpochSeconds * kSecond + static_cast<std::uint64_t>(world->clock_ns) : kSecond;
}
/// On the simulated clock, of an absolute time.
inline std::uint64_t moment_of(clockid_t clock, const timespec& time) {
  const std::uint64_t ns = ns_of(time), base = base_of(clock);
  return ns > base ? ns - base : 0;
}
inline std::uint64_t after(std::uint64_t ns) { return world->now + ns; }
inline std::uint64_t after_ms(int ms) { return ms < 0 ? kNever : after(static_cast<std::uint64_t>(ms) * 1'000'000); }

inline void sleep_ns(std::uint64_t ns) {
  // A short sleep on a busy machine is a longer one.
  if (ns < 1'000'000) ns *= 1 + world->draw_below(20);
  wait_for(nullptr, after(ns), "sleep");
}

/// The supervisor looks at which processes are there before this one continues.
inline void settle() {
  if (world->request == Request::kNone) world->request = Request::kSettle;
  world->change();
  note("settle");
  world->pass(self);
}

// Files: what is known of this process's descriptors.

inline constexpr int kMostFiles = 4096;
struct File {
  enum Kind : unsigned char { kPlain, kStream, kTimer } kind = kPlain;
  bool listens = false, far = false;        // kStream; far: the other end is on another host
  bool is_datagram = false;                 // kStream, of which only addresses are asked
  sockaddr_in own = {}, peer = {};          // kStream
  std::uint64_t expires = 0, interval = 0;  // kTimer
};
inline File files[kMostFiles];

inline bool is_stream(int fd) { return fd >= 0 && fd < kMostFiles && files[fd].kind == File::kStream; }
inline bool is_timer(int fd) { return fd >= 0 && fd < kMostFiles && files[fd].kind == File::kTimer; }
inline void forget(int fd) {
  if (fd >= 0 && fd < kMostFiles) files[fd] = {};
}

/// Timers are event counters that are set when their time has come. The next one of this process.
inline std::uint64_t run_timers() {
  std::uint64_t next = kNever;
  for (int fd = 0; fd < kMostFiles; ++fd) {
    if (files[fd].kind != File::kTimer || files[fd].expires == 0) continue;
    if (files[fd].expires <= world->now) {
      const std::uint64_t one = 1;
      raw_syscall(SYS_write, fd, reinterpret_cast<long>(&one), sizeof one);
      files[fd].expires = files[fd].interval > 0 ? world->now + files[fd].interval : 0;
    }
    if (files[fd].expires != 0 && files[fd].expires < next) next = files[fd].expires;
  }
  return next;
}

inline int ready(pollfd* entries, nfds_t count) {
  const timespec none = {};
  return static_cast<int>(raw_syscall(SYS_ppoll, reinterpret_cast<long>(entries), static_cast<long>(count),
                                      reinterpret_cast<long>(&none), 0, 8));
}
inline bool is_ready(int fd, short events) {
  pollfd entry = {.fd = fd, .events = events, .revents = 0};
  return ready(&entry, 1) != 0;
}
inline bool blocks(int fd) { return (raw_syscall(SYS_fcntl, fd, F_GETFL) & O_NONBLOCK) == 0; }
/// Before a call that would wait.
inline void await(int fd, short events, const char* call) {
  if (!is_ready(fd, events)) look_until(kNever, call, [&] { return is_ready(fd, events); });
}
inline long result_of(long raw) {
  if (raw >= 0) return raw;
  errno = static_cast<int>(-raw);
  return -1;
}

template <class Look>
int poll_until(std::uint64_t deadline, const char* call, Look&& look) {
  int count = 0;
  for (;;) {
    const std::uint64_t timer = run_timers();
    const bool found = look_until(timer < deadline ? timer : deadline, call, [&] { return (count = look()) != 0; });
    if (found || world->now >= deadline) break;
  }
  return static_cast<int>(result_of(count));
}

inline int own_host() { return world->processes[own_process].host; }
/// What has been sent on `fd`, or its end, is for the supervisor to deliver.
inline void send_away(int fd) {
  if (is_stream(fd) && files[fd].far) world->traffic = true;
}

/// Whether a write to it fails: it is a file, and disks are full.
bool is_full(int fd);
/// Of streams that were open when this program began.
void adopt_streams();
/// No longer listens.
void close_stream(int fd);

}  // namespace lockstep::simulation
