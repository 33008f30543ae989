#include "comm/mpi/wait_notices.h"

#include <algorithm>
#include <span>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "comm/mpi/transfers.h"

namespace lockstep::comm {
namespace {

constexpr int kNoticeTag = 1;

}  // namespace

WaitNotices::WaitNotices(const Session& session, const TagLayout& tags, Clock::duration patience)
    : session_(session),
      tags_(tags),
      patience_(patience),
      sending_(static_cast<std::size_t>(session.size()), MPI_REQUEST_NULL),
      heard_(static_cast<std::size_t>(session.size())) {
  static_assert(std::is_trivially_copyable_v<Notice>);
}

WaitNotices::~WaitNotices() {
  if (std::ranges::any_of(sending_, [](MPI_Request request) { return request != MPI_REQUEST_NULL; }))
    keep_for_mpi(mine_);
}

void WaitNotices::check(const Op& op, std::uint64_t completed, const std::vector<int>& missing) {
  notify(op, completed);
  listen();
  compare_notices(op, missing);
  probe_messages(op);
}

void WaitNotices::notify(const Op& op, std::uint64_t completed) {
  if (mine_->op.op_index == op.op_index) return;
  // The last notice lies in mine_ until it is out; one that does not get out says enough to whom it is for.
  int done = 0;
  check_mpi(MPI_Testall(static_cast<int>(sending_.size()), sending_.data(), &done, MPI_STATUSES_IGNORE),
            "notifying the other ranks of a stall");
  if (done == 0) return;
  *mine_ = {op, completed};
  for (int peer = 0; peer < session_.size(); ++peer)
    if (peer != session_.rank())
      check_mpi(MPI_Isend(mine_.get(), sizeof(Notice), MPI_BYTE, peer, kNoticeTag, session_.notices(),
                          &sending_[static_cast<std::size_t>(peer)]),
                "notifying the other ranks of a stall");
}

void WaitNotices::listen() {
  constexpr const char* kDoing = "reading the other ranks' notices";
  for (;;) {
    int found = 0;
    MPI_Status status;
    check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, kNoticeTag, session_.notices(), &found, &status), kDoing);
    if (found == 0) return;
    check_mpi(MPI_Recv(&heard_[static_cast<std::size_t>(status.MPI_SOURCE)], sizeof(Notice), MPI_BYTE,
                       status.MPI_SOURCE, kNoticeTag, session_.notices(), MPI_STATUS_IGNORE),
              kDoing);
  }
}

void WaitNotices::compare_notices(const Op& op, const std::vector<int>& missing) const {
  for (int peer = 0; peer < session_.size(); ++peer) {
    const Notice& notice = heard_[static_cast<std::size_t>(peer)];
    if (notice.op.op_index == op.op_index && notice.op.history != op.history)
      throw OutOfStepError(out_of_step_text(session_.name_of_rank(peer), notice.op, op), kSameProgram);
    if (notice.completed >= op.op_index && std::binary_search(missing.begin(), missing.end(), peer))
      out_of_step(peer, fmt::format("has done its #{} and is in {}", op.sequence, describe(notice.op)), op);
  }
}

void WaitNotices::probe_messages(const Op& op) {
  for (int peer = 0; peer < session_.size(); ++peer) {
    if (peer == session_.rank()) continue;
    int found = 0;
    MPI_Status status;
    check_mpi(MPI_Iprobe(peer, MPI_ANY_TAG, session_.data(), &found, &status), "looking for messages");
    if (found == 0) continue;
    // The first message that nobody has asked for. One of a later operation, or more of this one, may just be early.
    const TagFields theirs = tags_.decode(status.MPI_TAG);
    const TagFields ours = tags_.fields_of(op, theirs.phase);
    const std::uint32_t lag = tags_.distance(theirs, ours);
    if (theirs == ours || lag > op.op_index || lag >= tags_.farthest()) continue;
    if (lag == 0) {
      if (std::exchange(suspected_index_, op.op_index) != op.op_index) suspected_since_ = RunningClock::now();
      if (RunningClock::now() - suspected_since_ < patience_) continue;
    }
    // The group's own exchanges have an op_index, but no sequence number. So the number of an operation long ago may be
    // off.
    std::string what = fmt::format("{} {}", lag > 0 ? "has been in" : "is in", name_of(theirs.kind));
    if (op.sequence > lag) what += fmt::format(" #{}", op.sequence - lag);
    if (lag > 0)
      what += ", which this rank was not";
    else if (theirs.dtype != ours.dtype || theirs.reduce != ours.reduce)
      what += fmt::format(" ({} of {})", name_of(theirs.reduce), lockstep::name_of(theirs.dtype));
    else if (theirs.kind == ours.kind)
      what += " of another size, offset, arena, root, step or bucket, or after other operations";
    out_of_step(peer, what, op);
  }
}

void WaitNotices::out_of_step(int peer, const std::string& theirs, const Op& ours) const {
  throw OutOfStepError(
      fmt::format("out of step: {} {}, this rank is in {}", session_.name_of_rank(peer), theirs, describe(ours)),
      kSameProgram);
}

void WaitNotices::find_states(const Op& op, const std::vector<int>& missing, std::span<PeerState> states) {
  listen();
  for (int rank = 0; rank < session_.size(); ++rank) {
    if (rank == session_.rank()) continue;
    const bool waits = heard_[static_cast<std::size_t>(rank)].op.op_index >= op.op_index;
    const bool awaited = std::ranges::binary_search(missing, rank);
    states[static_cast<std::size_t>(rank)] =
        awaited ? (waits ? PeerState::kWaits : PeerState::kLate) : (waits ? PeerState::kDone : PeerState::kQuiet);
  }
}

bool WaitNotices::is_first_to_wait(const Op& op) const {
  const auto lower = std::span(heard_).first(static_cast<std::size_t>(session_.rank()));
  return std::ranges::none_of(lower, [&](const Notice& notice) { return notice.op.op_index >= op.op_index; });
}

void WaitNotices::abandon_notices() {
  for (MPI_Request& request : sending_)
    if (request != MPI_REQUEST_NULL) check_mpi(MPI_Request_free(&request), "ending MPI");
}

}  // namespace lockstep::comm
