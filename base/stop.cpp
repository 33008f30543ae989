#include "base/stop.h"

#include <csignal>

#include <atomic>

#include "base/error.h"

namespace lockstep {
namespace {

std::atomic<int> g_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "the handler may only touch lock-free atomics");

extern "C" void on_stop_signal(int number) {
  int expected = 0;
  if (!g_signal.compare_exchange_strong(expected, number)) {
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
}

int stop_signal() noexcept { return g_signal.load(std::memory_order_relaxed); }

void throw_if_stopped(const char* doing) {
  if (const int number = stop_signal(); number != 0)
    throw InterruptedError(number,
                           fmt::format("stopped by {} while {}", number == SIGINT ? "Ctrl-C" : "SIGTERM", doing));
}

}  // namespace lockstep
