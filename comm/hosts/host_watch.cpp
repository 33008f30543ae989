// How an engine finds out, and says, who is not there.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>

#include "base/error.h"
#include "base/status_report.h"
#include "base/text.h"
#include "comm/hosts/host_engine.h"

namespace lockstep::comm {
namespace {

// How long an operation stands still before the ranks report to each other whom they wait for. Shorter than the
// timeout, and longer than a slow step.
constexpr Clock::duration kPatience = std::chrono::seconds(1);
constexpr auto kConnectionCheckEvery = std::chrono::milliseconds(500);
constexpr auto kLongestProbe = std::chrono::seconds(120);
// What this rank's last words may take.
constexpr auto kFarewell = std::chrono::milliseconds(500);

}  // namespace

bool HostEngine::waits_for_local(int local) const {
  const std::uint64_t index = completed() + 1;
  if (local == sync_.local() || posted_ < index) return false;
  if (!sync_.has_posted(local, index)) return true;
  if (local >= sync_.drivers() || sync_.has_finished(local, index)) return false;
  for (int i = 0; i < sync_.size(); ++i)
    if (!sync_.has_posted(i, index)) return false;
  return true;
}

void HostEngine::check_peers() {
  // This rank's own view first.
  check_step();
  check_abort();
  if (idle()) return;
  check_locals();
  check_links();
  check_connections();
  const auto now = Clock::now();
  const std::uint64_t progress = this->progress();
  if (progress != progress_at_last_look_) still_since_ = now;
  progress_at_last_look_ = progress;
  if (idle()) return;
  // Who has heard others say that they wait says so at once, so that they do not take it for the one who is missing.
  if (now - still_since_ < std::min(kPatience, timeout_ / 3) && !(channel_ && channel_->others_say_they_wait())) return;
  find_who_is_silent(silent_);
  if (channel_) channel_->announce_wait(silent_);
  // The others here have no links, or other ones.
  find_who_is_missing(false);
  if (channel_) sync_.blame(completed() + 1, missing_);
}

void HostEngine::check_abort() const {
  if (const auto reason = sync_.abort_reason()) reason->raise();
  if (channel_ && channel_->abort_reason()) channel_->abort_reason()->raise();
}

void HostEngine::check_step() const {
  if (finished_ >= posted_) return;
  const Op& ours = op_at(finished_ + 1);
  const int local = sync_.posted_otherwise(ours);
  if (local < 0) return;
  throw OutOfStepError(
      out_of_step_text(connections_.peers.name_of(rank_of_local(local)), sync_.posted_by(local, ours.op_index), ours),
      kSameProgram);
}

void HostEngine::check_locals() {
  for (int local = 0; local < sync_.size(); ++local) {
    const int rank = rank_of_local(local);
    if (!waits_for_local(local) || !connections_.peers.has_ended(rank)) continue;
    // What it has done before its end counts.
    advance();
    if (idle()) return;
    if (!waits_for_local(local)) continue;
    // Whoever stops a job signals one rank after the other: this one's turn may be yet to come.
    await_own_stop_request();
    check_abort();
    connections_.peers.throw_ended(rank, fmt::format("{}; {}", describe(first()), sync_.progress_of(local)));
  }
}

void HostEngine::check_links() {
  for (std::size_t i = 0; channel_ && i < channel_->links(); ++i) {
    if (!channel_->waits_for(i) || !channel_->link(i).is_down()) continue;
    await_own_stop_request();
    // Another link may have the reason.
    advance();
    check_abort();
    if (idle()) return;
    if (channel_->waits_for(i)) fail_for_link(i);
  }
}

void HostEngine::fail_for_link(std::size_t i) {
  const Link& link = channel_->link(i);
  throw_lost(link.rank(), link.error(), describe(first()));
}

void HostEngine::throw_lost(int rank, int error, const std::string& waiting_in) const {
  const int in_job = connections_.peers.job_ranks().of(rank);
  if (error == 0 || error == ECONNRESET || error == EPIPE) connections_.peers.throw_ended(rank, waiting_in);
  report_missing_ranks({&in_job, 1});
  throw DeviceError(fmt::format("the connection to {} is lost ({}), and this rank waits for it in {}",
                                connections_.peers.name_of(rank), errno_text(error), waiting_in),
                    "look at that host and the network to it");
}

bool HostEngine::is_gone(int peer) {
  if (local_of(peer)) return connections_.peers.has_ended(peer);
  if (links_.is_down(peer)) return true;
  if (channel_ && idle()) channel_->listen();
  // The way to it in the channel, where that one is in it: a rank that has ended before it was called never answers.
  for (std::size_t i = 0; channel_ && i < channel_->links(); ++i)
    if (channel_->link(i).rank() == peer) return channel_->link(i).is_down();
  return false;
}

void HostEngine::throw_gone(int peer, const std::string& waiting_in) const {
  if (local_of(peer)) connections_.peers.throw_ended(peer, waiting_in);
  throw_lost(peer, links_.is_down(peer) ? links_.error_of(peer) : 0, waiting_in);
}

/// A connection on which questions remain unanswered: what has been sent is sent again and again; or nothing can be
/// sent, because the way is gone, and TCP only probes; or keepalive does. TCP itself would retry for a quarter of an
/// hour. A peer that only does not read acknowledges or answers probes, and is waited for. Whatever else may be, its
/// kernel gives a sign at least every two minutes, the longest that TCP waits between two probes.
void HostEngine::check_connections() {
  const auto now = Clock::now();
  if (!channel_ || now < next_connection_check_) return;
  next_connection_check_ = now + kConnectionCheckEvery;
  const auto patience = std::min<Clock::duration>(kLinkPatience, timeout_);
  for (std::size_t i = 0; i < channel_->links(); ++i) {
    const Link& link = channel_->link(i);
    tcp_info info{};
    socklen_t length = sizeof info;
    if (link.is_down() || ::getsockopt(link.fd(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    Clock::time_point& since = silent_since_[i];
    const auto last_word = now - std::chrono::milliseconds(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
    const bool unanswered = (info.tcpi_unacked > 0 && info.tcpi_retransmits > 0) || info.tcpi_probes > 0;
    if (!unanswered || last_word > since) since = now;
    if (!channel_->waits_for(i)) continue;
    if (now - since >= patience)
      fail_for_silence(i, now - since);
    else if (now - last_word >= patience + kLongestProbe)
      fail_for_silence(i, now - last_word);
  }
}

void HostEngine::fail_for_silence(std::size_t i, Clock::duration silence) {
  const int silent = channel_->link(i).rank(), in_job = connections_.peers.job_ranks().of(silent);
  report_missing_ranks({&in_job, 1});
  throw DeviceError(fmt::format("{} has not answered for {:.3g} s, and {} waits for it in {}",
                                connections_.peers.name_of(silent), std::chrono::duration<double>(silence).count(),
                                connections_.peers.name_of(rank()), describe(first())),
                    "look at that host and the network between the two");
}

void HostEngine::check_ended_peers() {
  check_abort();
  if (channel_ && idle()) channel_->listen();
  std::string who;
  int rank = -1;
  for (int local = 0; local < sync_.size() && rank < 0; ++local)
    if (local != sync_.local() && connections_.peers.has_ended(rank_of_local(local))) rank = rank_of_local(local);
  for (std::size_t i = 0; channel_ && rank < 0 && i < channel_->links(); ++i)
    if (channel_->link(i).is_down()) rank = channel_->link(i).rank();
  if (rank < 0) return;
  await_own_stop_request();
  connections_.peers.throw_ended(rank, {});
}

/// Whom this rank itself misses in the first operation: ranks of this host that have not come to it, else those at the
/// other ends of its links that have not said that they wait in it, too. Only this is reported to others: what they
/// conclude from it must not return as an observation.
void HostEngine::find_who_is_silent(std::vector<int>& silent) const {
  silent.clear();
  const std::uint64_t index = completed() + 1;
  for (int i = 0; i < sync_.size(); ++i)
    if (!sync_.has_posted(i, index)) silent.push_back(rank_of_local(i));
  if (!silent.empty() || !channel_ || finished_ >= index) return;
  for (std::size_t i = 0; i < channel_->links(); ++i)
    if (channel_->waits_for(i) && channel_->said_to_wait_for(i, index) == nullptr)
      silent.push_back(channel_->link(i).rank());
}

/// Those who have said that they wait are not to blame; those whom they miss are. `as_others_say`: also those whom
/// the other ranks of this host have found.
void HostEngine::find_who_is_missing(bool as_others_say) {
  find_who_is_silent(missing_);
  const std::uint64_t index = completed() + 1;
  if (!missing_.empty() && connections_.peers.host_of(missing_.front()) == connections_.host) return;
  const auto waits_too = [&](int rank) {
    if (connections_.peers.host_of(rank) == connections_.host) return true;
    for (std::size_t i = 0; channel_ && i < channel_->links(); ++i)
      if (channel_->link(i).rank() == rank) return channel_->said_to_wait_for(i, index) != nullptr;
    return false;
  };
  const auto add = [&](int rank) {
    if (rank >= 0 && !waits_too(rank) && std::find(missing_.begin(), missing_.end(), rank) == missing_.end())
      missing_.push_back(rank);
  };
  if (channel_ && finished_ < index)
    for (std::size_t i = 0; i < channel_->links(); ++i)
      if (const std::vector<int>* const said = channel_->said_to_wait_for(i, index))
        for (const int rank : *said) add(rank);
  for (int i = 0; as_others_say && i < sync_.drivers(); ++i)
    if (i != sync_.local() && !sync_.has_finished(i, index))
      for (const int rank : sync_.blamed_by(i, index)) add(rank);
  std::sort(missing_.begin(), missing_.end());
}

/// Fills missing_, too.
std::string HostEngine::missing_text() {
  find_who_is_missing(true);
  if (missing_.empty())
    for (std::size_t i = 0; channel_ && i < channel_->links(); ++i)
      if (channel_->waits_for(i)) missing_.push_back(channel_->link(i).rank());
  if (missing_.empty())
    for (int i = 0; i < sync_.size(); ++i)
      if (waits_for_local(i)) missing_.push_back(rank_of_local(i));
  std::vector<std::string> names;
  for (const int rank : missing_) {
    names.push_back(connections_.peers.name_of(rank));
    const auto local = std::ranges::find(here_, rank) - here_.begin();
    if (local < sync_.size()) names.back() += ", " + sync_.progress_of(static_cast<int>(local));
  }
  return first_names(names);
}

void HostEngine::watch_stall() {
  // Twice the patience: by then all have reported to each other.
  if (idle() || !stall_.is_due(progress(), Clock::now(), 2 * std::min(kPatience, timeout_ / 3))) return;
  const std::string whom = missing_text();
  if (!missing_.empty() && sync_.claim_mention(completed() + 1, stall_.times()))
    warn_of_stall(describe(first()), stall_.waited_seconds(), whom);
}

void HostEngine::time_out(double waited_seconds) {
  const std::string whom = missing_text();
  throw_timeout(waited_seconds, connections_.peers.job_ranks().of(missing_), whom);
}

void HostEngine::announce_abort(const std::exception_ptr& failure) {
  auto reason = AbortReason::of(failure);
  if (!reason) return;
  // "This rank" is this one.
  if (reason->kind == AbortReason::Kind::kOutOfStep && !reason->what.starts_with("rank "))
    reason->what = fmt::format("{} is {}", connections_.peers.name_of(rank()), reason->what);
  sync_.announce(*reason);
  if (channel_) channel_->announce_abort(*reason, Deadline::after(kFarewell));
}

}  // namespace lockstep::comm
