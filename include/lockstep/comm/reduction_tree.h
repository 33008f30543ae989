// One binary tree over what is summed, whoever computes which part of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lockstep::comm {

/// Note [Reduction tree]
/// A sum over V leaves whose bits do not depend on how many ranks compute it. The tree over leaves [0, V) splits them
/// at the largest power of two below their number, and so on; a node is left + right, a leaf what its owner put in. A
/// rank has a contiguous run of leaves, and adds up what lies in it as far as the tree allows: what is left are the
/// values of a few nodes, its partial sums, one for each maximal node within the run, at most 2 log2 V of them. Whoever
/// has the partial sums of all runs, in the order of the leaves, finds the root by the same additions, wherever they
/// were done before: so 1, 2, 3, 5 or V ranks have the same bits. A rank order, ((l0 + l1) + l2) + …, would have them
/// only where no rank adds anything up by itself.
///
/// Run number p of n is slice_of(V, p, n), sampler's formula, or as long as its rank's share says, where ranks are not
/// equally fast; runs are numbered so that the ranks of a host have neighbouring ones (ProcessGroup::define_tree), and
/// a host has a run, too.

/// A node, by the leaves under it: [first, first + count).
struct TreeNode {
  std::uint32_t first = 0;
  std::uint32_t count = 0;

  std::uint32_t end() const { return first + count; }
  friend bool operator==(const TreeNode&, const TreeNode&) = default;
};

/// Does not change, so threads may share one. What it returns by reference or as a span is its own. Ranks are below
/// ranks(): nothing checks them.
class ReductionTree {
 public:
  static constexpr std::size_t kMostLeaves = std::size_t{1} << 16;
  /// Of nodes that wait for their other half while leaves are taken in order.
  static constexpr std::size_t kMostDepth = 17;

  /// `positions[r]`: the number of rank r's run; all numbers once. `shares[r]`: its leaves; empty: as slice_of() has
  /// them. Throws UsageError for no leaves, more than kMostLeaves, or fewer than ranks, and for shares that are not one
  /// of 1 or more for each rank, `leaves` together. `number` is its group's for it.
  ReductionTree(std::size_t leaves, std::vector<int> positions, std::uint8_t number = 1,
                std::span<const std::uint32_t> shares = {});

  std::size_t leaves() const { return leaves_; }
  std::uint8_t number() const { return number_; }
  int ranks() const { return static_cast<int>(positions_.size()); }
  /// The number of a rank's run.
  int position_of(int rank) const { return positions_[static_cast<std::size_t>(rank)]; }
  /// The leaves of a rank.
  TreeNode run_of(int rank) const;
  /// The nodes of its partial sums, in the order of the leaves.
  std::span<const TreeNode> partials_of(int rank) const { return partials_[static_cast<std::size_t>(rank)]; }
  /// The ranks in the order of their runs.
  const std::vector<int>& order() const { return order_; }
  std::size_t most_partials() const { return most_partials_; }
  /// Whether both are over the same leaves, and each rank has the same of them.
  bool has_runs_of(const ReductionTree& other) const {
    return positions_ == other.positions_ && begins_ == other.begins_;
  }
  /// Whether each rank has one partial sum.
  bool one_each() const { return most_partials_ == 1; }

  /// Those of all ranks.
  std::vector<TreeNode> all_partials() const;
  /// The maximal nodes within [begin, end).
  std::vector<TreeNode> nodes_within(std::uint32_t begin, std::uint32_t end) const;
  /// Whether the two are the children of one node.
  bool are_siblings(const TreeNode& left, const TreeNode& right) const;

 private:
  std::uint32_t leaves_;
  std::uint8_t number_;
  std::vector<int> positions_, order_;
  std::vector<std::uint32_t> begins_;            // by run, and the end of the last one
  std::vector<std::vector<TreeNode>> partials_;  // by rank
  std::size_t most_partials_ = 0;
};

/// How sources, each the value of a node, become the values of the largest nodes that they make up: they are taken in
/// the order of their leaves, and after each the last two values that are there are added as many times as `additions`
/// says.
struct TreeProgram {
  std::vector<std::uint8_t> additions = {};  // by source
  std::vector<std::size_t> ends = {};        // by result: the number of the source after its last one

  TreeProgram() = default;
  /// For nodes in the order of their leaves.
  TreeProgram(const ReductionTree& tree, std::span<const TreeNode> sources);
  /// For the partial sums of all ranks, in the order of their runs: to the root.
  explicit TreeProgram(const ReductionTree& tree) : TreeProgram(tree, tree.all_partials()) {}
  std::size_t results() const { return ends.size(); }
};

}  // namespace lockstep::comm
