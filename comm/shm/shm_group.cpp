#include "comm/shm/shm_group.h"

#include <sched.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/status_report.h"
#include "base/stop.h"
#include "base/text.h"
#include "comm/shm/peers.h"
#include "comm/shm/pipeline.h"
#include "comm/shm/segment.h"
#include "comm/shm/shm_arena.h"
#include "comm/shm/wakeup.h"
#include "comm/stall_notice.h"
#include "comm/text_exchange.h"

namespace lockstep::comm {
namespace {

// Looks before a wait sleeps: about 100 µs, a few times what waking up costs.
constexpr int kSpins = 2000;
// Where ranks outnumber cores: how often a wait lets another process have the core before it sleeps, which costs both
// of them more than a switch.
constexpr int kYields = 20;
// The longest sleep, and the time between two looks at deadline, stop requests and the other processes.
constexpr auto kNap = std::chrono::milliseconds(20);
// Between the end of a rank that was asked to stop and the same request to the next one, on a busy machine.
constexpr auto kStopStraggles = std::chrono::milliseconds(50);
// The time between two looks at the other processes by a caller that only polls.
constexpr auto kLookEvery = std::chrono::milliseconds(100);

void relax_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class ShmGroup final : public ProcessGroup {
 public:
  ShmGroup(int rank, int size, Clock::duration timeout, Peers peers, Segment board)
      : ProcessGroup(rank, size, timeout),
        peers_(std::move(peers)),
        board_(std::move(board)),
        pipeline_(rank, size, board_),
        texts_(rank, size) {}

  void adopt(std::unique_ptr<Store> store) { store_ = std::move(store); }

  std::string name() const override { return "shm"; }
  void poll() override;
  void watch_peers() override;
  Store* store() override { return store_.get(); }
  void shutdown() override;

 protected:
  std::unique_ptr<Arena> map_arena(std::size_t bytes) override;
  /// Through the slots.
  std::vector<std::string> exchange(const std::string& mine) override;
  bool has_let_go(std::uint64_t sequence) const noexcept override { return pipeline_.completed_sequence() >= sequence; }
  void start(const Op& op) override;
  bool is_done(std::uint64_t sequence) override;
  void wait_done(std::uint64_t sequence, Deadline deadline) override;

 private:
  static_assert(Segment::kMostText <= kMostText && kMostText < TextExchange::kTextBytes);

  template <class Condition>
  void wait_until(Condition&& done, Deadline deadline);
  /// Throws if another rank cannot or will not come.
  void check_peers();
  /// For a caller that never waits: check_peers() where nothing has happened for a while.
  void check_peers_now_and_then();
  void mention_stall(Clock::time_point now);
  [[noreturn]] void time_out(double waited_seconds) const;
  std::vector<int> missing() const;
  std::string text_of(const std::vector<int>& missing) const;
  std::string progress_of(int rank) const;

  std::unique_ptr<Store> store_;
  Peers peers_;
  Segment board_;
  Pipeline pipeline_;
  TextExchange texts_;
  Clock::time_point next_look_{};  // of check_peers_now_and_then()
  StallNotice stall_;
};

std::unique_ptr<Arena> ShmGroup::map_arena(std::size_t bytes) {
  auto segment = Segment::map(rank(), size(), bytes, [&](const std::string& mine) { return exchange(mine); });
  return std::make_unique<ShmArena>(std::move(segment), rank(), bytes);
}

std::vector<std::string> ShmGroup::exchange(const std::string& mine) {
  return failure_.guard([&] {
    pipeline_.submit(texts_.begin(mine), 0);
    const std::uint64_t index = pipeline_.submitted();
    wait_until([&] { return pipeline_.completed() >= index; }, Deadline::after(timeout()));
    return texts_.all();
  });
}

void ShmGroup::start(const Op& op) {
  failure_.guard([&] {
    pipeline_.submit(op, op.stride_bytes);
    pipeline_.advance();
  });
}

void ShmGroup::poll() {
  failure_.guard([&] {
    if (!pipeline_.advance()) check_peers_now_and_then();
  });
}

void ShmGroup::watch_peers() {
  failure_.guard([&] {
    if (pipeline_.advance() || stop_signal() != 0) return;
    const auto now = Clock::now();
    if (now < next_look_) return;
    next_look_ = now + kLookEvery;
    if (!pipeline_.idle()) check_peers();
    for (int other = 0; other < size(); ++other) {
      if (other == rank() || !peers_.has_ended(other)) continue;
      std::this_thread::sleep_for(kStopStraggles);
      throw_if_stopped("waiting for the other ranks");
      throw DeviceError(fmt::format("{} has ended", peers_.full_name_of(other)),
                        fmt::format("look at the log of rank {}", other));
    }
  });
}

bool ShmGroup::is_done(std::uint64_t sequence) {
  return failure_.guard([&] {
    if (pipeline_.completed_sequence() < sequence && !pipeline_.advance()) check_peers_now_and_then();
    return pipeline_.completed_sequence() >= sequence;
  });
}

void ShmGroup::wait_done(std::uint64_t sequence, Deadline deadline) {
  failure_.guard([&] { wait_until([&] { return pipeline_.completed_sequence() >= sequence; }, deadline); });
}

template <class Condition>
void ShmGroup::wait_until(Condition&& done, Deadline deadline) {
  const bool yields = peers_.oversubscribed();
  Clock::time_point begin{}, next_look{};  // known from the first sleep on: a short wait reads no clock
  RankControlBlock& own = pipeline_.control(rank());
  int spins = 0;
  while (!done()) {
    if (pipeline_.advance()) {
      spins = 0;
      continue;
    }
    if (++spins <= (yields ? kYields : kSpins)) {
      if (yields)
        ::sched_yield();
      else
        relax_cpu();
      continue;
    }
    const auto now = Clock::now();
    if (begin == Clock::time_point{}) begin = now;
    if (now >= next_look) {
      throw_if_stopped("waiting for the other ranks");
      check_peers();
      if (deadline.expired()) time_out(seconds_between(begin, now));
      mention_stall(now);
      next_look = now + kNap;
    }
    const auto ticket = announce_sleep(own);
    if (!pipeline_.advance()) {
      const auto nap = std::min<Clock::duration>(kNap, deadline.remaining() + std::chrono::milliseconds(1));
      sleep(own, ticket, nap);
    }
    end_sleep(own);
    spins = 0;
  }
}

void ShmGroup::check_peers_now_and_then() {
  // Of ranks that have all been asked to stop the first to end is no surprise: the next wait says that it is one.
  if (pipeline_.idle() || stop_signal() != 0) return;
  const auto now = Clock::now();
  if (now < next_look_) return;
  check_peers();
  next_look_ = now + kLookEvery;
}

void ShmGroup::check_peers() {
  if (const int rank = pipeline_.out_of_step(); rank >= 0) {
    throw OutOfStepError(out_of_step_text(peers_.name_of(rank), pipeline_.posted_instead(rank), pipeline_.contested()),
                         "start every rank with the same binary, options and data");
  }
  for (int rank = 0; rank < size(); ++rank) {
    if (!pipeline_.waits_for(rank) || !peers_.has_ended(rank)) continue;
    // What it has done before its end counts.
    pipeline_.advance();
    if (pipeline_.idle()) return;
    if (!pipeline_.waits_for(rank)) continue;
    // Whoever stops a job signals one rank after the other: this one's turn may be yet to come.
    std::this_thread::sleep_for(kStopStraggles);
    throw_if_stopped("waiting for the other ranks");
    report_missing_ranks({&rank, 1});
    throw DeviceError(fmt::format("{} has ended, and this rank waits for it in {}; {}", peers_.full_name_of(rank),
                                  describe(pipeline_.first()), progress_of(rank)),
                      fmt::format("look at the log of rank {}", rank));
  }
}

std::string ShmGroup::progress_of(int rank) const {
  if (!pipeline_.has_posted_any(rank)) return "it has issued nothing yet";
  return fmt::format("the last that it issued is {}", describe(pipeline_.last_posted_by(rank)));
}

std::vector<int> ShmGroup::missing() const {
  std::vector<int> missing;
  for (int r = 0; r < size(); ++r)
    if (pipeline_.waits_for(r)) missing.push_back(r);
  return missing;
}

std::string ShmGroup::text_of(const std::vector<int>& missing) const {
  std::vector<std::string> names;
  for (const int rank : missing) names.push_back(fmt::format("{}, {}", peers_.name_of(rank), progress_of(rank)));
  return first_names(names);
}

void ShmGroup::mention_stall(Clock::time_point now) {
  if (pipeline_.idle() || !stall_.is_due(pipeline_.completed(), now)) return;
  const auto who = missing();
  if (!who.empty() && claim_mention(pipeline_.control(0), pipeline_.completed() + 1, stall_.times()))
    warn_of_stall(describe(pipeline_.first()), stall_.waited_seconds(), text_of(who));
}

void ShmGroup::time_out(double waited_seconds) const {
  const auto who = missing();
  report_missing_ranks(who);
  throw TimeoutError(fmt::format("{} timed out after {:.3g} s waiting for {}", describe(pipeline_.first()),
                                 waited_seconds, text_of(who)),
                     fmt::format("look at the log of rank {}; if it is only slow, raise --timeout-seconds",
                                 who.empty() ? 0 : who.front()));
}

void ShmGroup::shutdown() {
  barrier().wait_host();
  failure_.guard([&] { store_->leave(Deadline::after(timeout())); });
}

}  // namespace

std::unique_ptr<ProcessGroup> make_shm_group(std::unique_ptr<Store>&& store, Clock::duration timeout) {
  Peers peers(*store, Deadline::after(timeout));
  return make_shm_group(std::move(store), std::move(peers), timeout);
}

std::unique_ptr<ProcessGroup> make_shm_group(std::unique_ptr<Store>&& store, Peers&& peers, Clock::duration timeout) {
  const int rank = store->rank(), size = store->size();
  if (const int other = peers.elsewhere(); other >= 0) {
    const std::string what = fmt::format("{} and {} share no memory", peers.name_of(0), peers.name_of(other));
    if (rank != other) throw PeerError(static_cast<int>(ExitCode::kDevice), what);
    throw DeviceError(what, "leave --backend out: auto goes through the network");
  }
  int round = 0;
  const auto exchange = [&](const std::string& mine) {
    return store->all_gather_text(fmt::format("sharing memory, round {}", ++round), mine, Deadline::after(timeout));
  };
  auto board = Segment::map(rank, size, sizeof(RankControlBlock), exchange);
  peers.watch(rank);
  auto group = std::make_unique<ShmGroup>(rank, size, timeout, std::move(peers), std::move(board));
  group->adopt(std::move(store));
  return group;
}

}  // namespace lockstep::comm
