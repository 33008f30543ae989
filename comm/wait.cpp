#include "comm/wait.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "base/log.h"
#include "base/text.h"

namespace lockstep::comm {
namespace {

// Between two looks of one wait: longer, and this process did something else or was stopped.
constexpr Clock::duration kLongestLook = std::chrono::seconds(3);
// Looks come a little late, and what is twice as long shall not drift.
constexpr Clock::duration kStep = std::chrono::milliseconds(500);
std::atomic<Clock::duration::rep> the_warning{Clock::duration(std::chrono::seconds(10)).count()};

}  // namespace

void nap(Clock::duration idle) {
  constexpr auto kShort = std::chrono::milliseconds(20), kLong = std::chrono::milliseconds(500);
  if (idle <= kShort)
    ::sched_yield();
  else
    std::this_thread::sleep_for(std::chrono::microseconds(idle <= kLong ? 50 : 200));
}

void await_own_stop_request() {
  // Between the end of a rank that was asked to stop and the same request to the next one, on a busy machine.
  constexpr auto kStopStraggles = std::chrono::milliseconds(50);
  std::this_thread::sleep_for(kStopStraggles);
  throw_if_stopped("waiting for the other ranks");
}

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

std::string first_names(const std::vector<std::string>& names) {
  std::vector<std::string> first(names.begin(),
                                 names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kNamedRanks)));
  if (names.size() > kNamedRanks) first.push_back(fmt::format("{} more", names.size() - kNamedRanks));
  return join(first, "; ");
}

}  // namespace lockstep::comm
