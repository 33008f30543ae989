#include "base/stop.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <ctime>

#include <array>
#include <atomic>
#include <thread>

#include "base/error.h"
#include "base/signals.h"
#include "base/status_report.h"

namespace lockstep {
namespace {

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
