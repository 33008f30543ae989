#include "ddp/replicate.h"

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

TEST(Broadcast, AllSizesEndUpAsTheRootsOwn) {
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

TEST(CheckReplicas, NamesThePieceAndTheRank) {
  if (group().size() == 1) return;  // one rank is always in step with itself: the case above
  Pieces pieces({100, 20, 7}, 5);
  if (group().rank() == group().size() - 1) pieces.memory[1][19] ^= std::byte{1};
  try {
    check_replicas(group(), pieces.named);
    FAIL() << "accepted";
  } catch (const OutOfStepError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("piece1"), std::string::npos) << text;
    EXPECT_NE(text.find("rank " + std::to_string(group().size() - 1)), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace lockstep::ddp
