#include "ddp/shard_sums.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lockstep::ddp {

using comm::TreeNode;

namespace {

struct Value {
  TreeNode node;
  ShardSums::Sum sum;
};

/// left + right, so that as few values as possible wait. Which of two numbers is added to the other does not matter to
/// the sum's bits.
ShardSums::Sum add(ShardSums::Sum left, ShardSums::Sum right) {
  if (left.sources.size() < right.sources.size()) std::swap(left, right);
  left.sources.insert(left.sources.end(), right.sources.begin(), right.sources.end());
  left.additions.insert(left.additions.end(), right.additions.begin(), right.additions.end());
  ++left.additions.back();
  return left;
}

}  // namespace

ShardSums::ShardSums(const comm::ReductionTree& tree, int rank, std::size_t at_once) {
  const TreeNode run = tree.run_of(rank);
  const auto most = static_cast<std::uint32_t>(std::clamp<std::size_t>(at_once, 1, tree.leaves()));
  std::vector<Value> waiting;  // after a turn, the value of waiting[i] is in place i
  for (std::uint32_t leaf = run.first; leaf < run.end();) {
    const std::uint32_t end = std::min((leaf / most + 1) * most, run.end());
    Turn turn{.shards = {leaf, end - leaf}, .first_place = waiting.size(), .sums = {}};
    places_ = std::max(places_, turn.first_place + turn.shards.count);
    for (std::size_t i = 0; leaf < end; ++leaf, ++i) {
      Value value{.node = {leaf, 1}, .sum = {.sources = {turn.first_place + i}, .additions = {0}}};
      for (; !waiting.empty() && tree.are_siblings(waiting.back().node, value.node); waiting.pop_back()) {
        value.node = {waiting.back().node.first, waiting.back().node.count + value.node.count};
        value.sum = add(std::move(waiting.back().sum), std::move(value.sum));
      }
      waiting.push_back(std::move(value));
    }
    for (std::size_t place = 0; place < waiting.size(); ++place) {
      Sum sum = std::exchange(waiting[place].sum, {.into = place, .sources = {place}, .additions = {0}});
      sum.into = place;
      if (sum.sources != std::vector{place}) turn.sums.push_back(std::move(sum));
    }
    turns_.push_back(std::move(turn));
  }
  LOCKSTEP_ASSERT(std::ranges::equal(waiting, tree.partials_of(rank), {}, &Value::node),
                  "other partial sums than the tree's");
}

std::size_t ShardSums::most_in_a_turn() const {
  std::size_t most = 0;
  for (const Turn& turn : turns_) most = std::max<std::size_t>(most, turn.shards.count);
  return most;
}

}  // namespace lockstep::ddp
