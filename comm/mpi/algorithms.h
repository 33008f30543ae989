// Which messages an operation over MPI consists of, and in which order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/mpi/transfers.h"
#include "lockstep/comm/op.h"
#include "lockstep/comm/reduction_tree.h"

namespace lockstep::comm {

/// Sizes that steer the algorithms; every rank of a group has the same. They change times, never results. The
/// defaults are the best of what was measured on one host.
struct Tuning {
  std::size_t chunk_bytes = 1 << 20;     // of one message; a multiple of 64
  std::uint32_t chunks_under_way = 4;    // to and from each peer, in each phase; 1 to 32
  std::size_t small_bytes = 16 << 10;    // allreduces in which a rank would send no more take one exchange with all
  std::size_t scratch_bytes = 8 << 20;   // an operation's, at most: many ranks get smaller chunks
  std::size_t operations_under_way = 4;  // later ones wait their turn

  /// Regions up to this size are small. A few numbers always are: two exchanges of them cost more.
  std::size_t small_limit(int world_size) const {
    return std::max<std::size_t>(small_bytes / static_cast<std::size_t>(world_size - 1), 256);
  }
};

/// One operation's state machine: begin() starts the first messages, each complete one may start others. Objects are
/// kept and used again, so that an operation allocates nothing once its scratch has grown to what is needed.
class CollectiveAlgorithm {
 public:
  virtual ~CollectiveAlgorithm() = default;
  CollectiveAlgorithm(const CollectiveAlgorithm&) = delete;
  CollectiveAlgorithm& operator=(const CollectiveAlgorithm&) = delete;

  void begin(const Op& op) {
    op_ = op;
    start();
  }
  virtual void on_complete(const Message& transfer) = 0;
  virtual bool done() const = 0;
  const Op& op() const { return op_; }

 protected:
  CollectiveAlgorithm(int rank, int size, const Tuning& tuning, Transfers& transfers)
      : rank_(rank), size_(size), tuning_(tuning), transfers_(transfers) {}

  virtual void start() = 0;

  void send(int peer, std::uint8_t phase, std::uint32_t chunk, const std::byte* from, std::size_t bytes) {
    transfers_.send(op_, {this, Message::Direction::kSend, phase, peer, chunk, bytes}, from);
  }
  void receive(int peer, std::uint8_t phase, std::uint32_t chunk, std::byte* to, std::size_t bytes) {
    transfers_.receive(op_, {this, Message::Direction::kReceive, phase, peer, chunk, bytes}, to);
  }

  const TreeProgram& program_of(const ReductionTree& tree);

  const int rank_;
  const int size_;
  const Tuning tuning_;

 private:
  std::vector<TreeProgram> programs_;  // by trees' numbers, of all partial sums
  Transfers& transfers_;
  Op op_;
};

/// Numbers that are ticked off in any order, up to 64 ahead of the first that is not.
class Ticks {
 public:
  static constexpr std::uint32_t kMostAhead = 64;
  void tick(std::uint32_t number) {
    ahead_ |= std::uint64_t{1} << (number - prefix_);
    while ((ahead_ & 1) != 0) {
      ahead_ >>= 1;
      ++prefix_;
    }
  }
  /// All numbers below this are ticked off.
  std::uint32_t prefix() const { return prefix_; }

 private:
  std::uint32_t prefix_ = 0;
  std::uint64_t ahead_ = 0;
};

/// A byte range cut into messages.
struct Chunks {
  std::size_t begin = 0;
  std::size_t bytes = 0;
  std::size_t chunk_bytes = 1;

  std::uint32_t count() const { return static_cast<std::uint32_t>((bytes + chunk_bytes - 1) / chunk_bytes); }
  std::size_t begin_of(std::uint32_t chunk) const { return begin + chunk * chunk_bytes; }
  std::size_t bytes_of(std::uint32_t chunk) const {
    const std::size_t rest = bytes - chunk * chunk_bytes;
    return rest < chunk_bytes ? rest : chunk_bytes;
  }
};

/// Two halves. In the first, every rank sends each peer that peer's slice, and reduces its own slice from its own
/// bytes and what the peers sent, in rank order (Note [Rank order]). In the second, it sends its reduced slice to all.
/// An allreduce is both, reduce_scatter the first, allgather the second; a reduce is both, with the second to the root
/// alone. Slices travel in chunks, several at a time in
/// both directions, and a chunk's second half starts when its first half is done: bytes flow both ways all the time.
/// A rank sends and receives 2 (N - 1) / N of the region, which is the least that an allreduce can do.
///
/// Along a tree (Note [Reduction tree]) a rank sends each chunk of its partial sums, one message each.
///
/// Memory: in the second half, a peer's chunk replaces this rank's own contribution, and the first half may still be
/// sending that. So the chunk is awaited only once the send is complete.
class Exchange final : public CollectiveAlgorithm {
 public:
  Exchange(int rank, int size, const Tuning& tuning, Transfers& transfers);

  void on_complete(const Message& transfer) override;
  bool done() const override { return unfinished_ == 0; }

 private:
  enum Phase : std::uint8_t { kReduceScatter, kAllGather };

  /// One other rank: its slice of the region, and how far messages to and from it have got.
  struct Peer {
    int rank = 0;
    Chunks slice;
    std::uint32_t partials = 1;     // that it sends of each chunk
    std::size_t first_scratch = 0;  // of a chunk's places for partial sums, its first
    // Messages of the first half: chunk after chunk, of each its partial sums.
    Ticks scattered;               // that have been sent to it
    Ticks arrived;                 // that it has sent
    std::uint32_t scattering = 0;  // the next to send to it
    std::uint32_t expecting = 0;   // the next to await from it
    std::uint32_t gathering = 0;   // next chunk of our slice, reduced, to send to it
    std::uint32_t gathered = 0;    // of those, complete
    std::uint32_t collecting = 0;  // next chunk of its slice, reduced, to await from it
    std::uint32_t collected = 0;   // of those, complete
  };

  void start() override;
  bool reduces() const { return op().kind != OpKind::kAllGather; }
  /// Whether the slices, which are final, come together at `rank`.
  bool gathers_at(int rank) const {
    return op().kind != OpKind::kReduceScatter && (op().kind != OpKind::kReduce || rank == op().root);
  }

  void scatter(Peer& peer);
  void expect(Peer& peer);
  void reduce_arrived();
  void gather(Peer& peer);
  void collect(Peer& peer);
  Peer& peer_of(int rank);
  std::byte* scratch_of(std::uint32_t chunk, std::size_t place);

  std::byte* data_ = nullptr;   // the region's
  Chunks own_;                  // our slice
  std::uint32_t partials_ = 1;  // that we send of each chunk
  std::size_t places_ = 0;      // of partial sums of a chunk, from all peers
  std::uint32_t window_ = 1;    // chunks under way
  std::uint32_t reduced_ = 0;   // chunks of our slice that are final
  std::size_t unfinished_ = 0;  // messages that are not complete, started or not
  std::vector<Peer> peers_;     // in the order in which we turn to them: rank + 1, rank + 2, …
  std::vector<const std::byte*> sources_;
  std::unique_ptr<std::byte[]> scratch_;
  std::size_t scratch_bytes_ = 0;
};

/// Every rank sends its whole region to every other, or to a reduce's root, and who gets all of them reduces them
/// itself, in rank order: the same bits everywhere as with an Exchange (Note [Rank order]), in one exchange instead of
/// two.
class SmallReduce final : public CollectiveAlgorithm {
 public:
  SmallReduce(int rank, int size, const Tuning& tuning, Transfers& transfers);

  void on_complete(const Message& transfer) override;
  bool done() const override { return unfinished_ == 0; }

 private:
  void start() override;
  bool reduces_at(int rank) const { return op().kind != OpKind::kReduce || rank == op().root; }

  const std::size_t part_bytes_;
  int unfinished_ = 0;
  std::unique_ptr<std::byte[]> scratch_;    // one part for each rank; our own stays unused
  std::vector<const std::byte*> sources_;   // by rank
  std::vector<const std::byte*> in_order_;  // of a tree's leaves
};

/// Down a binomial tree, in chunks: a rank passes a chunk on while the next one arrives. Counted from the root, rank
/// v's parent is v without its lowest set bit.
class TreeBroadcast final : public CollectiveAlgorithm {
 public:
  TreeBroadcast(int rank, int size, const Tuning& tuning, Transfers& transfers)
      : CollectiveAlgorithm(rank, size, tuning, transfers) {
    children_.reserve(32);
  }

  void on_complete(const Message& transfer) override;
  bool done() const override { return unfinished_ == 0; }

 private:
  struct Child {
    int rank = 0;
    std::uint32_t sending = 0;  // next chunk
    std::uint32_t sent = 0;
  };

  void start() override;
  void expect();
  void pass_on(Child& child);

  Chunks chunks_;
  int parent_ = -1;
  Ticks arrived_;
  std::uint32_t expecting_ = 0;
  std::uint32_t available_ = 0;  // chunks that are here
  std::size_t unfinished_ = 0;
  std::vector<Child> children_;  // largest subtree first
};

/// ⌈log2 N⌉ rounds of empty messages: in round k every rank notifies the one 2^k after it that it has come, and all
/// ranks that it has heard of. Each round has other peers, so the messages need no round number.
class DisseminationBarrier final : public CollectiveAlgorithm {
 public:
  DisseminationBarrier(int rank, int size, const Tuning& tuning, Transfers& transfers)
      : CollectiveAlgorithm(rank, size, tuning, transfers) {}

  void on_complete(const Message& transfer) override;
  bool done() const override { return distance_ >= size_ && under_way_ == 0; }

 private:
  void start() override;
  void next_round();

  int distance_ = 1;  // of this round's peers; at least size_ after the last round
  int under_way_ = 0;
};

}  // namespace lockstep::comm
