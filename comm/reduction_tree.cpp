#include "lockstep/comm/reduction_tree.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "base/error.h"

namespace lockstep::comm {

ReductionTree::ReductionTree(std::size_t leaves, std::vector<int> positions, std::uint8_t number,
                             std::span<const std::uint32_t> shares)
    : leaves_(static_cast<std::uint32_t>(leaves)),
      number_(number),
      positions_(std::move(positions)),
      order_(positions_.size()),
      partials_(positions_.size()) {
  if (leaves == 0 || leaves > kMostLeaves)
    throw UsageError(fmt::format("a sum over {} shards", leaves), fmt::format("give 1 to {}", kMostLeaves));
  if (leaves < positions_.size())
    throw UsageError(fmt::format("{} shards for {} ranks", leaves, positions_.size()),
                     "give at least as many shards as ranks, or start fewer ranks");
  const std::size_t ranks = positions_.size();
  const auto together = std::accumulate(shares.begin(), shares.end(), std::uint64_t{0});
  if (!shares.empty() && (shares.size() != ranks || together != leaves || std::ranges::count(shares, 0u) > 0))
    throw UsageError(fmt::format("shares {} of {} shards for {} ranks", fmt::join(shares, ", "), leaves, ranks),
                     "give each rank one of 1 or more, all shards together");
  for (std::size_t rank = 0; rank < positions_.size(); ++rank)
    order_[static_cast<std::size_t>(positions_[rank])] = static_cast<int>(rank);
  begins_.push_back(0);
  for (std::size_t p = 0; p < ranks; ++p)
    begins_.push_back(shares.empty() ? static_cast<std::uint32_t>(leaves * (p + 1) / ranks)
                                     : begins_.back() + shares[static_cast<std::size_t>(order_[p])]);
  for (std::size_t rank = 0; rank < positions_.size(); ++rank) {
    const TreeNode run = run_of(static_cast<int>(rank));
    partials_[rank] = nodes_within(run.first, run.end());
    most_partials_ = std::max(most_partials_, partials_[rank].size());
  }
}

TreeNode ReductionTree::run_of(int rank) const {
  const auto position = static_cast<std::size_t>(position_of(rank));
  return {begins_[position], begins_[position + 1] - begins_[position]};
}

std::vector<TreeNode> ReductionTree::all_partials() const {
  std::vector<TreeNode> all;
  for (const int rank : order_) all.insert(all.end(), partials_of(rank).begin(), partials_of(rank).end());
  return all;
}

// Left children have a power of two of leaves, and begin at a multiple of it; what has another number ends at the last
// leaf. So a node that begins at `first` has, of 2^k leaves where `first` is a multiple of 2^k, those that there are.
std::vector<TreeNode> ReductionTree::nodes_within(std::uint32_t begin, std::uint32_t end) const {
  std::vector<TreeNode> nodes;
  while (begin < end) {
    std::uint32_t size = begin == 0 ? std::bit_ceil(leaves_) : std::uint32_t{1} << std::countr_zero(begin);
    while (std::min(begin + size, leaves_) > end) size /= 2;
    nodes.push_back({begin, std::min(begin + size, leaves_) - begin});
    begin = nodes.back().end();
  }
  return nodes;
}

bool ReductionTree::are_siblings(const TreeNode& left, const TreeNode& right) const {
  return std::has_single_bit(left.count) && left.first % (2 * left.count) == 0 && right.first == left.end() &&
         right.end() == std::min(left.first + 2 * left.count, leaves_);
}

TreeProgram::TreeProgram(const ReductionTree& tree, std::span<const TreeNode> sources) {
  std::vector<TreeNode> there;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    there.push_back(sources[i]);
    ends.push_back(i + 1);
    std::uint8_t count = 0;
    while (there.size() > 1 && tree.are_siblings(there[there.size() - 2], there.back())) {
      there[there.size() - 2].count += there.back().count;
      there.pop_back();
      ends[ends.size() - 2] = ends.back();
      ends.pop_back();
      ++count;
    }
    additions.push_back(count);
  }
}

}  // namespace lockstep::comm
