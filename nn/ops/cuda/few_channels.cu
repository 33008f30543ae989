#include "nn/ops/cuda/own_kernels.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/error.h"
#include "nn/ops/cuda/columns.cuh"
#include "nn/ops/cuda/cudnn.h"
#include "nn/ops/cuda/reduce.cuh"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

// Note [Few channels]
// The gradient of weights is a product: dyᵀ (O, outputs) times the inputs of each output's window (outputs, taps). With
// one channel of input and 3 × 3 taps it has 9 columns, and cuDNN's kernels in 16 bits, which take 8 channels or more
// at once, compute 8 times what is needed. Most of what has to be read is dy. So a thread has one pack of dy's columns
// and its sums for all taps, in registers: a pack is read once, and is worth 72 products in 16 bits.
//
//   threads of a block   `tile` packs of columns side by side, `lines` outputs below one another
//   grid                 groups of taps, chunks of bands, tiles of packs
//
// A band is some rows of one sample's outputs. What they see of x is in shared memory, as f32, with zeros around it:
// windows are read without conditions. Taps come in runs of kRun numbers that are adjacent in x; a group is kRuns of
// them, each at an offset of its own. Each group reads dy; those of a chunk run at the same time, so that L2 has it.
//
// The first stage (Note [Two stages] in norm.cu) leaves a block's sums in `parts` (chunks, O · taps + O): after those
// of the weights come dy's own, the bias's gradient, which cost 8 additions per pack instead of another pass over dy.
//
// 4,096 samples of 28 × 28 × 1 and 32 filters in bf16: dy is 206 MB and x 6 MB, 50 µs at the 4.26 TB/s that copies
// reach on an H200. 0.92 G products and 0.1 G additions take 31 µs at 132 · 128 per cycle of 1.98 GHz; with all else
// that is about 125 instructions per pack, 48 µs. So 60 to 80 µs are expected. A thread adds up 270 numbers in a row,
// the second stage 373 chunks. No GPU has measured it.
constexpr int kTapThreads = 128, kTapWarps = kTapThreads / kWarp;
constexpr int kTapBlocksAtOnce = 3;  // of a multiprocessor, of 168 registers for each thread
constexpr int kTapBlocks = 384;      // of a group of taps: all at once on 128 multiprocessors or more
constexpr int kRuns = 3, kRun = 3, kTaps = kRuns * kRun;
constexpr int kMostGroups = 4;  // of taps
constexpr int kMostChannels = 4, kMostFilters = 65536;
constexpr int kTapTile = 8;       // 128 bytes of a row of dy
constexpr int kPacksAhead = 5;    // packs of dy on their way to a thread: 30 KB to a multiprocessor
constexpr int kCellRows = 8;      // of x, on their way to a warp
constexpr int kMostCells = 4096;  // of what a band sees of x
constexpr int kSlack = kRun - 1;  // cells after them that a run may read, for sums that nobody takes

struct TapPlan {
  int filters = 0, taps = 0;
  int rows = 0, row = 0;                  // of a sample of x: how many, and elements of each
  int out_rows = 0, out_columns = 0;      // of a sample of y
  int kernel_rows = 0, kernel_row = 0;    // of a filter: how many rows, and elements of each
  int runs_of_row = 0, groups = 0;        // of taps
  int above = 0, before = 0, stride = 0;  // padding, in rows and in elements, and rows from a window to the one below
  int pitch = 0;                          // cells of a row of x in shared memory
  int down = 0, across = 0;               // cells from a window to the one below, and to the next one
  int band = 1, bands = 0;                // rows of outputs, and how many times these in a sample
  int packs = 0, tile = 1, lines = 1;
  int columns_on = 0, cells_on = 0, cells_back = 0;  // `lines` outputs on, and where that is beyond the row's end
  int elements_on = 0;                               // of dy
  int units = 0, chunk = 1, chunks = 0;              // bands of all samples

  constexpr std::int64_t sums() const { return std::int64_t{filters} * (taps + 1); }
};

constexpr int as_int(std::int64_t size) { return static_cast<int>(size); }

TapPlan plan_taps(const ConvProblem& problem) {
  const Window& window = problem.window;
  const std::int64_t channels = problem.x[3], samples = problem.x[0];
  TapPlan plan;
  plan.filters = as_int(problem.y[3]);
  plan.taps = as_int(window.kernel[0] * window.kernel[1] * channels);
  plan.rows = as_int(problem.x[1]);
  plan.row = as_int(problem.x[2] * channels);
  plan.out_rows = as_int(problem.y[1]);
  plan.out_columns = as_int(problem.y[2]);
  plan.kernel_rows = as_int(window.kernel[0]);
  plan.kernel_row = as_int(window.kernel[1] * channels);
  plan.runs_of_row = as_int(ceil_div(plan.kernel_row, kRun));
  plan.groups = as_int(ceil_div(plan.kernel_rows * plan.runs_of_row, kRuns));
  plan.above = as_int(window.padding[0]);
  plan.before = as_int(window.padding[1] * channels);
  plan.stride = as_int(window.stride[0]);
  plan.across = as_int(window.stride[1] * channels);
  plan.pitch = (plan.out_columns - 1) * plan.across + plan.kernel_row;
  plan.down = plan.stride * plan.pitch;

  plan.packs = plan.filters * as_int(static_cast<std::int64_t>(size_of(problem.dtype))) / kVectorBytes;
  plan.tile = as_int(at_most(power_of_two_above(plan.packs), kTapTile));
  plan.lines = kTapThreads / plan.tile;
  plan.columns_on = plan.lines % plan.out_columns;
  plan.cells_on = plan.lines / plan.out_columns * plan.down + plan.columns_on * plan.across;
  plan.cells_back = plan.down - plan.out_columns * plan.across;
  plan.elements_on = plan.lines * plan.filters;

  // As many rows as there is space for, but bands for all blocks, of at least an output for each line.
  const std::int64_t blocks = at_least(kTapBlocks / ceil_div(plan.packs, plan.tile), 1);
  const std::int64_t most = (kMostCells / plan.pitch - plan.kernel_rows) / plan.stride + 1;
  const std::int64_t wanted =
      at_least(samples * plan.out_rows / blocks, ceil_div(plan.lines, std::int64_t{plan.out_columns}));
  plan.bands = as_int(ceil_div(plan.out_rows, at_most(most, wanted)));
  plan.band = as_int(ceil_div(plan.out_rows, plan.bands));
  plan.bands = as_int(ceil_div(plan.out_rows, plan.band));
  plan.units = as_int(samples * plan.bands);
  plan.chunk = as_int(ceil_div(plan.units, blocks));
  plan.chunks = as_int(ceil_div(plan.units, plan.chunk));
  return plan;
}

// `rows` rows of x from row `top` on, which may be outside of it, become cells. All threads of the block take part.
template <class T>
__device__ void fill_cells(const TapPlan& plan, const T* x, int top, int rows, float* cells) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int first = warp; first < rows; first += kTapWarps * kCellRows)
    for (int column = lane; column < plan.pitch; column += kWarp) {
      const int from = column - plan.before;
      T values[kCellRows];
#pragma unroll
      for (int i = 0; i < kCellRows; ++i) {
        const int row = first + i * kTapWarps, h = top + row;
        const bool inside = row < rows && h >= 0 && h < plan.rows && from >= 0 && from < plan.row;
        values[i] = inside ? x[h * plan.row + from] : T{};
      }
#pragma unroll
      for (int i = 0; i < kCellRows; ++i) {
        const int row = first + i * kTapWarps;
        if (row < rows) cells[row * plan.pitch + column] = to_float(values[i]);
      }
    }
  if (threadIdx.x < kSlack) cells[rows * plan.pitch + static_cast<int>(threadIdx.x)] = 0.0f;
}

// A pack that is on its way to a thread: nvcc would give each of its elements a register.
using Words = Pack<std::uint32_t, kVectorBytes / 4>;
template <class T>
__device__ Words load_words(const T* at) {
  return *reinterpret_cast<const Words*>(at);
}

template <int kWidth, class T>
__global__ void __launch_bounds__(kTapThreads, kTapBlocksAtOnce)
    sums_of_taps(TapPlan plan, const T* x, const T* dy, float* parts) {
  constexpr int kSums = kWidth * (kTaps + 1);
  static_assert(kTapWarps * kTapTile * kSums <= kMostCells);
  __shared__ float cells[kMostCells + kSlack];
  const int t = static_cast<int>(threadIdx.x), lane = t % plan.tile, line = t / plan.tile;
  const int pack = static_cast<int>(blockIdx.z) * plan.tile + lane, first_run = static_cast<int>(blockIdx.x) * kRuns;
  const int first_column = line % plan.out_columns;
  const int first_cell = line / plan.out_columns * plan.down + first_column * plan.across;
  int runs[kRuns];  // cells from a window's first
  for (int r = 0; r < kRuns; ++r) {
    const int row = (first_run + r) / plan.runs_of_row, in_row = (first_run + r) % plan.runs_of_row;
    runs[r] = row < plan.kernel_rows ? row * plan.pitch + in_row * kRun : 0;
  }

  float sums[kTaps + 1][kWidth] = {};  // the last: of dy alone
  const int first_unit = static_cast<int>(blockIdx.y) * plan.chunk;
  for (int unit = first_unit; unit < plan.units && unit < first_unit + plan.chunk; ++unit) {
    const int sample = unit / plan.bands, first_row = unit % plan.bands * plan.band;
    const int rows = plan.out_rows - first_row < plan.band ? plan.out_rows - first_row : plan.band;
    const int count = pack < plan.packs ? rows * plan.out_columns * plan.filters : 0;  // elements of dy
    const T* const from =
        dy + (std::int64_t{sample} * plan.out_rows + first_row) * plan.out_columns * plan.filters + pack * kWidth;
    Words ahead[kPacksAhead];
#pragma unroll
    for (int i = 0; i < kPacksAhead; ++i) {
      const int at = line * plan.filters + i * plan.elements_on;
      if (at < count) ahead[i] = load_words(from + at);
    }
    __syncthreads();  // the cells of the band before have been read
    fill_cells(plan, x + std::int64_t{sample} * plan.rows * plan.row, first_row * plan.stride - plan.above,
               (rows - 1) * plan.stride + plan.kernel_rows, cells);
    __syncthreads();
    int column = first_column, cell = first_cell;
    for (int first = line * plan.filters; first < count; first += kPacksAhead * plan.elements_on) {
#pragma unroll
      for (int i = 0; i < kPacksAhead; ++i) {
        const int at = first + i * plan.elements_on, next = at + kPacksAhead * plan.elements_on;
        if (at >= count) continue;
        float gradient[kWidth];
        const auto values = std::bit_cast<Pack<T, kWidth>>(ahead[i]);
        for (int k = 0; k < kWidth; ++k) gradient[k] = to_float(values.of[k]);
        if (next < count) ahead[i] = load_words(from + next);
        for (int k = 0; k < kWidth; ++k) sums[kTaps][k] += gradient[k];
        for (int tap = 0; tap < kTaps; ++tap) {
          const float value = cells[cell + runs[tap / kRun] + tap % kRun];
          for (int k = 0; k < kWidth; ++k) sums[tap][k] += value * gradient[k];
        }
        column += plan.columns_on;
        cell += plan.cells_on;
        if (column >= plan.out_columns) {
          column -= plan.out_columns;
          cell += plan.cells_back;
        }
      }
    }
  }

  // Lanes of a warp that have the same pack, then warps, whose sums are in the cells.
  for (int step = kWarp / 2; step >= plan.tile; step /= 2)
#pragma unroll
    for (int tap = 0; tap <= kTaps; ++tap)
      for (int k = 0; k < kWidth; ++k) sums[tap][k] += __shfl_xor_sync(kAllLanes, sums[tap][k], step);
  __syncthreads();
  if (t % kWarp < plan.tile) {
    float* const own = cells + (t / kWarp * plan.tile + lane) * kSums;
#pragma unroll
    for (int tap = 0; tap <= kTaps; ++tap)
      for (int k = 0; k < kWidth; ++k) own[tap * kWidth + k] = sums[tap][k];
  }
  __syncthreads();
  float* const to = parts + blockIdx.y * plan.sums();
  for (int i = t; i < plan.tile * kSums; i += kTapThreads) {
    const int filter = (static_cast<int>(blockIdx.z) * plan.tile + i / kSums) * kWidth + i % kWidth;
    const int tap = i % kSums / kWidth, run = first_run + tap / kRun;
    const int row = run / plan.runs_of_row, in_row = run % plan.runs_of_row * kRun + tap % kRun;
    const bool known = tap < kTaps ? row < plan.kernel_rows && in_row < plan.kernel_row : first_run == 0;
    if (filter >= plan.filters || !known) continue;
    float sum = 0.0f;
    for (int w = 0; w < kTapWarps; ++w) sum += cells[w * plan.tile * kSums + i];
    to[tap < kTaps ? filter * plan.taps + row * plan.kernel_row + in_row : plan.filters * plan.taps + filter] = sum;
  }
}

// The second stage: a block has kJoinColumns sums, and kBlock / kJoinColumns threads for the chunks of each. db may be
// nullptr.
__global__ void __launch_bounds__(kBlock)
    join_taps(TapPlan plan, const float* parts, bool accumulate_w, float* dw, bool accumulate_b, float* db) {
  constexpr int kLines = kBlock / kJoinColumns;
  __shared__ float held[kBlock];
  const int t = static_cast<int>(threadIdx.x), line = t / kJoinColumns;
  const std::int64_t i = std::int64_t{blockIdx.x} * kJoinColumns + t % kJoinColumns, sums = plan.sums();
  const std::int64_t weights = sums - plan.filters, wanted = db != nullptr ? sums : weights;
  float sum = 0.0f;
  if (i < wanted)
    for (std::int64_t chunk = line; chunk < plan.chunks; chunk += kLines) sum += parts[chunk * sums + i];
  held[t] = sum;
  for (int step = kLines / 2; step > 0; step /= 2) {
    __syncthreads();
    if (line < step) held[t] += held[t + step * kJoinColumns];
  }
  if (line > 0 || i >= wanted) return;
  float* const to = i < weights ? dw + i : db + (i - weights);
  *to = (i < weights ? accumulate_w : accumulate_b) ? *to + held[t] : held[t];
}

}  // namespace

int few_channel_passes(const ConvProblem& problem) {
  const Window& window = problem.window;
  const Shape &x = problem.x, &y = problem.y;
  const std::int64_t channels = x[3], pack = kVectorBytes / static_cast<std::int64_t>(size_of(problem.dtype));
  if (channels > kMostChannels || groups_of(x, problem.w) > 1 || y[3] % pack != 0 || y[3] > kMostFilters) return 0;
  // What kernels count in an int.
  if (x[0] * y[1] > kMostBlocks || x[1] * x[2] * channels > kMostBlocks) return 0;
  for (const auto& extents : {window.stride, window.padding})
    if (std::ranges::max(extents) > kMostCells) return 0;
  const std::int64_t row = window.kernel[1] * channels;
  if (window.kernel[0] * ((y[2] - 1) * window.stride[1] * channels + row) > kMostCells) return 0;
  const std::int64_t groups = ceil_div(window.kernel[0] * ceil_div(row, kRun), kRuns);
  return groups <= kMostGroups ? as_int(groups) : 0;
}

void few_channel_gradients(Context& context, const ConvProblem& problem, const Tensor& x, const Tensor& dy,
                           bool accumulate_w, const Tensor& dw, bool accumulate_b, const Tensor& db) {
  const char* const what = "a convolution's backward to its weight";
  const TapPlan plan = plan_taps(problem);
  const Tensor parts = Tensor::empty(context.allocator, {plan.chunks, plan.sums()});
  with_float_type(problem.dtype, [&]<class T>(T) {
    constexpr int kWidth = kVector<T>;
    LOCKSTEP_ASSERT(fits_packs(dy.data<T>(), kWidth), "dy of {} is misaligned", problem.describe());
    launch(what, sums_of_taps<kWidth, T>,
           dim3(static_cast<unsigned>(plan.groups), static_cast<unsigned>(plan.chunks),
                static_cast<unsigned>(ceil_div(plan.packs, plan.tile))),
           dim3(kTapThreads), context.stream, plan, x.data<T>(), dy.data<T>(), parts.f32());
  });
  launch(what, join_taps, dim3(static_cast<unsigned>(ceil_div(plan.sums(), kJoinColumns))), dim3(kBlock),
         context.stream, plan, parts.f32(), accumulate_w, dw.f32(), accumulate_b, db.defined() ? db.f32() : nullptr);
}

}  // namespace lockstep::nn::cuda
