// Allreduce, reduce_scatter and allgather of regions that are worth cutting into slices.
#pragma once

#include <memory>
#include <vector>

#include "comm/mpi/collective_algorithm.h"

namespace lockstep::comm {

/// Two halves. In the first, every rank sends each peer that peer's slice, and reduces its own slice from its own
/// bytes and what the peers sent, in rank order (Note [Rank order]). In the second, it sends its reduced slice to all.
/// An allreduce is both, reduce_scatter the first, allgather the second. Slices travel in chunks, several at a time in
/// both directions, and a chunk's second half starts when its first half is done: bytes flow both ways all the time.
/// A rank sends and receives 2 (N - 1) / N of the region, which is the least that an allreduce can do.
///
/// Memory: a chunk that a peer sends in the second half lands where this rank's own contribution lay, which the first
/// half may still be sending: it is only awaited once that send is complete.
class Exchange final : public CollectiveAlgorithm {
 public:
  Exchange(int rank, int size, const Tuning& tuning, Transfers& transfers);

  void on_complete(const Transfer& transfer) override;
  bool done() const override { return unfinished_ == 0; }

 private:
  enum Phase : std::uint8_t { kReduceScatter, kAllGather };

  /// One other rank: its slice of the region, and how far messages to and from it have got.
  struct Peer {
    int rank = 0;
    Chunks slice;
    Ticks scattered;               // chunks of its slice that have been sent to it
    Ticks arrived;                 // chunks of our slice that it has sent
    std::uint32_t scattering = 0;  // next chunk of its slice to send to it
    std::uint32_t expecting = 0;   // next chunk of our slice to await from it
    std::uint32_t gathering = 0;   // next chunk of our slice, reduced, to send to it
    std::uint32_t gathered = 0;    // of those, complete
    std::uint32_t collecting = 0;  // next chunk of its slice, reduced, to await from it
    std::uint32_t collected = 0;   // of those, complete
  };

  void start() override;
  bool reduces() const { return op().kind != OpKind::kAllGather; }
  bool gathers() const { return op().kind != OpKind::kReduceScatter; }

  void scatter(Peer& peer);
  void expect(Peer& peer);
  void reduce_arrived();
  void gather(Peer& peer);
  void collect(Peer& peer);
  Peer& peer_of(int rank);
  std::byte* scratch_of(std::uint32_t chunk, std::size_t peer_index);

  std::byte* data_ = nullptr;   // the region's
  Chunks own_;                  // our slice
  std::uint32_t reduced_ = 0;   // chunks of our slice that are final
  std::size_t unfinished_ = 0;  // messages that are not complete, started or not
  std::vector<Peer> peers_;     // in the order in which we turn to them: rank + 1, rank + 2, …
  std::vector<const std::byte*> sources_;
  std::unique_ptr<std::byte[]> scratch_;
  std::size_t scratch_bytes_ = 0;
};

}  // namespace lockstep::comm
