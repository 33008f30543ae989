#include "comm/engine.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/flight_record.h"
#include "base/signals.h"

namespace lockstep::comm {
namespace {

// The longest sleep of a wait, and the time between two checks of deadline, stop requests and the other ranks.
constexpr Clock::duration kNap = std::chrono::milliseconds(20);
// The longest sleep of a thread that has nothing under way.
constexpr Clock::duration kLongNap = std::chrono::seconds(1);
// The time between two checks of the other ranks by a caller that only polls.
constexpr auto kCheckPollingEvery = std::chrono::milliseconds(100);

/// What both drivers have in common.
class EngineGroup : public ProcessGroup {
 public:
  std::string name() const final { return engine_->name(); }
  std::size_t preferred_bucket_bytes() const final { return engine_->preferred_bucket_bytes(); }
  Store* store() final { return store_.get(); }
  bool encrypts() const final { return engine_->encrypts(); }
  std::vector<PeerTime> sending_times() const final { return engine_->sending_times(); }

 protected:
  EngineGroup(int rank, int size, std::unique_ptr<Engine> engine, std::unique_ptr<Store> store, Clock::duration timeout)
      : ProcessGroup(rank, size, timeout),
        store_(store != nullptr && store->lasts() ? std::move(store) : nullptr),
        engine_(std::move(engine)) {}

  /// Gives the engine its next operation; its op_index.
  virtual std::uint64_t hand_over(const Op& op) = 0;
  virtual void wait_for_index(std::uint64_t index, Deadline deadline) = 0;

  std::unique_ptr<Arena> map_arena(std::size_t bytes) final {
    return engine_->map_arena(
        bytes, [&](const std::string& mine, bool within_host) { return exchange_texts(mine, within_host); });
  }
  std::vector<std::string> exchange(const std::string& mine) final { return exchange_texts(mine, false); }
  bool oversubscribed() const final { return engine_->oversubscribed(); }
  bool sees_all_copies() const final { return engine_->sees_all_copies(); }
  std::vector<int> ranks_by_host() const final { return engine_->ranks_by_host(); }
  void start(const Op& op) final { hand_over(op); }

  void leave_store() {
    if (store_ != nullptr) failure_.guard([&] { store_->leave(Deadline::after(timeout())); });
  }

  /// After an orderly end, where nobody moves operations on any more, nor looks at deadlines.
  void refuse_later_calls() {
    failure_.set(std::make_exception_ptr(UsageError("a call of a group after its shutdown()",
                                                    "issue all operations, and wait for them, before shutdown()")));
  }

  std::unique_ptr<Store> store_;  // may hold what the engine works with
  std::unique_ptr<Engine> engine_;

 private:
  std::vector<std::string> exchange_texts(const std::string& mine, bool within_host) {
    static_assert(kMostText < Engine::kTextBytes);
    wait_for_index(hand_over(engine_->text_op(mine, within_host)), Deadline::after(timeout()));
    return engine_->texts();
  }
};

class InlineGroup final : public EngineGroup {
 public:
  InlineGroup(int rank, int size, std::unique_ptr<Engine> engine, std::unique_ptr<Store> store, Clock::duration timeout)
      : EngineGroup(rank, size, std::move(engine), std::move(store), timeout) {}

  void poll() override;
  void watch_peers() override;
  void shutdown() override;

 protected:
  bool has_let_go(std::uint64_t sequence) const noexcept override { return engine_->completed_sequence() >= sequence; }
  std::uint64_t hand_over(const Op& op) override;
  bool is_done(std::uint64_t sequence) override;
  void wait_done(std::uint64_t sequence, Deadline deadline) override {
    wait([&] { return engine_->completed_sequence() >= sequence; }, deadline);
  }
  void wait_for_index(std::uint64_t index, Deadline deadline) override {
    wait([&] { return engine_->completed() >= index; }, deadline);
  }
  bool transfer_at_once(const PairTransfer& transfer) override;
  void start_transfer(const std::shared_ptr<PairTransfer>& transfer) override;
  bool is_transfer_done(const PairTransfer& transfer) override;
  void wait_for_transfer(const PairTransfer& transfer, Deadline deadline) override {
    wait([&] { return transfer.done.load(); }, deadline, &transfer);
  }

 private:
  /// Failure::guard; also notifies the other ranks.
  template <class Action>
  auto guard(Action&& action) {
    failure_.throw_if_any();
    try {
      return action();
    } catch (...) {
      failure_.set(std::current_exception());
      engine_->announce_abort(std::current_exception());
      throw;
    }
  }
  /// For an operation, or for `transfer`.
  template <class Condition>
  void wait(Condition&& done, Deadline deadline, const PairTransfer* transfer = nullptr);
  void advance_or_check();
  bool is_time_to_check();

  Clock::time_point next_check_{};
};

std::uint64_t InlineGroup::hand_over(const Op& op) {
  return guard([&] {
    const std::uint64_t index = engine_->submit(op);
    engine_->advance();
    return index;
  });
}

bool InlineGroup::transfer_at_once(const PairTransfer& transfer) {
  return guard([&] { return engine_->transfer_at_once(transfer); });
}

void InlineGroup::start_transfer(const std::shared_ptr<PairTransfer>& transfer) {
  guard([&] {
    engine_->submit(transfer);
    // Receives wait for the sends that follow them, which other ranks can take while this one copies.
    if (transfer->sends) engine_->advance_sends();
  });
}

bool InlineGroup::is_transfer_done(const PairTransfer& transfer) {
  return guard([&] {
    if (!transfer.done) advance_or_check();
    return transfer.done.load();
  });
}

bool InlineGroup::is_done(std::uint64_t sequence) {
  return guard([&] {
    if (engine_->completed_sequence() < sequence) advance_or_check();
    return engine_->completed_sequence() >= sequence;
  });
}

void InlineGroup::poll() {
  check_thread("poll()");
  guard([&] { advance_or_check(); });
}

void InlineGroup::shutdown() {
  check_transfers_done();
  barrier().wait_host();
  guard([&] {
    engine_->check_all_received();
    engine_->leave();
  });
  leave_store();
  refuse_later_calls();
}

template <class Condition>
void InlineGroup::wait(Condition&& done, Deadline deadline, const PairTransfer* transfer) {
  guard([&] {
    if (done()) return;
    Clock::duration waited{};
    bool recorded = false;  // short waits, which only spin, are not
    const bool in_time = wait_until(
        engine_->wait_policy(false), deadline, done, [&] { return engine_->advance(); },
        [&](Clock::duration so_far) {
          waited = so_far;
          if (!std::exchange(recorded, true)) flight::begin_wait();
          engine_->check();
          if (deadline.expired()) return;
          engine_->watch_stall();
          if (transfer != nullptr && !transfer->done) engine_->watch_stall_of(*transfer);
        },
        [&](Clock::duration idle) {
          const auto most = std::min<Clock::duration>(kNap, deadline.remaining() + std::chrono::milliseconds(1));
          engine_->sleep(most, idle, done);
        });
    if (in_time && recorded) flight::end_wait();
    if (in_time) return;
    const double seconds = std::chrono::duration<double>(waited).count();
    if (transfer != nullptr) engine_->time_out(*transfer, seconds);
    engine_->time_out(seconds);
  });
}

bool InlineGroup::is_time_to_check() {
  // Of ranks that have all been asked to stop the first to end is no surprise: the next wait says that it is one.
  if (stop_signal() != 0) return false;
  const auto now = Clock::now();
  if (now < next_check_) return false;
  next_check_ = now + kCheckPollingEvery;
  return true;
}

void InlineGroup::advance_or_check() {
  if (engine_->advance() || engine_->is_quiet() || !is_time_to_check()) return;
  engine_->check();
}

void InlineGroup::watch_peers() {
  guard([&] {
    if (engine_->advance() || !is_time_to_check()) return;
    engine_->check();
    engine_->check_ended_peers();
  });
}

class ThreadGroup final : public EngineGroup {
 public:
  ThreadGroup(int rank, int size, std::function<std::unique_ptr<Engine>()> make, std::unique_ptr<Store> store,
              Clock::duration timeout);
  ~ThreadGroup() override { end_thread(EndRequest::kAbandon); }

  void poll() override { throw_if_failed(); }
  void shutdown() override {
    check_transfers_done();
    barrier().wait_host();
    end_thread(EndRequest::kLeave);
    failure_.throw_if_any();
    leave_store();
    refuse_later_calls();
  }

 protected:
  bool has_let_go(std::uint64_t sequence) const noexcept override {
    return completed_sequence_.load(std::memory_order_acquire) >= sequence;
  }
  std::uint64_t hand_over(const Op& op) override;
  bool is_done(std::uint64_t sequence) override {
    throw_if_failed();
    return completed_sequence_.load(std::memory_order_acquire) >= sequence;
  }
  void wait_done(std::uint64_t sequence, Deadline deadline) override {
    wait([&] { return completed_sequence_.load(std::memory_order_acquire) >= sequence; }, deadline);
  }
  void wait_for_index(std::uint64_t index, Deadline deadline) override {
    wait([&] { return completed_.load(std::memory_order_acquire) >= index; }, deadline);
  }
  void start_transfer(const std::shared_ptr<PairTransfer>& transfer) override;
  bool is_transfer_done(const PairTransfer& transfer) override {
    throw_if_failed();
    return transfer.done.load(std::memory_order_acquire);
  }
  void wait_for_transfer(const PairTransfer& transfer, Deadline deadline) override {
    waited_for_transfer_.store(&transfer, std::memory_order_relaxed);
    wait([&] { return transfer.done.load(std::memory_order_acquire); }, deadline);
    waited_for_transfer_.store(nullptr, std::memory_order_relaxed);
  }

 private:
  enum class EndRequest { kNone, kLeave, kAbandon };

  template <class Condition>
  void wait(Condition&& done, Deadline deadline);
  template <class Condition>
  void nap_until(Condition&& done, bool oversubscribed, bool recorded = false);
  void end_thread(EndRequest ending);
  /// When this throws, the thread has ended (nap_until).
  void throw_if_failed() {
    try {
      failure_.throw_if_any();
    } catch (...) {
      end_thread(EndRequest::kAbandon);
      throw;
    }
  }

  // The thread's:
  void run(const std::function<std::unique_ptr<Engine>()>& make);
  void serve();
  bool has_orders() const {
    return handed_.load(std::memory_order_acquire) != engine_->submitted() ||
           handed_transfers_.load(std::memory_order_acquire) != taken_transfers_ || ending();
  }
  void take_orders();
  void publish_completed();
  void check();
  void time_out(double waited_seconds);
  void sleep(Clock::duration idle);
  bool ending() const { return ending_.load(std::memory_order_acquire) != EndRequest::kNone; }

  std::mutex mutex_;
  std::vector<Op> issued_;  // not yet taken by the thread; guarded by mutex_
  std::vector<Op> taken_;   // the thread's; swapped with issued_, so that neither allocates for long
  std::vector<std::shared_ptr<PairTransfer>> issued_transfers_;  // as issued_
  std::atomic<std::uint64_t> handed_{0};
  std::atomic<std::uint64_t> handed_transfers_{0};
  std::uint64_t taken_transfers_ = 0;  // the thread's
  std::atomic<EndRequest> ending_{EndRequest::kNone};
  std::atomic<bool> ready_{false};  // there is an engine

  std::atomic<std::uint64_t> completed_{0};
  std::atomic<std::uint64_t> completed_sequence_{0};
  // When the caller's wait began and ends, by RunningClock; the thread knows what to say when it is over.
  std::atomic<const PairTransfer*> waited_for_transfer_{nullptr};  // nullptr: for an operation
  std::atomic<Clock::rep> wait_begin_{0};
  std::atomic<Clock::rep> wait_end_{kNoWait};
  static constexpr Clock::rep kNoWait = Clock::time_point::max().time_since_epoch().count();

  std::thread thread_;
};

// ---- The caller's side ----

ThreadGroup::ThreadGroup(int rank, int size, std::function<std::unique_ptr<Engine>()> make,
                         std::unique_ptr<Store> store, Clock::duration timeout)
    : EngineGroup(rank, size, nullptr, std::move(store), timeout) {
  issued_.reserve(256);
  taken_.reserve(256);
  thread_ = start_thread([this, make = std::move(make)] { run(make); });
  nap_until([&] { return ready_.load(std::memory_order_acquire); }, false);
}

std::uint64_t ThreadGroup::hand_over(const Op& op) {
  throw_if_failed();
  std::uint64_t index = 0;
  {
    const std::lock_guard lock(mutex_);
    issued_.push_back(op);
    index = handed_.fetch_add(1, std::memory_order_release) + 1;
  }
  engine_->wake_up();
  return index;
}

void ThreadGroup::start_transfer(const std::shared_ptr<PairTransfer>& transfer) {
  throw_if_failed();
  {
    const std::lock_guard lock(mutex_);
    issued_transfers_.push_back(transfer);
    handed_transfers_.fetch_add(1, std::memory_order_release);
  }
  engine_->wake_up();
}

template <class Condition>
void ThreadGroup::wait(Condition&& done, Deadline deadline) {
  wait_begin_.store(RunningClock::now().time_since_epoch().count(), std::memory_order_relaxed);
  wait_end_.store(deadline.when().time_since_epoch().count(), std::memory_order_release);
  nap_until(done, engine_->oversubscribed(), true);
  wait_end_.store(kNoWait, std::memory_order_relaxed);
}

/// The deadline is the thread's to see. When this throws, the thread has ended: it would continue to read and write
/// what transfers name, and the caller frees that as it unwinds.
template <class Condition>
void ThreadGroup::nap_until(Condition&& done, bool oversubscribed, bool recorded) {
  const auto look = [&] {
    failure_.guard([] { throw_if_stopped("waiting for the other ranks"); });
    return false;
  };
  bool has_begun = false;
  const auto check = [&](Clock::duration) {
    if (recorded && !std::exchange(has_begun, true)) flight::begin_wait();
  };
  try {
    wait_until(nap_policy(oversubscribed), Deadline::never(), done, look, check, nap);
    if (has_begun) flight::end_wait();
  } catch (...) {
    end_thread(EndRequest::kAbandon);
    throw;
  }
}

void ThreadGroup::end_thread(EndRequest ending) {
  if (!thread_.joinable()) return;
  ending_.store(ending, std::memory_order_release);
  if (ready_.load(std::memory_order_acquire)) engine_->wake_up();
  thread_.join();
}

// ---- The thread's side ----

void ThreadGroup::run(const std::function<std::unique_ptr<Engine>()>& make) {
  try {
    engine_ = make();
    ready_.store(true, std::memory_order_release);
    serve();
    if (ending_.load(std::memory_order_acquire) != EndRequest::kLeave) return;
    engine_->check_all_received();
    engine_->leave();
  } catch (...) {
    failure_.set(std::current_exception());
    if (engine_ != nullptr) engine_->announce_abort(std::current_exception());
  }
}

void ThreadGroup::serve() {
  WaitPolicy policy = engine_->wait_policy(true);
  policy.doing = nullptr;
  const auto advance = [&] {
    if (has_orders()) take_orders();
    if (!engine_->advance()) return false;
    publish_completed();
    return true;
  };
  wait_until(
      policy, Deadline::never(), [&] { return ending(); }, advance, [&](Clock::duration) { check(); },
      [&](Clock::duration idle) { sleep(idle); });
}

void ThreadGroup::check() {
  if (engine_->is_quiet()) return;
  engine_->check();
  publish_completed();
  if (engine_->is_quiet()) return;
  const auto now = RunningClock::now().time_since_epoch().count();
  if (now >= wait_end_.load(std::memory_order_acquire))
    time_out(std::chrono::duration<double>(Clock::duration(now - wait_begin_.load(std::memory_order_relaxed))).count());
  engine_->watch_stall();
  if (const PairTransfer* const transfer = waited_for_transfer_.load(std::memory_order_relaxed))
    if (engine_->has(transfer)) engine_->watch_stall_of(*transfer);
}

/// What the caller waits for may have been done meanwhile.
void ThreadGroup::time_out(double waited_seconds) {
  if (const PairTransfer* const transfer = waited_for_transfer_.load(std::memory_order_relaxed)) {
    if (engine_->has(transfer)) engine_->time_out(*transfer, waited_seconds);
  } else if (!engine_->idle()) {
    engine_->time_out(waited_seconds);
  }
}

void ThreadGroup::sleep(Clock::duration idle) {
  Clock::duration most = kLongNap;
  if (!engine_->is_quiet()) {
    const auto end = RunningClock::time_point(Clock::duration(wait_end_.load(std::memory_order_acquire)));
    const auto left = end - RunningClock::now();
    most = std::clamp<Clock::duration>(left, std::chrono::milliseconds(1), kNap);
  }
  engine_->sleep(most, idle, [&] { return has_orders(); });
  publish_completed();
}

void ThreadGroup::take_orders() {
  {
    const std::lock_guard lock(mutex_);
    issued_.swap(taken_);
    for (auto& transfer : issued_transfers_) engine_->submit(std::move(transfer));
    taken_transfers_ += issued_transfers_.size();
    issued_transfers_.clear();
  }
  for (const Op& op : taken_) engine_->submit(op);
  taken_.clear();
}

void ThreadGroup::publish_completed() {
  completed_sequence_.store(engine_->completed_sequence(), std::memory_order_release);
  completed_.store(engine_->completed(), std::memory_order_release);
}

}  // namespace

std::unique_ptr<ProcessGroup> make_inline_group(int rank, int size, std::unique_ptr<Engine> engine,
                                                std::unique_ptr<Store> store, Clock::duration timeout) {
  return std::make_unique<InlineGroup>(rank, size, std::move(engine), std::move(store), timeout);
}

std::unique_ptr<ProcessGroup> make_thread_group(int rank, int size, std::function<std::unique_ptr<Engine>()> make,
                                                std::unique_ptr<Store> store, Clock::duration timeout) {
  return std::make_unique<ThreadGroup>(rank, size, std::move(make), std::move(store), timeout);
}

}  // namespace lockstep::comm
