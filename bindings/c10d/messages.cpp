#include "bindings/c10d/messages.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "bindings/c10d/tensors.h"

namespace lockstep::pytorch {

using comm::ProcessGroup;

namespace {

std::string described(const Envelope& envelope) {
  return "a message with tag " + std::to_string(envelope[0]) + " of " + std::to_string(envelope[1]) + " elements";
}

void check_envelope(const Envelope& theirs, const Envelope& ours, int rank) {
  if (theirs == ours) return;
  throw OutOfStepError(
      "rank " + std::to_string(rank) + " sends " + described(theirs) + ", and this rank receives " + described(ours),
      "receive what a rank sends in the order in which it sends it");
}

}  // namespace

MessageWork::MessageWork(const std::shared_ptr<Messages>& messages, int rank, ::c10d::OpType type, const char* title,
                         const at::Tensor& tensor, int peer, int tag, std::chrono::milliseconds timeout)
    : Work(rank, type, title, {tensor}, {tensor}),
      messages_(messages),
      sends_(type == ::c10d::OpType::SEND),
      tensor_(tensor),
      memory_(sends_ ? contiguous(on_host(tensor)) : memory_for(host_memory_for(tensor))),
      peer_(peer),
      envelope_{tag, static_cast<std::int64_t>(Elements(tensor.scalar_type()).count(tensor))},
      deadline_(Deadline::after(timeout)) {}

bool MessageWork::isCompleted() {
  if (!Work::isCompleted())
    if (const auto messages = messages_.lock()) messages->advance();
  return Work::isCompleted();
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  constexpr int kYields = 200, kShortNaps = 10'000;
  // Without `timeout` its own deadline completes it.
  const auto end = timeout == kNoTimeout ? Deadline::never() : Deadline::after(timeout);
  for (int looks = 0; !isCompleted() && !end.expired(); ++looks)
    if (looks < kYields)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(looks < kShortNaps ? 50 : 200));
  return Work::wait(timeout == kNoTimeout ? timeout : std::chrono::milliseconds(1));
}

void MessageWork::deliver() {
  if (sends_) return;
  check_envelope(*theirs_, envelope_, peer_);
  const at::NoGradGuard no_grad;
  write_back(memory_, tensor_);
}

// ---- Messages ----

Messages::Messages(std::unique_ptr<ProcessGroup> group)
    : group_(std::move(group)), expected_(static_cast<std::size_t>(group_->size())) {}

void Messages::start(c10::intrusive_ptr<MessageWork> work) {
  std::vector<Over> over;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!ended_,
                "lockstep: the group has been destroyed → send nothing after destroy_process_group() or abort");
    if (!work->sends_) {
      waiting_.push_back(work);
    } else
      try {
        begin(*work);
        begun_.push_back(work);
      } catch (...) {
        over.push_back({work, std::current_exception()});
      }
    look(over);
    if (under_way() && !has_thread_) {
      has_thread_ = true;
      // It keeps what it uses: a process may end, or give the group up, while messages are under way.
      std::thread([self = shared_from_this()] { self->serve(); }).detach();
    } else if (under_way() && sleeps_) {
      changed_.notify_all();
    }
  }
  complete(std::move(over));
}

void Messages::advance() {
  std::vector<Over> over;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_) look(over);
  }
  complete(std::move(over));
}

void Messages::look(std::vector<Over>& over) {
  for (; !waiting_.empty(); waiting_.pop_front()) {
    auto& work = waiting_.front();
    try {
      if (work->peer_ == kAnyRank) work->peer_ = who_has_sent();
      if (work->peer_ == kAnyRank) break;
      begin(*work);
      begun_.push_back(std::move(work));
    } catch (...) {
      over.push_back({std::move(work), std::current_exception()});
    }
  }
  std::erase_if(waiting_, [&](auto& work) {
    if (!work->deadline_.expired()) return false;
    over.push_back({std::move(work), std::make_exception_ptr(
                                         TimeoutError("receiving from any rank timed out, or waits for such a receive",
                                                      "look at the logs of the ranks that should send"))});
    return true;
  });
  begun_.remove_if([&](auto& work) {
    std::exception_ptr error;
    try {
      if (!is_over(*work)) return false;
    } catch (...) {
      error = std::current_exception();
    }
    over.push_back({std::move(work), error});
    return true;
  });
}

bool Messages::is_over(const MessageWork& work) {
  if (!work.deadline_.expired()) return work.of_envelope_.done() && work.of_values_.done();
  work.of_envelope_.wait(Deadline::after({}));
  work.of_values_.wait(Deadline::after({}));
  return true;
}

void Messages::begin(MessageWork& work) {
  const Elements elements(work.tensor_.scalar_type());
  void* const values = work.memory_.data_ptr();
  const std::size_t count = elements.count(work.memory_);
  if (work.sends_) {
    work.of_envelope_ = group_->isend(std::span<const std::int64_t>(work.envelope_), work.peer_);
    work.of_values_ = group_->isend(values, count, elements.dtype, work.peer_);
    return;
  }
  Expected expected = take_expected(work.peer_);
  work.theirs_ = std::move(expected.envelope);
  work.of_envelope_ = std::move(expected.transfer);
  work.of_values_ = group_->irecv(values, count, elements.dtype, work.peer_);
}

/// kAnyRank: nobody yet.
int Messages::who_has_sent() {
  for (int r = 0; r < group_->size(); ++r) {
    if (r == group_->rank()) continue;
    Expected& expected = expected_[static_cast<std::size_t>(r)];
    expected = take_expected(r);
    if (expected.transfer.done()) return r;
  }
  return kAnyRank;
}

/// The envelope that comes next from `rank`.
Messages::Expected Messages::take_expected(int rank) {
  Expected expected = std::exchange(expected_[static_cast<std::size_t>(rank)], {});
  if (expected.envelope == nullptr) {
    expected.envelope = std::make_shared<Envelope>();
    expected.transfer = group_->irecv(std::span<std::int64_t>(*expected.envelope), rank);
  }
  return expected;
}

void Messages::complete(std::vector<Over> over) {
  for (auto& [work, error] : over) {
    if (error == nullptr) try {
        work->deliver();
      } catch (...) {
        error = std::current_exception();
      }
    if (error != nullptr) failed_ = true;
    // The work's outputs are the tensor as well: this releases nothing of the program's.
    work->tensor_.reset();
    work->memory_.reset();
    work->complete(error == nullptr ? error : as_torch_error(error));
    retired_.add(std::move(work));
  }
  retired_.clear();
}

std::vector<Messages::Over> Messages::take_all(const std::exception_ptr& error) {
  std::vector<Over> all;
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
  for (auto& work : begun_) all.push_back({std::move(work), error});
  for (auto& work : waiting_) all.push_back({std::move(work), error});
  begun_.clear();
  waiting_.clear();
  return all;
}

void Messages::abandon(const std::exception_ptr& error) { complete(take_all(error)); }

void Messages::end(ProcessGroup& all, Deadline deadline) {
  advance();
  const auto under_way = std::make_exception_ptr(
      UsageError("a group is destroyed while sends or receives are under way", "wait for all of them before"));
  if (auto left = take_all(under_way); !left.empty()) {
    complete(std::move(left));
    std::rethrow_exception(under_way);
  }
  // Envelopes that are expected and will never come: who knows of them sends one.
  std::vector<std::uint8_t> mine, flags(expected_.size() * expected_.size());
  for (const Expected& expected : expected_) mine.push_back(expected.envelope != nullptr ? 1 : 0);
  set_timeout(all, deadline);
  all.all_gather(std::span<const std::uint8_t>(mine), std::span(flags));
  const Envelope none = {};
  std::vector<comm::Transfer> transfers;
  for (int r = 0; r < group_->size(); ++r)
    if (flags[static_cast<std::size_t>(r) * expected_.size() + static_cast<std::size_t>(group_->rank())] != 0)
      transfers.push_back(group_->isend(std::span<const std::int64_t>(none), r));
  for (Expected& expected : expected_)
    if (expected.envelope != nullptr) transfers.push_back(expected.transfer);
  for (const comm::Transfer& transfer : transfers) transfer.wait(deadline);
  set_timeout(*group_, deadline);
  group_->shutdown();
}

/// The thread's.
void Messages::serve() {
  constexpr auto kPause = std::chrono::microseconds(100);
  const Retired::OnThread here;
  std::unique_lock lock(mutex_);
  while (!ended_) {
    if (under_way()) {
      // First of all a pause: most are over soon, and who waits for them moves them.
      changed_.wait_for(lock, kPause, [&] { return ended_; });
    } else {
      sleeps_ = true;
      changed_.wait(lock, [&] { return ended_ || under_way(); });
      sleeps_ = false;
      continue;
    }
    std::vector<Over> over;
    if (!ended_) look(over);
    if (over.empty()) continue;
    lock.unlock();
    complete(std::move(over));
    lock.lock();
  }
}

}  // namespace lockstep::pytorch
