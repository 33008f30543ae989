// How the supervisor replaces ranks that others outlive: Note [Survivors].
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "launcher/supervisor.h"

namespace lockstep::launcher {

void Supervisor::look_at_survivors() {
  using enum Survivors::Outlook;
  const auto outlook = lost_hosts_.empty() ? survivors_.outlook(reports_) : kHopeless;
  if (outlook == kReady && !stop_asked_ && !reader_gone_ && replace_ranks()) return;
  if (outlook != kWaits || stop_asked_ || reader_gone_) return enter(Phase::kPatience, kPatience);
  if (Clock::now() < phase_until_) return;
  // A host that does not answer just now may be lost, and is what the others wait for.
  if (hosts_.any_overdue()) {
    phase_until_ = Clock::now() + kPatience;
    return;
  }
  const bool lost = std::ranges::any_of(reports_, &RankReport::ended);
  if (lost && Clock::now() < ending_since_ + survivors_.patience()) {
    phase_until_ = ending_since_ + survivors_.patience();
    return;
  }
  for (auto& connection : connections_)
    if (connection.rank >= 0 && !connection.closed() && !survivors_.is_stranded(connection.rank)) {
      auto& report = reports_[static_cast<std::size_t>(connection.rank)];
      report.given_up = !report.ended();
      let_go(connection);
    }
  if (survivors_.outlook(reports_) != kReady) enter(Phase::kPatience, kPatience);
}

bool Supervisor::replace_ranks() {
  std::vector<int> lost;
  for (const auto& report : reports_)
    if (report.ended()) lost.push_back(report.rank);
  const std::int64_t step = survivors_.step(reports_);
  Connection* const waiting = lost.empty() ? nullptr : spare();
  const bool spared = waiting != nullptr && waiting->waits;
  const RootCause cause = find_root_cause(report());
  const auto started = replace_({.cause = cause,
                                 .ranks = lost,
                                 .to_start = {lost.begin() + (spared ? 1 : 0), lost.end()},
                                 .step = step,
                                 .since = ending_since_});
  if (!started) return false;
  for (const int rank : lost) {
    for (auto& connection : connections_)
      if (connection.rank == rank) let_go(connection);
    reports_[static_cast<std::size_t>(rank)] = {};
    reports_[static_cast<std::size_t>(rank)].rank = rank;
    flights_[static_cast<std::size_t>(rank)] = {};
  }
  status_.replace(lost);
  for (auto& report : reports_) report.missing.clear();
  if (spared) {
    processes_.replace_by_spare(lost.front());
    ended_spares_ = 0;
    Hello hello = *std::exchange(waiting->spare, std::nullopt);
    hello.rank = lost.front();
    greet(*waiting, hello);
  }
  for (const auto& [rank, pid] : started->wrappers) processes_.replace(rank, pid);
  for (const auto& [rank, host] : started->remote) processes_.replace_remote(rank, host);
  for (auto& connection : connections_)
    if (!connection.closed() && connection.rank >= 0)
      send(connection, Rejoin{encode_place(started->places[static_cast<std::size_t>(connection.rank)])});
  survivors_.replace(lost, step);
  phase_ = Phase::kRunning;
  phase_until_ = ending_since_ = Clock::time_point::max();
  return true;
}

Supervisor::Connection* Supervisor::spare() {
  const auto found = std::ranges::find_if(
      connections_, [](const Connection& connection) { return connection.spare && !connection.closed(); });
  return found != connections_.end() ? &*found : nullptr;
}

/// Once the job makes steps: it would take the processors from ranks that start.
void Supervisor::keep_spare() {
  if (start_spare_ && ended_spares_ < kMostEndedSpares && phase_ == Phase::kRunning && survivors_.may_rejoin() &&
      !processes_.has_spare())
    processes_.add_spare(start_spare_());
}

void Supervisor::hear_spare(Connection& connection, const Message& message) {
  if (const auto* status = std::get_if<Status>(&message))
    connection.waits = connection.waits || status->report.kind == StatusReport::Kind::kStranded;
  if (std::holds_alternative<Ended>(message)) {
    connection.channel->close();
    if (phase_ == Phase::kRunning && ++ended_spares_ == kMostEndedSpares)
      console_.say("spare processes end by themselves: lost ranks are started when they are needed");
  }
  if (const auto* output = std::get_if<Output>(&message))
    for (const auto& line : split(output->bytes, '\n'))
      if (!line.empty()) console_.say("the spare process: " + line);
}

}  // namespace lockstep::launcher
