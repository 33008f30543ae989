#include "nn/ops/cpu/spread_threads.h"

#include <sched.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <array>

#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(2);

/// For up to 8,192 processors.
using CpuSets = std::array<cpu_set_t, 8>;

/// The calling thread's affinity; all zero if the system does not say.
CpuSets affinity() {
  CpuSets sets = {};
  if (::sched_getaffinity(0, sizeof sets, sets.data()) != 0) return {};
  return sets;
}

/// Replaces what `processors` holds by the processors of `sets`, ascending.
void list_processors(const CpuSets& sets, std::vector<int>& processors) {
  processors.clear();
  for (int cpu = 0; cpu < static_cast<int>(sizeof sets) * 8; ++cpu)
    if (CPU_ISSET_S(cpu, sizeof sets, sets.data())) processors.push_back(cpu);
}

bool contains(std::span<const int> values, int value) { return std::ranges::find(values, value) != values.end(); }

/// Puts the calling thread there and lets it go wherever it might before.
void move_to(int cpu) {
  const CpuSets before = affinity();
  CpuSets there = {};
  CPU_SET_S(cpu, sizeof there, there.data());
  if (::sched_setaffinity(0, sizeof there, there.data()) == 0) ::sched_setaffinity(0, sizeof before, before.data());
}

}  // namespace

void moves_apart(std::span<const int> on, std::span<const std::vector<int>> allowed, std::span<int> moves) {
  std::ranges::fill(moves, -1);
  for (std::size_t i = 0; i < on.size(); ++i) {
    if (!contains(on.first(i), on[i])) continue;
    const auto free =
        std::ranges::find_if(allowed[i], [&](int cpu) { return !contains(on, cpu) && !contains(moves, cpu); });
    if (free != allowed[i].end()) moves[i] = *free;
  }
}

ThreadSpreader::ThreadSpreader(int threads, Processor processor) : threads_(threads), processor_(processor) {
  if (threads_ < 2) return;
  const auto count = static_cast<std::size_t>(threads_);
  on_.resize(count);
  moves_.resize(count);
  allowed_.resize(count);
  for (std::vector<int>& processors : allowed_) processors.reserve(static_cast<std::size_t>(::get_nprocs_conf()));
}

int ThreadSpreader::spread() {
  if (threads_ < 2) return 0;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return 0;
  next_ = now + kInterval;

  std::ranges::fill(on_, -1);
  on_threads(threads_, [&](int thread, int) { on_[static_cast<std::size_t>(thread)] = processor_(); });
  // A thread that the region did not get, or a system without that call, says -1.
  if (contains(on_, -1)) return 0;
  bool distinct = true;
  for (std::size_t i = 1; i < on_.size(); ++i) distinct = distinct && !contains(std::span(on_).first(i), on_[i]);
  if (distinct) return 0;

  on_threads(threads_,
             [&](int thread, int) { list_processors(affinity(), allowed_[static_cast<std::size_t>(thread)]); });
  moves_apart(on_, allowed_, moves_);
  const auto moved = static_cast<int>(std::ranges::count_if(moves_, [](int cpu) { return cpu >= 0; }));
  if (moved == 0) return 0;
  on_threads(threads_, [&](int thread, int) {
    if (const int cpu = moves_[static_cast<std::size_t>(thread)]; cpu >= 0) move_to(cpu);
  });
  return moved;
}

}  // namespace lockstep::nn::cpu
