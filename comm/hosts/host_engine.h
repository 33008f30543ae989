// Moves the operations of a group on several hosts on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/engine.h"
#include "comm/hosts/channel.h"
#include "comm/hosts/host_connections.h"
#include "comm/hosts/intra_host_sync.h"
#include "comm/hosts/pair_links.h"
#include "comm/shm/pair_rings.h"
#include "comm/shm/peers.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::comm {

/// Note [Hosts]
/// Each rank posts its operations, in their order, to the other ranks of its host (comm/hosts/intra_host_sync.h). Those
/// of them that drive a channel move the data (Note [Channels], Note [Two levels]); the others have nothing to do but
/// to wait: their arena's copies are read and written where they lie. An operation is complete when all channels of the
/// host have finished it.
class HostEngine final : public Engine {
 public:
  HostEngine(HostConnections connections, Clock::duration timeout);

  const char* name() const override { return "hosts"; }
  bool encrypts() const override { return connections_.encrypts; }
  std::size_t preferred_bucket_bytes() const override { return std::size_t{4} << 20; }
  bool oversubscribed() const override { return connections_.peers.oversubscribed(); }
  std::vector<ProcessGroup::PeerTime> sending_times() const override;
  std::unique_ptr<Arena> map_arena(std::size_t bytes, TextExchange exchange) override;
  std::vector<int> ranks_by_host() const override;
  void wake_up() const override { sync_.wake_up(); }

  WaitPolicy wait_policy(bool by_thread) const override;
  void sleep(Clock::duration at_most, Clock::duration idle, FunctionRef<bool()> awake) override;

  void check_peers() override;
  void check_ended_peers() override;
  void announce_abort(const std::exception_ptr& failure) override;

 private:
  bool advance_operations() override;
  std::string name_of(int rank) const override { return connections_.peers.name_of(rank); }
  const JobRanks& job_ranks() const override { return connections_.peers.job_ranks(); }
  std::uint64_t progress() const override {
    return posted_ + finished_ + completed() + (channel_ ? channel_->progress() : 0);
  }
  void find_states(const Op&, std::span<PeerState> states) override { find_states_by(Witnesses::kHost, states); }
  std::string suspect_text(int rank) const override;
  bool speaks(const Op& op, unsigned times) override { return sync_.claim_stall_warning(op.op_index, times); }
  bool is_gone(const PairTransfer& transfer) override;
  [[noreturn]] void throw_gone(const PairTransfer& transfer) override;
  std::string trouble_with(int peer) const override { return links_.trouble_with(peer); }
  void begin_round() override { links_.advance(); }
  void end_round() override { rings_.end_round(sync_); }
  void open_stream(int peer) override;
  std::size_t write_some(int to, std::span<const std::byte> header, std::span<const std::byte> values) override;
  std::size_t read_some(int from, std::span<std::byte> bytes) override;
  bool is_flushed(int to, std::uint64_t bytes) override;
  /// Its number on this host, if it is here.
  std::optional<int> local_of(int rank) const;

  bool post_all();
  bool finish_all();
  bool retire();

  int rank_of_local(int local) const { return here_[static_cast<std::size_t>(local)]; }
  bool waits_for_local(int local) const;
  void check_abort() const;
  void check_step() const;
  void listen_while_idle();
  void check_locals();
  void check_links();
  void check_connections();
  /// Who counts: this rank alone, those at the other ends of its links, or the other ranks of this host as well.
  enum class Witnesses { kSelf, kLinks, kHost };
  void find_states_by(Witnesses witnesses, std::span<PeerState> states) const;
  const std::vector<int>& find_missing_by(Witnesses witnesses);
  [[noreturn]] void fail_for_link(std::size_t i);
  [[noreturn]] void throw_lost(int rank, int error, const std::string& waiting_in) const;
  [[noreturn]] void throw_silent(int rank, Clock::duration silence, const std::string& waiting_in) const;
  Link* link_to(int rank);
  Clock::duration patience() const { return std::min<Clock::duration>(kLinkPatience, timeout_); }

  HostConnections connections_;
  const std::vector<int>& here_;  // the ranks of this host
  const Clock::duration timeout_;
  IntraHostSync sync_;
  std::optional<Channel> channel_;
  PairRings rings_;
  PairLinks links_;
  std::uint64_t posted_ = 0;
  std::uint64_t finished_ = 0;
  std::vector<pollfd> entries_to_poll_;
  // Of the channel: rank and descriptor. Never changed, so other threads may ask about them; one that is closed has no
  // answer, and of the descriptor's next file the answer does not matter: this group has failed by then.
  std::vector<std::pair<int, int>> sockets_;

  // Of a stall:
  std::uint64_t progress_at_last_look_ = 0;
  Clock::time_point still_since_{};
  Clock::time_point next_connection_check_{};
  std::vector<PeerState> states_;
  std::vector<int> missing_;  // in the first operation
};

/// The group of the ranks of `store`, whose `peers` are on several hosts: memory inside a host, sockets between them.
/// Collective, blocking. `rendezvous`: the host where they have joined, if over TCP, and their secret. With `threaded`
/// a thread of the group drives it, else the caller (Note [Drivers]).
///
/// On success the group takes `store` and `peers`, and its shutdown() ends the store; throws what connect_hosts() does.
std::unique_ptr<ProcessGroup> make_hosts_group(std::unique_ptr<Store>&& store, Peers&& peers,
                                               const Rendezvous& rendezvous, Clock::duration timeout, bool threaded);
/// For ranks that are already connected.
std::unique_ptr<ProcessGroup> make_hosts_group(std::unique_ptr<Store> store, HostConnections connections,
                                               Clock::duration timeout, bool threaded);

}  // namespace lockstep::comm
