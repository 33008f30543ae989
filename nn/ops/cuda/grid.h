// Launch shapes and how work is cut into pieces: pure arithmetic on sizes, for host and kernels alike. None of it asks
// the GPU: so the order of sums, which follows from it, is the same on all of them.
#pragma once

#include <cstdint>

namespace lockstep::nn::cuda {

constexpr int kWarp = 32;
constexpr int kBlock = 256;  // threads, where nothing else is said
constexpr int kMostBlocks = 0x7fffffff;
constexpr int kVectorBytes = 16;  // the widest access of one thread

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t at_most(std::int64_t a, std::int64_t most) { return a < most ? a : most; }
constexpr std::int64_t at_least(std::int64_t a, std::int64_t least) { return a > least ? a : least; }
constexpr std::int64_t power_of_two_above(std::int64_t n) {  // or n itself
  std::int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

/// Element by element: a thread has this many packs, which lie a block's width apart.
constexpr int kPacksPerThread = 4;
constexpr std::int64_t element_blocks(std::int64_t count, int width) {
  return ceil_div(count, std::int64_t{kBlock} * kPacksPerThread * width);
}

/// A matrix of (rows, packs) with contiguous rows, processed column by column: block (i, j) has columns [i · tile, (i +
/// 1) · tile) and rows [j · chunk, (j + 1) · chunk). Its threads lie `tile` side by side, and kBlock / tile rows below
/// one another.
struct ColumnPlan {
  std::int64_t rows = 0, packs = 0;
  std::int64_t chunk = 1, chunks = 0;
  std::int64_t tiles = 0;
  int tile = 1;   // a power of two, at most kWarp
  int lines = 1;  // kBlock / tile
};

/// About `blocks` blocks, fewer where a thread would have less than `rows_per_thread` rows. `most_tile` is a power of
/// two.
constexpr ColumnPlan plan_columns(std::int64_t rows, std::int64_t packs, std::int64_t blocks, int rows_per_thread,
                                  int most_tile = kWarp) {
  ColumnPlan plan;
  plan.rows = rows;
  plan.packs = packs;
  plan.tile = static_cast<int>(at_most(power_of_two_above(packs), most_tile));
  plan.lines = kBlock / plan.tile;
  plan.tiles = ceil_div(packs, plan.tile);
  const std::int64_t wanted = at_most(at_least(blocks / at_least(plan.tiles, 1), 1), 65535);
  const std::int64_t step = std::int64_t{plan.lines} * rows_per_thread;
  plan.chunk = at_least(ceil_div(ceil_div(rows, wanted), step), 1) * step;
  plan.chunks = ceil_div(rows, plan.chunk);
  return plan;
}

/// A transposition of (rows, columns) matrices by way of shared memory: pieces of tile_rows by tile_columns elements,
/// at most kTileElements, in rows of `pitch` elements there. An odd pitch spreads a column over all banks.
struct TransposePlan {
  std::int64_t rows = 0, columns = 0;
  std::int64_t down = 0, across = 0;  // pieces of a matrix
  int tile_rows = 1, tile_columns = 1, pitch = 1;
};
constexpr int kTileElements = 4096;
constexpr int kTileCapacity = kTileElements * 3 / 2;  // two columns, and one for the pitch
constexpr int kTileEdge = 64;

/// For at least two rows and two columns: anything else is a copy.
constexpr TransposePlan plan_transpose(std::int64_t rows, std::int64_t columns) {
  TransposePlan plan;
  plan.rows = rows;
  plan.columns = columns;
  // A narrow matrix is read, or written, as one stretch.
  plan.tile_columns = static_cast<int>(at_most(columns, rows < kTileEdge ? kTileElements / rows : kTileEdge));
  plan.tile_rows = static_cast<int>(at_most(rows, columns < kTileEdge ? kTileElements / columns : kTileEdge));
  plan.pitch = plan.tile_columns | 1;
  if (plan.tile_rows * plan.pitch > kTileCapacity) plan.tile_rows = kTileCapacity / plan.pitch;
  plan.down = ceil_div(rows, plan.tile_rows);
  plan.across = ceil_div(columns, plan.tile_columns);
  return plan;
}

/// `count` elements of which the first is `ahead` elements after a boundary of vectors of `width`: head elements, then
/// packs, then tail elements.
struct Stretch {
  std::int64_t packs = 0;
  int head = 0, tail = 0;
};
constexpr Stretch stretch_of(std::int64_t ahead, std::int64_t count, int width) {
  Stretch made;
  made.head = static_cast<int>(at_most((width - ahead % width) % width, count));
  made.packs = (count - made.head) / width;
  made.tail = static_cast<int>((count - made.head) % width);
  return made;
}

/// A sum over `count` elements: partial sums of `chunk` elements each, which are then added up by one block.
struct SumPlan {
  std::int64_t chunk = 1, chunks = 0;
};
constexpr SumPlan plan_sum(std::int64_t count, std::int64_t least_chunk, std::int64_t most_chunks) {
  SumPlan plan;
  plan.chunk = at_least(ceil_div(ceil_div(count, most_chunks), least_chunk), 1) * least_chunk;
  plan.chunks = ceil_div(count, plan.chunk);
  return plan;
}

}  // namespace lockstep::nn::cuda
