#include "ddp/shard_sums.h"

#include <algorithm>

#include "base/error.h"

namespace lockstep::ddp {

using comm::TreeNode;

ShardSums::ShardSums(const comm::ReductionTree& tree, int rank, std::size_t at_once) {
  const TreeNode run = tree.run_of(rank);
  const auto most = static_cast<std::uint32_t>(std::clamp<std::size_t>(at_once, 1, tree.leaves()));
  std::vector<TreeNode> waiting;  // the value of waiting[i] is in place i
  for (std::uint32_t leaf = run.first; leaf < run.end();) {
    const std::uint32_t end = std::min((leaf / most + 1) * most, run.end());
    Turn turn{.shards = {leaf, end - leaf}, .first_place = waiting.size(), .moves = {}};
    places_ = std::max(places_, turn.first_place + turn.shards.count);
    for (std::size_t i = 0; leaf < end; ++leaf, ++i) {
      TreeNode node{leaf, 1};
      std::size_t place = turn.first_place + i;
      for (; !waiting.empty() && tree.are_siblings(waiting.back(), node); waiting.pop_back()) {
        turn.moves.push_back({.into = waiting.size() - 1, .from = place});
        place = waiting.size() - 1;
        node = {waiting.back().first, waiting.back().count + node.count};
      }
      if (place != waiting.size()) turn.moves.push_back({.into = waiting.size(), .from = place, .adds = false});
      waiting.push_back(node);
    }
    turns_.push_back(std::move(turn));
  }
  LOCKSTEP_ASSERT(std::ranges::equal(waiting, tree.partials_of(rank)), "other partial sums than the tree's");
}

std::size_t ShardSums::most_in_a_turn() const {
  std::size_t most = 0;
  for (const Turn& turn : turns_) most = std::max<std::size_t>(most, turn.shards.count);
  return most;
}

}  // namespace lockstep::ddp
