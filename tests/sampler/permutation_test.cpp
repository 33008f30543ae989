#include "lockstep/sampler/permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "base/splitmix.h"
#include "lockstep/sampler/slice.h"

namespace lockstep::sampler {
namespace {

std::vector<std::uint64_t> first(std::uint64_t count, const Permutation& order) {
  std::vector<std::uint64_t> samples;
  for (std::uint64_t i = 0; i < count; ++i) samples.push_back(order(i));
  return samples;
}

using Values = std::vector<std::uint64_t>;

// A change of these numbers changes every run that anybody wants to repeat.
TEST(Permutation, BitsNeverChange) {
  EXPECT_EQ(first(7, Permutation(7, 1, 0)), (Values{0, 6, 1, 3, 2, 5, 4}));
  EXPECT_EQ(first(7, Permutation(7, 1, 1)), (Values{3, 0, 1, 6, 5, 2, 4}));
  EXPECT_EQ(first(8, Permutation(1437, 1, 0)), (Values{706, 1078, 1019, 1393, 1265, 41, 1149, 1073}));
  EXPECT_EQ(first(8, Permutation(1437, 12345, 67)), (Values{952, 1207, 808, 500, 435, 1260, 139, 1337}));
  EXPECT_EQ(first(8, Permutation(4096, 1, 0)), (Values{239, 806, 981, 794, 470, 1521, 1279, 3119}));
  EXPECT_EQ(first(8, Permutation(5003, 1, 0)), (Values{3647, 2212, 423, 713, 4639, 2731, 3920, 3241}));
  EXPECT_EQ(first(8, Permutation(60000, 1, 9)), (Values{9295, 39971, 11026, 21358, 37042, 46824, 33840, 5433}));
  EXPECT_EQ(first(6, Permutation(1000000000, 0, 0)),
            (Values{714650344, 53876370, 355999391, 124030135, 507523597, 665787003}));
  EXPECT_EQ(first(6, Permutation(1073741825, 18446744073709551615u, 1099511627776)),
            (Values{505680915, 685432843, 694963559, 222644988, 400048541, 1000560438}));
}

TEST(SplitMix, MatchesThePublishedStream) {
  // The first outputs for seed 0, as in the reference implementations.
  SplitMix64 random(0);
  EXPECT_EQ(random.next(), 0xe220a8397b1dcdafu);
  EXPECT_EQ(random.next(), 0x6e789e6aa1b965f4u);
  EXPECT_EQ(random.next(), 0x06c45d188009454fu);
  EXPECT_EQ(SplitMix64::word(0, 2), 0x06c45d188009454fu);
}

TEST(Permutation, IsABijection) {
  for (const std::uint64_t length : {1u, 2u, 3u, 7u, 100u, 4095u, 4096u, 4097u, 8191u, 100003u, (1u << 20) + 1}) {
    for (const std::uint64_t seed : {0u, 1u, 12345u}) {
      const Permutation order(length, seed, seed % 3);
      std::vector<bool> seen(length, false);
      for (std::uint64_t i = 0; i < length; ++i) {
        const std::uint64_t sample = order(i);
        ASSERT_LT(sample, length);
        ASSERT_FALSE(seen[sample]) << "length " << length << ": " << sample << " twice";
        seen[sample] = true;
      }
    }
  }
}

TEST(Permutation, HugeLengthsStayInsideWithoutRepeats) {
  for (const std::uint64_t length : {1000000000u, (1u << 30) + 1, ~0u}) {
    const Permutation order(length, 7, 3);
    std::unordered_set<std::uint64_t> seen;
    for (std::uint64_t i = 0; i < 200000; ++i) {
      const std::uint64_t near = order(i), far = order(length - 1 - i);
      ASSERT_LT(near, length);
      ASSERT_LT(far, length);
      ASSERT_TRUE(seen.insert(near).second);
      ASSERT_TRUE(seen.insert(far).second);
    }
  }
}

TEST(Permutation, SeedAndEpochBothMatter) {
  for (const std::uint64_t length : {1000u, 10000u}) {
    const Values base = first(20, Permutation(length, 1, 0));
    EXPECT_EQ(base, first(20, Permutation(length, 1, 0)));
    EXPECT_NE(base, first(20, Permutation(length, 2, 0)));
    EXPECT_NE(base, first(20, Permutation(length, 1, 1)));
    EXPECT_NE(first(20, Permutation(length, 1, 2)), first(20, Permutation(length, 2, 1)));
  }
}

TEST(Permutation, PositionOutsideIsABug) {
  EXPECT_THROW(Permutation(10, 1, 0)(10), InternalError);
  EXPECT_THROW(Permutation(5000, 1, 0)(5000), InternalError);
  EXPECT_THROW(Permutation(0, 1, 0), InternalError);
}

// Chi-square against uniform counts, as a distance from its mean in standard deviations. The seeds are fixed, so a
// bound of 5 either always holds or never does.
double chi_square_sigmas(const std::vector<double>& counts) {
  const double expected = std::accumulate(counts.begin(), counts.end(), 0.0) / static_cast<double>(counts.size());
  double chi_square = 0;
  for (const double count : counts) chi_square += (count - expected) * (count - expected) / expected;
  const double freedom = static_cast<double>(counts.size() - 1);
  return (chi_square - freedom) / std::sqrt(2 * freedom);
}

TEST(Permutation, EveryPositionIsUniform) {
  constexpr int kOrders = 20000;
  constexpr std::uint64_t kBins = 64;
  for (const std::uint64_t length : {64u, 1000u, 4096u, 5003u, 65536u, 1000003u}) {
    for (const std::uint64_t position : {std::uint64_t{0}, std::uint64_t{1}, length / 2, length - 1}) {
      std::vector<double> counts(kBins, 0.0);
      for (int epoch = 0; epoch < kOrders; ++epoch) {
        const std::uint64_t sample = Permutation(length, 1, epoch)(position);
        counts[sample * kBins / length] += 1;
      }
      EXPECT_LT(std::abs(chi_square_sigmas(counts)), 5) << "length " << length << " position " << position;
    }
  }
}

TEST(Permutation, TinyLengthsReachEveryOrderEquallyOften) {
  constexpr int kOrders = 48000;
  std::vector<double> counts(24, 0.0);  // 4! orders, numbered by their Lehmer code
  for (int epoch = 0; epoch < kOrders; ++epoch) {
    const Values v = first(4, Permutation(4, 99, epoch));
    std::size_t code = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      std::size_t smaller_after = 0;
      for (std::size_t j = i + 1; j < 4; ++j) smaller_after += v[j] < v[i];
      code = code * (4 - i) + smaller_after;
    }
    counts[code] += 1;
  }
  EXPECT_LT(std::abs(chi_square_sigmas(counts)), 5);
}

TEST(Permutation, NeighboursAreIndependent) {
  // Where two neighbouring positions land, in an 8 × 8 grid, and how far apart they land.
  for (const std::uint64_t length : {4096u, 5003u, 1000003u}) {
    std::vector<double> grid(64, 0.0), gaps(64, 0.0);
    for (int epoch = 0; epoch < 200; ++epoch) {
      const Permutation order(length, 5, epoch);
      for (std::uint64_t i = 0; i < 4000; i += 2) {
        const std::uint64_t a = order(i), b = order(i + 1);
        grid[a * 8 / length * 8 + b * 8 / length] += 1;
        gaps[(b + length - a) % length * 64 / length] += 1;
      }
    }
    // Sampling without replacement moves these counts by far less than the bound.
    EXPECT_LT(std::abs(chi_square_sigmas(grid)), 5) << length;
    EXPECT_LT(std::abs(chi_square_sigmas(gaps)), 5) << length;
  }
}

TEST(Permutation, FixedPointsAndInversionsAreThoseOfARandomOrder) {
  constexpr std::uint64_t kLength = 4099;
  constexpr int kOrders = 400;
  double fixed = 0, ascents = 0;
  for (int epoch = 0; epoch < kOrders; ++epoch) {
    const Values v = first(kLength, Permutation(kLength, 11, epoch));
    for (std::uint64_t i = 0; i < kLength; ++i) fixed += v[i] == i;
    for (std::uint64_t i = 0; i + 1 < kLength; ++i) ascents += v[i] < v[i + 1];
  }
  EXPECT_NEAR(fixed / kOrders, 1.0, 5 / std::sqrt(kOrders));  // Poisson(1)
  const double expected_ascents = (kLength - 1) / 2.0;        // Eulerian: variance (n + 1) / 12
  EXPECT_NEAR(ascents / kOrders, expected_ascents, 5 * std::sqrt((kLength + 1) / 12.0 / kOrders));
}

TEST(Slice, CoversEverythingOnceInOrder) {
  for (std::uint64_t count = 0; count < 60; ++count) {
    for (std::uint64_t parts = 1; parts < 20; ++parts) {
      std::uint64_t at = 0, smallest = count, largest = 0;
      for (std::uint64_t part = 0; part < parts; ++part) {
        const Slice slice = slice_of(count, part, parts);
        ASSERT_EQ(slice.begin, at);
        ASSERT_EQ(slice.begin, count * part / parts);
        at = slice.end();
        smallest = std::min(smallest, slice.count);
        largest = std::max(largest, slice.count);
      }
      ASSERT_EQ(at, count);
      ASSERT_LE(largest - smallest, 1u);
    }
  }
}

TEST(Slice, DoesNotOverflow) {
  constexpr std::uint64_t kHuge = ~std::uint64_t{0};
  EXPECT_EQ(slice_of(kHuge, 6, 7).end(), kHuge);
  EXPECT_EQ(slice_of(kHuge, 4095, 4096).end(), kHuge);
}

TEST(Slice, FinerCutsNest) {
  for (std::uint64_t count = 0; count < 50; ++count) {
    for (const std::uint64_t world : {1u, 2u, 4u, 8u}) {
      for (std::uint64_t rank = 0; rank < world; ++rank) {
        const std::uint64_t per_rank = 8 / world;
        const Slice whole = slice_of(count, rank, world);
        EXPECT_EQ(whole.begin, slice_of(count, rank * per_rank, 8).begin);
        EXPECT_EQ(whole.end(), slice_of(count, (rank + 1) * per_rank - 1, 8).end());
      }
    }
  }
}

TEST(EvalSlice, CountsExactlyN) {
  for (const std::uint64_t length : {0u, 1u, 3u, 360u, 361u, 10000u}) {
    for (int world = 1; world <= 7; ++world) {
      std::uint64_t at = 0;
      for (int rank = 0; rank < world; ++rank) {
        const Slice slice = eval_slice(length, rank, world);
        ASSERT_EQ(slice.begin, at);
        at += slice.count;
      }
      ASSERT_EQ(at, length);
    }
  }
}

}  // namespace
}  // namespace lockstep::sampler
