#include "comm/nccl/stall_poll.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "comm/store.h"

namespace lockstep::comm {
namespace {

constexpr auto kPollEvery = std::chrono::seconds(1);
// Until all who wait have seen that somebody asks.
constexpr auto kReportAfter = std::chrono::seconds(3);

}  // namespace

StallPoll::StallPoll(ProcessGroup& control, std::uint32_t number)
    : control_(control),
      store_(control.store()),
      number_(number),
      diagnosis_(*this, control.size(), {.confirms = kReportAfter}) {}

void StallPoll::look(const Op& op, Clock::time_point now) {
  if (store_ == nullptr || stall_warning() == Clock::duration::zero()) return;
  if (op.sequence != sequence_) {
    sequence_ = op.sequence;
    has_said_ = false;
    next_poll_ = now + kPollEvery;
  }
  try {
    if (now >= next_poll_) {
      next_poll_ = now + kPollEvery;
      ask();
      if (std::ranges::any_of(said_, [](const auto& value) { return value.has_value(); })) say();
    }
    diagnosis_.look(op, op.sequence, now);
  } catch (const InterruptedError&) {
    throw;
  } catch (const Error&) {
    // A store breaks when a rank has ended, which whoever watches the ranks finds out and says better.
    store_ = nullptr;
  }
}

void StallPoll::find_states(const Op&, std::span<PeerState> states) {
  say();
  ask();
  if (!answered()) {
    states.front() = PeerState::kAbsent;
    return;
  }
  for (std::size_t rank = 0; rank < said_.size(); ++rank)
    if (!said_[rank]) states[rank] = PeerState::kAbsent;
}

bool StallPoll::speaks(const Op&, unsigned) {
  const auto lower = std::span(said_).first(static_cast<std::size_t>(control_.rank()));
  return !answered() || std::ranges::none_of(lower, [](const auto& value) { return value.has_value(); });
}

std::string StallPoll::key_of(int rank) const {
  return fmt::format("waiting in NCCL's operation #{} of group {}/{}", sequence_, number_, rank);
}

void StallPoll::say() {
  if (!std::exchange(has_said_, true)) store_->set(key_of(control_.rank()), "");
}

void StallPoll::ask() {
  std::vector<std::string> keys;
  for (int rank = 0; rank < control_.size(); ++rank) keys.push_back(key_of(rank));
  said_ = store_->try_get(keys, Deadline::after({}));
}

}  // namespace lockstep::comm
