#include "block.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fibers.h"
#include "soft_cuda.h"
#include "streams.h"

// CUDA's names, which kernels read. One grid runs at a time: grids_mutex below.
// NOLINTBEGIN(readability-identifier-naming)
uint3 threadIdx{};
uint3 blockIdx{};
dim3 blockDim{};
dim3 gridDim{};
// NOLINTEND(readability-identifier-naming)

namespace lockstep::soft_cuda {

int current_lane = 0;

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 1024;

enum class State : std::uint8_t { kNew, kRunning, kAtBarrier, kInWarp, kDone };

struct Thread {
  State state = State::kNew;
  Fiber* fiber = nullptr;  // where it waits
  const char* what = nullptr;
  std::source_location where;
  unsigned mask = 0;
};

struct Warp {
  unsigned arrived = 0;  // lanes that wait for others
  unsigned ready = 0;    // lanes that wait no longer
  bool mixed = false;    // not all that have arrived came with the same call and mask
  std::array<std::uint64_t, kWarp> brought{};
  std::array<std::uint64_t, kWarp> result{};
};

// The one block that runs.
struct Running {
  const Kernel* kernel = nullptr;
  bool backwards = false;
  unsigned threads = 0;
  unsigned started = 0;  // of the order: see thread_at()
  unsigned limit = 0;    // where starting stops once somebody waits: the end of a warp
  unsigned current = 0;
  std::array<Thread, kMostThreads> thread;
  std::array<uint3, kMostThreads> place;  // of each thread in the block
  std::array<Warp, kMostThreads / kWarp> warp;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> idle;
  Fiber* fiber = nullptr;  // that is entered
  std::exception_ptr fault;
  std::uint64_t early_returns = 0;

  unsigned thread_at(unsigned i) const { return backwards ? threads - 1 - i : i; }
  // After the last thread of the warp of the i-th, in the order.
  unsigned warp_end(unsigned i) const {
    const unsigned first = thread_at(i) / kWarp * kWarp;
    return backwards ? threads - first : std::min(first + kWarp, threads);
  }
  bool nobody_waits() const { return idle.size() + 1 == fibers.size(); }  // one runs
  unsigned next_of(unsigned lanes) const {                                // in the order; one at least
    return static_cast<unsigned>(backwards ? 31 - std::countl_zero(lanes) : std::countr_zero(lanes));
  }
};
Running running;
std::mutex grids_mutex;
bool complained_of_early_returns = false;

std::string text(const uint3& at) { return fmt::format("({}, {}, {})", at.x, at.y, at.z); }

std::string text(const std::source_location& where) {
  const std::string file = where.file_name();
  const auto slash = file.rfind('/');
  return fmt::format("{}:{}", slash == std::string::npos ? file : file.substr(slash + 1), where.line());
}

uint3 place_of(unsigned t) { return running.place[t]; }

void set_current(unsigned t) {
  running.current = t;
  current_lane = static_cast<int>(t % kWarp);
  threadIdx = running.place[t];
}

[[noreturn]] void fail(const std::string& what) {
  throw KernelFault(fmt::format("kernel \"{}\", block {} of {} threads: {}", running.kernel->what, text(blockIdx),
                                running.threads, what));
}

void fiber_main();

Fiber* fresh_fiber() {
  if (running.idle.empty()) {
    running.fibers.push_back(std::make_unique<Fiber>(running.fibers.size()));
    running.idle.push_back(running.fibers.back().get());
  }
  Fiber* const fiber = running.idle.back();
  running.idle.pop_back();
  fiber->prepare(fiber_main);
  return fiber;
}

// The fiber of a lane that waits no longer, which becomes the current one.
Fiber* resume_one(Warp& warp, unsigned first) {
  const unsigned lane = running.next_of(warp.ready);
  warp.ready &= ~(1u << lane);
  running.thread[first + lane].state = State::kRunning;
  set_current(first + lane);
  return running.thread[first + lane].fiber;
}

// Runs threads that have not begun, one after the other on the same stack, until one has to wait.
void fiber_main() {
  for (;;) {
    try {
      while (running.started < running.limit || (running.nobody_waits() && running.started < running.threads)) {
        const unsigned t = running.thread_at(running.started++);
        set_current(t);
        running.thread[t].state = State::kRunning;
        running.kernel->call(running.kernel->arguments);
        running.thread[running.current].state = State::kDone;
      }
    } catch (...) {
      running.fault = std::current_exception();
    }
    Fiber* const self = running.fiber;
    running.idle.push_back(self);
    const unsigned first = running.current / kWarp * kWarp;
    Warp& warp = running.warp[first / kWarp];
    if (warp.ready == 0 || running.fault) {
      self->leave();
    } else {
      running.fiber = resume_one(warp, first);
      self->go_to(*running.fiber);
    }
  }
}

void enter(Fiber* fiber) {
  running.fiber = fiber;
  fiber->enter();
  if (running.fault) std::rethrow_exception(std::exchange(running.fault, nullptr));
}

// Resumes the warp's other lanes; when none of them can run, leaves.
void wait_here() {
  Fiber* const self = running.fiber;
  const unsigned first = running.current / kWarp * kWarp;
  Warp& warp = running.warp[first / kWarp];
  running.thread[running.current].fiber = self;
  running.limit = running.warp_end(running.started - 1);
  if (running.started < running.limit) {
    running.fiber = fresh_fiber();
    self->go_to(*running.fiber);
  } else if (warp.ready != 0) {
    running.fiber = resume_one(warp, first);
    self->go_to(*running.fiber);
  } else {
    self->leave();
  }
}

std::string whereabouts(unsigned t) {
  const Thread& thread = running.thread[t];
  switch (thread.state) {
    case State::kAtBarrier:
    case State::kInWarp: return fmt::format("is in {} ({})", thread.what, text(thread.where));
    case State::kDone: return "has returned";
    default: return "runs";
  }
}

// Runs a warp's lanes until each is done or at a barrier.
void run_warp(unsigned first) {
  const unsigned last = std::min(first + kWarp, running.threads);
  Warp& warp = running.warp[first / kWarp];
  while (warp.ready != 0) enter(resume_one(warp, first));
  for (unsigned t = first; t < last; ++t) {
    const Thread& waiting = running.thread[t];
    if (waiting.state != State::kInWarp) continue;
    for (unsigned other = first; other < last; ++other)
      if ((waiting.mask >> (other - first) & 1u) != 0 && running.thread[other].state != State::kInWarp)
        fail(fmt::format("thread {} waits in {} ({}) for thread {}, which {}", text(place_of(t)), waiting.what,
                         text(waiting.where), text(place_of(other)), whereabouts(other)));
    fail(fmt::format("thread {} waits in {} ({}) with mask {:08x} in vain: others of these lanes came with other masks",
                     text(place_of(t)), waiting.what, text(waiting.where), waiting.mask));
  }
}

// All threads have gone as far as they can. False: all are done.
bool release_barrier() {
  const Thread* first = nullptr;
  unsigned first_index = 0, returned = 0;
  for (unsigned t = 0; t < running.threads; ++t) {
    const Thread& thread = running.thread[t];
    if (thread.state == State::kDone) {
      ++returned;
      continue;
    }
    if (first == nullptr) {
      first = &thread;
      first_index = t;
    } else if (thread.where.line() != first->where.line() || thread.where.file_name() != first->where.file_name()) {
      fail(fmt::format("barriers diverge: thread {} {}, thread {} {}", text(place_of(first_index)),
                       whereabouts(first_index), text(place_of(t)), whereabouts(t)));
    }
  }
  if (first == nullptr) return false;
  if (returned > 0) {
    running.early_returns += returned;
    if (!std::exchange(complained_of_early_returns, true))
      std::fprintf(stderr, "soft CUDA: in kernel \"%s\" %u threads have returned when others wait at %s\n",
                   running.kernel->what, returned, text(first->where).c_str());
  }
  for (unsigned t = 0; t < running.threads; ++t)
    if (running.thread[t].state == State::kAtBarrier) running.warp[t / kWarp].ready |= 1u << (t % kWarp);
  return true;
}

void run_block() {
  running.started = 0;
  for (unsigned t = 0; t < running.threads; ++t) running.thread[t].state = State::kNew;
  for (unsigned w = 0; w * kWarp < running.threads; ++w) {
    running.warp[w].arrived = running.warp[w].ready = 0;
    running.warp[w].mixed = false;
  }
  while (running.started < running.threads) {
    running.limit = running.warp_end(running.started);
    enter(fresh_fiber());
    run_warp(running.thread_at(running.started - 1) / kWarp * kWarp);
  }
  if (running.idle.size() == running.fibers.size()) return;  // nobody waits
  while (release_barrier())
    for (unsigned first = 0; first < running.threads; first += kWarp) run_warp(first);
}

}  // namespace

void check_grid(const char* what, dim3 grid, dim3 block) {
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMostThreads || block.z > 64)
    throw KernelFault(
        fmt::format("kernel \"{}\": no GPU starts blocks of ({}, {}, {}) threads", what, block.x, block.y, block.z));
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    throw KernelFault(
        fmt::format("kernel \"{}\": no GPU starts a grid of ({}, {}, {}) blocks", what, grid.x, grid.y, grid.z));
}

void run_grid(const Kernel& kernel, dim3 grid, dim3 block) {
  const std::lock_guard lock(grids_mutex);
  running.kernel = &kernel;
  running.threads = block.x * block.y * block.z;
  running.early_returns = 0;
  complained_of_early_returns = false;
  blockDim = block;
  gridDim = grid;
  for (unsigned t = 0; t < running.threads; ++t)
    running.place[t] = {t % block.x, t / block.x % block.y, t / block.x / block.y};
  try {
    for (unsigned z = 0; z < grid.z; ++z)
      for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
          blockIdx = {x, y, z};
          running.backwards = ((x ^ y ^ z) & 1u) != 0;
          run_block();
        }
  } catch (...) {
    running.idle.clear();  // stacks of threads that wait are taken back as they are
    for (const auto& fiber : running.fibers) running.idle.push_back(fiber.get());
    throw;
  }
  count_grid(running.early_returns);
}

void fail_thread(const char* what, std::source_location where) {
  fail(fmt::format("thread {}: {} ({})", text(threadIdx), what, text(where)));
}

void sync_block(const char* what, std::source_location where) {
  Thread& self = running.thread[running.current];
  self.state = State::kAtBarrier;
  self.what = what;
  self.where = where;
  wait_here();
}

const std::uint64_t* sync_warp(const char* what, unsigned mask, std::uint64_t brought, std::source_location where) {
  const unsigned first = running.current / kWarp * kWarp;
  const unsigned self_lane = running.current - first;
  Thread& self = running.thread[running.current];
  Warp& warp = running.warp[first / kWarp];
  if ((mask >> self_lane & 1u) == 0) fail_thread(fmt::format("its mask of {} leaves it out", what).c_str(), where);
  const unsigned lanes = running.threads - first;
  if (lanes < kWarp && (mask >> lanes) != 0)
    fail_thread(fmt::format("its mask of {} names lanes that the block does not have", what).c_str(), where);
  self.state = State::kInWarp;
  self.what = what;
  self.where = where;
  self.mask = mask;
  warp.brought[self_lane] = brought;
  const Thread& before = warp.arrived == 0 ? self : running.thread[first + running.next_of(warp.arrived)];
  warp.mixed = warp.mixed || before.mask != mask || before.what != what || before.where.line() != where.line();
  warp.arrived |= 1u << self_lane;
  if ((warp.arrived & mask) != mask) {
    wait_here();
    return warp.result.data();
  }
  for (unsigned i = 0; i < kWarp; ++i) {
    if ((mask >> i & 1u) == 0) continue;
    const Thread& other = running.thread[first + i];
    if (warp.mixed && (other.mask != mask || other.what != what || other.where.line() != where.line()))
      fail_thread(fmt::format("it is in {} with mask {:08x}, but lane {} is in {} ({}) with mask {:08x}", what, mask, i,
                              other.what, text(other.where), other.mask)
                      .c_str(),
                  where);
    warp.result[i] = warp.brought[i];
  }
  warp.arrived &= ~mask;
  if (warp.arrived == 0) warp.mixed = false;
  warp.ready |= mask & ~(1u << self_lane);
  self.state = State::kRunning;
  return warp.result.data();
}

}  // namespace lockstep::soft_cuda
