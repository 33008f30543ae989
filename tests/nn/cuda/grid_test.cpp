// How work is cut into blocks: nothing left out, nothing twice, nothing that a launch does not take.
#include "nn/ops/cuda/grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "nn/ops/cuda/update_chunk.h"

namespace lockstep::nn::cuda {
namespace {

constexpr std::int64_t kMany[] = {1,    2,    3,    4,    5,    7,     8,     31,    32,        33,
                                  63,   64,   65,   127,  255,  256,   257,   1000,  1023,      1024,
                                  1025, 4095, 4096, 4097, 5000, 50257, 65536, 99991, 100000007, std::int64_t{1} << 40};

TEST(Grid, ElementBlocks) {
  EXPECT_EQ(element_blocks(0, 4), 0);
  for (const std::int64_t count : kMany)
    for (const int width : {1, 4, 8}) {
      const std::int64_t blocks = element_blocks(count, width), each = std::int64_t{kBlock} * kPacksPerThread * width;
      EXPECT_GE(blocks * each, count);
      EXPECT_LT((blocks - 1) * each, count);
    }
}

TEST(Grid, Columns) {
  for (const std::int64_t rows : kMany)
    for (const std::int64_t packs : kMany)
      for (const std::int64_t blocks : {1024, 4096})
        for (const int rows_per_thread : {2, 4}) {
          if (packs > 100000) continue;
          const ColumnPlan plan = plan_columns(rows, packs, blocks, rows_per_thread);
          ASSERT_EQ(plan.tile & (plan.tile - 1), 0);
          ASSERT_LE(plan.tile, kWarp);
          ASSERT_EQ(plan.tile * plan.lines, kBlock);
          ASSERT_GE(plan.tiles * plan.tile, packs);
          ASSERT_LT((plan.tiles - 1) * plan.tile, packs);
          ASSERT_GE(plan.chunks * plan.chunk, rows);
          ASSERT_LT((plan.chunks - 1) * plan.chunk, rows);
          ASSERT_LE(plan.chunks, 65535);
          ASSERT_EQ(plan.chunk % (std::int64_t{plan.lines} * rows_per_thread), 0);
          if (plan.tiles <= blocks) {
            ASSERT_LE(plan.chunks * plan.tiles, blocks);
          }
          // Enough of them, where there are enough rows.
          if (rows >= 4 * blocks * kBlock && plan.tiles * 4 <= blocks) {
            ASSERT_GE(plan.chunks * plan.tiles, blocks / 2);
          }
        }
  EXPECT_EQ(plan_columns(0, 5, 1024, 4).chunks, 0);
}

TEST(Grid, NarrowTilesHaveMoreLines) {
  for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{896}, std::int64_t{65535}})
    for (const std::int64_t packs : kMany) {
      const ColumnPlan plan = plan_columns(rows, packs, 1, 1, 8);
      ASSERT_EQ(plan.tile, std::min<std::int64_t>(power_of_two_above(packs), 8));
      ASSERT_EQ(plan.tile * plan.lines, kBlock);
      ASSERT_GE(plan.tiles * plan.tile, packs);
      ASSERT_EQ(plan.chunks, 1);
      ASSERT_GE(plan.chunk, rows);
    }
}

TEST(Grid, Transposes) {
  for (const std::int64_t rows : kMany)
    for (const std::int64_t columns : kMany) {
      if (rows < 2 || columns < 2) continue;
      const TransposePlan plan = plan_transpose(rows, columns);
      ASSERT_GE(plan.tile_rows, 1);
      ASSERT_GE(plan.tile_columns, 1);
      ASSERT_GE(plan.pitch, plan.tile_columns);
      ASSERT_EQ(plan.pitch % 2, 1);
      ASSERT_LE(plan.tile_rows * plan.pitch, kTileCapacity) << rows << " by " << columns;
      ASSERT_GE(plan.down * plan.tile_rows, rows);
      ASSERT_LT((plan.down - 1) * plan.tile_rows, rows);
      ASSERT_GE(plan.across * plan.tile_columns, columns);
      ASSERT_LT((plan.across - 1) * plan.tile_columns, columns);
      // No piece is so narrow that a warp would read or write only a few elements at a time.
      if (rows >= kTileEdge && columns >= kTileEdge) {
        ASSERT_EQ(plan.tile_rows * plan.tile_columns, kTileElements);
      }
      if (rows < kTileEdge && columns < kTileEdge) {
        ASSERT_EQ(plan.down * plan.across, 1);
      }
    }
}

TEST(Grid, Stretches) {
  for (const int width : {1, 4, 8})
    for (std::int64_t ahead = 0; ahead < 2 * width; ++ahead)
      for (std::int64_t count = 0; count < 40; ++count) {
        const Stretch made = stretch_of(ahead, count, width);
        ASSERT_EQ(made.head + made.packs * width + made.tail, count);
        ASSERT_LT(made.head, width);
        ASSERT_LT(made.tail, width);
        ASSERT_GE(made.tail, 0);
        if (made.packs > 0) {
          ASSERT_EQ((ahead + made.head) % width, 0);
        }
      }
}

TEST(Grid, Sums) {
  EXPECT_EQ(plan_sum(0, 4096, 100).chunks, 0);
  for (const std::int64_t count : kMany) {
    const SumPlan plan = plan_sum(count, 4096, 100);
    EXPECT_EQ(plan.chunk % 4096, 0);
    EXPECT_LE(plan.chunks, 100);
    EXPECT_GE(plan.chunks * plan.chunk, count);
    EXPECT_LT((plan.chunks - 1) * plan.chunk, count);
  }
}

TEST(UpdateChunks, EveryElementIsOneBlocksWork) {
  std::vector<UpdateArrays> all;
  for (std::int64_t i = 0; i < 300; ++i) all.push_back({.count = i * 37 % 101});  // some of none
  all.push_back({.count = 12345});
  std::vector<std::int64_t> seen(all.size());
  std::vector<float> parameters(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i].parameter = &parameters[i];
  int chunks = 0;
  for_chunks(all, 16, [&](const UpdateChunk& chunk) {
    ++chunks;
    EXPECT_LE(chunk.size, UpdateChunk::kMost);
    EXPECT_EQ(chunk.first_block[0], 0U);
    for (std::uint32_t block = 0; block < chunk.blocks(); ++block) {
      const int at = chunk.array_of(block);
      const UpdateArrays& arrays = chunk.arrays[at];
      ASSERT_GE(block, chunk.first_block[at]);
      const std::int64_t begin = std::int64_t{block - chunk.first_block[at]} * 16;
      ASSERT_LT(begin, arrays.count);
      seen[static_cast<std::size_t>(arrays.parameter - parameters.data())] += at_most(arrays.count - begin, 16);
    }
  });
  EXPECT_EQ(chunks, 6);  // 298 of them are not empty
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(seen[i], all[i].count) << i;
}

TEST(UpdateChunks, AHugeArrayIsAChunkOfItsOwnWhereItMustBe) {
  const std::int64_t half = std::int64_t{1} << 30;
  const std::vector<UpdateArrays> all = {{.count = half}, {.count = half}, {.count = half - 1}, {.count = 1}};
  std::vector<std::uint32_t> blocks;
  for_chunks(all, 1, [&](const UpdateChunk& chunk) { blocks.push_back(chunk.blocks()); });
  EXPECT_EQ(blocks, (std::vector<std::uint32_t>{1U << 30, (1U << 31) - 1, 1U}));
}

}  // namespace
}  // namespace lockstep::nn::cuda
