#include "comm/stall.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/flight_record.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/flight.h"

namespace lockstep::comm {
namespace {

// Between two looks of one wait: longer, and this process did something else or was stopped.
constexpr Clock::duration kLongestLook = std::chrono::seconds(3);
// Looks come a little late, and what is twice as long shall not drift.
constexpr Clock::duration kStep = std::chrono::milliseconds(500);
std::atomic<Clock::duration::rep> the_warning{Clock::duration(std::chrono::seconds(10)).count()};

}  // namespace

void set_stall_warning(Clock::duration after) { the_warning.store(after.count(), std::memory_order_relaxed); }

Clock::duration stall_warning() { return Clock::duration(the_warning.load(std::memory_order_relaxed)); }

bool StallNotice::is_due(std::uint64_t progress, Clock::time_point now, Clock::duration at_least) {
  if (progress != progress_ || next_ == Clock::duration::zero()) {
    progress_ = progress;
    waited_ = Clock::duration::zero();
    next_ = stall_warning();
    times_ = 0;
  } else {
    if (now - last_look_ <= kLongestLook) waited_ += now - last_look_;
  }
  last_look_ = now;
  if (next_ == Clock::duration::zero() || waited_ < next_ || waited_ < at_least) return false;
  next_ = 2 * std::max(next_, waited_ - waited_ % kStep);
  ++times_;
  return true;
}

double StallNotice::waited_seconds() const { return std::chrono::duration<double>(waited_).count(); }
void warn_of_stall(const std::string& what, double waited_seconds, const std::string& whom) {
  log_warn(
      "{} has waited {:.{}f} s for {} → look at that process and its log; after --timeout-seconds this is an error",
      what, waited_seconds, waited_seconds < 10 ? 1 : 0, whom);
}

std::string first_names(const std::vector<std::string>& names, std::size_t most, const char* separator) {
  std::vector<std::string> first(names.begin(),
                                 names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), most)));
  if (names.size() > most) first.push_back(fmt::format("{} more", names.size() - most));
  return join(first, separator);
}

void find_suspects(std::span<const PeerState> states, PeerState least, std::vector<int>& suspects) {
  suspects.clear();
  const PeerState worst = std::ranges::max(states);
  for (std::size_t rank = 0; worst >= least && rank < states.size(); ++rank)
    if (states[rank] == worst) suspects.push_back(static_cast<int>(rank));
}

StallDiagnosis::StallDiagnosis(StallReports& reports, int size, Patience patience)
    : reports_(reports), patience_(patience), states_(static_cast<std::size_t>(size)) {}

void StallDiagnosis::look(const Op& op, std::uint64_t moves, Clock::time_point now) {
  const bool due = notice_.is_due(moves, now, patience_.at_least);
  if (notice_.times() == 0) confirm_at_.reset();  // something has moved
  if (due && !confirm_at_) {
    find(op, suspects_);
    confirm_at_ = now + patience_.confirms;
  }
  if (!confirm_at_ || now < *confirm_at_) return;
  confirm_at_.reset();
  // A rank that has only just come to the operation reports later that it waits.
  find(op, still_);
  std::erase_if(suspects_, [&](int rank) { return !std::ranges::binary_search(still_, rank); });
  const auto [job_ranks, names] = named(suspects_);
  flight::set_missing(job_ranks);
  const std::string whom = still_.empty() ? reports_.other_cause() : names;
  if (!whom.empty() && reports_.speaks(op, notice_.times()))
    warn_of_stall(describe(op), notice_.waited_seconds(), whom);
}

StallDiagnosis::Suspects StallDiagnosis::suspects(const Op& op) {
  find(op, still_);
  return named(still_);
}

void StallDiagnosis::find(const Op& op, std::vector<int>& suspects) {
  std::ranges::fill(states_, PeerState::kDone);
  reports_.find_states(op, states_);
  find_suspects(states_, PeerState::kStarted, suspects);
}

StallDiagnosis::Suspects StallDiagnosis::named(std::vector<int> ranks) const {
  std::vector<std::string> names;
  for (int& rank : ranks) {
    const int in_job = reports_.job_rank(rank);
    names.push_back(reports_.suspect_text(rank) + where_is(in_job, names.size()));
    rank = in_job;
  }
  return {std::move(ranks), first_names(names)};
}

}  // namespace lockstep::comm
