#include "lockstep/nn/ops/embedding.h"

#include <limits>

#include "base/error.h"
#include "nn/ops/cuda/columns.cuh"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/own_kernels.h"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

constexpr int kMoveBlocks = 4096;
constexpr int kMoveRows = 4;  // that a thread has on their way at once

// Note [Sums by token]
// Text repeats itself: half of it may be one token, the other half tokens that occur once. So places are put into the
// order of their tokens (sort_tokens: equal ones stay in the order of the text) and cut into pieces of kPiece places,
// which are all the same work. A piece adds up each token's rows in order. Tokens that begin and end within a piece are
// done with that; the sum of a token that continues beyond the piece's end, or began before it, is left in `parts`, and
// a block for each such token adds up its parts. Where pieces end depends on the tokens alone, so the same text gives
// the same bits.
constexpr int kPiece = 16;
constexpr int kRowsAtOnce = 8;   // rows of a piece on their way, with those of the table that they are added to
constexpr int kPartsAtOnce = 4;  // of a token

// y (N, C) = table (V, C) [indices]
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock)
    index_select(ColumnPlan plan, std::int64_t table_rows, const T* table, const std::int32_t* indices, T* y) {
  const Place at = place_in(plan);
  if (at.pack >= plan.packs) return;
  for (std::int64_t row = at.row; row < at.end; row += kMoveRows * plan.lines) {
    Pack<T, kWidth> values[kMoveRows];
    std::int64_t index[kMoveRows];
    for (int i = 0; i < kMoveRows; ++i) {
      const std::int64_t r = row + i * plan.lines;
      index[i] = r < at.end ? indices[r] : -1;
    }
    for (int i = 0; i < kMoveRows; ++i) {
      if (index[i] >= 0 && index[i] < table_rows) {
        values[i] = load_pack<kWidth>(table + (index[i] * plan.packs + at.pack) * kWidth);
        continue;
      }
      for (int k = 0; k < kWidth; ++k) values[i].of[k] = from_float<T>(std::numeric_limits<float>::quiet_NaN());
    }
    for (int i = 0; i < kMoveRows; ++i) {
      const std::int64_t r = row + i * plan.lines;
      if (r < at.end) store_pack(y + (r * plan.packs + at.pack) * kWidth, values[i]);
    }
  }
}

// y (B, T, C) = x (B, T, C) + table (T, C); may be in place.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock)
    add_to_each(ColumnPlan plan, std::int64_t tokens, const T* x, const T* table, T* y) {
  const Place at = place_in(plan);
  if (at.pack >= plan.packs) return;
  for (std::int64_t row = at.row; row < at.end; row += kMoveRows * plan.lines) {
    Pack<T, kWidth> values[kMoveRows] = {}, added[kMoveRows] = {};
    for (int i = 0; i < kMoveRows; ++i) {
      const std::int64_t r = row + i * plan.lines;
      if (r >= at.end) continue;
      values[i] = load_pack<kWidth>(x + (r * plan.packs + at.pack) * kWidth);
      added[i] = load_pack<kWidth>(table + (r % tokens * plan.packs + at.pack) * kWidth);
    }
    for (int i = 0; i < kMoveRows; ++i) {
      const std::int64_t r = row + i * plan.lines;
      if (r >= at.end) continue;
      for (int k = 0; k < kWidth; ++k)
        values[i].of[k] = from_float<T>(to_float(values[i].of[k]) + to_float(added[i].of[k]));
      store_pack(y + (r * plan.packs + at.pack) * kWidth, values[i]);
    }
  }
}

// indices (N, each); no positions: `position`.
__global__ void __launch_bounds__(kBlock)
    row_indices_of(const std::int32_t* positions, std::int64_t position, std::int64_t rows, std::int64_t each,
                   std::int64_t count, std::int32_t* indices) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= count) return;
  const std::int64_t at = positions != nullptr ? positions[i] : position;
  indices[i] = static_cast<std::int32_t>(at >= 0 && at < rows ? i / each * rows + at : -1);
}

// Where a thread of the sums is: a pack of columns, and one of the block's lines.
struct ThreadPlace {
  int tile, lines;  // threads side by side, and below one another
  std::int64_t packs;

  __device__ int line() const { return static_cast<int>(threadIdx.x) / tile; }
  __device__ std::int64_t pack() const {
    return std::int64_t{blockIdx.y} * tile + static_cast<int>(threadIdx.x) % tile;
  }
};

// A piece for each line. parts (pieces, 2, C): its sums of a token that began before it, and of one that begins in it
// and continues after it.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock)
    sum_pieces(ThreadPlace own, std::int64_t count, std::int64_t table_rows, const TokenPlace* order, const T* dy,
               float* parts, float* dtable) {
  const std::int64_t piece = std::int64_t{blockIdx.x} * own.lines + own.line(), pack = own.pack();
  const std::int64_t begin = piece * kPiece, end = at_most(begin + kPiece, count);
  if (begin >= count || pack >= own.packs) return;
  const std::int64_t columns = own.packs * kWidth, column = pack * kWidth;
  const std::int32_t before = begin > 0 ? order[begin - 1].token : -1, after = end < count ? order[end].token : -1;
  TokenPlace places[kPiece];  // after the end: its last one again, which is read and not added
  for (int i = 0; i < kPiece; ++i) places[i] = order[at_most(begin + i, end - 1)];
  const auto held = static_cast<int>(end - begin);

  // Where the sum of a token that ends with the i-th place goes: to the table, unless others have parts of it.
  const auto next_of = [&](int i) { return i + 1 < held ? places[i + 1 < kPiece ? i + 1 : i].token : after; };
  const auto is_shared = [&](int i) {
    return places[i].token == before || (i + 1 == held && places[i].token == after);
  };
  const auto ends = [&](int i) { return i < held && (i + 1 == held || next_of(i) != places[i].token); };
  const auto adds = [&](int i) { return ends(i) && !is_shared(i) && places[i].token < table_rows; };

  float sum[kWidth] = {};
  for (int first = 0; first < kPiece; first += kRowsAtOnce) {
    Pack<T, kWidth> values[kRowsAtOnce];
    Pack<float, kWidth> sums[kRowsAtOnce] = {};
    for (int i = 0; i < kRowsAtOnce; ++i) {
      values[i] = load_pack<kWidth>(dy + places[first + i].place * columns + column);
      if (adds(first + i)) sums[i] = load_pack<kWidth>(dtable + places[first + i].token * columns + column);
    }
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int at = first + i;
      for (int k = 0; k < kWidth; ++k) sum[k] += to_float(values[i].of[k]);
      if (!ends(at)) continue;
      for (int k = 0; k < kWidth; ++k) sums[i].of[k] += sum[k];
      if (adds(at))
        store_pack(dtable + places[at].token * columns + column, sums[i]);
      else if (is_shared(at))
        store_pack(parts + (piece * 2 + (places[at].token == before ? 0 : 1)) * columns + column, sums[i]);
      for (float& of_next : sum) of_next = 0.0f;
    }
  }
}

// A block for each piece in which a token begins that continues after it. It sums that token's parts of all pieces;
// the block's lines share the pieces.
template <int kWidth>
__global__ void __launch_bounds__(kBlock) join_pieces(ThreadPlace own, std::int64_t count, std::int64_t table_rows,
                                                      const TokenPlace* order, const float* parts, float* dtable) {
  __shared__ float held[kWidth][kBlock];
  const std::int64_t piece = blockIdx.x, begin = piece * kPiece, end = begin + kPiece;  // all but the last are full
  const std::int32_t token = order[end - 1].token;
  if (order[end].token != token || token >= table_rows) return;
  if (begin > 0 && order[begin - 1].token == token) return;  // it has begun before
  std::int64_t low = end, high = count;                      // where it ends: between them
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (order[middle].token == token)
      low = middle + 1;
    else
      high = middle;
  }
  const std::int64_t pieces = ceil_div(low, kPiece) - piece;
  const std::int64_t pack = own.pack(), columns = own.packs * kWidth, column = pack * kWidth;
  const bool used = pack < own.packs;
  const int t = static_cast<int>(threadIdx.x), line = own.line();

  float sum[kWidth] = {};
  if (used)
    for (std::int64_t i = line; i < pieces; i += kPartsAtOnce * own.lines) {
      Pack<float, kWidth> values[kPartsAtOnce] = {};
      for (int j = 0; j < kPartsAtOnce; ++j) {
        const std::int64_t at = i + j * own.lines;
        if (at >= pieces) continue;
        values[j] = load_pack<kWidth>(parts + ((piece + at) * 2 + (at == 0 ? 1 : 0)) * columns + column);
      }
      for (int j = 0; j < kPartsAtOnce; ++j)
        for (int k = 0; k < kWidth; ++k) sum[k] += values[j].of[k];
    }
  for (int k = 0; k < kWidth; ++k) held[k][t] = sum[k];
  for (int step = own.lines / 2; step > 0; step /= 2) {
    __syncthreads();
    if (line < step)
      for (int k = 0; k < kWidth; ++k) held[k][t] += held[k][t + step * own.tile];
  }
  if (line > 0 || !used) return;
  float* const to = dtable + token * columns + column;
  for (int k = 0; k < kWidth; ++k) to[k] += held[k][t];
}

// A pair of elements that are turned together. `count`: of pairs.
template <class T>
__global__ void __launch_bounds__(kBlock)
    rotate_pairs(std::int64_t count, std::int64_t tokens, std::int64_t width, std::int64_t half, const float* cosines,
                 const float* sines, std::int64_t first, float sign, const T* x, T* y) {
  for_own_elements(count, [&](std::int64_t i) {
    const std::int64_t row = 2 * i / width, head = i / half, d = i % half;
    const std::int64_t angle = (first + row % tokens) * half + d, at = head * 2 * half + d;
    const float a = to_float(x[at]), b = to_float(x[at + half]), cosine = cosines[angle], sine = sign * sines[angle];
    y[at] = from_float<T>(a * cosine - b * sine);
    y[at + half] = from_float<T>(b * cosine + a * sine);
  });
}

class CudaEmbedding final : public EmbeddingKernels {
 public:
  explicit CudaEmbedding(Context& context) : context_(context) {}

  void forward(const Tensor& table, const Tensor& indices, const Tensor& y) override {
    const OpProfileScope scope(context_, "embedding", {&indices, &y, &y});  // of the table as much as y has
    const std::int64_t rows = table.size(0), columns = table.size(1), n = indices.count();
    if (n == 0 || columns == 0) return;
    LOCKSTEP_ASSERT(y.count() == n * columns && y.dtype() == table.dtype());
    with_float_type(y.dtype(), [&]<class T>(T) {
      constexpr int kWide = kVector<T>;
      const bool wide = columns % kWide == 0 && fits_packs(table.data<T>(), kWide) && fits_packs(y.data<T>(), kWide);
      with_width<kWide>(wide, [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        const ColumnPlan plan = plan_columns(n, columns / kWidth, kMoveBlocks, kMoveRows);
        launch("an embedding", index_select<kWidth, T>, grid_of(plan), dim3(kBlock), context_.stream, plan, rows,
               table.data<T>(), indices.data<std::int32_t>(), y.data<T>());
      });
    });
  }

  void backward(const Tensor& indices, const Tensor& dy, bool accumulate, const Tensor& dtable) override {
    const OpProfileScope scope(context_, "embedding's backward", {&indices, &dy, &dtable});
    const std::int64_t rows = dtable.size(0), columns = dtable.size(1), n = indices.count();
    if (!accumulate) clear(dtable);
    if (n == 0 || dtable.count() == 0) return;
    LOCKSTEP_ASSERT(dy.count() == n * columns, "{} indices and gradients {}", n, to_string(dy.shape()));
    const Tensor order = sort_tokens(context_, indices, rows);
    const auto* const places = reinterpret_cast<const TokenPlace*>(order.data<std::int32_t>());
    const std::int64_t pieces = ceil_div(n, kPiece);
    const Tensor parts = Tensor::empty(context_.allocator, {pieces, 2, columns});
    with_float_type(dy.dtype(), [&]<class T>(T) {
      constexpr int kWide = kVector<float>;  // of bf16, too: four columns have four sums
      const bool wide = columns % kWide == 0 && fits_packs(dy.data<T>(), kWide) && fits_packs(dtable.f32(), kWide);
      with_width<kWide>(wide, [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        const ColumnPlan plan = plan_columns(n, columns / kWidth, 1, 1);  // for its tiles
        const ThreadPlace own = {plan.tile, plan.lines, plan.packs};
        LOCKSTEP_ASSERT(plan.tiles <= 65535, "an embedding of {} columns", columns);
        const auto tiles = static_cast<unsigned>(plan.tiles);
        launch("an embedding's backward", sum_pieces<kWidth, T>,
               dim3(static_cast<unsigned>(ceil_div(pieces, plan.lines)), tiles), dim3(kBlock), context_.stream, own, n,
               rows, places, dy.data<T>(), parts.f32(), dtable.f32());
        launch("an embedding's backward", join_pieces<kWidth>, dim3(static_cast<unsigned>(pieces - 1), tiles),
               dim3(kBlock), context_.stream, own, n, rows, places, parts.f32(), dtable.f32());
      });
    });
  }

  void add_rows(const Tensor& x, const Tensor& table, std::int64_t first, const Tensor& y) override {
    const OpProfileScope scope(context_, "adding positions", {&x, &table, &y});
    const std::int64_t tokens = x.size(1), columns = x.size(2);
    if (x.count() == 0) return;
    LOCKSTEP_ASSERT(first >= 0 && first + tokens <= table.size(0) && table.size(1) == columns &&
                    table.dtype() == x.dtype() && y.dtype() == x.dtype() && y.count() == x.count());
    with_float_type(y.dtype(), [&]<class T>(T) {
      constexpr int kWide = kVector<T>;
      const T* const rows = table.data<T>() + first * columns;
      const bool wide = columns % kWide == 0 && fits_packs(x.data<T>(), kWide) && fits_packs(rows, kWide) &&
                        fits_packs(y.data<T>(), kWide);
      with_width<kWide>(wide, [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        const ColumnPlan plan = plan_columns(x.size(0) * tokens, columns / kWidth, kMoveBlocks, kMoveRows);
        launch("adding positions", add_to_each<kWidth, T>, grid_of(plan), dim3(kBlock), context_.stream, plan, tokens,
               x.data<T>(), rows, y.data<T>());
      });
    });
  }

  // For each position and feature a column sum over the batch.
  void add_rows_backward(const Tensor& dy, std::int64_t first, bool accumulate, const Tensor& dtable) override {
    const OpProfileScope scope(context_, "positions' gradient", {&dy, &dtable});
    const std::int64_t batch = dy.size(0), tokens = dy.size(1), columns = dy.size(2);
    LOCKSTEP_ASSERT(first >= 0 && first + tokens <= dtable.size(0) && dtable.size(1) == columns);
    if (!accumulate) {
      clear(dtable.slice(0, first));
      clear(dtable.slice(first + tokens, dtable.size(0)));
    }
    if (tokens * columns == 0) return;
    sum_columns(context_, dy.reshaped({batch, tokens * columns}), accumulate,
                dtable.slice(first, first + tokens).reshaped({tokens * columns}));
  }

  void rotate(const Tensor& x, const Tensor& cosines, const Tensor& sines, std::int64_t first, bool back,
              const Tensor& y) override {
    const OpProfileScope scope(context_, "rotary positions", {&x, &y});
    with_float_type(x.dtype(), [&]<class T>(T) {
      launch_each("rotary positions", rotate_pairs<T>, context_.stream, x.count() / 2, x.size(1), x.size(2),
                  cosines.size(1), cosines.f32(), sines.f32(), first, back ? -1.0f : 1.0f, x.data<T>(), y.data<T>());
    });
  }

  void row_indices(const Tensor& positions, std::int64_t position, std::int64_t rows, const Tensor& indices) override {
    const OpProfileScope scope(context_, "row indices", {&indices});
    const std::int64_t count = indices.count(), blocks = ceil_div(count, kBlock);
    if (count == 0) return;
    LOCKSTEP_ASSERT(blocks <= kMostBlocks, "{} row indices", count);
    launch("row indices", row_indices_of, dim3(static_cast<unsigned>(blocks)), dim3(kBlock), context_.stream,
           positions.defined() ? positions.data<std::int32_t>() : nullptr, position, rows, count / indices.size(0),
           count, indices.data<std::int32_t>());
  }

 private:
  void clear(const Tensor& table) {
    if (table.bytes() == 0) return;
    check_cuda(cudaMemsetAsync(table.raw(), 0, table.bytes(), native(context_.stream)), "clearing a table's gradient");
  }

  static dim3 grid_of(const ColumnPlan& plan) {
    LOCKSTEP_ASSERT(plan.tiles <= kMostBlocks, "rows of {} packs", plan.packs);
    return dim3(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.chunks));
  }

  Context& context_;
};

}  // namespace

std::unique_ptr<EmbeddingKernels> make_embedding_kernels(Context& context) {
  return std::make_unique<CudaEmbedding>(context);
}

}  // namespace lockstep::nn::cuda
