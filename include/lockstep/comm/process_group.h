// Collectives among a fixed set of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/device.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/base/misuse.h"
#include "lockstep/comm/arena.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/op.h"
#include "lockstep/comm/reduction_tree.h"
#include "lockstep/comm/transfer.h"

namespace lockstep::comm {

class ProcessGroup;

/// A ticket: the group and the sequence number of the operation. Copying is free; the group must outlive it, and the
/// thread that uses the group uses it. A default one is complete. Operations of a group finish in the order in which
/// they were issued, so a ticket needs no state of its own.
class Work {
 public:
  Work() = default;
  Work(ProcessGroup* group, std::uint64_t sequence) : group_(group), sequence_(sequence) {}

  /// Whether the operation is complete; gives a backend without its own thread a chance to make progress. Throws what
  /// the group has failed with.
  bool done() const;
  /// Blocks the calling thread until the operation is complete. Throws TimeoutError naming the operation and the
  /// ranks that are missing when `deadline` passes, and what the operation failed with (MpiError, OutOfStepError…).
  void wait_host(Deadline deadline) const;
  /// wait_host with the group's default timeout.
  void wait_host() const;
  /// Orders `stream` after the operation, and returns at once. On the CPU a stream is the calling thread: this blocks
  /// like wait_host().
  void wait(StreamView stream) const;

  std::uint64_t sequence() const { return sequence_; }

 private:
  ProcessGroup* group_ = nullptr;  // nullptr: nothing to wait for
  std::uint64_t sequence_ = 0;
};

class Store;
struct GroupOrigin;

/// Note [Same order]
/// Every rank issues the same collectives, on the same regions, in the same order. Each one takes the group's next
/// sequence number; backends compare its signature and the history before it (Note [Signatures]), so that ranks out of
/// step are found and named instead of mixing data: on the CPU before an operation moves anything, on GPUs with NCCL
/// every hundred operations and in check_in_step().
///
/// Note [Rank order]
/// Reductions combine the ranks' contributions in rank order, ((r0 + r1) + r2) + …, each element once, whatever the
/// backend, message size or chunking: so every rank receives the same bits, and so do all backends. bf16 and
/// f16 are summed and multiplied in f32 and rounded once, unless a Rounding asks for more. Where several hosts
/// have several ranks each, the ranks of a host are combined first, in rank order, and then the hosts, in the order of
/// their first ranks: (r0 + r1) + (r2 + r3); with one rank per host that is the rank order again. MPI, where it is
/// asked for, keeps to the rank order there too. NCCL alone chooses the order itself, by how the GPUs are connected:
/// every rank receives the same bits there too, but not those of the other backends.
///
/// Note [Several groups]
/// A process may have several groups at a time: of the whole job (make_group() again) and of some of its ranks
/// (split()). Each has memory, connections and communicators of its own, so they may be used by different threads, and
/// end in any order. Ranks that are in two of them issue the operations of both so that none waits for another one
/// crosswise, and shut them down in the same order. A group that ends with an error leaves the others as they are.
///
/// Threads: one thread uses a group; the backend may use others inside. Another one may take over when all operations
/// are complete, though sends and receives may be under way. Before that, to issue, to wait, to ask or to allocate
/// there is a UsageError; other calls are not checked. Any thread may ask for rank(), size(), job_rank(), name(),
/// encrypts(), device() and sending_times(). Memory: what a blocking call is given by a pointer or a span is the
/// caller's again when it returns or throws. Errors: after an operation failed the group is broken: every later call
/// throws the same error. Destructors issue nothing; a normal end calls shutdown() on every rank. Without it the others
/// take this one for lost.
class ProcessGroup {
 public:
  virtual ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The number that rank `rank` of this group has in the job: launchers, logs and messages name ranks by it.
  int job_rank(int rank) const;
  /// "self", "shm", "hosts", "mpi", "nccl".
  virtual std::string name() const = 0;
  /// Whether there are other hosts, and traffic to them is encrypted (GroupOptions::encrypt).
  virtual bool encrypts() const { return false; }
  /// Where its arenas are. On a GPU, operations come after what its computation's stream was given before they are
  /// issued, as if that stream ran them.
  virtual Device device() const { return {}; }

  /// That stream; on the CPU there is none.
  virtual StreamView producer_stream() const { return {}; }

  /// From this size on an operation runs at full speed. If more data could be one operation, two are better, because
  /// the first can start earlier. It is the default size of buckets.
  virtual std::size_t preferred_bucket_bytes() const { return std::size_t{25} << 20; }

  /// Collective: the same `bytes` on every rank, or OutOfStepError on the lowest rank that asks for another size than
  /// rank 0, and PeerError on the others. Zeroed, page-aligned (on a GPU: aligned to 256 bytes). Throws std::bad_alloc
  /// when there is no memory, DeviceError when there is none that ranks can share (PeerError on the ranks that had it).
  virtual std::unique_ptr<Arena> allocate(std::size_t bytes);
  /// Whether its operations may name `arena`, which may have been destroyed: one of its own.
  virtual bool has(const Arena* arena) const;
  /// The one of its arenas in which `bytes` bytes from `data` lie; nullptr: none.
  const Arena* arena_of(const void* data, std::size_t bytes) const;

  /// Blocking; not collective. Copies between arenas of this group, other memory of their device, and the host's, after
  /// all work that the device was given before. The two do not overlap.
  virtual void copy(void* to, const void* from, std::size_t bytes);
  /// Makes a region zero, before whatever is given to the device or issued afterwards. Not collective.
  virtual void zero(const Region& region);

  /// In place: afterwards every rank's region holds the reduction of all ranks' regions. `bucket` of gradients, if it
  /// is one: for messages, and the same on all ranks. `rounding`, the same on all ranks too, is of bf16 and f16, and
  /// makes a difference where several hosts have several ranks each, over sockets alone.
  Work all_reduce(const Region& region, ReduceOp op, std::int32_t bucket = -1, Rounding rounding = Rounding::kOnce);
  /// Collective, once for each tree: how sums over `leaves` values, of which each rank has a contiguous run, are made
  /// the same bits at any number of ranks (Note [Reduction tree]). Runs follow the order of the hosts, and of the ranks
  /// in each. `shares`: how many leaves each rank has, by rank; empty: as many as the others, but for one. The tree
  /// lives as long as the group; at most 254, of which those of the same leaves and shares are one. Throws UsageError
  /// on every rank for fewer leaves than ranks, shares that do not go with them, and a tree too many; OutOfStepError
  /// where ranks name other numbers.
  const ReductionTree& define_tree(std::size_t leaves, std::span<const std::uint32_t> shares = {});
  /// Afterwards every rank's region, f32 or f64, holds the sum along `tree` of all ranks' partial sums: those of this
  /// rank are in the region and at multiples of `partial_stride` bytes after it, in the order of
  /// ReductionTree::partials_of(); what the others hold then is unspecified.
  Work all_reduce(const Region& region, const ReductionTree& tree, std::size_t partial_stride,
                  std::int32_t bucket = -1);
  /// The same for a host buffer of the caller's, as many values on every rank: blocking, staged through an arena that
  /// the group keeps. For what is not worth an arena: it copies twice, or once where the ranks share memory (Note
  /// [Direct results]).
  template <class T>
  void all_reduce(std::span<T> values, ReduceOp op = ReduceOp::kSum) {
    all_reduce_host(values.data(), values.size(), dtype_of<T>(), op);
  }
  /// Likewise: afterwards rank `root`'s `values` are the reduction of all ranks', and those of the others as before.
  template <class T>
  void reduce(std::span<T> values, int root, ReduceOp op = ReduceOp::kSum) {
    reduce_host(values.data(), values.size(), dtype_of<T>(), op, root);
  }
  /// Likewise: afterwards `values` are rank `root`'s on every rank.
  template <class T>
  void broadcast(std::span<T> values, int root) {
    broadcast_host(values.data(), values.size(), dtype_of<T>(), root);
  }
  /// Likewise: afterwards `all`, size() times as many values (else UsageError), are every rank's `mine`, in rank order.
  /// The two do not overlap.
  template <class T>
  void all_gather(std::span<const T> mine, std::span<T> all) {
    check_parts(mine.size(), all.size());
    all_gather_host(mine.data(), mine.size(), dtype_of<T>(), all.data());
  }
  /// Likewise: `all` is size() times as many values as `mine` (else UsageError), a part for each rank, in rank order.
  /// Afterwards `mine` is the reduction of this rank's part over all ranks. The two do not overlap.
  template <class T>
  void reduce_scatter(std::span<const T> all, std::span<T> mine, ReduceOp op = ReduceOp::kSum) {
    check_parts(mine.size(), all.size());
    reduce_scatter_host(all.data(), mine.data(), mine.size(), dtype_of<T>(), op);
  }
  /// The same of types that are known at run time; `count` is of all values, or of one rank's part.
  void all_reduce_host(void* values, std::size_t count, DType dtype, ReduceOp op);
  void reduce_host(void* values, std::size_t count, DType dtype, ReduceOp op, int root);
  void broadcast_host(void* values, std::size_t count, DType dtype, int root);
  void all_gather_host(const void* mine, std::size_t count, DType dtype, void* all);
  void reduce_scatter_host(const void* all, void* mine, std::size_t count, DType dtype, ReduceOp op);

  /// The same: part r of `from`, from_counts[r] values, goes to rank r, and to_counts[r] values of rank r become part
  /// r of `to`. Counts may differ and be 0. They are compared pair by pair, as those of sends and receives are, and so
  /// is that both ranks are in their same all-to-all. The two buffers do not overlap. Throws UsageError unless there is
  /// a count for each rank, the sums are the buffers' sizes, and the rank's own two counts are equal.
  template <class U, class T>
  requires std::is_same_v<std::remove_const_t<U>, T>
  void all_to_all(std::span<U> from, std::span<const std::size_t> from_counts, std::span<T> to,
                  std::span<const std::size_t> to_counts) {
    check_counts(from_counts, from.size(), "sends");
    check_counts(to_counts, to.size(), "receives");
    all_to_all_host(from.data(), from_counts, to.data(), to_counts, dtype_of<T>());
  }
  /// As many values for each rank as of each rank: from.size() / size(). Throws UsageError where that is no whole
  /// number or `to` has another size.
  template <class U, class T>
  requires std::is_same_v<std::remove_const_t<U>, T>
  void all_to_all(std::span<U> from, std::span<T> to) {
    const auto counts = equal_counts(from.size(), to.size());
    all_to_all_host(from.data(), counts, to.data(), counts, dtype_of<T>());
  }
  void all_to_all_host(const void* from, std::span<const std::size_t> from_counts, void* to,
                       std::span<const std::size_t> to_counts, DType dtype);

  /// Note [Sends and receives]
  /// Between two ranks, of the host's memory, and no part of the group's sequence of operations (Note [Same order]).
  /// What a rank sends to another one is received there in the order sent, as many values of the same type; otherwise
  /// the receiver throws OutOfStepError, and the group is broken. `values` stay, and are left alone, until the transfer
  /// is done or has failed, or the group is destroyed. Throws UsageError for this rank itself, and for one that there
  /// is not. It moves on whenever this rank is in a call of the group, as operations do. To send blocks until the
  /// values have left this rank's memory, which may take the receiver: who wants to send and receive at a time issues
  /// both before it waits. On GPUs the CPU's group of the same ranks carries them.
  template <class T>
  Transfer isend(std::span<T> values, int to) {
    return isend(values.data(), values.size(), dtype_of<std::remove_const_t<T>>(), to);
  }
  template <class T>
  Transfer irecv(std::span<T> values, int from) {
    return irecv(values.data(), values.size(), dtype_of<T>(), from);
  }
  /// The same of types that are known at run time. `keeps`, if given, stays until the transfer is done or the group is
  /// destroyed: the owner of the values, for callers that may end before. A thread of the group may release it.
  Transfer isend(const void* values, std::size_t count, DType dtype, int to, std::shared_ptr<const void> keeps = {});
  Transfer irecv(void* values, std::size_t count, DType dtype, int from, std::shared_ptr<const void> keeps = {});
  /// Of regions of this group's arenas. On a GPU the values go to the other GPU by NCCL, after what the computation's
  /// stream was given before; the host waits for nothing (Transfer::wait(stream)).
  Transfer isend(const Region& region, int to);
  Transfer irecv(const Region& region, int from);
  /// all_to_all() with a part of one size for each rank. Blocking. Throws UsageError for regions of two types or sizes.
  void all_to_all(const Region& from, const Region& to);
  /// Blocking, with the group's timeout.
  template <class T>
  void send(std::span<T> values, int to) {
    isend(values, to).wait();
  }
  template <class T>
  void recv(std::span<T> values, int from) {
    irecv(values, from).wait();
  }

  /// In place: afterwards rank r's slice_of(region) holds the reduction; the rest of the region is unspecified.
  Work reduce_scatter(const Region& region, ReduceOp op);
  /// In place: rank r contributes its slice_of(region); afterwards every rank holds all slices.
  Work all_gather(const Region& region);
  /// Afterwards rank `root`'s region holds what an all_reduce() would leave in all of them, to the bit; the others' are
  /// unspecified.
  Work reduce(const Region& region, ReduceOp op, int root);
  /// Afterwards every rank's region holds rank `root`'s.
  Work broadcast(const Region& region, int root);
  /// Done when every rank has issued it. What a rank has done before to memory that several ranks see is done then
  /// (Note [Copies of other ranks]).
  Work barrier();

  /// Blocking: every rank's bytes (any sizes, also none) on every rank, in rank order. For small objects.
  virtual std::vector<std::vector<std::byte>> all_gather_objects(std::span<const std::byte> mine);
  /// Blocking: every rank's bytes on `root`, in rank order; an empty vector elsewhere.
  std::vector<std::vector<std::byte>> gather_objects(std::span<const std::byte> mine, int root);
  std::vector<std::string> all_gather_text(const std::string& mine);
  std::vector<std::int64_t> all_gather_numbers(std::int64_t mine);

  /// Between these two calls operations are captured by a device (Backend::capture()), not done;
  /// end_capture() says how many. Only groups whose arenas are on such a device have use for them.
  virtual void begin_capture() {}
  virtual std::uint64_t end_capture() { return 0; }
  /// A graph of `count` operations has been given to the device: they count as issued.
  virtual void replayed(std::uint64_t count) { static_cast<void>(count); }

  /// Lets a backend without its own thread advance what is under way. Cheap; never blocks.
  virtual void poll() = 0;

  /// For a rank that waits for others by other means than this group's operations: throws DeviceError if the backend
  /// knows that one of them has ended. Cheap enough for every poll; never blocks.
  virtual void watch_peers() { poll(); }

  /// For each rank of another host, how long bytes from this rank to it have been in flight since the group began. Asks
  /// the kernel; empty if the backend does not know.
  struct PeerTime {
    int rank = 0;
    Clock::duration time{};
  };
  virtual std::vector<PeerTime> sending_times() const { return {}; }

  /// The store through which the ranks have joined, for exchanges in which no rank is obliged to take part; the
  /// caller's thread uses it. The group owns it. nullptr where there is none (groups of split() have none), or another
  /// thread has it.
  virtual Store* store() { return nullptr; }

  /// Collective, blocking: throws OutOfStepError unless all ranks have issued the same operations up to here. Nothing
  /// to do where each operation is compared before it moves anything.
  virtual void check_in_step() {}

  /// Collective, blocking, as MPI_Comm_split: the ranks that give the same `color` become a group of their own, in the
  /// order of `key`, those with the same key in the order of this group. A negative color: in none, and nullptr is
  /// returned. The backend is chosen anew by the options of make_group(): a part on one host shares memory. The part
  /// does not depend on this group afterwards, and may end after it (Note [Several groups]).
  ///
  /// All ranks have succeeded, or all throw: what make_group() throws where the ranks of a part cannot be joined, and
  /// PeerError on the others; then this group is as it was. Throws UsageError for a group of GPUs.
  std::unique_ptr<ProcessGroup> split(int color, int key = 0);
  /// split() of all ranks into one group: the same ranks once more.
  std::unique_ptr<ProcessGroup> duplicate() { return split(0, rank_); }

  /// Collective, blocking: ends the group in an orderly way. Throws UsageError if a transfer of this rank is not done,
  /// OutOfStepError if this rank has not received all that others sent to it. To issue or to wait afterwards is a
  /// UsageError.
  virtual void shutdown() = 0;

  /// Ends with it: for whoever keeps a reference.
  Lifetime::Ref lifetime() const { return lifetime_.ref(); }

  /// The timeout of waits that name no deadline.
  Clock::duration timeout() const { return timeout_; }
  /// Of those that begin afterwards, on this rank. Above zero.
  void set_timeout(Clock::duration timeout) { timeout_ = timeout; }

  /// The training step that operations issued from now on belong to, the same on all ranks, which compare it; -1 is
  /// none.
  void set_step(std::int64_t step) { step_ = step; }

 protected:
  ProcessGroup(int rank, int size, Clock::duration timeout) : rank_(rank), size_(size), timeout_(timeout) {}

  /// The backend's part of allocate(); all ranks come to it, with the same size.
  virtual std::unique_ptr<Arena> map_arena(std::size_t bytes) = 0;
  static constexpr std::size_t kMostText = 240;
  /// Collective, blocking: every rank's text of at most kMostText bytes on every rank, without an operation's number
  /// and without an arena.
  virtual std::vector<std::string> exchange(const std::string& mine) = 0;
  /// Whether the memory that operations up to this one work on may be freed. Neither waits nor throws.
  virtual bool has_let_go(std::uint64_t sequence) const noexcept = 0;

  /// Whether the ranks of this machine may run on fewer cores than they are, as far as the group knows.
  virtual bool oversubscribed() const { return false; }
  /// All ranks, those of a host together, if where they are decides what is summed first; else nothing.
  virtual std::vector<int> ranks_by_host() const { return {}; }

 public:
  /// Whether each rank sees the copies of all ranks (Arena::copy_of), and start() takes Op::into (Note [Direct
  /// results]): all ranks share memory, and each moves its operations on by itself.
  virtual bool sees_all_copies() const { return false; }

 protected:
  /// Starts `op`, which has been checked and is good during the call; does not wait for other ranks. Operations
  /// complete in order of their sequence numbers.
  virtual void start(const Op& op) = 0;
  /// Whether the operation with this number is complete; rethrows a failure.
  virtual bool is_done(std::uint64_t sequence) = 0;
  virtual void wait_done(std::uint64_t sequence, Deadline deadline) = 0;
  /// Orders `stream` after the operation. As it is here, it blocks like wait_done().
  virtual void make_wait(std::uint64_t sequence, StreamView stream);

  /// What carries sends and receives of the host's memory: this group, or one of the CPU with the same ranks, which
  /// outlives it.
  virtual ProcessGroup& pair_group() { return *this; }
  /// Moves a transfer, which has been checked, if all of it can be moved now; whether it was. Else start_transfer()
  /// follows with the same one, and continues it.
  virtual bool transfer_at_once(const PairTransfer& transfer);
  /// Starts a transfer, which has been checked; does not wait for the other rank.
  virtual void start_transfer(const std::shared_ptr<PairTransfer>& transfer);
  /// Whether it is done; rethrows a failure.
  virtual bool is_transfer_done(const PairTransfer& transfer);
  virtual void wait_for_transfer(const PairTransfer& transfer, Deadline deadline);
  virtual void make_wait_for_transfer(const PairTransfer& transfer, StreamView stream);
  /// For shutdown(): throws UsageError where a transfer has been issued that is not done.
  void check_transfers_done() const;

  std::int64_t step() const { return step_; }
  /// The number of the operation that was issued last.
  std::uint64_t last_issued() const { return sequence_; }
  /// For a device that repeats operations without their being issued again: the next one is `sequence` + 1.
  void set_last_issued(std::uint64_t sequence) { sequence_ = sequence; }

  /// Throws UsageError where another thread than this one has operations under way; `doing` names what is to be done.
  void check_thread(const char* doing);
  /// Throws UsageError unless the region lies in an arena of this group; `doing` names what is to be done with it.
  void check_region(const Region& region, const char* doing) const;

  /// An operation on `count` elements at `data`, on the group's device, which are no arena's (Op::part). Of groups
  /// whose start() takes such.
  Work issue_at(OpKind kind, ReduceOp reduce, int root, void* data, std::size_t count, DType dtype,
                void* part = nullptr);

  Failure failure_;  // what broke the group

 private:
  friend class Arena;
  friend class Transfer;
  friend class Work;
  friend struct GroupOrigin;
  Work issue(OpKind kind, ReduceOp reduce, int root, const Region& region, std::int32_t bucket = -1,
             const Op::Into& into = {}, const ReductionTree* along = nullptr, std::size_t partial_stride = 0,
             Rounding rounding = Rounding::kOnce);
  Op next_op(OpKind kind, ReduceOp reduce, int root, std::size_t count, DType dtype);
  Arena& control_arena();
  struct PairState;
  PairState& pair_state();
  struct Piece;
  void stage(std::size_t count, std::size_t most, std::size_t bytes, FunctionRef<void(const Piece&)> fill,
             FunctionRef<Work(const Piece&)> issue, FunctionRef<void(const Piece&)> take);
  Region piece_of(const Piece& piece, DType dtype) const;
  Region parts_of(const Piece& piece, DType dtype) const;
  std::size_t most_of_part(DType dtype) const;
  void check_parts(std::size_t mine, std::size_t all) const;
  void check_counts(std::span<const std::size_t> counts, std::size_t all, const char* does) const;
  std::vector<std::size_t> equal_counts(std::size_t from, std::size_t to) const;
  Transfer issue_transfer(bool sends, void* values, std::size_t count, DType dtype, int peer,
                          std::uint64_t all_to_all = 0, std::shared_ptr<const void> keeps = {});
  void exchange_parts(const std::byte* from, std::span<const std::size_t> from_counts, std::byte* to,
                      std::span<const std::size_t> to_counts, DType dtype);
  bool has_transfer_in(const Arena& arena) noexcept;
  bool detach(const Arena& arena) noexcept;

  int rank_;
  int size_;
  Clock::duration timeout_;
  std::uint64_t sequence_ = 0;
  std::int64_t step_ = -1;
  std::uint64_t waited_for_ = 0;  // by the host: operations up to this one are complete
  std::uint32_t allocated_ = 0;   // arenas, so far
  std::vector<Arena*> arenas_;    // those that live
  std::vector<std::unique_ptr<ReductionTree>> trees_;
  std::unique_ptr<Arena> control_;             // for objects; allocated at first use
  std::unique_ptr<Arena> staging_;             // for the host's memory; likewise
  std::shared_ptr<PairState> pairs_;           // of sends and receives; nullptr: there were none
  std::shared_ptr<const GroupOrigin> origin_;  // nullptr: it was made of another group
  ThreadId user_ = nullptr;                    // whose the operations under way are
  std::uint64_t forks_ = forks();              // of the process that has made it
  Lifetime lifetime_;
};

}  // namespace lockstep::comm
