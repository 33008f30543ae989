#include "comm/cpus.h"

#include <sched.h>

#include <atomic>
#include <cerrno>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"

namespace lockstep::comm {
namespace {

static_assert(std::is_trivially_copyable_v<CpuMask>);

// The kernel takes a mask of any multiple of a long; cpu_set_t alone is too small for the largest machines.
constexpr std::size_t kSets = CpuMask().size() / CPU_SETSIZE;

}  // namespace

std::string ranges_text(const CpuMask& cpus) {
  std::string text;
  for (std::size_t first = 0; first < cpus.size(); ++first) {
    if (!cpus[first]) continue;
    std::size_t last = first;
    while (last + 1 < cpus.size() && cpus[last + 1]) ++last;
    if (!text.empty()) text += ',';
    text += first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last);
    first = last;
  }
  return text;
}

CpuMask parse_ranges(std::string_view text) {
  CpuMask cpus;
  for (const auto& piece : split(trim(text), ',')) {
    const auto dash = piece.find('-');
    const auto first = parse_int(piece.substr(0, dash));
    const auto last = dash == std::string::npos ? first : parse_int(piece.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || static_cast<std::size_t>(*last) >= cpus.size()) return {};
    for (auto cpu = static_cast<std::size_t>(*first); cpu <= static_cast<std::size_t>(*last); ++cpu) cpus.set(cpu);
  }
  return cpus;
}

CpuMask allowed_cpus() {
  std::vector<cpu_set_t> sets(kSets);
  CpuMask cpus;
  if (::sched_getaffinity(0, sets.size() * sizeof(cpu_set_t), sets.data()) != 0) {
    for (std::size_t cpu = 0; cpu < std::thread::hardware_concurrency(); ++cpu) cpus.set(cpu);
    return cpus;
  }
  for (std::size_t cpu = 0; cpu < cpus.size(); ++cpu)
    cpus[cpu] = CPU_ISSET(cpu % CPU_SETSIZE, &sets[cpu / CPU_SETSIZE]);
  return cpus;
}

void set_allowed_cpus(const CpuMask& cpus) {
  std::vector<cpu_set_t> sets(kSets);
  for (std::size_t cpu = 0; cpu < cpus.size(); ++cpu)
    if (cpus[cpu]) CPU_SET(cpu % CPU_SETSIZE, &sets[cpu / CPU_SETSIZE]);
  if (::sched_setaffinity(0, sets.size() * sizeof(cpu_set_t), sets.data()) != 0)
    throw DeviceError(fmt::format("cannot bind to the chosen cores: {}", errno_text(errno)),
                      "LOCKSTEP_BIND=none runs without binding");
}

void warn_of_crowd(int processes, const CpuMask& cpus) {
  static std::atomic_flag warned = ATOMIC_FLAG_INIT;
  if (warned.test_and_set() || env("LOCKSTEP_LAUNCHER")) return;
  log_warn("{} processes share {} core{} of host {}: they take turns, which is slow", processes, cpus.count(),
           cpus.count() == 1 ? "" : "s", host_name());
}

}  // namespace lockstep::comm
