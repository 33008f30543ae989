// Collectives in memory that all ranks share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/engine.h"
#include "comm/shm/pair_rings.h"
#include "comm/shm/peers.h"
#include "comm/shm/segment.h"
#include "comm/shm/slot_board.h"
#include "comm/shm/sockets.h"
#include "comm/store.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::comm {

/// Part `local` of a segment that the ranks of a host have mapped, one part per rank.
class ShmArena final : public Arena {
 public:
  ShmArena(Segment segment, int local, std::size_t bytes)
      : Arena(segment.part(local), bytes, segment.part_bytes()), segment_(std::move(segment)) {}
  ~ShmArena() override {
    // The operations that are under way stay in the group's queue.
    if (!detach()) segment_.leak();
  }

 private:
  Segment segment_;
};

/// Note [Shared memory]
/// An operation goes through three stages on each rank, in the order of op_index:
///   posted    this rank has come to it: it is in its slot (Note [Slots]), with this rank's bytes if they are few;
///   worked    all ranks that it takes from have posted it, and this rank has done its share;
///   completed this rank's region is what was promised, and nobody else touches it any more.
/// Few bytes: each rank takes all contributions from the slots, and is complete when it has done its share: the root of
/// a broadcast, and those who only contribute to a reduction, at once. Many bytes: each rank reduces its slice_of()
/// everyone's region where it lies, in rank order, and writes the result into all of them (Note [Lines]); that is
/// complete when all ranks have said that they are finished. A rank does its share in one go: put off, it would cost
/// the same core the same time, so this engine gains nothing from a thread.
///
/// An allreduce of many bytes on several sockets has stages in between (Note [Two levels]), if LOCKSTEP_SHM_SOCKETS
/// asks for them.
///
/// Several operations are under way at once, on regions that do not overlap.
class ShmEngine final : public Engine {
 public:
  ShmEngine(int rank, int size, Peers peers, Segment board);

  const char* name() const override { return "shm"; }
  bool oversubscribed() const override { return peers_.oversubscribed(); }
  bool sees_all_copies() const override { return true; }
  std::unique_ptr<Arena> map_arena(std::size_t bytes, TextExchange exchange) override;
  WaitPolicy wait_policy(bool by_thread) const override;
  void sleep(Clock::duration at_most, Clock::duration idle, FunctionRef<bool()> awake) override;
  void check_peers() override;
  void check_ended_peers() override;

  /// What it takes of each rank's part of `board`.
  static std::size_t board_bytes(int ranks);

 private:
  bool advance_operations() override;
  std::string name_of(int rank) const override { return peers_.name_of(rank); }
  void find_states(const Op& op, std::span<PeerState> states) override;
  std::string suspect_text(int rank) const override { return name_of(rank) + ", " + board_.progress_of(rank); }
  bool speaks(const Op& op, unsigned times) override { return board_.claim_stall_warning(op.op_index, times); }
  const JobRanks& job_ranks() const override { return peers_.job_ranks(); }
  bool is_gone(const PairTransfer& transfer) override { return peers_.has_ended(transfer.peer); }
  [[noreturn]] void throw_gone(const PairTransfer& transfer) override {
    peers_.throw_ended(transfer.peer, describe(transfer, name_of(transfer.peer)));
  }
  std::size_t write_some(int to, std::span<const std::byte> header, std::span<const std::byte> values) override {
    return rings_.write_some(to, header, values);
  }
  std::size_t read_some(int from, std::span<std::byte> bytes) override { return rings_.read_some(from, bytes); }
  void end_round() override { rings_.end_round(board_); }
  bool is_flushed(int to, std::uint64_t bytes) override { return rings_.is_flushed(to, bytes); }

  /// A part of a region, in bytes from its start.
  struct Stretch {
    std::size_t begin = 0;
    std::size_t bytes = 0;
  };

  bool is_small(const Op& op) const;
  void post(const Op& op);
  struct Ranks {
    int begin = 0, end = 0;

    bool contains(int rank) const { return begin <= rank && rank < end; }
  };
  Ranks sources_of(const Op& op) const;
  bool may_work(const Op& op);
  bool in_two_levels(const Op& op) const;
  bool advance_levels(const Op& op);
  bool all_reached(std::uint64_t index, unsigned stage) const;
  void work(const Op& op);
  void work_from_slots(const Op& op);
  void work_in_place(const Op& op);
  void take_from(const Op& op, int rank, const std::byte* from);
  void reduce_slice(const Op& op);
  void reduce_slice_along_tree(const Op& op, const Stretch& slice);
  template <class At>
  void set_sources_along_tree(const Op& op, const At& at);
  const TreeProgram& program_of(const Op& op);
  void reduce_into(const Op& op);
  void retire();
  std::byte* copy_of(const Op& op, int rank) const {
    return op.data + (rank - this->rank()) * static_cast<std::ptrdiff_t>(op.stride_bytes);
  }
  /// What `rank` puts into its slot if the operation is small.
  Stretch contribution_of(const Op& op, int rank) const;
  Stretch slice_bytes_of(const Op& op, int rank) const;
  Stretch reduced_bytes_of(const Op& op) const;

  /// Whether `rank` is one of those that the first operation waits for: to free its slot, to post it, else to finish
  /// it.
  bool waits_for(int rank) const;

  Peers peers_;
  Segment memory_;
  SlotBoard board_;
  PairRings rings_;
  std::vector<const std::byte*> sources_;  // scratch
  std::vector<std::byte*> copies_;         // scratch
  std::vector<TreeProgram> programs_;      // by trees' numbers
  std::uint64_t posted_ = 0;
  std::uint64_t worked_ = 0;
  std::optional<SocketLevels> levels_;  // nothing: one
  unsigned stage_ = 0;                  // that this rank has reached of operation worked_ + 1, if that is in two
  int next_to_post_ = 0;                // operation worked_ + 1 waits for no rank before it
};

/// The group of the ranks of `store`, which must all be on one host: no data goes through the kernel or another
/// process. Collective, blocking. The caller drives it; a wait spins briefly (not at all where ranks outnumber cores)
/// and then sleeps.
///
/// On success the group takes `store`, and its shutdown() ends it. Where the ranks cannot share memory, DeviceError on
/// the lowest rank that cannot and PeerError on the others, and `store` is left where it was, of use for something
/// else.
std::unique_ptr<ProcessGroup> make_shm_group(std::unique_ptr<Store>&& store, Clock::duration timeout);
/// For ranks that have joined: `peers` are those of `store`, and are taken with it.
std::unique_ptr<ProcessGroup> make_shm_group(std::unique_ptr<Store>&& store, Peers&& peers, Clock::duration timeout);

}  // namespace lockstep::comm
