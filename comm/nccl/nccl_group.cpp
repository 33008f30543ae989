#include "comm/nccl/nccl_group.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "base/flight_record.h"
#include "base/hash.h"
#include "base/signals.h"
#include "comm/agree.h"
#include "comm/flight.h"
#include "comm/nccl/agreement.h"
#include "comm/nccl/communicator.h"
#include "comm/nccl/device_arena.h"
#include "comm/nccl/device_pairs.h"
#include "comm/nccl/kernels.h"
#include "comm/nccl/nccl_api.h"
#include "comm/nccl/op_log.h"
#include "comm/nccl/partials.h"
#include "comm/nccl/stall_poll.h"
#include "comm/stall.h"
#include "comm/wait.h"

namespace lockstep::comm {
namespace {

// Looks at the word before a wait on the host sleeps between two of them.
constexpr int kYields = 100;
constexpr auto kNap = std::chrono::microseconds(50);
// Between two looks at the other ranks' processes by one that waits, and at everything by one that only polls.
constexpr auto kLookAtPeersEvery = std::chrono::milliseconds(5);
// Between two questions of is_done() to CUDA and NCCL, each of which costs microseconds; it is called after each
// operator of backward. The word (Note [Completion word]) is read each time.
constexpr auto kAskEvery = std::chrono::milliseconds(1);
constexpr auto kLookEvery = std::chrono::milliseconds(100);
// Operations between two comparisons (Note [Histories]); a step has one at least.
constexpr std::uint64_t kCompareEvery = 100;

class NcclGroup final : public DeviceGroup {
 public:
  NcclGroup(ProcessGroup& control, const DeviceGroupOptions& options, const NcclApi& api);
  ~NcclGroup() override;

  /// Collective: what is left of the making, where the ranks wait for each other.
  void join(const ncclUniqueId& id);

  StreamView producer_stream() const override { return producer_; }
  std::string name() const override { return "nccl"; }
  void copy(void* to, const void* from, std::size_t bytes) override;
  void zero(const Region& region) override;
  std::vector<std::vector<std::byte>> all_gather_objects(std::span<const std::byte> mine) override;
  void poll() override;
  void watch_peers() override { control_.watch_peers(); }
  void check_in_step() override;
  void shutdown() override;

  void begin_capture() override;
  std::uint64_t end_capture() override;
  void replayed(std::uint64_t count) override;
  void time_operations(bool on) override { timer_.turn(on); }
  std::vector<OpTime> device_times(const CudaEvent& origin) override;

 protected:
  std::unique_ptr<Arena> map_arena(std::size_t bytes) override;
  std::vector<std::string> exchange(const std::string& mine) override;
  /// What the producer's stream comes after is over before memory is freed, which waits for the GPU; what was only
  /// captured has not begun.
  bool has_let_go(std::uint64_t sequence) const noexcept override {
    return sequence <= joined_ || sequence > op_log_.launched() || sequence <= word_->read();
  }
  void start(const Op& op) override;
  bool is_done(std::uint64_t sequence) override;
  void wait_done(std::uint64_t sequence, Deadline deadline) override;
  void make_wait(std::uint64_t sequence, StreamView stream) override;
  ProcessGroup& pair_group() override { return control_; }
  void start_transfer(const std::shared_ptr<PairTransfer>& transfer) override;
  bool is_transfer_done(const PairTransfer& transfer) override;
  void wait_for_transfer(const PairTransfer& transfer, Deadline deadline) override;
  void make_wait_for_transfer(const PairTransfer& transfer, StreamView stream) override;

 private:
  template <class Action>
  auto guard(Action&& action);
  void fail();
  void refuse_capture(const Op& op);
  void compare_now_and_then();
  void give(const Op& op);
  void settle(const Op& op, ncclResult_t result);
  void make_partials_fit(const Op& op);
  void give_along_tree(const Op& op);
  void make_room(std::uint64_t count);
  bool is_complete(std::uint64_t sequence);
  void wait_until_complete(std::uint64_t sequence, Deadline deadline);
  template <class Done, class Look, class TimeOut>
  void wait_on_host(Deadline deadline, Done&& done, Look&& look, TimeOut&& time_out);
  void finish_transfers();
  template <class Done>
  void wait_for_pair(const PairTransfer& transfer, Deadline deadline, Done&& done);
  void check_peers();
  void check_processes();
  [[noreturn]] void time_out(const Op& op, double waited_seconds);
  [[noreturn]] void time_out(const PairTransfer& transfer, double waited_seconds) const;

  ProcessGroup& control_;
  const StreamView producer_;
  std::shared_ptr<Communicator> communicator_;  // arenas use it too
  DevicePairs pairs_;
  StallNotice pairs_stall_;
  std::optional<ProgressExchange> progress_exchange_;
  std::optional<HistoryCheck> history_check_;
  std::optional<StallPoll> stall_poll_;

  CudaStream stream_{CudaStream::Priority::kHigh};  // of all operations
  CudaEvent ready_;
  DeviceBytes bytes_;
  std::unique_ptr<DeviceArena> partials_;  // that other ranks have sent; nullptr: there were none
  std::unique_ptr<CompletionWord> word_;
  EventRing events_;
  OpTimer timer_;

  OpLog op_log_;
  std::uint64_t joined_ = 0;    // the producer's stream comes after these
  std::uint64_t compared_ = 0;  // histories up to here
  Clock::time_point next_look_{};
  Clock::time_point next_ask_{};
  Clock::time_point next_peer_check_{};

  bool capturing_ = false;
  EventRing captured_events_;  // events of a capture mean nothing outside of it
};

NcclGroup::NcclGroup(ProcessGroup& control, const DeviceGroupOptions& options, const NcclApi& api)
    : DeviceGroup(control.rank(), control.size(), options.timeout.value_or(control.timeout()), options.device),
      control_(control),
      producer_(options.producer),
      communicator_(std::make_shared<Communicator>(api, options.device, control.rank(), control.size())),
      pairs_(api, options.device, control, options.producer),
      bytes_(options.producer),
      word_(std::make_unique<CompletionWord>()) {}

NcclGroup::~NcclGroup() {
  communicator_->end();
  // Freeing it would wait for kernels that may be under way even so.
  if (communicator_->state() != Communicator::State::kAborted) return;
  static_cast<void>(word_.release());
  static_cast<void>(partials_.release());
}

template <class Action>
auto NcclGroup::guard(Action&& action) {
  failure_.throw_if_any();
  try {
    return action();
  } catch (const CudaError&) {
    // Many a call is refused in a capture, NCCL's not among them: the steps can do without it.
    if (!capturing_) fail();
    throw;
  } catch (...) {
    fail();
    throw;
  }
}

void NcclGroup::fail() {
  failure_.set(std::current_exception());
  communicator_->abort();
  pairs_.abort();
}

// ---- Beginning and end ----

void NcclGroup::join(const ncclUniqueId& id) {
  guard([&] {
    progress_exchange_.emplace(control_);
    history_check_.emplace(control_);
    stall_poll_.emplace(control_, crc32c(std::as_bytes(std::span(&id, 1))));
    join_ranks(*communicator_, id, control_, *progress_exchange_, timeout(), [&] {
      throw_if_stopped("joining the other ranks");
      check_processes();
    });
  });
}

void NcclGroup::shutdown() {
  finish_transfers();
  check_transfers_done();
  check_in_step();  // first: what a rank has issued too many never ends
  guard([&] {
    wait_until_complete(op_log_.launched(), Deadline::after(timeout()));
    control_.barrier().wait_host();
    const auto deadline = Deadline::after(timeout());
    const auto look = [&] {
      check_processes();
      if (deadline.expired())
        throw TimeoutError("leaving NCCL timed out", "let go of all CUDA graphs that hold collectives before");
    };
    pairs_.leave(look);
    communicator_->leave(look);
  });
}

// ---- Memory and objects ----

std::vector<std::string> NcclGroup::exchange(const std::string& mine) {
  return guard([&] { return control_.all_gather_text(mine); });
}

std::unique_ptr<Arena> NcclGroup::map_arena(std::size_t bytes) {
  failure_.throw_if_any();
  LOCKSTEP_ASSERT(!capturing_ && communicator_->state() == Communicator::State::kReady,
                  "an allocation in a capture, or after the end");
  DeviceArena::check_size(bytes);
  std::unique_ptr<DeviceArena> arena;
  try {
    run_collectively(control_, [&] { arena = DeviceArena::allocate(bytes, communicator_); });
  } catch (...) {
    arena.reset();  // here, and not while the exception unwinds past it
    throw;
  }
  const auto registered = control_.all_gather_numbers(arena->registered() ? 1 : 0);
  if (std::ranges::find(registered, 0) != registered.end()) arena->deregister();
  return arena;
}

void NcclGroup::copy(void* to, const void* from, std::size_t bytes) {
  LOCKSTEP_ASSERT(!capturing_, "a copy by the host in a capture");
  guard([&] {
    wait_until_complete(op_log_.launched(), Deadline::after(timeout()));
    bytes_.copy(to, from, bytes);
  });
}

void NcclGroup::zero(const Region& region) {
  check_region(region, "zeroing");
  guard([&] { bytes_.zero(region.data(), region.bytes()); });
}

std::vector<std::vector<std::byte>> NcclGroup::all_gather_objects(std::span<const std::byte> mine) {
  return guard([&] { return control_.all_gather_objects(mine); });
}

// ---- Operations ----

void NcclGroup::start(const Op& op) {
  if (!capturing_) refuse_capture(op);
  guard([&] {
    LOCKSTEP_ASSERT(communicator_->state() == Communicator::State::kReady, "{} after the end", describe(op));
    if (!capturing_) {
      compare_now_and_then();
      make_room(1);
    }
    give(op);
    if (capturing_) {
      captured_events_.record(op.sequence, stream_.get());
      op_log_.capture(op);
    } else {
      events_.record(op.sequence, stream_.get());
      op_log_.launch(op);
    }
  });
}

/// A capture that begin_capture() has not announced, such as one of PyTorch's.
void NcclGroup::refuse_capture(const Op& op) {
  cudaStreamCaptureStatus status{};
  if (cudaStreamIsCapturing(native(producer_), &status) == cudaSuccess && status == cudaStreamCaptureStatusNone) return;
  static_cast<void>(cudaGetLastError());
  set_last_issued(op.sequence - 1);  // nothing has happened
  throw UsageError(fmt::format("{} in the capture of a CUDA graph", describe(op)),
                   "capture computation alone, or call DeviceGroup::begin_capture() before");
}

/// All ranks come here with as many operations, also those that left one out: they are found where they issue the next.
void NcclGroup::compare_now_and_then() {
  if (op_log_.launched() < compared_ + kCompareEvery) return;
  compared_ = op_log_.launched();
  history_check_->compare(op_log_.last());
}

void NcclGroup::check_in_step() {
  LOCKSTEP_ASSERT(!capturing_, "ranks are compared in a capture");
  guard([&] {
    compared_ = op_log_.launched();
    history_check_->compare(op_log_.last());
  });
}

/// The completion word is written after the operation and before the entry, in the stream's order. So a capture that
/// waits for the entry has no unjoined branch in the captured graph.
void NcclGroup::give(const Op& op) {
  const bool along_tree = op.along != nullptr && size() > 1 && op.count > 0;
  if (along_tree) make_partials_fit(op);
  ready_.record(native(producer_));
  ready_.make_wait(stream_.get());
  if (!capturing_) timer_.begin(op, stream_.get());
  if (along_tree) {
    give_along_tree(op);
  } else {
    settle(op, give_to_nccl(communicator_->api(), communicator_->get(), rank(), size(), op, word_->scratch(),
                            stream_.get()));
  }
  if (!capturing_) timer_.end(stream_.get());
  word_->count_up(stream_.view());
}

/// Waits until NCCL has taken what a call has given to it.
void NcclGroup::settle(const Op& op, ncclResult_t result) {
  const auto begin = Clock::now();
  const auto deadline = Deadline::after(timeout());
  result = communicator_->settle(result, [&] {
    throw_if_stopped("waiting for the other ranks");
    check_processes();
    const auto now = Clock::now();
    if (deadline.expired()) time_out(op, seconds_between(begin, now));
    stall_poll_->look(op, now);
  });
  if (result != ncclSuccess) throw_nccl_error(communicator_->api(), communicator_->get(), result, describe(op));
}

/// Of what the other ranks send in one operation.
void NcclGroup::make_partials_fit(const Op& op) {
  std::size_t sources = 0;
  for (int r = 0; r < size(); ++r) sources += op.along->partials_of(r).size();
  if (sources > TreeSources::kMost)
    throw UsageError(fmt::format("{} partial sums of {} shards on {} GPUs", sources, op.along->leaves(), size()),
                     fmt::format("at most {} are added at a time: choose fewer shards, or a multiple of the ranks",
                                 TreeSources::kMost));
  const std::size_t received = sources - op.along->partials_of(rank()).size();
  const std::size_t bytes = slice_of(op.count, size_of(op.dtype), rank(), size()).count * size_of(op.dtype) * received;
  if (partials_ != nullptr && bytes <= partials_->bytes()) return;
  if (capturing_) check_cuda(cudaErrorStreamCaptureUnsupported, "memory for partial sums in a capture");
  wait_until_complete(op_log_.launched(), Deadline::after(timeout()));
  partials_.reset();
  DeviceArena::check_size(bytes);
  partials_ = DeviceArena::allocate(std::max<std::size_t>(bytes, 1), nullptr);
}

/// Each rank adds the partial sums of its slice, and all gather the slices.
void NcclGroup::give_along_tree(const Op& op) {
  const NcclApi& api = communicator_->api();
  settle(op, exchange_partials(api, communicator_->get(), rank(), size(), op, partials_->data(), stream_.get()));
  add_partials(op, rank(), size(), partials_->data(), stream_.view());
  Op gather = op;
  gather.kind = OpKind::kAllGather;
  settle(op, give_to_nccl(api, communicator_->get(), rank(), size(), gather, word_->scratch(), stream_.get()));
}

void NcclGroup::make_room(std::uint64_t count) {
  if (const std::uint64_t first = op_log_.first_blocking(count); first > 0)
    wait_until_complete(first, Deadline::after(timeout()));
}

bool NcclGroup::is_complete(std::uint64_t sequence) {
  op_log_.complete(word_->read());
  return op_log_.completed() >= sequence;
}

bool NcclGroup::is_done(std::uint64_t sequence) {
  return guard([&] {
    if (is_complete(sequence)) return true;
    if (capturing_) return false;
    const auto now = Clock::now();
    if (now < next_ask_) return false;
    next_ask_ = now + kAskEvery;
    check_peers();
    return is_complete(sequence);
  });
}

void NcclGroup::wait_done(std::uint64_t sequence, Deadline deadline) {
  LOCKSTEP_ASSERT(!capturing_ && sequence <= op_log_.launched(), "a wait for operation #{}, which is only captured",
                  sequence);
  guard([&] { wait_until_complete(sequence, deadline); });
}

void NcclGroup::wait_until_complete(std::uint64_t sequence, Deadline deadline) {
  wait_on_host(
      deadline, [&] { return is_complete(sequence); },
      [&] { stall_poll_->look(op_log_.first_under_way(), Clock::now()); },
      [&](double waited_seconds) { time_out(op_log_.first_under_way(), waited_seconds); });
}

/// Calls look() now and then, and at `deadline` time_out(), which throws.
template <class Done, class Look, class TimeOut>
void NcclGroup::wait_on_host(Deadline deadline, Done&& done, Look&& look, TimeOut&& time_out) {
  Clock::duration waited{};
  const auto check = [&](Clock::duration so_far) {
    waited = so_far;
    check_peers();
    if (!done() && !deadline.expired()) look();
  };
  flight::begin_wait();
  const bool in_time = wait_until(
      {.yields = kYields, .check_every = {}}, deadline, done, [&] { return pairs_.advance(); }, check,
      [](Clock::duration) { std::this_thread::sleep_for(kNap); });
  if (!in_time) time_out(std::chrono::duration<double>(waited).count());
  flight::end_wait();
}

void NcclGroup::make_wait(std::uint64_t sequence, StreamView stream) {
  guard([&] {
    if (capturing_) {
      // begin_capture() has seen to what came before.
      if (sequence > op_log_.launched()) captured_events_.make_wait(sequence, native(stream));
    } else {
      if (!is_complete(sequence)) events_.make_wait(sequence, native(stream));
      if (stream.native == producer_.native) joined_ = std::max(joined_, sequence);
    }
  });
}

// ---- Sends and receives ----

void NcclGroup::start_transfer(const std::shared_ptr<PairTransfer>& transfer) {
  check_usage(!capturing_, "a send or a receive in a capture", "issue it before or after the captured step");
  guard([&] {
    pairs_.start(transfer);
    pairs_.advance();
  });
}

bool NcclGroup::is_transfer_done(const PairTransfer& transfer) {
  failure_.throw_if_any();
  if (capturing_) return transfer.done;  // CUDA answers no questions in a capture
  return guard([&] {
    while (!transfer.done && pairs_.advance()) {
    }
    if (!transfer.done) check_processes();
    return transfer.done.load();
  });
}

/// What a stream was ordered after need not have been waited for by the host.
void NcclGroup::finish_transfers() {
  guard([&] {
    wait_on_host(
        Deadline::after(timeout()), [&] { return pairs_.first_launched() == nullptr; }, [] {},
        [&](double waited_seconds) { time_out(*pairs_.first_launched(), waited_seconds); });
  });
}

void NcclGroup::wait_for_transfer(const PairTransfer& transfer, Deadline deadline) {
  wait_for_pair(transfer, deadline, [&] { return transfer.done.load(); });
}

void NcclGroup::make_wait_for_transfer(const PairTransfer& transfer, StreamView stream) {
  wait_for_pair(transfer, Deadline::after(timeout()), [&] { return pairs_.is_launched(transfer); });
  guard([&] { pairs_.make_wait(transfer, native(stream)); });
}

template <class Done>
void NcclGroup::wait_for_pair(const PairTransfer& transfer, Deadline deadline, Done&& done) {
  LOCKSTEP_ASSERT(!capturing_, "a wait for a transfer in a capture");
  guard([&] {
    const auto look = [&] {
      if (pairs_stall_.is_due(pairs_.progress(), Clock::now()))
        warn_of_stall(transfer, pairs_stall_.waited_seconds(), control_.job_rank(transfer.peer),
                      pairs_.name_of(transfer.peer));
    };
    wait_on_host(deadline, done, look, [&](double waited_seconds) { time_out(transfer, waited_seconds); });
  });
}

void NcclGroup::time_out(const PairTransfer& transfer, double waited_seconds) const {
  throw_transfer_timeout(transfer, waited_seconds, control_.job_rank(transfer.peer), pairs_.name_of(transfer.peer));
}

// ---- Watching ----

void NcclGroup::poll() {
  failure_.throw_if_any();
  if (!capturing_ && !pairs_.idle()) guard([&] { pairs_.advance(); });
  if (capturing_ || is_complete(op_log_.launched())) return;
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + kLookEvery;
  guard([&] {
    check_peers();
    if (const auto stalled = RunningClock::now() - op_log_.progress();
        !is_complete(op_log_.launched()) && stalled > timeout())
      time_out(op_log_.first_under_way(), std::chrono::duration<double>(stalled).count());
    if (!is_complete(op_log_.launched())) stall_poll_->look(op_log_.first_under_way(), now);
  });
}

/// Throws what has gone wrong, as far as can be known without waiting.
void NcclGroup::check_peers() {
  const cudaError_t status = cudaStreamQuery(stream_.get());
  if (status == cudaErrorNotReady)
    static_cast<void>(cudaGetLastError());  // it is noted as if it were an error
  else
    check_cuda(status, "a collective, or what came before it,");
  const ncclResult_t result = communicator_->async_error();
  if (result != ncclSuccess)
    throw_nccl_error(communicator_->api(), communicator_->get(), result,
                     op_log_.any_under_way() ? describe(op_log_.first_under_way()) : std::string("NCCL"));
  check_processes();
}

void NcclGroup::check_processes() {
  const auto now = Clock::now();
  if (now < next_peer_check_) return;
  next_peer_check_ = now + kLookAtPeersEvery;
  try {
    control_.watch_peers();
  } catch (const DeviceError& error) {
    if (!op_log_.any_under_way()) throw;
    throw DeviceError(
        fmt::format("{}, and this rank waits for it in {}", error.what(), describe(op_log_.first_under_way())),
        error.remedy());
  }
}

void NcclGroup::time_out(const Op& op, double waited_seconds) {
  const auto answers = progress_exchange_->ask({.issued = last_issued(), .completed = op_log_.completed()},
                                               Deadline::after(patience_of(timeout())));
  const int late = first_late(answers, op.sequence);
  if (late >= 0 && late != rank()) give_up_on({&late, 1});
  throw TimeoutError(
      fmt::format("{} timed out after {:.3g} s{}", describe(op), waited_seconds, waiting_text(answers, op.sequence)),
      late < 0 ? std::string("look at the logs of all ranks; if they are only slow, raise --timeout-seconds")
               : fmt::format("look at the log of rank {}; if it is only slow, raise --timeout-seconds", late));
}

std::vector<OpTime> NcclGroup::device_times(const CudaEvent& origin) {
  LOCKSTEP_ASSERT(!capturing_, "times are read in a capture");
  return guard([&] {
    wait_until_complete(op_log_.launched(), Deadline::after(timeout()));
    return timer_.times(origin);
  });
}

// ---- Captures ----

void NcclGroup::begin_capture() {
  LOCKSTEP_ASSERT(!capturing_, "a capture in a capture");
  guard([&] {
    if (!is_complete(op_log_.launched())) events_.make_wait(op_log_.launched(), native(producer_));
    joined_ = op_log_.launched();
    op_log_.begin_capture();
    captured_events_.clear();
    capturing_ = true;
  });
}

std::uint64_t NcclGroup::end_capture() {
  LOCKSTEP_ASSERT(capturing_, "the end of a capture that was not begun");
  capturing_ = false;
  set_last_issued(op_log_.launched());
  return op_log_.end_capture();
}

void NcclGroup::replayed(std::uint64_t count) {
  LOCKSTEP_ASSERT(!capturing_, "a launch in a capture");
  if (count == 0) return;
  LOCKSTEP_ASSERT(op_log_.has_captured(count), "no capture had {} operations", count);
  const std::uint64_t before = op_log_.launched();
  LOCKSTEP_ASSERT(joined_ >= before || is_complete(before), "a launch that operation #{} may still overtake", before);
  guard([&] {
    make_room(count);
    op_log_.replay(count, step());
    joined_ = op_log_.launched();
    set_last_issued(joined_);
    events_.record(joined_, native(producer_));
    compare_now_and_then();
  });
}

}  // namespace

std::unique_ptr<DeviceGroup> make_nccl_group(ProcessGroup& control, const DeviceGroupOptions& options,
                                             const NcclApi* api) {
  std::unique_ptr<NcclGroup> group;
  run_collectively(control, [&] {
    check_device(options.device);
    if (api == nullptr)
      api = &load_nccl();
    else
      check_nccl_version(*api);
    check_cuda(cudaSetDevice(options.device), "choosing a GPU");
    group = std::make_unique<NcclGroup>(control, options, *api);
  });
  compare_manifests(control, {{"NCCL", nccl_version_text(*api)}});

  separate_sharing_ranks(control);
  group->join(agree_on_id(control, *api));
  return group;
}

}  // namespace lockstep::comm
