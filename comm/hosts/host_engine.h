// Moves the operations of a group on several hosts on.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/function_ref.h"
#include "comm/hosts/channel.h"
#include "comm/hosts/host_meeting.h"
#include "comm/hosts/intra_host_sync.h"
#include "comm/op.h"
#include "comm/shm/peers.h"
#include "comm/stall_notice.h"

namespace lockstep::comm {

/// Note [Hosts]
/// Each rank posts its operations, in their order, to the other ranks of its host (comm/hosts/intra_host_sync.h). Those
/// of them that drive a channel move the data (Note [Channels], Note [Two levels]); the others have nothing to do but
/// to wait: their arena's copies are read and written where they lie. An operation is complete when all channels of the
/// host have finished it. Nothing here blocks but sleep(); no allocation once queue and pool have been as large as they
/// get. One thread uses it, but for wake_up().
class HostEngine {
 public:
  HostEngine(HostMeeting met, Clock::duration timeout);

  int rank() const { return rank_; }
  /// This rank among those of its host, and how many those are.
  int local() const { return sync_.local(); }
  int local_size() const { return sync_.size(); }
  bool oversubscribed() const { return met_.peers.oversubscribed(); }
  bool encrypts() const { return met_.encrypts; }
  bool drives() const { return channel_.has_value(); }

  /// An operation, or an exchange of texts, as it is handed over. `part_bytes` lie between the copies of its arena.
  /// With `here` it is among the ranks of each host alone: their texts (own_text()) are in text_here() when it is
  /// complete.
  struct Order {
    Op op;
    std::size_t part_bytes = 0;
    bool here = false;
  };
  void submit(const Order& order);

  static constexpr std::size_t kTextBytes = 256;
  static_assert(Segment::kMostText < kTextBytes);
  /// For exchanges: every rank's text lies in all_texts(), kTextBytes each, while one among all is under progress.
  Order order_for_all_texts();
  Order order_for_texts_here();
  std::byte* all_texts() const;
  void set_own_text(const std::string& text) { own_text_ = text; }
  std::string text_here(int local) const;

  /// Does what can be done now; whether anything was.
  bool advance();
  /// The op_index of the last operation that has been taken, and of the last that is complete.
  std::uint64_t submitted() const { return submitted_; }
  std::uint64_t completed() const { return completed_; }
  std::uint64_t completed_sequence() const { return completed_sequence_; }
  bool idle() const { return completed_ == submitted_; }

  /// Sleeps until something may have changed, at most so long; not at all where `awake` says so, after everybody who
  /// changes what it looks at knows to call wake_up().
  void sleep(Clock::duration at_most, FunctionRef<bool()> awake);
  void wake_up() const { sync_.wake_up(); }

  /// For a rank that waits: throws what has ended the group, or will.
  void check_peers();
  /// For one that waits by other means: throws if another rank is known to have ended.
  void check_ended_peers();
  /// For one that waits, too: says so when that has lasted long.
  void mention_stall();
  [[noreturn]] void time_out(double waited_seconds);
  /// Tells the others what this rank fails with, where that is of interest to them.
  void announce_abort(const std::exception_ptr& failure);

 private:
  struct Entry {
    Op op;
    std::size_t part_bytes = 0;
    bool here = false;
  };
  const Entry& entry_of(std::uint64_t index) const { return entries_[head_ + (index - completed_ - 1)]; }
  const Op& first() const { return entry_of(completed_ + 1).op; }

  bool post_all();
  bool finish_all();
  bool retire();

  int rank_of_local(int local) const { return here_[static_cast<std::size_t>(local)]; }
  bool waits_for_local(int local) const;
  void check_abort() const;
  void check_step() const;
  void check_locals();
  void check_links();
  void check_connections();
  void find_who_is_silent(std::vector<int>& silent) const;
  void find_who_is_missing(bool as_others_say);
  std::string progress_of(int rank) const;
  std::string missing_text();
  std::uint64_t progress() const { return posted_ + finished_ + completed_ + (channel_ ? channel_->progress() : 0); }
  [[noreturn]] void fail_for_link(std::size_t i);
  [[noreturn]] void fail_for_silence(std::size_t i, Clock::duration silence);

  HostMeeting met_;
  const int rank_;
  const std::vector<int>& here_;  // the ranks of this host
  const Clock::duration timeout_;
  IntraHostSync sync_;
  std::optional<Channel> channel_;

  std::vector<Entry> entries_;  // taken, not complete: from head_ on
  std::size_t head_ = 0;
  std::uint64_t history_ = 0;
  std::uint64_t submitted_ = 0;
  std::uint64_t posted_ = 0;
  std::uint64_t finished_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t completed_sequence_ = 0;

  std::string own_text_;
  std::vector<std::byte> texts_here_;
  std::vector<pollfd> entries_to_poll_;

  // Of a stall:
  std::uint64_t progress_at_last_look_ = 0;
  Clock::time_point still_since_{};
  StallNotice stall_;
  Clock::time_point next_connection_check_{};
  std::vector<Clock::time_point> silent_since_;  // by link: since when TCP asks, and nobody answers
  std::vector<int> silent_;                      // whom this rank misses in the first operation
  std::vector<int> missing_;                     // whom all of them wait for, as far as is known
};

}  // namespace lockstep::comm
