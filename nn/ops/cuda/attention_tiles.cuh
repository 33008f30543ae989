// Products of tiles, of which attention's kernels are made.
#pragma once

#include <cmath>
#include <initializer_list>
#include <type_traits>

#include "lockstep/nn/ops/dropout.h"
#include "nn/ops/cuda/attention_tiled.h"
#include "nn/ops/cuda/reduce.cuh"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {

// Note [Tiles]
// A block has kTile rows of one head, its own, and goes over the others, kTile at a time. Two products alternate:
//   scores  (kTile, kTile)   own rows · other rowsᵀ, over the head's width in slabs of kSlab columns;
//   results (kTile, kOut)   += weights (kTile, kTile) · other rows, half a tile of them (a panel) at a time.
// Its 256 threads are 16 by 16: thread (down, across) has rows 4 · down to 4 · down + 3; of scores columns across,
// across + 16, …, of results columns 4 · across to 4 · across + 3 of each 64. Sixteen threads side by side, which are
// half a warp, so have a row. Slabs, panels and weights go through shared memory, whose pitches spread what a warp
// reads at once over all banks. What a head has beyond kOut columns other blocks do, which compute the scores again.
constexpr int kTile = 64, kSlab = 32;
constexpr int kAcross = 16;
constexpr int kPanel = kTile / 2;
constexpr int kSlabPitch = kSlab + 4, kWeightPitch = kTile + 4;
constexpr int kMostOut = 128;
static_assert(2 * kTile * kSlabPitch >= kPanel * kMostOut);

using Four = Pack<float, 4>;
/// Shared memory of a block.
struct TileMemory {
  Four slabs[2 * kTile * kSlabPitch / 4];  // or a panel
  Four weights[kTile * kWeightPitch / 4];

  __device__ float* own_slab() { return reinterpret_cast<float*>(slabs); }
  __device__ float* other_slab() { return own_slab() + kTile * kSlabPitch; }
  __device__ float* panel() { return own_slab(); }
  __device__ float* weight(int row) { return reinterpret_cast<float*>(weights) + row * kWeightPitch; }
};

struct TilePlace {
  int down, across;
};
__device__ inline TilePlace tile_place() {
  return {static_cast<int>(threadIdx.x) / kAcross, static_cast<int>(threadIdx.x) % kAcross};
}

/// Rows of one head: `rows` of them are there, of `width` columns.
template <class T>
struct TileRows {
  T* first;
  std::int64_t stride;
  std::int64_t rows, width;

  __device__ TileRows from(std::int64_t row) const { return {first + row * stride, stride, rows - row, width}; }
};

/// Which head a block works on: head `index` of samples · heads.
template <class T>
__device__ TileRows<T> rows_of_head(const HeadRows& all, const AttentionSizes& sizes, std::int64_t index,
                                    std::int64_t rows) {
  const std::int64_t sample = index / sizes.heads, head = index % sizes.heads;
  return {static_cast<T*>(all.data) + sample * all.sample_stride + head * sizes.width, all.row_stride, rows,
          sizes.width};
}

/// How many tokens there are of a head's sample.
__device__ inline std::int64_t tokens_of(const AttentionSizes& sizes, std::int64_t head) {
  if (sizes.lengths == nullptr) return sizes.past + sizes.queries;
  const std::int64_t length = sizes.lengths[head / sizes.heads];
  return length < 0 ? 0 : length < sizes.queries ? length : sizes.queries;
}

// kRows rows of kColumns columns from `column` on, as f32, with zeros where there is nothing.
template <int kRows, int kColumns, int kPitch, int kLoad, class T>
__device__ void load_tile(const TileRows<const T>& from, std::int64_t column, float* to) {
  constexpr int kPacks = kColumns / kLoad;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kPacks; i += kBlock) {
    const int row = i / kPacks, at = i % kPacks * kLoad;
    Pack<float, kLoad> values = {};
    if (row < from.rows && column + at < from.width) {
      const auto read = load_pack<kLoad>(from.first + row * from.stride + column + at);
      for (int k = 0; k < kLoad; ++k) values.of[k] = to_float(read.of[k]);
    }
    store_pack(to + row * kPitch + at, values);
  }
}

// scores += own · otherᵀ
template <int kLoad, class T>
__device__ void score(const TileRows<const T>& own, const TileRows<const T>& other, TileMemory& memory,
                      float (&scores)[4][4]) {
  const TilePlace place = tile_place();
  for (std::int64_t column = 0; column < own.width; column += kSlab) {
    __syncthreads();  // what lies there has been read
    load_tile<kTile, kSlab, kSlabPitch, kLoad>(own, column, memory.own_slab());
    load_tile<kTile, kSlab, kSlabPitch, kLoad>(other, column, memory.other_slab());
    __syncthreads();
    const float* const a = memory.own_slab() + place.down * 4 * kSlabPitch;
    const float* const b = memory.other_slab() + place.across * kSlabPitch;
#pragma unroll
    for (int k = 0; k < kSlab; k += 4) {
      Four of_own[4], of_other[4];
      for (int i = 0; i < 4; ++i) {
        of_own[i] = load_pack<4>(a + i * kSlabPitch + k);
        of_other[i] = load_pack<4>(b + i * kAcross * kSlabPitch + k);
      }
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
          for (int c = 0; c < 4; ++c) scores[i][j] += of_own[i].of[c] * of_other[j].of[c];
    }
  }
}

// The weights of a tile, for add_weighted(). To be called after score(), which has waited for the readers of the last
// ones.
__device__ inline void leave_weights(TileMemory& memory, const float (&weights)[4][4]) {
  const TilePlace place = tile_place();
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) memory.weight(place.down * 4 + i)[place.across + j * kAcross] = weights[i][j];
}

// results += weights · columns [column, column + kOut) of other
template <int kOut, int kLoad, class T>
__device__ void add_weighted(const TileRows<const T>& other, std::int64_t column, TileMemory& memory,
                             float (&results)[4][kOut / kAcross]) {
  const TilePlace place = tile_place();
  for (int begin = 0; begin < kTile && begin < other.rows; begin += kPanel) {
    __syncthreads();
    load_tile<kPanel, kOut, kOut, kLoad>(other.from(begin), column, memory.panel());
    __syncthreads();
    const float* const panel = memory.panel() + place.across * 4;
#pragma unroll 2
    for (int k = 0; k < kPanel; k += 4) {
      Four weights[4];
      for (int i = 0; i < 4; ++i) weights[i] = load_pack<4>(memory.weight(place.down * 4 + i) + begin + k);
      for (int c = 0; c < 4; ++c)
        for (int part = 0; part < kOut / 64; ++part) {
          const Four values = load_pack<4>(panel + (k + c) * kOut + part * 64);
          for (int i = 0; i < 4; ++i)
            for (int e = 0; e < 4; ++e) results[i][part * 4 + e] += weights[i].of[c] * values.of[e];
        }
    }
  }
}

// Columns [column, column + kOut) of `to`, as far as they are there.
template <int kOut, int kLoad, class T>
__device__ void store_results(const float (&results)[4][kOut / kAcross], const float (&factors)[4], std::int64_t column,
                              const TileRows<T>& to) {
  const TilePlace place = tile_place();
  for (int i = 0; i < 4; ++i) {
    const int row = place.down * 4 + i;
    if (row >= to.rows) continue;
    for (int part = 0; part < kOut / 64; ++part)
      for (int e = 0; e < 4; e += kLoad) {
        const std::int64_t at = column + part * 64 + place.across * 4 + e;
        if (at >= to.width) continue;
        Pack<T, kLoad> made;
        for (int k = 0; k < kLoad; ++k) made.of[k] = from_float<T>(results[i][part * 4 + e + k] * factors[i]);
        store_pack(to.first + row * to.stride + at, made);
      }
  }
}

/// What dropout, if there is any, leaves of the weights of one head, one at a time: four neighbouring keys' bits are
/// made for each.
class Dropped {
 public:
  __device__ Dropped(const AttentionDropout& mask, const AttentionSizes& sizes, std::int64_t index)
      : mask_(mask),
        state_(mask.numbers == nullptr ? DropoutState{}
                                       : DropoutState{mask.numbers[0], mask.numbers[1], mask.numbers[2]}),
        sample_(state_.first_sample + index / sizes.heads),
        head_(index % sizes.heads),
        tokens_(sizes.queries) {}

  /// `value` times what dropout makes of the weight of `query` and `key`.
  __device__ float of(float value, std::int64_t query, std::int64_t key) const {
    if (mask_.numbers == nullptr) return value;
    const RandomBits bits = attention_bits(state_, mask_.layer, sample_, head_, tokens_, query, key);
    return bits.word[key % 4] >= mask_.threshold ? value * mask_.scale : 0.0f;
  }

 private:
  AttentionDropout mask_;
  DropoutState state_;
  std::int64_t sample_, head_, tokens_;
};

/// Calls run(drops) with whether there is a mask: kernels without one have no trace of it. Those that read one element
/// at a time are slow anyway, and are compiled once.
template <int kLoad, class F>
void with_mask(const AttentionDropout& mask, F&& run) {
  if constexpr (kLoad > 1)
    if (mask.numbers == nullptr) return run(std::false_type());
  run(std::true_type());
}

// Of the threads that share a row: the same in all of them.
__device__ inline float row_largest(float value) {
  for (int step = kAcross / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}
__device__ inline float row_sum(float value) {
  for (int step = kAcross / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

/// How the blocks of a launch share the work: all heads, and parts of their columns, of a tile together.
struct TileGrid {
  std::int64_t heads = 0;  // samples · heads
  std::int64_t parts = 0;  // of a head's columns
  std::int64_t tiles = 0;

  __device__ std::int64_t part() const { return blockIdx.x % parts; }
  __device__ std::int64_t head() const { return blockIdx.x / parts % heads; }
  __device__ std::int64_t tile() const { return blockIdx.x / parts / heads; }
};

inline float scale_of(const AttentionSizes& sizes) { return 1.0f / std::sqrt(static_cast<float>(sizes.width)); }

inline TileGrid tile_grid(const AttentionSizes& sizes, int out) {
  return {sizes.samples * sizes.heads, ceil_div(sizes.width, out), ceil_div(sizes.queries, kTile)};
}
inline dim3 blocks_of(const TileGrid& grid) {
  const std::int64_t blocks = grid.heads * grid.parts * grid.tiles;
  LOCKSTEP_ASSERT(blocks <= kMostBlocks, "attention in {} blocks", blocks);
  return dim3(static_cast<unsigned>(blocks));
}

template <class T>
bool rows_fit_packs(const AttentionSizes& sizes, std::initializer_list<const HeadRows*> all) {
  if (sizes.width % 4 != 0) return false;
  for (const HeadRows* const rows : all)
    if (!fits_packs(static_cast<const T*>(rows->data), 4) || rows->sample_stride % 4 != 0 || rows->row_stride % 4 != 0)
      return false;
  return true;
}

/// Calls run(out, load) with the width of results that suits a head's, and how many elements are read at once. Heads
/// that are read one element at a time are slow anyway, and have one width of results.
template <class F>
void with_tile_widths(std::int64_t width, bool wide, F&& run) {
  using std::integral_constant;
  if (!wide)
    run(integral_constant<int, 64>{}, integral_constant<int, 1>{});
  else if (width > 64)
    run(integral_constant<int, 128>{}, integral_constant<int, 4>{});
  else
    run(integral_constant<int, 64>{}, integral_constant<int, 4>{});
}

}  // namespace lockstep::nn::cuda
