#include "devices/cpus.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <fstream>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/env.h"

namespace lockstep::devices {
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
  log_warn("{} processes share {} core{} of host {}: they run in time slices, which is slow", processes, cpus.count(),
           cpus.count() == 1 ? "" : "s", host_name());
}

Locality locality_of(const std::string& bus_id, const std::filesystem::path& sysfs) {
  if (bus_id.empty()) return {};
  const auto place = sysfs / "bus/pci/devices" / bus_id;
  Locality found;
  // -1 on machines without NUMA, and where the firmware does not say.
  if (!(std::ifstream(place / "numa_node") >> found.node) || found.node < 0) return {};
  std::string cpus;
  std::getline(std::ifstream(place / "local_cpulist"), cpus);
  found.cpus = parse_ranges(cpus);
  return found;
}

void prefer_memory_of(int node) {
  constexpr std::size_t kMostNodes = 1024;  // the most that Linux can be built for
  constexpr std::size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  if (node < 0 || static_cast<std::size_t>(node) >= kMostNodes) return;
  std::array<unsigned long, kMostNodes / kBits> nodes{};
  const auto bit = static_cast<std::size_t>(node);
  nodes[bit / kBits] = 1UL << (bit % kBits);
  // The kernel ignores the last of the bits whose number it is given.
  if (::syscall(SYS_set_mempolicy, MPOL_PREFERRED, nodes.data(), kMostNodes + 1) != 0)
    log_debug("memory is not taken from NUMA node {}: {}", node, errno_text(errno));
}

}  // namespace lockstep::devices
