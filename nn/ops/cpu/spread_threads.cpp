#include "nn/ops/cpu/spread_threads.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <set>

namespace lockstep::nn::cpu {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(2);

/// Room for 8,192 processors.
using CpuSets = std::array<cpu_set_t, 8>;

/// The calling thread's affinity; all zero if the system does not say.
CpuSets affinity() {
  CpuSets sets = {};
  if (::sched_getaffinity(0, sizeof sets, sets.data()) != 0) return {};
  return sets;
}

std::vector<int> processors_of(const CpuSets& sets) {
  std::vector<int> processors;
  for (int cpu = 0; cpu < static_cast<int>(sizeof sets) * 8; ++cpu)
    if (CPU_ISSET_S(cpu, sizeof sets, sets.data())) processors.push_back(cpu);
  return processors;
}

/// Puts the calling thread there and lets it go wherever it might before.
void move_to(int cpu) {
  const CpuSets before = affinity();
  CpuSets there = {};
  CPU_SET_S(cpu, sizeof there, there.data());
  if (::sched_setaffinity(0, sizeof there, there.data()) == 0) ::sched_setaffinity(0, sizeof before, before.data());
}

}  // namespace

std::vector<int> moves_apart(std::span<const int> on, std::span<const std::vector<int>> allowed) {
  std::vector<int> moves(on.size(), -1);
  std::set<int> taken(on.begin(), on.end()), kept;
  for (std::size_t i = 0; i < on.size(); ++i) {
    if (kept.insert(on[i]).second) continue;
    const auto free = std::ranges::find_if(allowed[i], [&](int cpu) { return !taken.contains(cpu); });
    if (free == allowed[i].end()) continue;
    moves[i] = *free;
    taken.insert(*free);
  }
  return moves;
}

int ThreadSpreader::spread() {
  if (threads_ < 2) return 0;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return 0;
  next_ = now + kInterval;

  const auto count = static_cast<std::size_t>(threads_);
  std::vector<int> on(count, -1);
#pragma omp parallel num_threads(threads_)
  on[static_cast<std::size_t>(omp_get_thread_num())] = ::sched_getcpu();
  const std::set<int> distinct(on.begin(), on.end());
  // A thread that the region did not get, or a system without that call, says -1.
  if (distinct.size() == count || distinct.contains(-1)) return 0;

  std::vector<std::vector<int>> allowed(count);
#pragma omp parallel num_threads(threads_)
  allowed[static_cast<std::size_t>(omp_get_thread_num())] = processors_of(affinity());
  const std::vector<int> moves = moves_apart(on, allowed);
  const auto moved = static_cast<int>(std::ranges::count_if(moves, [](int cpu) { return cpu >= 0; }));
  if (moved == 0) return 0;
#pragma omp parallel num_threads(threads_)
  if (const int cpu = moves[static_cast<std::size_t>(omp_get_thread_num())]; cpu >= 0) move_to(cpu);
  return moved;
}

}  // namespace lockstep::nn::cpu
