// Where a rank's shards lie while they are added: every place that is added to or taken has what the tree says.
#include "ddp/shard_sums.h"

#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <utility>

namespace lockstep::ddp {
namespace {

using comm::ReductionTree;
using comm::TreeNode;

TEST(ShardSums, LeaveThePartialSumsInTheFirstPlaces) {
  for (std::size_t leaves = 1; leaves <= 17; ++leaves)
    for (int ranks = 1; ranks <= static_cast<int>(std::min<std::size_t>(leaves, 6)); ++ranks) {
      std::vector<int> positions(static_cast<std::size_t>(ranks));
      std::iota(positions.begin(), positions.end(), 0);
      const ReductionTree tree(leaves, positions);
      for (int rank = 0; rank < ranks; ++rank)
        for (const std::size_t at_once : {1u, 2u, 3u, 4u, 8u}) {
          SCOPED_TRACE(fmt::format("{} shards, rank {} of {}, {} at once", leaves, rank, ranks, at_once));
          const ShardSums sums(tree, rank, at_once);
          std::vector<std::optional<TreeNode>> places(sums.places());
          std::uint32_t next = tree.run_of(rank).first;
          for (const auto& turn : sums.turns()) {
            ASSERT_EQ(turn.shards.first, next);
            ASSERT_GE(turn.shards.count, 1u);
            ASSERT_LE(turn.shards.count, at_once);
            next = turn.shards.end();
            for (std::uint32_t i = 0; i < turn.shards.count; ++i) {
              ASSERT_LT(turn.first_place + i, places.size());
              ASSERT_FALSE(places[turn.first_place + i]) << "what waits there is overwritten";
              places[turn.first_place + i] = TreeNode{turn.shards.first + i, 1};
            }
            for (const auto& [into, sources, additions] : turn.sums) {
              ASSERT_EQ(sources.size(), additions.size());
              std::vector<TreeNode> waiting;
              for (std::size_t i = 0; i < sources.size(); ++i) {
                ASSERT_TRUE(places[sources[i]]);
                waiting.push_back(*std::exchange(places[sources[i]], std::nullopt));
                for (int n = 0; n < additions[i]; ++n) {
                  ASSERT_GE(waiting.size(), 2u);
                  TreeNode left = waiting[waiting.size() - 2], right = waiting.back();
                  if (right.first < left.first) std::swap(left, right);
                  ASSERT_TRUE(tree.are_siblings(left, right));
                  waiting.pop_back();
                  waiting.back() = {left.first, left.count + right.count};
                }
              }
              ASSERT_EQ(waiting.size(), 1u);
              ASSERT_FALSE(places[into]) << "what is not added yet is overwritten";
              places[into] = waiting.front();
            }
          }
          ASSERT_EQ(next, tree.run_of(rank).end());
          const auto partials = tree.partials_of(rank);
          for (std::size_t p = 0; p < places.size(); ++p) {
            ASSERT_EQ(places[p].has_value(), p < partials.size());
            if (places[p]) {
              ASSERT_EQ(*places[p], partials[p]);
            }
          }
        }
    }
}

// What docs/ddp.md says of memory.
TEST(ShardSums, OneAtATimeTakesFewPlaces) {
  const ReductionTree eight(8, {0}), sixty_four(64, {0});
  EXPECT_EQ(ShardSums(eight, 0, 1).places(), 4u);
  EXPECT_EQ(ShardSums(sixty_four, 0, 1).places(), 7u);
  EXPECT_EQ(ShardSums(eight, 0, 2).places(), 4u);
}

// A chain is one pass over memory, without values that wait.
TEST(ShardSums, AddAShardToAllWaitingSumsInOnePass) {
  const ShardSums sums(ReductionTree(8, {0}), 0, 2);
  ASSERT_EQ(sums.turns().size(), 4u);
  const auto& last = sums.turns().back().sums;
  ASSERT_EQ(last.size(), 1u);
  EXPECT_EQ(last[0].into, 0u);
  EXPECT_EQ(last[0].sources, (std::vector<std::size_t>{2, 3, 1, 0}));
  EXPECT_EQ(last[0].additions, (std::vector<std::uint8_t>{0, 1, 1, 1}));
}

}  // namespace
}  // namespace lockstep::ddp
