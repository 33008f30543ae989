#include "bindings/c10d/messages.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "bindings/c10d/tensors.h"

namespace lockstep::pytorch {

using comm::ProcessGroup;

namespace {

constexpr std::int64_t kAllToAll = -1;  // in the place of a tag

std::string described(const Envelope& envelope) {
  return (envelope[0] == kAllToAll ? std::string("a part of an all-to-all")
                                   : "a message with tag " + std::to_string(envelope[0])) +
         " of " + std::to_string(envelope[1]) + " elements";
}

void check_envelope(const Envelope& theirs, const Envelope& ours, std::size_t rank) {
  if (theirs == ours) return;
  throw OutOfStepError(
      "rank " + std::to_string(rank) + " sends " + described(theirs) + ", and this rank receives " + described(ours),
      "receive what a rank sends in the order in which it sends it");
}

}  // namespace

std::shared_ptr<State> State::make(std::unique_ptr<ProcessGroup> group) {
  auto state = std::make_shared<State>();
  state->group = std::move(group);
  state->messages = std::make_unique<Messages>(*state);
  const bool moves_itself = state->group->size() == 1 || state->group->sees_all_copies();
  state->queue = std::make_unique<TaskQueue>(moves_itself ? TaskQueue::RunsOn::kCaller : TaskQueue::RunsOn::kThread,
                                             [weak = std::weak_ptr(state)] {
                                               const auto there = weak.lock();
                                               return there != nullptr && there->messages->advance();
                                             });
  return state;
}

MessageWork::MessageWork(std::shared_ptr<State> state, ::c10d::OpType type, const char* title, const at::Tensor& tensor,
                         int peer, int tag)
    : Work(state->group->rank(), type, title, {tensor}, {tensor}),
      state_(std::move(state)),
      sends_(type == ::c10d::OpType::SEND),
      tensor_(tensor),
      peer_(peer),
      envelope_{tag, static_cast<std::int64_t>(Elements(tensor.scalar_type()).count(tensor))},
      deadline_(Deadline::after(state_->group->timeout())) {}

void MessageWork::advance() {
  if (state_->queue->where() == TaskQueue::RunsOn::kCaller) state_->queue->run([&] { state_->messages->advance(); });
}

bool MessageWork::isCompleted() {
  if (!Work::isCompleted()) advance();
  return Work::isCompleted();
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  constexpr int kLooks = 200;
  const auto end = timeout == kNoTimeout ? deadline_ : Deadline::after(timeout);
  for (int looks = 0; !isCompleted() && !end.expired(); ++looks) {
    if (state_->queue->where() == TaskQueue::RunsOn::kThread) break;
    // Not under the queue's lock: other threads may have to issue what the other rank waits for.
    if (looks < kLooks)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  isCompleted();  // the last look, which may complete it with a timeout that says who is missing
  return Work::wait(timeout == kNoTimeout ? timeout : std::max(timeout, std::chrono::milliseconds(1)));
}

// ---- Messages ----

Messages::Messages(State& state) : state_(state), expected_(static_cast<std::size_t>(state.group->size())) {}

void Messages::start(const c10::intrusive_ptr<MessageWork>& work) {
  try {
    work->memory_ = work->sends_ ? contiguous(work->tensor_) : memory_for(work->tensor_);
    if (work->peer_ == kAnyRank) {
      from_any_.push_back(work);
    } else {
      begin(*work);
      begun_.push_back(work);
    }
  } catch (...) {
    end(*work, as_torch_error(std::current_exception()));
    return;
  }
  advance();
}

void Messages::begin(MessageWork& work) {
  ProcessGroup& group = *state_.group;
  const Elements elements(work.tensor_.scalar_type());
  void* const values = work.memory_.data_ptr();
  const std::size_t count = elements.count(work.memory_);
  if (work.sends_) {
    work.of_envelope_ = group.isend(std::span<const std::int64_t>(work.envelope_), work.peer_);
    work.of_values_ = group.isend(values, count, elements.dtype, work.peer_);
    return;
  }
  Expected expected = take_expected(work.peer_);
  work.theirs_ = std::move(expected.envelope);
  work.of_envelope_ = std::move(expected.transfer);
  work.of_values_ = group.irecv(values, count, elements.dtype, work.peer_);
}

Messages::Expected Messages::take_expected(int rank) {
  Expected expected = std::exchange(expected_[static_cast<std::size_t>(rank)], {});
  if (expected.envelope == nullptr) {
    expected.envelope = std::make_shared<Envelope>();
    expected.transfer = state_.group->irecv(std::span<std::int64_t>(*expected.envelope), rank);
  }
  return expected;
}

void Messages::begin_from_any() {
  ProcessGroup& group = *state_.group;
  while (!from_any_.empty()) {
    int found = kAnyRank;
    for (int r = 0; r < group.size(); ++r) {
      if (r == group.rank()) continue;
      Expected& expected = expected_[static_cast<std::size_t>(r)];
      expected = take_expected(r);
      if (found == kAnyRank && expected.transfer.done() && (*expected.envelope)[0] != kAllToAll) found = r;
    }
    if (found == kAnyRank) return;
    const auto work = from_any_.front();
    work->peer_ = found;
    begin(*work);
    from_any_.pop_front();
    begun_.push_back(work);
  }
}

void Messages::all_to_all(const void* from, const std::vector<std::size_t>& from_counts, void* to,
                          const std::vector<std::size_t>& to_counts, DType dtype, bool all) {
  ProcessGroup& group = *state_.group;
  const auto ranks = static_cast<std::size_t>(group.size()), own = static_cast<std::size_t>(group.rank());
  const auto* source = static_cast<const std::byte*>(from);
  auto* target = static_cast<std::byte*>(to);
  if (from_counts[own] != to_counts[own])
    throw UsageError("an all_to_all in which rank " + std::to_string(own) + " has " + std::to_string(from_counts[own]) +
                         " elements for itself, and expects " + std::to_string(to_counts[own]),
                     "give what one rank sends and the other receives the same size");
  // After an error the group is broken, and what its transfers name has to stay.
  auto* const mine = new std::vector<Envelope>(ranks);
  auto* const theirs = new std::vector<Expected>(ranks);
  std::vector<comm::Transfer> transfers;
  for (std::size_t r = 0; r < ranks; ++r) {
    const int rank = static_cast<int>(r);
    const std::size_t sent = from_counts[r], received = to_counts[r];
    if (r == own && sent > 0) std::memcpy(target, source, sent * size_of(dtype));
    if (r != own && (all || sent > 0)) {
      (*mine)[r] = {kAllToAll, static_cast<std::int64_t>(sent)};
      transfers.push_back(group.isend(std::span<const std::int64_t>((*mine)[r]), rank));
      if (sent > 0) transfers.push_back(group.isend(source, sent, dtype, rank));
    }
    if (r != own && (all || received > 0)) {
      (*theirs)[r] = take_expected(rank);
      transfers.push_back((*theirs)[r].transfer);
      if (received > 0) transfers.push_back(group.irecv(target, received, dtype, rank));
    }
    source += sent * size_of(dtype);
    target += received * size_of(dtype);
  }
  for (const comm::Transfer& transfer : transfers) transfer.wait();
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto envelope = (*theirs)[r].envelope;
    if (envelope != nullptr) check_envelope(*envelope, {kAllToAll, static_cast<std::int64_t>(to_counts[r])}, r);
  }
  delete mine;
  delete theirs;
}

bool Messages::finish_if_done(MessageWork& work) {
  const bool late = work.deadline_.expired();
  if (late) {
    work.of_envelope_.wait(Deadline::after({}));
    work.of_values_.wait(Deadline::after({}));
  } else if (!work.of_envelope_.done() || !work.of_values_.done()) {
    return false;
  }
  if (!work.sends_) {
    const at::NoGradGuard no_grad;
    check_envelope(*work.theirs_, work.envelope_, static_cast<std::size_t>(work.peer_));
    write_back(work.memory_, work.tensor_);
  }
  end(work, nullptr);
  return true;
}

void Messages::end(MessageWork& work, const std::exception_ptr& error) {
  if (error != nullptr) state_.failed = true;
  work.tensor_.reset();
  work.memory_.reset();
  state_.queue->retire(c10::intrusive_ptr<MessageWork>::reclaim_copy(&work));
  work.complete(error);
}

bool Messages::advance() {
  const auto fail = [&](MessageWork& work) { end(work, as_torch_error(std::current_exception())); };
  if (!from_any_.empty()) try {
      begin_from_any();
      if (!from_any_.empty() && from_any_.front()->deadline_.expired())
        throw TimeoutError("receiving from any rank timed out", "look at the logs of the ranks that should send");
    } catch (...) {
      fail(*from_any_.front());
      from_any_.pop_front();
    }
  for (auto at = begun_.begin(); at != begun_.end();) {
    bool over = true;
    try {
      over = finish_if_done(**at);
    } catch (...) {
      fail(**at);
    }
    at = over ? begun_.erase(at) : std::next(at);
  }
  return !begun_.empty() || !from_any_.empty();
}

void Messages::end() {
  advance();
  if (!begun_.empty() || !from_any_.empty())
    throw UsageError("a group is ended while sends or receives are under way", "wait for all of them before");
  ProcessGroup& group = *state_.group;
  if (group.size() == 1) return;
  // Envelopes that are expected and will never come: who knows of them sends one.
  std::vector<std::uint8_t> mine, all(expected_.size() * expected_.size());
  for (const Expected& expected : expected_) mine.push_back(expected.envelope != nullptr ? 1 : 0);
  group.all_gather(std::span<const std::uint8_t>(mine), std::span(all));
  const Envelope none = {};
  std::vector<comm::Transfer> transfers;
  for (int r = 0; r < group.size(); ++r)
    if (all[static_cast<std::size_t>(r) * expected_.size() + static_cast<std::size_t>(group.rank())] != 0)
      transfers.push_back(group.isend(std::span<const std::int64_t>(none), r));
  for (Expected& expected : expected_)
    if (expected.envelope != nullptr) transfers.push_back(expected.transfer);
  for (const comm::Transfer& transfer : transfers) transfer.wait();
}

}  // namespace lockstep::pytorch
