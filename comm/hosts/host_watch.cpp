// How an engine finds out, and says, who is not there.
#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/flight_record.h"
#include "base/text.h"
#include "comm/flight.h"
#include "comm/hosts/host_engine.h"

namespace lockstep::comm {
namespace {

constexpr auto kConnectionCheckEvery = std::chrono::milliseconds(500);
// What this rank's last words may take.
constexpr auto kFarewell = std::chrono::milliseconds(500);

bool is_lost(const Link& link, const PairTransfer& transfer) {
  return link.is_down() || (transfer.sends && link.send_error() != 0);
}

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
  listen_while_idle();
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
  // A rank that has received reports of waiting reports its own waiting at once, so that it does not count as missing.
  if (!channel_ || (now - still_since_ < patience_for(timeout_) && !channel_->others_say_they_wait())) return;
  channel_->announce_wait(find_missing_by(Witnesses::kSelf));
  // The others here have no links, or other ones.
  sync_.blame(completed() + 1, find_missing_by(Witnesses::kLinks));
}

/// Others may say something to a rank that has no operation under way, but waits for a transfer.
void HostEngine::listen_while_idle() {
  if (channel_ && idle()) channel_->listen();
}

void HostEngine::check_abort() const {
  if (const auto reason = sync_.abort_reason()) reason->raise();
  if (channel_ && channel_->abort_reason()) channel_->abort_reason()->raise();
}

void HostEngine::check_step() const {
  if (finished_ >= posted_) return;
  const auto [local, index] = sync_.find_difference(finished_ + 1);
  if (local < 0) return;
  throw OutOfStepError(
      out_of_step_text(connections_.peers.name_of(rank_of_local(local)), sync_.posted_by(local, index), op_at(index)),
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
  give_up_on({&in_job, 1});
  throw DeviceError(fmt::format("the connection to {} is lost ({}), and this rank waits for it in {}",
                                connections_.peers.name_of(rank), errno_text(error), waiting_in),
                    "look at that host and the network to it");
}

/// The connection for transfers. Before it is there: that of the channel, where `rank` is in it, because a rank that
/// has ended before it was called never answers.
Link* HostEngine::link_to(int rank) {
  if (Link* const link = links_.link_with(rank)) return link;
  for (std::size_t i = 0; channel_ && i < channel_->links(); ++i)
    if (channel_->link(i).rank() == rank) return &channel_->link(i);
  return nullptr;
}

bool HostEngine::is_gone(const PairTransfer& transfer) {
  if (local_of(transfer.peer)) return connections_.peers.has_ended(transfer.peer);
  Link* const link = link_to(transfer.peer);
  if (link == nullptr) return false;
  return is_lost(*link, transfer) || link->silence(Clock::now(), patience()) > Clock::duration::zero();
}

void HostEngine::throw_gone(const PairTransfer& transfer) {
  // What it has said before its end comes first.
  listen_while_idle();
  check_abort();
  const std::string waiting_in = describe(transfer, name_of(transfer.peer));
  if (local_of(transfer.peer)) connections_.peers.throw_ended(transfer.peer, waiting_in);
  Link& link = *link_to(transfer.peer);
  if (is_lost(link, transfer)) throw_lost(transfer.peer, link.error(), waiting_in);
  throw_silent(transfer.peer, std::max(link.silence(Clock::now(), patience()), patience()), waiting_in);
}

/// A connection on which nobody answers; a peer that only does not read is waited for.
void HostEngine::check_connections() {
  const auto now = Clock::now();
  if (!channel_ || now < next_connection_check_) return;
  next_connection_check_ = now + kConnectionCheckEvery;
  for (std::size_t i = 0; i < channel_->links(); ++i) {
    Link& link = channel_->link(i);
    const auto silence = link.silence(now, patience());
    if (silence > Clock::duration::zero() && channel_->waits_for(i))
      throw_silent(link.rank(), silence, describe(first()));
  }
}

void HostEngine::throw_silent(int rank, Clock::duration silence, const std::string& waiting_in) const {
  const int in_job = connections_.peers.job_ranks().of(rank);
  give_up_on({&in_job, 1});
  throw DeviceError(
      fmt::format("{} has not answered for {:.3g} s, and {} waits for it in {}", connections_.peers.name_of(rank),
                  std::chrono::duration<double>(silence).count(), connections_.peers.name_of(this->rank()), waiting_in),
      "look at that host and the network between the two");
}

void HostEngine::check_ended_peers() {
  listen_while_idle();
  check_abort();
  int rank = -1;
  for (int local = 0; local < sync_.size() && rank < 0; ++local)
    if (local != sync_.local() && connections_.peers.has_ended(rank_of_local(local))) rank = rank_of_local(local);
  for (std::size_t i = 0; channel_ && rank < 0 && i < channel_->links(); ++i)
    if (channel_->link(i).is_down()) rank = channel_->link(i).rank();
  if (rank < 0) return;
  await_own_stop_request();
  connections_.peers.throw_ended(rank, {});
}

/// Of the first operation. Only what this rank sees itself is reported to other hosts: what they conclude from it must
/// not return as an observation.
void HostEngine::find_states_by(Witnesses witnesses, std::span<PeerState> states) const {
  const std::uint64_t index = completed() + 1;
  const auto suspect = [&](int rank, PeerState state) {
    PeerState& known = states[static_cast<std::size_t>(rank)];
    known = std::max(known, state);
  };
  const std::size_t links = channel_ && finished_ < index ? channel_->links() : 0;
  // Those who have reported that they wait are not to blame; those whom they miss are.
  const auto blame = [&](int rank) {
    if (rank < 0 || rank >= size() || local_of(rank)) return;
    for (std::size_t i = 0; channel_ && i < channel_->links(); ++i)
      if (channel_->link(i).rank() == rank && channel_->said_to_wait_for(i, index) != nullptr) return;
    suspect(rank, PeerState::kLate);
  };
  for (std::size_t i = 0; i < links; ++i) {
    const std::vector<int>* const said = channel_->said_to_wait_for(i, index);
    if (channel_->waits_for(i))
      suspect(channel_->link(i).rank(), said != nullptr ? PeerState::kWaits : PeerState::kLate);
    if (said != nullptr && witnesses != Witnesses::kSelf) std::ranges::for_each(*said, blame);
  }
  for (int i = 0; witnesses == Witnesses::kHost && i < sync_.drivers(); ++i)
    if (i != sync_.local() && !sync_.has_finished(i, index)) std::ranges::for_each(sync_.blamed_by(i, index), blame);
  for (int i = 0; i < sync_.size(); ++i)
    if (!sync_.has_posted(i, index))
      suspect(rank_of_local(i), PeerState::kAbsent);
    else if (waits_for_local(i))
      suspect(rank_of_local(i), PeerState::kStarted);
}

const std::vector<int>& HostEngine::find_missing_by(Witnesses witnesses) {
  std::ranges::fill(states_, PeerState::kDone);
  find_states_by(witnesses, states_);
  find_suspects(states_, PeerState::kLate, missing_);
  return missing_;
}

std::string HostEngine::suspect_text(int rank) const {
  const auto local = local_of(rank);
  return name_of(rank) + (local ? ", " + sync_.progress_of(*local) : "");
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
