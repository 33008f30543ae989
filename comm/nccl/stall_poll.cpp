#include "comm/nccl/stall_poll.h"

#include <algorithm>
#include <span>

#include "base/error.h"
#include "comm/flight.h"

namespace lockstep::comm {
namespace {

constexpr auto kPollEvery = std::chrono::seconds(1);
// Until all who wait have seen that somebody asks.
constexpr auto kReportAfter = std::chrono::seconds(3);

}  // namespace

StallPoll::StallPoll(Store* store, int rank, int size, std::uint32_t number)
    : store_(store), rank_(static_cast<std::size_t>(rank)), size_(static_cast<std::size_t>(size)), number_(number) {}

void StallPoll::look(const Op& op, Clock::time_point now) {
  if (store_ == nullptr) return;
  const bool due = notice_.is_due(op.sequence, now);
  if (op.sequence != sequence_) {
    sequence_ = op.sequence;
    keys_.clear();
    said_ = false;
    report_at_.reset();
    next_poll_ = now + kPollEvery;
  }
  if (stall_warning() == Clock::duration::zero() || (!due && now < next_poll_)) return;
  next_poll_ = now + kPollEvery;
  try {
    ask(op, due, now);
  } catch (const InterruptedError&) {
    throw;
  } catch (const Error&) {
    // A store breaks when a rank has ended, which whoever watches the ranks finds out and says better.
    store_ = nullptr;
  }
}

void StallPoll::ask(const Op& op, bool due, Clock::time_point now) {
  for (std::size_t r = keys_.size(); r < size_; ++r)
    keys_.push_back(fmt::format("waiting in NCCL's operation #{} of group {}/{}", op.sequence, number_, r));
  const auto say = [&] {
    if (!said_) store_->set(keys_[rank_], "");
    said_ = true;
  };
  if (due && !report_at_) {
    say();
    report_at_ = now + kReportAfter;
  }
  const auto said = store_->try_get(keys_, Deadline::after({}));
  const auto has_said = [](const std::optional<std::string>& value) { return value.has_value(); };
  if (std::ranges::any_of(said, has_said)) say();
  if (!report_at_ || now < *report_at_) return;
  report_at_.reset();
  // Without an answer to its own key nothing is known of the others either.
  if (!said[rank_]) return warn_of_stall(describe(op), notice_.waited_seconds(), "rank 0, which does not answer");
  if (std::ranges::any_of(std::span(said).first(rank_), has_said)) return;
  std::vector<std::string> missing;
  for (std::size_t r = 0; r < size_; ++r)
    if (!said[r])
      missing.push_back(
          fmt::format("rank {}, which does not wait in it{}", r, where_is(static_cast<int>(r), missing.size())));
  warn_of_stall(describe(op), notice_.waited_seconds(),
                missing.empty() ? "a GPU or the network between them: every rank waits in it" : first_names(missing));
}

}  // namespace lockstep::comm
