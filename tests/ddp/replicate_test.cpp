#include "lockstep/ddp/replicate.h"
#include "base/error.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/ranks.h"

namespace lockstep::ddp {
namespace {

using lockstep::testing::group;

std::byte pattern(int rank, std::size_t piece, std::size_t i) {
  return static_cast<std::byte>((static_cast<std::size_t>(rank) * 31 + piece * 17 + i * 7 + i / 251) & 0xff);
}

struct Pieces {
  // `seed`: the rank whose pattern fills the pieces.
  Pieces(const std::vector<std::size_t>& sizes, int seed) {
    for (std::size_t p = 0; p < sizes.size(); ++p) {
      memory.emplace_back(sizes[p]);
      for (std::size_t i = 0; i < sizes[p]; ++i) memory[p][i] = pattern(seed, p, i);
    }
    for (std::size_t p = 0; p < sizes.size(); ++p) named.push_back({"piece" + std::to_string(p), memory[p]});
  }
  std::vector<std::vector<std::byte>> memory;
  std::vector<NamedBytes> named;
};

TEST(Broadcast, AllSizesMatchTheRoots) {
  // Around the 4 MiB that travel at once, with empty pieces in between and at the ends.
  const std::size_t full = std::size_t{4} << 20;
  const std::vector<std::vector<std::size_t>> cases = {
      {}, {0}, {0, 0, 0}, {1}, {3, 0, 5}, {full}, {full + 1}, {full - 1, 2, 0, full, 7}, {0, 2 * full + 3, 0}};
  for (const auto& sizes : cases) {
    for (int root = 0; root < group().size(); ++root) {
      Pieces pieces(sizes, group().rank());
      broadcast_state(group(), pieces.named, root);
      const Pieces wanted(sizes, root);
      ASSERT_TRUE(pieces.memory == wanted.memory) << sizes.size() << " pieces from rank " << root;
    }
  }
}

TEST(CheckReplicas, EqualStatesPass) {
  Pieces pieces({100, 0, 7}, 5);
  EXPECT_NO_THROW(check_replicas(group(), pieces.named));
}

/// What check_replicas() says on every rank, where `odd` has other bytes in some pieces.
std::string said(int odd, const std::vector<std::size_t>& pieces) {
  Pieces mine({100, 20, 7, 100'000}, 5);
  if (group().rank() == odd)
    for (const std::size_t piece : pieces) mine.memory[piece].back() ^= std::byte{1};
  try {
    check_replicas(group(), mine.named);
  } catch (const OutOfStepError& error) {
    return error.what();
  }
  return "equal";
}

TEST(CheckReplicas, NamesThePieceAndTheRanks) {
  const int size = group().size();
  if (size == 1) return;  // one rank is always in step with itself: the case above
  for (int odd = 0; odd < size; ++odd) {
    if (size == 2) {
      EXPECT_EQ(said(odd, {1}), "piece1 differs between rank 0 and rank 1");
      EXPECT_EQ(said(odd, {3, 2}), "piece2 (and 1 more) differs between rank 0 and rank 1");
      continue;
    }
    EXPECT_EQ(said(odd, {1}), fmt::format("piece1 on rank {} differs from that of the other {} ranks", odd, size - 1));
    EXPECT_EQ(said(odd, {0, 1, 3}),
              fmt::format("piece0 (and 2 more) on rank {} differs from that of the other {} ranks", odd, size - 1));
  }
}

// No rank can be called the odd one.
TEST(CheckReplicas, NamesBothSidesWhereThereIsNoMajority) {
  const int size = group().size();
  if (size < 3) return;
  Pieces mine({100}, group().rank() == 1 && size == 3 ? 1 : group().rank() / 2 * 2);
  try {
    check_replicas(group(), mine.named);
    FAIL() << "accepted";
  } catch (const OutOfStepError& error) {
    EXPECT_EQ(std::string(error.what()), size == 3 ? "piece0 differs between rank 0 and ranks 1, 2"
                                                   : "piece0 differs between ranks 0, 1 and ranks 2, 3");
  }
}

TEST(CheckReplicas, RanksWithOtherPieces) {
  if (group().size() == 1) return;
  const Pieces mine(std::vector<std::size_t>(group().rank() == 1 ? 3 : 2, 50), 5);
  EXPECT_THROW(check_replicas(group(), mine.named), OutOfStepError);
}

}  // namespace
}  // namespace lockstep::ddp
