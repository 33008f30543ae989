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
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fibers.h"
#include "races.h"
#include "soft_cuda.h"
#include "streams.h"

// CUDA's names, which kernels read. One grid runs at a time: grids_mutex below.
// NOLINTBEGIN(readability-identifier-naming)
#define PLACE __attribute__((section("lockstep_places"))) constinit
PLACE uint3 threadIdx{};
PLACE uint3 blockIdx{};
PLACE dim3 blockDim{};
PLACE dim3 gridDim{};
// NOLINTEND(readability-identifier-naming)

extern "C" char __start_lockstep_places;  // NOLINT: the linker's
extern "C" char __stop_lockstep_places;   // NOLINT

namespace lockstep::soft_cuda {

PLACE int current_lane = 0;
unsigned current_thread = 0;

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
};
// Of each warp, for its lanes to read: what is not the kernel's memory either.
PLACE std::uint64_t warp_results[kMostThreads / kWarp][kWarp] = {};
#undef PLACE

// The threads of a block warp by warp, the warps in any order, and the lanes of each up or down.
struct Order {
  unsigned threads = 0;
  bool backwards = false;
  std::array<std::uint16_t, kMostThreads> thread;
  std::array<std::uint16_t, kMostThreads> warp_end;      // after the last thread of the i-th one's warp
  std::array<std::uint16_t, kMostThreads / kWarp> warp;  // their first threads
};

// The one block that runs.
struct Running {
  const Kernel* kernel = nullptr;
  bool is_watched = false;
  std::array<Order, 4> orders;  // few: making one takes as long as a small block
  const Order* order = nullptr;
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

  unsigned thread_at(unsigned i) const { return order->thread[i]; }
  unsigned warp_end(unsigned i) const { return order->warp_end[i]; }
  bool nobody_waits() const { return idle.size() + 1 == fibers.size(); }  // one runs
  unsigned next_of(unsigned lanes) const {                                // in the order; one at least
    return static_cast<unsigned>(order->backwards ? 31 - std::countl_zero(lanes) : std::countr_zero(lanes));
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

uint3 block_at(std::uint64_t index) {
  const std::uint64_t row = index / gridDim.x;
  return {static_cast<unsigned>(index % gridDim.x), static_cast<unsigned>(row % gridDim.y),
          static_cast<unsigned>(row / gridDim.y)};
}

uint3 place_of(unsigned t) { return running.place[t]; }

void set_current(unsigned t) {
  running.current = current_thread = t;
  current_lane = static_cast<int>(t % kWarp);
  threadIdx = running.place[t];
}

KernelFault fault_of(const std::string& what) {
  return KernelFault(fmt::format("kernel \"{}\", block {} of {} threads: {} (LOCKSTEP_SOFT_SEED={})",
                                 running.kernel->what, text(blockIdx), running.threads, what, machine().seed));
}

[[noreturn]] void fail(const std::string& what) { throw fault_of(what); }

void make_order(Order& order) {
  const unsigned warps = (running.threads + kWarp - 1) / kWarp;
  std::uint64_t random = random_for_grids();
  order.threads = running.threads;
  order.backwards = (random >> 63) != 0;
  for (unsigned w = 0; w < warps; ++w) {
    const auto at = static_cast<unsigned>(random % (w + 1));
    random = random * 6364136223846793005u + 1442695040888963407u;
    order.warp[w] = order.warp[at];
    order.warp[at] = static_cast<std::uint16_t>(w * kWarp);
  }
  unsigned i = 0;
  for (unsigned w = 0; w < warps; ++w) {
    const unsigned first = order.warp[w], lanes = std::min(kWarp, running.threads - first), begin = i;
    for (unsigned lane = 0; lane < lanes; ++lane, ++i) {
      order.thread[i] = static_cast<std::uint16_t>(first + (order.backwards ? lanes - 1 - lane : lane));
      order.warp_end[i] = static_cast<std::uint16_t>(begin + lanes);
    }
  }
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

std::string location_of(unsigned t) {
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
                         text(waiting.where), text(place_of(other)), location_of(other)));
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
                       location_of(first_index), text(place_of(t)), location_of(t)));
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
  if (running.is_watched) watch_barrier();
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
  while (release_barrier()) {
    running.order = &running.orders[random_for_grids() % running.orders.size()];
    for (unsigned first = 0, w = 0; first < running.threads; first += kWarp, ++w) run_warp(running.order->warp[w]);
  }
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

void forget_orders() {
  const std::lock_guard lock(grids_mutex);
  for (Order& order : running.orders) order.threads = 0;
}

void run_grid(const Kernel& kernel, dim3 grid, dim3 block) {
  const std::lock_guard lock(grids_mutex);
  running.kernel = &kernel;
  running.threads = block.x * block.y * block.z;
  running.early_returns = 0;
  running.is_watched = begin_watch(kernel, grid, block);
  for (Order& order : running.orders)
    if (order.threads != running.threads) make_order(order);
  make_order(running.orders[random_for_grids() % running.orders.size()]);
  complained_of_early_returns = false;
  blockDim = block;
  gridDim = grid;
  for (unsigned t = 0; t < running.threads; ++t)
    running.place[t] = {t % block.x, t / block.x % block.y, t / block.x / block.y};
  try {
    const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z, first = random_for_grids() % blocks;
    std::uint64_t step = 1 + random_for_grids() % blocks;
    while (std::gcd(step, blocks) != 1) ++step;
    step %= blocks;
    for (std::uint64_t i = 0, at = first; i < blocks; ++i, at = at + step < blocks ? at + step : at + step - blocks) {
      blockIdx = block_at(at);
      running.order = &running.orders[random_for_grids() % running.orders.size()];
      if (running.is_watched && !watch_block(at)) {
        end_watch();
        running.is_watched = false;
      }
      if (!running.is_watched) poison_shared(kernel.function);
      run_block();
    }
    if (running.is_watched) end_watch();
  } catch (...) {
    if (running.is_watched) end_watch();
    running.idle.clear();  // stacks of threads that wait are taken back as they are
    for (const auto& fiber : running.fibers) running.idle.push_back(fiber.get());
    throw;
  }
  count_grid(running.early_returns);
}

void abandon_thread(const std::string& what) {
  running.fault = std::make_exception_ptr(fault_of(what));
  running.fiber->leave();
  std::abort();  // nobody comes back
}

std::string thread_text(unsigned thread) { return text(place_of(thread)); }
std::string block_text(std::uint64_t index) { return text(block_at(index)); }

std::uintptr_t places_begin() { return reinterpret_cast<std::uintptr_t>(&__start_lockstep_places); }
std::size_t places_bytes() { return reinterpret_cast<std::uintptr_t>(&__stop_lockstep_places) - places_begin(); }

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

const std::uint64_t* sync_warp(const char* what, unsigned mask, std::uint64_t brought, std::source_location where,
                               bool orders_memory) {
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
    return warp_results[first / kWarp];
  }
  for (unsigned i = 0; i < kWarp; ++i) {
    if ((mask >> i & 1u) == 0) continue;
    const Thread& other = running.thread[first + i];
    if (warp.mixed && (other.mask != mask || other.what != what || other.where.line() != where.line()))
      fail_thread(fmt::format("it is in {} with mask {:08x}, but lane {} is in {} ({}) with mask {:08x}", what, mask, i,
                              other.what, text(other.where), other.mask)
                      .c_str(),
                  where);
    warp_results[first / kWarp][i] = warp.brought[i];
  }
  if (running.is_watched && orders_memory) watch_warp_barrier(first, mask);
  warp.arrived &= ~mask;
  if (warp.arrived == 0) warp.mixed = false;
  warp.ready |= mask & ~(1u << self_lane);
  self.state = State::kRunning;
  return warp_results[first / kWarp];
}

}  // namespace lockstep::soft_cuda
