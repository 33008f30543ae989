// Which bytes of an operation cross which link between hosts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// The ranks of each host, ascending; hosts in the order of their first ranks.
using Hosts = std::vector<std::vector<int>>;

/// Sizes that steer what travels; every rank of a group has the same. They change times, never results.
struct HostTuning {
  std::size_t chunk_bytes = 128 << 10;  // of one message's payload, at most; a multiple of 64
  std::size_t least_chunk_bytes = 16 << 10;
  std::size_t chunks_a_slice = 8;  // that a channel has at least, of slices that are large enough
  std::size_t small_bytes =
      16 << 10;  // allreduces in which a host would send no more take one message to each other one
};

/// A stretch of the region.
struct Chunk {
  std::size_t begin = 0;  // bytes from the region's start
  std::size_t bytes = 0;
  int rank = -1;  // whose slice it is, in operations where ranks have slices
};

/// Note [Two levels]
/// Between hosts an operation has two phases, and each may be left out. Every host owns a part of the region.
///   reduce-scatter  every host sends each owner what it has for that owner's part: the reduction of its own ranks'
///                   contributions (allreduce, reduce_scatter, reduce), or the root's bytes (broadcast, from the root's
///                   host alone); the owner combines them, hosts in the order of their first ranks.
///   all-gather      the owner sends its part, final now, to all other hosts (allreduce, allgather, broadcast), or to
///                   the root's (reduce).
/// Where ranks have slices (reduce_scatter, allgather) a host owns those of its ranks; else the hosts' parts are equal.
/// A region of a few bytes is every host's own as a whole, of a reduce the root's host's: it is scattered to all that
/// own it, and nothing has to be gathered. A host sends and receives 2 (H - 1) / H of an allreduce's region, which is
/// the least that it can; all pairs of hosts exchange at the same time, in both directions.
///
/// Along a tree (Note [Reduction tree]) a host sends its partial sums, those that are left when its ranks' are added up
/// as far as the tree allows: a chunk's message holds one after the other.
///
/// Parts are cut into chunks, one message each. Chunk number c of a part is channel c % L's: the ranks with the same
/// number on their hosts are connected, as many of them as the smallest host has ranks (L), and each such channel moves
/// its chunks on its own. All ranks make the same plan.
class Plan {
 public:
  /// `hosts` and what it holds outlive the plan, and so do `partials`: how many partial sums each host has, along a
  /// tree. `channels` as above.
  Plan() = default;
  Plan(const Op& op, const Hosts& hosts, int channels, const HostTuning& tuning,
       std::span<const std::size_t> partials = {});

  /// The chunks of `host`'s part that are `channel`'s, and which they are.
  std::uint32_t chunk_count(int host, int channel) const;
  Chunk chunk(int host, int channel, std::uint32_t number) const;

  /// Whether `host` sends in the first phase.
  bool scatters(int host) const { return scatterers_ == kAll || scatterers_ == host; }
  /// Whether `owner` sends its part to `other` in the second.
  bool gathers(int owner, int other) const {
    return gathers_ && owner != other && (at_root_ ? other == root_host_ : other != root_host_);
  }
  /// Whether `host`'s ranks, or one of them, get the result.
  bool ends_at(int host) const { return !at_root_ || host == root_host_; }
  /// The region is every host's own as a whole.
  bool small() const { return small_; }
  /// Sums of bf16 travel as f32 where a host has several ranks, so that they are rounded once (Rounding::kOnce).
  bool widened() const { return widened_; }
  /// Of a payload that `host` sends in the first phase.
  std::size_t wire_bytes(const Chunk& chunk, int host) const {
    if (!partials_.empty()) return chunk.bytes * partials_[static_cast<std::size_t>(host)];
    return widened_ ? chunk.bytes * 2 : chunk.bytes;
  }

 private:
  static constexpr int kAll = -1, kNone = -2;

  /// A part's piece that belongs together: a host's whole part, or one rank's slice.
  struct Piece {
    std::size_t begin = 0;
    std::size_t bytes = 0;
  };
  std::size_t piece_count(int host) const;
  Piece piece(int host, std::size_t index) const;
  std::size_t chunks_in(const Piece& piece) const { return (piece.bytes + chunk_bytes_ - 1) / chunk_bytes_; }
  std::uint64_t all_chunks(int host) const;

  const Hosts* hosts_ = nullptr;
  std::span<const std::size_t> partials_;  // by host; empty: no tree
  std::size_t count_ = 0;
  std::size_t element_ = 1;
  std::size_t channels_ = 1;
  std::size_t chunk_bytes_ = 64;
  int ranks_ = 0;
  int scatterers_ = kNone;
  int root_host_ = -1;    // of a broadcast or a reduce
  bool at_root_ = false;  // a reduce: nobody else gets the result
  bool gathers_ = false;
  bool by_rank_ = false;
  bool small_ = false;
  bool widened_ = false;
};

}  // namespace lockstep::comm
