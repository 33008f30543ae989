// Where the gradients of a rank's shards lie while they are added along a tree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/comm/reduction_tree.h"

namespace lockstep::ddp {

/// Note [Shards]
/// A rank computes its shards in their order, some of them at a time. Each writes its gradients into a place of their
/// own, the next ones after the sums that wait for others: adding into what another shard has left would round
/// otherwise than the sum of the two. A gradient that all shards of a turn have written is added to what waits for it,
/// while it is in the caches. After the last turn the rank's partial sums lie in the first places, in their order.
class ShardSums {
 public:
  /// `at_once`: shards that are computed at a time, at most; a turn's first one is at a multiple of it.
  ShardSums(const comm::ReductionTree& tree, int rank, std::size_t at_once);

  /// Takes sources, one after the other; after source i the last two values that wait are added, additions[i] times.
  /// One value is left: what place `into`, which may be a source, then holds.
  struct Sum {
    std::size_t into = 0;
    std::vector<std::size_t> sources;  // places
    std::vector<std::uint8_t> additions;
  };
  struct Turn {
    comm::TreeNode shards;
    std::size_t first_place = 0;
    std::vector<Sum> sums;  // what to do, in order, when all of them have written
  };
  const std::vector<Turn>& turns() const { return turns_; }
  std::size_t most_in_a_turn() const;
  /// That are used.
  std::size_t places() const { return places_; }

 private:
  std::vector<Turn> turns_;
  std::size_t places_ = 1;
};

}  // namespace lockstep::ddp
