#include "base/error.h"
#include "nn/ops/cuda/attention_tiles.cuh"
#include "nn/ops/cuda/columns.cuh"

namespace lockstep::nn::cuda {
namespace {

constexpr int kWarps = kBlock / kWarp;
constexpr int kKeysAtOnce = 4;  // keys of a warp, while decoding
constexpr int kCopyBlocks = 4096, kCopyRows = 4;

// Softmax as keys come (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): the largest score
// so far, and sums that are made smaller whenever it grows.
template <int kOut, int kLoad, bool kDrops, class T>
__global__ void __launch_bounds__(kBlock)
    attend(TileGrid grid, AttentionSizes sizes, float scale, HeadRows q, HeadRows k, HeadRows v, HeadRows y,
           float* log_sums, AttentionDropout mask) {
  __shared__ TileMemory memory;
  const TilePlace place = tile_place();
  const std::int64_t head = grid.head(), column = grid.part() * kOut;
  // The last tiles see the most keys: they begin first.
  const std::int64_t begin = (grid.tiles - 1 - grid.tile()) * kTile;
  const auto own = rows_of_head<const T>(q, sizes, head, sizes.queries).from(begin);
  const std::int64_t tokens = tokens_of(sizes, head);
  std::int64_t seen = sizes.causal ? at_most(sizes.past + begin + at_most(own.rows, kTile), tokens) : tokens;
  if (sizes.past + begin >= tokens) seen = 0;  // all of it is padding
  const auto keys = rows_of_head<const T>(k, sizes, head, seen);
  const auto values = rows_of_head<const T>(v, sizes, head, seen);

  float largest[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity}, sums[4] = {};
  float results[4][kOut / kAcross] = {};
  for (std::int64_t first = 0; first < seen; first += kTile) {
    float weights[4][4] = {};
    score<kLoad>(own, keys.from(first), memory, weights);
    for (int i = 0; i < 4; ++i) {
      const std::int64_t position = sizes.past + begin + place.down * 4 + i;
      float most = largest[i];
      for (int j = 0; j < 4; ++j) {
        const std::int64_t key = first + place.across + j * kAcross;
        weights[i][j] = (key <= position || !sizes.causal) && key < seen ? weights[i][j] * scale : -kInfinity;
        most = fmaxf(most, weights[i][j]);
      }
      most = row_largest(most);
      const float factor = expf(largest[i] - most);
      largest[i] = most;
      float sum = 0.0f;
      for (int j = 0; j < 4; ++j) {
        weights[i][j] = expf(weights[i][j] - most);
        sum += weights[i][j];
      }
      sums[i] = sums[i] * factor + sum;
      for (float& result : results[i]) result *= factor;
    }
    if constexpr (kDrops) {
      const Dropped dropped(mask, sizes, head);
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
          weights[i][j] = dropped.of(weights[i][j], begin + place.down * 4 + i, first + place.across + j * kAcross);
    }
    leave_weights(memory, weights);
    add_weighted<kOut, kLoad>(values.from(first), column, memory, results);
  }
  float factors[4];
  for (int i = 0; i < 4; ++i) {
    const float sum = row_sum(sums[i]);
    const std::int64_t query = begin + place.down * 4 + i;
    factors[i] = sizes.past + query < tokens ? 1.0f / sum : 0.0f;  // else it is padding
    if (log_sums != nullptr && place.across == 0 && column == 0 && query < sizes.queries)
      log_sums[head * sizes.queries + query] = largest[i] + logf(sum);
  }
  store_results<kOut, kLoad>(results, factors, column, rows_of_head<T>(y, sizes, head, sizes.queries).from(begin));
}

// A block for each query; its warps share the keys, the lanes of a warp the columns.
template <class T>
__global__ void __launch_bounds__(kBlock)
    attend_one(AttentionSizes sizes, float scale, HeadRows q, HeadRows k, HeadRows v, HeadRows y) {
  constexpr int kColumns = static_cast<int>(kMostDecodeWidth) / kWarp;  // of a lane
  __shared__ float held[kWarps][kMostDecodeWidth], largest_of[kWarps], sum_of[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t query = blockIdx.x % sizes.queries, head = blockIdx.x / sizes.queries;
  const std::int64_t seen = sizes.past + query + 1;
  const auto own = rows_of_head<const T>(q, sizes, head, sizes.queries).from(query);
  const auto keys = rows_of_head<const T>(k, sizes, head, seen), values = rows_of_head<const T>(v, sizes, head, seen);
  const auto visit = [&](auto&& run) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (lane + c * kWarp < sizes.width) run(c, lane + c * kWarp);
  };

  float wanted[kColumns] = {}, results[kColumns] = {};
  visit([&](int c, int column) { wanted[c] = to_float(own.first[column]) * scale; });
  float largest = -kInfinity, sum = 0.0f;
  for (std::int64_t first = warp; first < seen; first += kWarps * kKeysAtOnce) {
    float scores[kKeysAtOnce] = {};
    for (int i = 0; i < kKeysAtOnce; ++i) {
      const std::int64_t key = first + i * kWarps;
      if (key < seen)
        visit([&](int c, int column) { scores[i] += wanted[c] * to_float(keys.first[key * keys.stride + column]); });
    }
    float most = largest;
    for (int i = 0; i < kKeysAtOnce; ++i) {
      scores[i] = warp_sum(scores[i]);
      if (first + i * kWarps >= seen) scores[i] = -kInfinity;
      most = fmaxf(most, scores[i]);
    }
    const float factor = expf(largest - most);
    largest = most;
    sum *= factor;
    for (float& result : results) result *= factor;
    for (int i = 0; i < kKeysAtOnce; ++i) {
      const std::int64_t key = first + i * kWarps;
      if (key >= seen) continue;
      const float weight = expf(scores[i] - most);
      sum += weight;
      visit([&](int c, int column) { results[c] += weight * to_float(values.first[key * values.stride + column]); });
    }
  }
  visit([&](int c, int column) { held[warp][column] = results[c]; });
  if (lane == 0) {
    largest_of[warp] = largest;
    sum_of[warp] = sum;
  }
  __syncthreads();
  float most = -kInfinity;  // the first warp's is finite: there is a key
  for (const float of_warp : largest_of) most = fmaxf(most, of_warp);
  float total = 0.0f, result = 0.0f;
  const int column = static_cast<int>(threadIdx.x);
  static_assert(kMostDecodeWidth <= kBlock);
  for (int w = 0; w < kWarps; ++w) {
    if (w >= seen) continue;  // it has seen nothing
    const float factor = expf(largest_of[w] - most);
    total += sum_of[w] * factor;
    if (column < sizes.width) result += held[w][column] * factor;
  }
  if (column < sizes.width)
    rows_of_head<T>(y, sizes, head, sizes.queries).from(query).first[column] = from_float<T>(result / total);
}

// A block for each row.
template <class T>
__global__ void __launch_bounds__(kBlock)
    clear_rows(std::int64_t tokens, std::int64_t count, const std::int32_t* lengths, HeadRows rows) {
  const std::int64_t sample = blockIdx.x / tokens, token = blockIdx.x % tokens;
  if (token < lengths[sample]) return;
  T* const row = static_cast<T*>(rows.data) + sample * rows.sample_stride + token * rows.row_stride;
  for (std::int64_t i = threadIdx.x; i < count; i += kBlock) row[i] = from_float<T>(0.0f);
}

template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock)
    move_rows(ColumnPlan plan, std::int64_t tokens, const T* from, HeadRows of_from, T* to, HeadRows of_to) {
  const Place at = place_in(plan);
  if (at.pack >= plan.packs) return;
  const auto place = [&](const HeadRows& rows, std::int64_t row) {
    return row / tokens * rows.sample_stride + row % tokens * rows.row_stride + at.pack * kWidth;
  };
  for (std::int64_t row = at.row; row < at.end; row += plan.lines)
    store_pack(to + place(of_to, row), load_pack<kWidth>(from + place(of_from, row)));
}

}  // namespace

void attend_tiled(Context& context, const AttentionSizes& sizes, DType dtype, const HeadRows& q, const HeadRows& k,
                  const HeadRows& v, const HeadRows& y, float* log_sums, const AttentionDropout& mask) {
  LOCKSTEP_ASSERT(sizes.past == 0 || (mask.numbers == nullptr && sizes.causal && sizes.lengths == nullptr),
                  "attention with a past, and with dropout or padding");
  with_float_type(dtype, [&]<class T>(T) {
    with_tile_widths(sizes.width, rows_fit_packs<T>(sizes, {&q, &k, &v, &y}), [&](auto out, auto load) {
      constexpr int kOut = decltype(out)::value, kLoad = decltype(load)::value;
      with_mask<kLoad>(mask, [&](auto drops) {
        const TileGrid grid = tile_grid(sizes, kOut);
        launch("attention", attend<kOut, kLoad, decltype(drops)::value, T>, blocks_of(grid), dim3(kBlock),
               context.stream, grid, sizes, scale_of(sizes), q, k, v, y, log_sums, mask);
      });
    });
  });
}

void attend_decoding(Context& context, const AttentionSizes& sizes, DType dtype, const HeadRows& q, const HeadRows& k,
                     const HeadRows& v, const HeadRows& y) {
  const std::int64_t blocks = sizes.samples * sizes.heads * sizes.queries;
  LOCKSTEP_ASSERT(sizes.width <= kMostDecodeWidth && blocks <= kMostBlocks, "attention of {} queries", blocks);
  with_float_type(dtype, [&]<class T>(T) {
    launch("attention", attend_one<T>, dim3(static_cast<unsigned>(blocks)), dim3(kBlock), context.stream, sizes,
           scale_of(sizes), q, k, v, y);
  });
}

void clear_padding(Context& context, DType dtype, std::int64_t samples, std::int64_t tokens, std::int64_t count,
                   const std::int32_t* lengths, const HeadRows& rows) {
  if (samples * tokens * count == 0) return;
  LOCKSTEP_ASSERT(samples * tokens <= kMostBlocks, "{} rows", samples * tokens);
  with_float_type(dtype, [&]<class T>(T) {
    launch("clearing padding", clear_rows<T>, dim3(static_cast<unsigned>(samples * tokens)), dim3(kBlock),
           context.stream, tokens, count, lengths, rows);
  });
}

void copy_rows(Context& context, DType dtype, std::int64_t samples, std::int64_t tokens, std::int64_t count,
               const HeadRows& from, const HeadRows& to) {
  if (samples * tokens * count == 0) return;
  with_float_type(dtype, [&]<class T>(T) {
    constexpr int kWide = kVector<T>;
    const auto* const read = static_cast<const T*>(from.data);
    auto* const written = static_cast<T*>(to.data);
    bool wide = count % kWide == 0 && fits_packs(read, kWide) && fits_packs(written, kWide);
    for (const HeadRows* const rows : {&from, &to})
      wide = wide && rows->sample_stride % kWide == 0 && rows->row_stride % kWide == 0;
    with_width<kWide>(wide, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const ColumnPlan plan = plan_columns(samples * tokens, count / kWidth, kCopyBlocks, kCopyRows);
      LOCKSTEP_ASSERT(plan.tiles <= kMostBlocks, "rows of {} packs", plan.packs);
      launch("copying rows", move_rows<kWidth, T>,
             dim3(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.chunks)), dim3(kBlock), context.stream,
             plan, tokens, read, from, written, to);
    });
  });
}

}  // namespace lockstep::nn::cuda
