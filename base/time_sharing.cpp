#include "base/cpu.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>

#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kSliceNanoseconds = 1'000'000;  // Linux' own: 1.4 ms with two processors, 2.8 with eight

/// What libgomp's wait does once a round.
void pause_once() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

/// From 10 to 140 cycles, by the kind of processor. The least of several readings: this process may be interrupted.
double nanoseconds_per_pause() {
  constexpr int kRounds = 200, kReadings = 5;
  double least = 1e9;
  for (int reading = 0; reading < kReadings; ++reading) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kRounds; ++i) pause_once();
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
    least = std::min(least, taken.count() / kRounds);
  }
  return std::max(least, 0.1);
}

/// Processors in the affinity mask, of which there may be more than a cpu_set_t holds; 0: the system does not say.
int allowed_processors() {
  std::array<unsigned long, 1024> mask = {};
  const long bytes = ::syscall(SYS_sched_getaffinity, 0, sizeof mask, mask.data());
  int count = 0;
  if (bytes > 0)
    for (const unsigned long word : mask) count += __builtin_popcountl(word);
  return count;
}

/// glibc has no call for it. Older kernels take the request and do nothing.
void ask_for_short_slices() {
  struct {
    std::uint32_t size = 48, policy = SCHED_OTHER;
    std::uint64_t flags = 0;
    std::int32_t nice = 0;
    std::uint32_t priority = 0;
    std::uint64_t runtime = kSliceNanoseconds, deadline = 0, period = 0;
  } request;
  if (::sched_getscheduler(0) != SCHED_OTHER) return;  // somebody has chosen
  request.nice = ::getpriority(PRIO_PROCESS, 0);       // the call sets it too
  if (::syscall(SYS_sched_setattr, 0, &request, 0U) != 0) log_debug("this system keeps its time slices");
}

}  // namespace

std::optional<std::string> openmp_spin_count(const EnvLookup& lookup, int processors) {
  if (lookup("GOMP_SPINCOUNT") || lookup("OMP_WAIT_POLICY") || processors < 2) return std::nullopt;
  if (lookup("LD_PRELOAD").value_or("").find("vgpreload") != std::string::npos) return std::nullopt;
  const double rounds = kSpinMicroseconds * 1000 / nanoseconds_per_pause();
  return std::to_string(static_cast<int>(std::clamp(rounds, 100.0, 300'000.0)));
}

void share_processors_well(char** argv) {
  take_signals_on_this_thread();
  ask_for_short_slices();
  const auto spins = openmp_spin_count(env, allowed_processors());
  if (!spins) return;
  set_env("GOMP_SPINCOUNT", *spins);
  // By its own path: /proc/self/exe would be called "exe" by ps and pkill from then on.
  std::string path(PATH_MAX, '\0');
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  path.resize(static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  // Timers of profilers continue, while their handlers are there again only when their libraries have been loaded
  // again.
  const SignalsBlocked across;
  ::execv(path.c_str(), argv);
  log_warn(
      "{} cannot be started again with GOMP_SPINCOUNT={} ({}) → set that variable, or compute is slow beside other "
      "busy programs",
      length > 0 ? path : std::string("this program, which has no /proc/self/exe,"), *spins, errno_text(errno));
  unset_env("GOMP_SPINCOUNT");
}

}  // namespace lockstep
