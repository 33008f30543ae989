#include "base/signals.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <ctime>
#include <thread>

#include "base/error.h"
#include "base/status_report.h"

namespace lockstep {
namespace {

// A frame with AMX's registers takes 11 KB, and with less than that on any thread the kernel refuses them to the
// process.
constexpr std::size_t kStackBytes = 64 * 1024;

thread_local bool takes_none = false;  // of what others send, for as long as the thread lives
sigset_t mask_before;                  // of the thread that called keep_signals_off_this_thread() first

/// Those that other processes and timers send. Not what a thread itself causes by what it does, and not what stops a
/// process for its terminal.
sigset_t from_outside() noexcept {
  sigset_t set;
  ::sigfillset(&set);
  for (const int number :
       {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPIPE, SIGXFSZ, SIGTSTP, SIGTTIN, SIGTTOU})
    ::sigdelset(&set, number);
  return set;
}

/// Handlers that are there, of other libraries too, run on the stacks of use_alternate_signal_stack().
void move_handlers_off_stacks() noexcept {
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action = {};
    if (::sigaction(number, nullptr, &action) != 0 || (action.sa_flags & SA_ONSTACK) != 0) continue;
    if ((action.sa_flags & SA_SIGINFO) == 0 && (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN)) continue;
    action.sa_flags |= SA_ONSTACK;
    ::sigaction(number, &action, nullptr);
  }
}

bool is_limited(int resource) {
  struct rlimit limit = {};
  return ::getrlimit(static_cast<__rlimit_resource>(resource), &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}

bool has_handler(int number) noexcept {
  struct sigaction action = {};
  return ::sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN;
}

/// Gives each thread's stack back when the thread ends. A key of its own and no thread_local object: that is registered
/// on the heap, in whatever step the thread first gets to run, and ends the process where there is no memory.
class StackKey {
 public:
  StackKey() noexcept : made_(::pthread_key_create(&key_, release) == 0) {}
  ~StackKey() {
    if (made_) ::pthread_key_delete(key_);
  }
  StackKey(const StackKey&) = delete;
  StackKey& operator=(const StackKey&) = delete;

  bool set(void* memory) const noexcept { return made_ && ::pthread_setspecific(key_, memory) == 0; }

 private:
  static void release(void* memory) noexcept {
    stack_t present = {};
    if (::sigaltstack(nullptr, &present) != 0 || present.ss_sp != memory) return;
    const stack_t none = {.ss_sp = nullptr, .ss_flags = SS_DISABLE, .ss_size = 0};
    if (::sigaltstack(&none, nullptr) == 0) ::munmap(memory, kStackBytes);
  }

  pthread_key_t key_ = 0;
  bool made_;
};

void restore_in_child() noexcept {
  if (takes_none) ::pthread_sigmask(SIG_SETMASK, &mask_before, nullptr);
  takes_none = false;
}

// One request may arrive twice: a terminal signals the whole group, and so may whoever passes signals on.
constexpr std::time_t kRepeatSeconds = 1;
constexpr std::array kStops = {SIGINT, SIGTERM, SIGUSR1, SIGHUP};

std::atomic<int> g_signal{0};
std::atomic<bool> g_deferred{false};
std::atomic<std::time_t> g_first_second{0};
std::atomic<bool> g_ignores_hangup{false};
std::atomic<pid_t> g_watching{0};  // the process whose signals a thread waits for
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<std::time_t>::is_always_lock_free,
              "the handler may only touch lock-free atomics");

const char* name_of_stop(int number) {
  switch (number) {
    case SIGINT: return "Ctrl-C";
    case SIGUSR1: return "SIGUSR1";
    case SIGHUP: return "SIGHUP";
    default: return "SIGTERM";
  }
}

/// Also a handler: of threads that were there before, and of processes that were forked.
extern "C" void on_stop_signal(int number) {
  struct timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  // The time first: a second signal may be handled on another thread before this handler ends.
  std::time_t no_time = 0;
  g_first_second.compare_exchange_strong(no_time, now.tv_sec);
  int no_signal = 0;
  if (!g_signal.compare_exchange_strong(no_signal, number) && now.tv_sec - g_first_second > kRepeatSeconds) {
    std::signal(number, SIG_DFL);
    sigset_t ending;
    sigemptyset(&ending);
    sigaddset(&ending, number);
    std::raise(number);
    pthread_sigmask(SIG_UNBLOCK, &ending, nullptr);
  }
}

/// Of the thread that takes this process's signals: the stops by waiting for them, all others as they come.
void take_signals() {
  sigset_t stops;
  sigemptyset(&stops);
  for (const int number : kStops) sigaddset(&stops, number);
  pthread_sigmask(SIG_SETMASK, &stops, nullptr);
  for (;;) {
    int number = 0;
    if (sigwait(&stops, &number) == 0 && !(number == SIGHUP && g_ignores_hangup)) on_stop_signal(number);
  }
}

}  // namespace

void use_alternate_signal_stack() noexcept {
  static const StackKey key;
  stack_t present = {};
  if (::sigaltstack(nullptr, &present) != 0 || (present.ss_flags & SS_DISABLE) == 0) return;
  void* const memory =
      ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) return;
  const stack_t stack = {.ss_sp = memory, .ss_flags = 0, .ss_size = kStackBytes};
  if (!key.set(memory) || ::sigaltstack(&stack, nullptr) != 0) ::munmap(memory, kStackBytes);
}

void keep_signals_off_this_thread() noexcept {
  use_alternate_signal_stack();
  move_handlers_off_stacks();
  if (takes_none) return;
  sigset_t wanted = from_outside();
  if (has_handler(SIGPROF)) ::sigdelset(&wanted, SIGPROF);
  static const bool first = [&wanted] {
    ::pthread_sigmask(SIG_BLOCK, &wanted, &mask_before);
    ::pthread_atfork(nullptr, nullptr, restore_in_child);
    return true;
  }();
  static_cast<void>(first);
  ::pthread_sigmask(SIG_BLOCK, &wanted, nullptr);
  takes_none = true;
}

void take_signals_on_this_thread() noexcept {
  const sigset_t all = from_outside();
  ::pthread_sigmask(SIG_UNBLOCK, &all, nullptr);
  takes_none = false;
}

BrokenPipesTolerated::BrokenPipesTolerated() noexcept {
  sigset_t pending;
  ::sigpending(&pending);
  pending_before_ = ::sigismember(&pending, SIGPIPE) == 1;
  sigset_t pipes;
  ::sigemptyset(&pipes);
  ::sigaddset(&pipes, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipes, &before_);
}

BrokenPipesTolerated::~BrokenPipesTolerated() {
  sigset_t pipes;
  ::sigemptyset(&pipes);
  ::sigaddset(&pipes, SIGPIPE);
  const timespec now = {};
  if (!pending_before_) ::sigtimedwait(&pipes, nullptr, &now);
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

SignalsBlocked::SignalsBlocked() noexcept {
  if (takes_none) return;
  const sigset_t wanted = from_outside();
  blocks_ = ::pthread_sigmask(SIG_BLOCK, &wanted, &before_) == 0;
}

namespace detail {

void begin_thread() noexcept {
  use_alternate_signal_stack();
  takes_none = true;
}

void refuse_thread(const std::system_error& error) {
  const bool limits_memory = is_limited(RLIMIT_AS) || is_limited(RLIMIT_DATA);
  throw DeviceError(fmt::format("no more threads can be started: {}", error.code().message()),
                    limits_memory ? "raise ulimit -v and ulimit -d, of which each thread takes its stack (ulimit -s)"
                                  : "raise ulimit -u and the control group's pids.max, or end other processes");
}

}  // namespace detail

void watch_for_stops() {
  struct sigaction action = {};
  action.sa_handler = on_stop_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  // Under nohup it stays ignored.
  struct sigaction current = {};
  g_ignores_hangup = sigaction(SIGHUP, nullptr, &current) == 0 && current.sa_handler == SIG_IGN;
  for (const int number : kStops)
    if (number != SIGHUP || !g_ignores_hangup) sigaction(number, &action, nullptr);
  keep_signals_off_this_thread();
  if (g_watching.exchange(getpid()) == getpid()) return;
  start_thread(take_signals).detach();
}

int stop_request() noexcept { return g_signal.load(std::memory_order_relaxed); }

int stop_signal() noexcept { return g_deferred.load(std::memory_order_relaxed) ? 0 : stop_request(); }

DeferredStops::DeferredStops() noexcept {
  g_deferred = true;
  report_status({.kind = StatusReport::Kind::kDefersStops});
}
DeferredStops::~DeferredStops() { g_deferred = false; }

void throw_if_stopped(const char* doing) {
  if (const int number = stop_signal(); number != 0)
    throw InterruptedError(number, fmt::format("stopped by {} while {}", name_of_stop(number), doing));
}

}  // namespace lockstep
