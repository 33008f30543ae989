#include "base/stop.h"

#include <csignal>
#include <ctime>

#include <atomic>

#include "base/error.h"
#include "base/status_report.h"

namespace lockstep {
namespace {

// One request may arrive twice: a terminal signals the whole group, and so may whoever passes signals on.
constexpr std::time_t kRepeatSeconds = 1;

std::atomic<int> g_signal{0};
std::atomic<bool> g_deferred{false};
std::atomic<std::time_t> g_first_second{0};
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

extern "C" void on_stop_signal(int number) {
  struct timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  // The time first: a second signal may be handled on another thread before this handler ends.
  std::time_t no_time = 0;
  g_first_second.compare_exchange_strong(no_time, now.tv_sec);
  int no_signal = 0;
  if (!g_signal.compare_exchange_strong(no_signal, number) && now.tv_sec - g_first_second > kRepeatSeconds) {
    std::signal(number, SIG_DFL);
    std::raise(number);
  }
}

}  // namespace

void install_stop_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_stop_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGUSR1, &action, nullptr);
  // Under nohup it stays ignored.
  struct sigaction current = {};
  if (sigaction(SIGHUP, nullptr, &current) == 0 && current.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
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
