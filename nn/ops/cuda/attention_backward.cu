#include "base/error.h"
#include "nn/ops/cuda/attention_tiles.cuh"

namespace lockstep::nn::cuda {
namespace {

// Note [Attention's gradients]
// With p_ts = exp(q_t · k_s · scale − log_sum_t), the weights, and mean_t = dy_t · y_t = Σ_s p_ts (dy_t · v_s):
//   dv_s = Σ_t p_ts dy_t        ds_ts = p_ts (dy_t · v_s − mean_t)
//   dq_t = scale · Σ_s ds_ts k_s    dk_s = scale · Σ_t ds_ts q_t
// Dropout multiplies weights by m_ts: then dv_s = Σ_t m_ts p_ts dy_t, ds_ts = p_ts (m_ts dy_t · v_s − mean_t), and
// mean_t = Σ_s m_ts p_ts (dy_t · v_s) is dy_t · y_t still.
// Two kernels, one with blocks of keys for dk and dv, and one with blocks of queries for dq: scores are computed twice,
// but every sum is one block's, in one order, and nothing is added in memory.

// means[head][t] = dy_t · y_t; a warp for each.
template <class T>
__global__ void __launch_bounds__(kBlock)
    dot_rows(AttentionSizes sizes, std::int64_t rows, HeadRows y, HeadRows dy, float* means) {
  const std::int64_t row = std::int64_t{blockIdx.x} * (kBlock / kWarp) + static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float sum = 0.0f;
  if (row < rows) {
    const std::int64_t head = row / sizes.queries, t = row % sizes.queries;
    const T* const of_y = rows_of_head<const T>(y, sizes, head, sizes.queries).from(t).first;
    const T* const of_dy = rows_of_head<const T>(dy, sizes, head, sizes.queries).from(t).first;
    for (std::int64_t c = lane; c < sizes.width; c += kWarp) sum += to_float(of_y[c]) * to_float(of_dy[c]);
  }
  sum = warp_sum(sum);
  if (row < rows && lane == 0) means[row] = sum;
}

// The weights of a tile from its scores. Rows are `own`, columns `other`: queries and keys, or, where kKeys, keys and
// queries.
template <bool kKeys>
__device__ void weigh(const AttentionSizes& sizes, std::int64_t tokens, float scale, const float* log_sums,
                      std::int64_t own, std::int64_t other, float (&scores)[4][4]) {
  const TilePlace place = tile_place();
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) {
      const std::int64_t row = own + place.down * 4 + i, column = other + place.across + j * kAcross;
      const std::int64_t query = kKeys ? column : row, key = kKeys ? row : column;
      const bool seen = sizes.causal ? key <= query : key < tokens;
      scores[i][j] = seen && query < tokens ? expf(scores[i][j] * scale - log_sums[query]) : 0.0f;
    }
}

// What dropout leaves of a tile of weights, or of their gradients.
template <bool kKeys>
__device__ void drop_tile(const AttentionDropout& mask, const AttentionSizes& sizes, std::int64_t head,
                          std::int64_t own, std::int64_t other, const float (&from)[4][4], float (&to)[4][4]) {
  const TilePlace place = tile_place();
  const Dropped dropped(mask, sizes, head);
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) {
      const std::int64_t row = own + place.down * 4 + i, column = other + place.across + j * kAcross;
      to[i][j] = dropped.of(from[i][j], kKeys ? column : row, kKeys ? row : column);
    }
}

// Gradients of scores, from the weights and the weights' gradients.
template <bool kKeys>
__device__ void through_softmax(std::int64_t tokens, const float* means, std::int64_t own, std::int64_t other,
                                const float (&weights)[4][4], float (&gradients)[4][4]) {
  const TilePlace place = tile_place();
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) {
      const std::int64_t query = kKeys ? other + place.across + j * kAcross : own + place.down * 4 + i;
      gradients[i][j] = query < tokens ? weights[i][j] * (gradients[i][j] - means[query]) : 0.0f;
    }
}

template <int kOut, int kLoad, bool kDrops, class T>
__global__ void __launch_bounds__(kBlock) differentiate_keys(TileGrid grid, AttentionSizes sizes, float scale,
                                                             AttentionGradients arrays, AttentionDropout mask) {
  __shared__ TileMemory memory;
  const std::int64_t head = grid.head(), column = grid.part() * kOut, count = sizes.queries;
  const std::int64_t tokens = tokens_of(sizes, head);
  const std::int64_t begin = grid.tile() * kTile;  // the first keys are seen by the most queries
  const auto q = rows_of_head<const T>(arrays.q, sizes, head, tokens);
  const auto dy = rows_of_head<const T>(arrays.dy, sizes, head, tokens);
  const auto k = rows_of_head<const T>(arrays.k, sizes, head, tokens).from(begin);
  const auto v = rows_of_head<const T>(arrays.v, sizes, head, tokens).from(begin);
  const float* const log_sums = arrays.log_sums + head * count;
  const float* const means = arrays.means + head * count;

  float dk[4][kOut / kAcross] = {}, dv[4][kOut / kAcross] = {};
  for (std::int64_t first = sizes.causal || begin >= tokens ? begin : 0; first < tokens; first += kTile) {
    float weights[4][4] = {}, gradients[4][4] = {};
    score<kLoad>(k, q.from(first), memory, weights);
    weigh<true>(sizes, tokens, scale, log_sums, begin, first, weights);
    if constexpr (kDrops) {
      float left[4][4];
      drop_tile<true>(mask, sizes, head, begin, first, weights, left);
      leave_weights(memory, left);
    } else {
      leave_weights(memory, weights);
    }
    add_weighted<kOut, kLoad>(dy.from(first), column, memory, dv);
    score<kLoad>(v, dy.from(first), memory, gradients);
    if constexpr (kDrops) drop_tile<true>(mask, sizes, head, begin, first, gradients, gradients);
    through_softmax<true>(tokens, means, begin, first, weights, gradients);
    leave_weights(memory, gradients);
    add_weighted<kOut, kLoad>(q.from(first), column, memory, dk);
  }
  const float scales[4] = {scale, scale, scale, scale}, ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  store_results<kOut, kLoad>(dk, scales, column, rows_of_head<T>(arrays.dk, sizes, head, count).from(begin));
  store_results<kOut, kLoad>(dv, ones, column, rows_of_head<T>(arrays.dv, sizes, head, count).from(begin));
}

template <int kOut, int kLoad, bool kDrops, class T>
__global__ void __launch_bounds__(kBlock) differentiate_queries(TileGrid grid, AttentionSizes sizes, float scale,
                                                                AttentionGradients arrays, AttentionDropout mask) {
  __shared__ TileMemory memory;
  const std::int64_t head = grid.head(), column = grid.part() * kOut, count = sizes.queries;
  const std::int64_t tokens = tokens_of(sizes, head);
  const std::int64_t begin = (grid.tiles - 1 - grid.tile()) * kTile;  // the last queries see the most keys
  const std::int64_t seen = begin >= tokens ? 0 : sizes.causal ? at_most(begin + kTile, tokens) : tokens;
  const auto q = rows_of_head<const T>(arrays.q, sizes, head, tokens).from(begin);
  const auto dy = rows_of_head<const T>(arrays.dy, sizes, head, tokens).from(begin);
  const auto k = rows_of_head<const T>(arrays.k, sizes, head, tokens);
  const auto v = rows_of_head<const T>(arrays.v, sizes, head, tokens);
  const float* const log_sums = arrays.log_sums + head * count;
  const float* const means = arrays.means + head * count;

  float dq[4][kOut / kAcross] = {};
  for (std::int64_t first = 0; first < seen; first += kTile) {
    float weights[4][4] = {}, gradients[4][4] = {};
    score<kLoad>(q, k.from(first), memory, weights);
    weigh<false>(sizes, tokens, scale, log_sums, begin, first, weights);
    score<kLoad>(dy, v.from(first), memory, gradients);
    if constexpr (kDrops) drop_tile<false>(mask, sizes, head, begin, first, gradients, gradients);
    through_softmax<false>(tokens, means, begin, first, weights, gradients);
    leave_weights(memory, gradients);
    add_weighted<kOut, kLoad>(k.from(first), column, memory, dq);
  }
  const float scales[4] = {scale, scale, scale, scale};
  store_results<kOut, kLoad>(dq, scales, column, rows_of_head<T>(arrays.dq, sizes, head, count).from(begin));
}

}  // namespace

void differentiate_tiled(Context& context, const AttentionSizes& sizes, DType dtype, const AttentionGradients& arrays,
                         const AttentionDropout& mask) {
  LOCKSTEP_ASSERT(sizes.past == 0, "gradients of attention with a past");
  const std::int64_t rows = sizes.samples * sizes.heads * sizes.queries;
  const std::int64_t blocks = ceil_div(rows, kBlock / kWarp);
  LOCKSTEP_ASSERT(blocks <= kMostBlocks, "attention of {} queries", rows);
  const float scale = scale_of(sizes);
  with_float_type(dtype, [&]<class T>(T) {
    launch("attention's backward", dot_rows<T>, dim3(static_cast<unsigned>(blocks)), dim3(kBlock), context.stream,
           sizes, rows, arrays.y, arrays.dy, arrays.means);
    const bool wide = rows_fit_packs<T>(
        sizes, {&arrays.q, &arrays.k, &arrays.v, &arrays.y, &arrays.dy, &arrays.dq, &arrays.dk, &arrays.dv});
    with_tile_widths(sizes.width, wide, [&](auto out, auto load) {
      constexpr int kOut = decltype(out)::value, kLoad = decltype(load)::value;
      const TileGrid grid = tile_grid(sizes, kOut);
      with_mask<kLoad>(mask, [&](auto drops) {
        constexpr bool kDrops = decltype(drops)::value;
        launch("attention's backward", differentiate_keys<kOut, kLoad, kDrops, T>, blocks_of(grid), dim3(kBlock),
               context.stream, grid, sizes, scale, arrays, mask);
        launch("attention's backward", differentiate_queries<kOut, kLoad, kDrops, T>, blocks_of(grid), dim3(kBlock),
               context.stream, grid, sizes, scale, arrays, mask);
      });
    });
  });
}

}  // namespace lockstep::nn::cuda
