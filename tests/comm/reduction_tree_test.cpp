// Which partial sums ranks have, and that whoever adds them up has the sum of all leaves.
#include "lockstep/comm/reduction_tree.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#include <random>

#include "base/error.h"
#include "comm/reduce.h"

namespace lockstep::comm {
namespace {

std::vector<int> identity(int ranks) {
  std::vector<int> positions(static_cast<std::size_t>(ranks));
  std::iota(positions.begin(), positions.end(), 0);
  return positions;
}

/// The tree as Note [Reduction tree] says it, of leaves [begin, end).
float sum_of(const std::vector<float>& leaves, std::size_t begin, std::size_t end) {
  if (end - begin == 1) return leaves[begin];
  const std::size_t left = std::bit_floor(end - begin - 1);
  return sum_of(leaves, begin, begin + left) + sum_of(leaves, begin + left, end);
}

std::vector<float> random_leaves(std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(count));
  std::uniform_real_distribution<float> numbers(-1.0f, 1.0f);
  std::vector<float> leaves(count);
  for (float& leaf : leaves) leaf = numbers(random);
  return leaves;
}

TEST(ReductionTree, PartialSumsOfAnyRunsGiveTheSumOfAllLeaves) {
  for (std::size_t count = 1; count <= 40; ++count) {
    const auto leaves = random_leaves(count);
    for (int ranks = 1; ranks <= static_cast<int>(count); ++ranks) {
      const ReductionTree tree(count, identity(ranks));
      std::vector<TreeNode> nodes;
      std::vector<float> values;
      for (int rank = 0; rank < ranks; ++rank)
        for (const TreeNode& node : tree.partials_of(rank)) {
          nodes.push_back(node);
          values.push_back(sum_of(leaves, node.first, node.end()));
        }
      const TreeProgram program(tree, nodes);
      ASSERT_EQ(program.results(), 1u) << count << " leaves on " << ranks << " ranks";
      std::vector<const std::byte*> sources;
      for (const float& value : values) sources.push_back(reinterpret_cast<const std::byte*>(&value));
      float sum = 0;
      reduce_along_tree(DType::kF32, reinterpret_cast<std::byte*>(&sum), sources, program.additions, 1);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(sum), std::bit_cast<std::uint32_t>(sum_of(leaves, 0, count)))
          << count << " leaves on " << ranks << " ranks";
    }
  }
}

TEST(ReductionTree, APartialSumIsAMaximalNodeOfTheTree) {
  for (std::uint32_t count = 1; count <= 33; ++count) {
    const ReductionTree tree(count, {0});
    for (std::uint32_t begin = 0; begin < count; ++begin)
      for (std::uint32_t end = begin + 1; end <= count; ++end) {
        const auto nodes = tree.nodes_within(begin, end);
        std::uint32_t at = begin;
        for (std::size_t i = 0; i < nodes.size(); ++i) {
          ASSERT_EQ(nodes[i].first, at);
          at = nodes[i].end();
          // Of one node alone: its own leaves are that.
          ASSERT_EQ(tree.nodes_within(nodes[i].first, nodes[i].end()).size(), 1u);
          if (i > 0) {
            ASSERT_FALSE(tree.are_siblings(nodes[i - 1], nodes[i])) << begin << " to " << end << " of " << count;
          }
        }
        ASSERT_EQ(at, end);
        ASSERT_LE(nodes.size(), 2u * static_cast<unsigned>(std::bit_width(count)));
      }
  }
}

TEST(ReductionTree, LeavesOneByOneAddUpToThePartialSums) {
  for (std::uint32_t count = 1; count <= 20; ++count)
    for (std::uint32_t begin = 0; begin < count; ++begin)
      for (std::uint32_t end = begin + 1; end <= count; ++end) {
        const ReductionTree tree(count, {0});
        std::vector<TreeNode> leaves;
        for (std::uint32_t leaf = begin; leaf < end; ++leaf) leaves.push_back({leaf, 1});
        const TreeProgram program(tree, leaves);
        const auto nodes = tree.nodes_within(begin, end);
        ASSERT_EQ(program.results(), nodes.size());
        for (std::size_t i = 0; i < nodes.size(); ++i) ASSERT_EQ(program.ends[i], nodes[i].end() - begin);
      }
}

TEST(ReductionTree, NeighbouringRunsFollowThePositions) {
  const ReductionTree tree(5, {1, 0});
  EXPECT_EQ(tree.run_of(1), (TreeNode{0, 2}));
  EXPECT_EQ(tree.run_of(0), (TreeNode{2, 3}));
  EXPECT_EQ(tree.order(), (std::vector<int>{1, 0}));
  EXPECT_EQ(tree.partials_of(0).size(), 2u);  // [2, 4) and [4, 5)
  EXPECT_FALSE(tree.one_each());
}

TEST(ReductionTree, InvalidTreesAreRefused) {
  EXPECT_THROW(ReductionTree(0, {0}), UsageError);
  EXPECT_THROW(ReductionTree(2, identity(3)), UsageError);
  EXPECT_THROW(ReductionTree(ReductionTree::kMostLeaves + 1, {0}), UsageError);
}

template <class T>
void sums_of_any_length(DType dtype) {
  const ReductionTree tree(11, identity(11));
  std::vector<TreeNode> nodes;
  for (std::uint32_t leaf = 0; leaf < 11; ++leaf) nodes.push_back({leaf, 1});
  const TreeProgram program(tree, nodes);
  for (const std::size_t count : {0u, 1u, 15u, 16u, 17u, 1000u, 70'001u}) {
    std::vector<std::vector<T>> values(11);
    for (std::size_t leaf = 0; leaf < 11; ++leaf)
      for (std::size_t i = 0; i < count; ++i)
        values[leaf].push_back(static_cast<T>(1) / static_cast<T>(3 + leaf * 7 + i % 97));
    const auto at = [&](std::size_t leaf, std::size_t i) { return values[leaf][i]; };
    std::vector<T> expected;
    for (std::size_t i = 0; i < count; ++i)
      expected.push_back(
          (((at(0, i) + at(1, i)) + (at(2, i) + at(3, i))) + ((at(4, i) + at(5, i)) + (at(6, i) + at(7, i)))) +
          ((at(8, i) + at(9, i)) + at(10, i)));
    std::vector<const std::byte*> sources;
    for (auto& one : values) sources.push_back(reinterpret_cast<const std::byte*>(one.data()));
    // Into two that are sources, and one that is not.
    std::vector<T> apart(count);
    const std::array targets = {reinterpret_cast<std::byte*>(values[3].data()),
                                reinterpret_cast<std::byte*>(apart.data()),
                                reinterpret_cast<std::byte*>(values[10].data())};
    reduce_along_tree(dtype, targets, sources, program.additions, count);
    for (const auto* made : {&values[3], &values[10], &apart})
      ASSERT_TRUE(count == 0 || std::memcmp(made->data(), expected.data(), count * sizeof(T)) == 0) << count;
  }
}

TEST(ReduceAlongTree, SumsOfAnyLengthIntoAnyTargets) {
  sums_of_any_length<float>(DType::kF32);
  sums_of_any_length<double>(DType::kF64);
}

}  // namespace
}  // namespace lockstep::comm
