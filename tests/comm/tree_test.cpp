// Allreduces along a tree: the same bits as one process has that adds all leaves, over every carrier.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/reduction_tree.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

using testing::group;

template <class T>
T leaf_value(std::size_t leaf, std::size_t i, std::uint64_t seed) {
  return static_cast<T>(1) / static_cast<T>(1 + (leaf * 31 + i * 7 + seed * 13) % 1009);
}

/// Of leaves [begin, end), as Note [Reduction tree] says.
template <class T>
std::vector<T> sum_of(std::size_t begin, std::size_t end, std::size_t count, std::uint64_t seed) {
  std::vector<T> sums(count);
  if (end - begin == 1) {
    for (std::size_t i = 0; i < count; ++i) sums[i] = leaf_value<T>(begin, i, seed);
    return sums;
  }
  const std::size_t left = std::bit_floor(end - begin - 1);
  sums = sum_of<T>(begin, begin + left, count, seed);
  const auto right = sum_of<T>(begin + left, end, count, seed);
  for (std::size_t i = 0; i < count; ++i) sums[i] += right[i];
  return sums;
}

template <class T>
void check_sum(const ReductionTree& tree, std::size_t count, std::uint64_t seed) {
  const std::size_t stride = align_up(count * sizeof(T)) + kArenaAlignment;
  const auto arena = group().allocate(kArenaAlignment + tree.most_partials() * stride);
  const auto partials = tree.partials_of(group().rank());
  std::vector<T> guard(1, static_cast<T>(-7));
  for (std::size_t p = 0; p < partials.size(); ++p) {
    const auto values = sum_of<T>(partials[p].first, partials[p].end(), count, seed);
    const std::size_t at = kArenaAlignment + p * stride;
    if (count > 0) group().copy(arena->data() + at, values.data(), count * sizeof(T));
    group().copy(arena->data() + at + count * sizeof(T), guard.data(), sizeof(T));
  }
  const Region region{arena.get(), kArenaAlignment, count, lockstep::dtype_of<T>()};
  group().all_reduce(region, tree, stride, 3).wait_host();
  const auto expected = sum_of<T>(0, tree.leaves(), count, seed);
  std::vector<T> made(count + 1);
  group().copy(made.data(), region.data(), (count + 1) * sizeof(T));
  ASSERT_TRUE(count == 0 || std::memcmp(made.data(), expected.data(), count * sizeof(T)) == 0)
      << count << " values of " << tree.leaves() << " leaves on rank " << group().rank() << " of " << group().size();
  ASSERT_EQ(made.back(), guard.front());
}

TEST(AlongATree, EveryCarrierHasTheBitsOfOneProcess) {
  const auto ranks = static_cast<std::size_t>(group().size());
  std::uint64_t seed = 0;
  for (const std::size_t leaves : {ranks, ranks + 1, std::size_t{8}, std::size_t{13}, std::size_t{64}}) {
    const ReductionTree& tree = group().define_tree(leaves);
    for (const std::size_t count : {0u, 1u, 5u, 63u, 1'000u, 4'097u, 70'001u}) {
      check_sum<float>(tree, count, ++seed);
      if (count < 5'000) check_sum<double>(tree, count, ++seed);
    }
  }
}

/// Of `leaves` for the ranks: the first has `more` than one, the last what is left, the others one each.
std::vector<std::uint32_t> unequal(std::size_t leaves, std::size_t more) {
  const auto ranks = static_cast<std::size_t>(group().size());
  std::vector<std::uint32_t> shares(ranks, 1);
  shares.front() += static_cast<std::uint32_t>(more);
  shares.back() += static_cast<std::uint32_t>(leaves - ranks - more);
  return shares;
}

TEST(AlongATree, RunsOfAnyLengthHaveTheSameBits) {
  const auto ranks = static_cast<std::size_t>(group().size());
  std::uint64_t seed = 0;
  for (const std::size_t leaves : {ranks + 1, ranks + 7, std::size_t{32}})
    for (const std::size_t more : {std::size_t{0}, std::size_t{1}, leaves - ranks}) {
      const auto shares = unequal(leaves, more);
      const ReductionTree& tree = group().define_tree(leaves, shares);
      for (int rank = 0; rank < group().size(); ++rank)
        ASSERT_EQ(tree.run_of(rank).count, shares[static_cast<std::size_t>(rank)]);
      ASSERT_EQ(&group().define_tree(leaves, shares), &tree);
      for (const std::size_t count : {1u, 63u, 4'097u, 70'001u}) check_sum<float>(tree, count, ++seed);
    }
}

TEST(AlongATree, SharesThatCannotBeAreRefused) {
  const auto ranks = static_cast<std::uint32_t>(group().size());
  auto shares = unequal(ranks + 3, 1);
  EXPECT_THROW(group().define_tree(ranks + 2, shares), UsageError);
  shares.front() -= 1;
  shares.push_back(1);
  EXPECT_THROW(group().define_tree(ranks + 3, shares), UsageError);
  shares.pop_back();
  shares.front() = 0;
  EXPECT_THROW(group().define_tree(ranks + 2, shares), UsageError);
  if (ranks > 1) {
    EXPECT_THROW(group().define_tree(ranks + 3, unequal(ranks + 3, group().rank() == 0 ? 1 : 2)), Error);
  }
  group().barrier().wait_host();
}

TEST(AlongATree, ManyRunConcurrently) {
  const ReductionTree& tree =
      group().define_tree(group().size() == 1 ? 3 : static_cast<std::size_t>(group().size()) + 2);
  constexpr std::size_t kCount = 3'000, kSums = 12;
  const std::size_t stride = align_up(kSums * kCount * sizeof(float));
  const auto arena = group().allocate(tree.most_partials() * stride);
  const auto others = group().allocate(kSums * kCount * sizeof(float));
  const std::vector<float> ones(kSums * kCount, 1.0f);
  group().copy(others->data(), ones.data(), ones.size() * sizeof(float));
  const auto partials = tree.partials_of(group().rank());
  for (std::size_t p = 0; p < partials.size(); ++p)
    for (std::size_t s = 0; s < kSums; ++s) {
      const auto values = sum_of<float>(partials[p].first, partials[p].end(), kCount, s);
      group().copy(arena->data() + p * stride + s * kCount * sizeof(float), values.data(), kCount * sizeof(float));
    }
  Work last;
  for (std::size_t s = 0; s < kSums; ++s) {
    const std::size_t at = s * kCount * sizeof(float);
    group().all_reduce({arena.get(), at, kCount, DType::kF32}, tree, stride);
    last = group().all_reduce({others.get(), at, kCount, DType::kF32}, ReduceOp::kSum);
  }
  last.wait_host();
  std::vector<float> made(kSums * kCount), counted(kSums * kCount);
  group().copy(made.data(), arena->data(), made.size() * sizeof(float));
  group().copy(counted.data(), others->data(), counted.size() * sizeof(float));
  for (std::size_t s = 0; s < kSums; ++s) {
    const auto expected = sum_of<float>(0, tree.leaves(), kCount, s);
    ASSERT_EQ(std::memcmp(made.data() + s * kCount, expected.data(), kCount * sizeof(float)), 0) << s;
  }
  for (const float value : counted) ASSERT_EQ(value, static_cast<float>(group().size()));
}

TEST(AlongATree, MismatchesAreRefused) {
  const auto ranks = static_cast<std::size_t>(group().size());
  EXPECT_THROW(group().define_tree(ranks - 1), UsageError);
  const ReductionTree& tree = group().define_tree(4 * ranks + 3);
  const ReductionTree alien(ranks, [&] {
    std::vector<int> positions;
    for (int r = 0; r < group().size(); ++r) positions.push_back(r);
    return positions;
  }());
  const auto arena = group().allocate(4096);
  EXPECT_THROW(group().all_reduce({arena.get(), 0, 16, DType::kF32}, alien, 64), UsageError);
  EXPECT_THROW(group().all_reduce({arena.get(), 0, 16, DType::kI32}, tree, 64), UsageError);
  if (tree.most_partials() > 1) {
    EXPECT_THROW(group().all_reduce({arena.get(), 0, 32, DType::kF32}, tree, 64), UsageError);
    EXPECT_THROW(group().all_reduce({arena.get(), 0, 16, DType::kF32}, tree, 65), UsageError);
    EXPECT_THROW(group().all_reduce({arena.get(), 0, 16, DType::kF32}, tree, 8192), UsageError);
  }
  group().barrier().wait_host();
}

}  // namespace
}  // namespace lockstep::comm
