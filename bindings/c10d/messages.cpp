#include "bindings/c10d/messages.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "bindings/c10d/tensors.h"

namespace lockstep::pytorch {

using comm::ProcessGroup;

std::shared_ptr<State> State::make(std::unique_ptr<ProcessGroup> group) {
  auto state = std::make_shared<State>();
  state->group = std::move(group);
  state->messages = std::make_unique<Messages>(*state);
  const std::string name = state->group->name();
  const bool moves_itself = name == "shm" || name == "self";
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
      tag_(tag),
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
    work.of_tag_ = group.isend(&work.tag_, 1, DType::kI64, work.peer_);
    work.of_values_ = group.isend(values, count, elements.dtype, work.peer_);
    return;
  }
  Expected expected = std::exchange(expected_[static_cast<std::size_t>(work.peer_)], {});
  if (expected.tag == nullptr) expected = expect_from(work.peer_);
  work.their_tag_ = std::move(expected.tag);
  work.of_tag_ = std::move(expected.transfer);
  work.of_values_ = group.irecv(values, count, elements.dtype, work.peer_);
}

Messages::Expected Messages::expect_from(int rank) const {
  auto tag = std::make_shared<std::int64_t>(0);
  const auto transfer = state_.group->irecv(tag.get(), 1, DType::kI64, rank);
  return {std::move(tag), transfer};
}

void Messages::begin_from_any() {
  ProcessGroup& group = *state_.group;
  while (!from_any_.empty()) {
    int found = kAnyRank;
    for (int r = 0; r < group.size(); ++r) {
      if (r == group.rank()) continue;
      Expected& expected = expected_[static_cast<std::size_t>(r)];
      if (expected.tag == nullptr) expected = expect_from(r);
      if (found == kAnyRank && expected.transfer.done()) found = r;
    }
    if (found == kAnyRank) return;
    const auto work = from_any_.front();
    work->peer_ = found;
    begin(*work);
    from_any_.pop_front();
    begun_.push_back(work);
  }
}

bool Messages::finish_if_done(MessageWork& work) {
  const bool late = work.deadline_.expired();
  if (late) {
    work.of_tag_.wait(Deadline::after({}));
    work.of_values_.wait(Deadline::after({}));
  } else if (!work.of_tag_.done() || !work.of_values_.done()) {
    return false;
  }
  if (!work.sends_) {
    const at::NoGradGuard no_grad;
    if (*work.their_tag_ != work.tag_)
      throw UsageError("rank " + std::to_string(work.peer_) + " has sent a message with tag " +
                           std::to_string(*work.their_tag_) + ", and this rank receives one with tag " +
                           std::to_string(work.tag_),
                       "receive a rank's messages in the order in which it sends them");
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
  // Tags that are expected and will never come: who knows of them sends one.
  std::vector<std::uint8_t> mine, all(expected_.size() * expected_.size());
  for (const Expected& expected : expected_) mine.push_back(expected.tag != nullptr ? 1 : 0);
  group.all_gather(std::span<const std::uint8_t>(mine), std::span(all));
  const std::int64_t none = 0;
  std::vector<comm::Transfer> transfers;
  for (int r = 0; r < group.size(); ++r)
    if (all[static_cast<std::size_t>(r) * expected_.size() + static_cast<std::size_t>(group.rank())] != 0)
      transfers.push_back(group.isend(&none, 1, DType::kI64, r));
  for (Expected& expected : expected_)
    if (expected.tag != nullptr) transfers.push_back(expected.transfer);
  for (const comm::Transfer& transfer : transfers) transfer.wait();
}

}  // namespace lockstep::pytorch
