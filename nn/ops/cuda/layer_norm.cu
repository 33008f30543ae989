#include "lockstep/nn/ops/layer_norm.h"

#include <algorithm>
#include <initializer_list>

#include "base/error.h"
#include "nn/ops/cuda/columns.cuh"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/reduce.cuh"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

// Note [Rows in registers]
// A team of threads has a row: a warp up to kWarpRow elements, four up to kWarpsRow, eight up to kBlockRow. Each thread
// keeps its packs in registers, so a row is read once however many passes are made over it; wider rows are read again,
// from the second cache.
constexpr int kFew = 8, kMany = 32;  // elements that a thread keeps
constexpr int kFourWarps = 4 * kWarp;
constexpr std::int64_t kWarpRow = std::int64_t{kWarp} * kFew;
constexpr std::int64_t kWarpsRow = std::int64_t{kFourWarps} * kFew;
constexpr std::int64_t kBlockRow = std::int64_t{kBlock} * kMany;
template <int kTeam>
constexpr int kTeamBlock = kTeam == kWarp ? kBlock : kTeam;  // of a block
template <int kHeld, int kWidth>
constexpr int kPacksOf = static_cast<int>(at_least(kHeld / kWidth, 1));  // of a thread
// Of backward: with what it adds to, 96 bytes are on their way to each of 512 threads of a multiprocessor.
template <int kHeld, int kWidth>
constexpr int kBackRows = kPacksOf<kHeld, kWidth> == 1 ? 2 : 1;

// Of the first stage of the parameters' gradients: see Note [Two stages] in columns.cuh.
constexpr int kLayerNormRows = 4;  // that a thread reads at once
constexpr int kPartWide = 4;       // columns of a thread
// Where backward is one kernel and a thread keeps kMany elements: its sums take so many registers that a
// multiprocessor has one of these blocks at once.
constexpr int kBackwardBlocks = 2 * 132;

template <int kTeam>
__device__ float team_sum(float value) {
  if constexpr (kTeam == kWarp)
    return warp_sum(value);
  else
    return block_sum<kTeam>(value);
}

// All of the values over the team: the same in all of its threads. All threads of the block take part.
template <int kTeam, int kCount>
__device__ void team_sums(float (&values)[kCount]) {
  for (float& value : values) value = warp_sum(value);
  if constexpr (kTeam > kWarp) {
    __shared__ float left[kTeam / kWarp][kCount];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    __syncthreads();  // what a call before this one left has been read
    if (lane == 0)
      for (int i = 0; i < kCount; ++i) left[warp][i] = values[i];
    __syncthreads();
    for (int i = 0; i < kCount; ++i) {
      values[i] = 0.0f;
      for (const auto& of_warp : left) values[i] += of_warp[i];
    }
  }
}

// A thread's share of a row. kHeld elements of it are kept, or none where kHeld is 0.
template <int kTeam, int kHeld, int kWidth, class T>
struct Share {
  static constexpr int kPacks = kPacksOf<kHeld, kWidth>;
  const T* row;
  std::int64_t packs;  // of the row
  int thread;          // of the team
  Pack<T, kWidth> held[kPacks];

  __device__ Share(const T* from, std::int64_t row_packs, int in_team) : row(from), packs(row_packs), thread(in_team) {
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (at(i) < packs) held[i] = load_pack<kWidth>(row + at(i) * kWidth);
    }
  }
  // Of from + added, which `to` becomes.
  __device__ Share(const T* from, const T* added, T* to, std::int64_t row_packs, int in_team)
      : row(to), packs(row_packs), thread(in_team) {
    Pack<T, kWidth> others[kPacks];
    const auto add = [&](int i, std::int64_t pack) {
      Numbers<kWidth> sum;
      for (int k = 0; k < kWidth; ++k) {
        sum.of[k] = to_float(held[i].of[k]) + to_float(others[i].of[k]);
        held[i].of[k] = from_float<T>(sum.of[k]);
      }
      store_rounded(to + pack * kWidth, sum);
    };
    const auto load = [&](int i, std::int64_t pack) {
      held[i] = load_pack<kWidth>(from + pack * kWidth);
      others[i] = load_pack<kWidth>(added + pack * kWidth);
    };
    if constexpr (kHeld > 0) {
      each(load);  // all before the first is stored: later loads would wait for that
      each(add);
    } else {
      each([&](int i, std::int64_t pack) {
        load(i, pack);
        add(i, pack);
      });
    }
  }
  __device__ std::int64_t at(int i) const { return thread + std::int64_t{i} * kTeam; }
  __device__ Pack<T, kWidth> get(int i, std::int64_t pack) const {
    if constexpr (kHeld > 0)
      return held[i];
    else
      return load_pack<kWidth>(row + pack * kWidth);
  }

  // Calls visit(i, pack) for all packs that are the thread's.
  template <class F>
  __device__ void each(F&& visit) const {
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (at(i) < packs) visit(i, at(i));
    } else {
      for (std::int64_t pack = thread; pack < packs; pack += kTeam) visit(0, pack);
    }
  }
};

// Parameters lie as the optimizer has them: packs of at most four f32.
template <int kWidth>
__device__ Numbers<kWidth> load_numbers(const float* from) {
  constexpr int kPart = kWidth < 4 ? kWidth : 4;
  Numbers<kWidth> made;
#pragma unroll
  for (int k = 0; k < kWidth; k += kPart) {
    const Pack<float, kPart> part = load_pack<kPart>(from + k);
    for (int i = 0; i < kPart; ++i) made.of[k + i] = part.of[i];
  }
  return made;
}
template <int kWidth>
__device__ void store_numbers(float* at, const float (&numbers)[kWidth]) {
  constexpr int kPart = kWidth < 4 ? kWidth : 4;
#pragma unroll
  for (int k = 0; k < kWidth; k += kPart) {
    Pack<float, kPart> part;
    for (int i = 0; i < kPart; ++i) part.of[i] = numbers[k + i];
    store_pack(at + k, part);
  }
}

template <int kTeam>
__device__ std::int64_t row_of_team() {
  return std::int64_t{blockIdx.x} * (kTeamBlock<kTeam> / kTeam) + static_cast<int>(threadIdx.x) / kTeam;
}

// kTeam threads a row of packs · kWidth elements. With kAdded it is x + added, which sum_of_both becomes; otherwise
// the two are not touched.
template <int kTeam, int kHeld, int kWidth, bool kAdded, class T>
__global__ void __launch_bounds__(kTeamBlock<kTeam>)
    normalise_rows(std::int64_t rows, std::int64_t packs, const T* x, const T* added, T* sum_of_both,
                   const float* gamma, const float* beta, float eps, T* y, float* means, float* inverses) {
  const int thread = static_cast<int>(threadIdx.x) % kTeam;
  const std::int64_t row = row_of_team<kTeam>(), begin = row * packs * kWidth;
  const bool inside = row < rows;
  using RowShare = Share<kTeam, kHeld, kWidth, T>;
  const RowShare share = [&] {
    if constexpr (kAdded)
      return RowShare(x + begin, added + begin, sum_of_both + begin, inside ? packs : 0, thread);
    else
      return RowShare(x + begin, inside ? packs : 0, thread);
  }();
  const float one_of = 1.0f / static_cast<float>(packs * kWidth);

  float sum = 0.0f;
  share.each([&](int i, std::int64_t pack) {
    const auto values = share.get(i, pack);
    for (int k = 0; k < kWidth; ++k) sum += to_float(values.of[k]);
  });
  const float mean = team_sum<kTeam>(sum) * one_of;
  float squares = 0.0f;
  share.each([&](int i, std::int64_t pack) {
    const auto values = share.get(i, pack);
    for (int k = 0; k < kWidth; ++k) {
      const float apart = to_float(values.of[k]) - mean;
      squares += apart * apart;
    }
  });
  const float inverse = 1.0f / sqrtf(team_sum<kTeam>(squares) * one_of + eps);
  share.each([&](int i, std::int64_t pack) {
    const auto values = share.get(i, pack);
    const Numbers<kWidth> scale = load_numbers<kWidth>(gamma + pack * kWidth);
    Numbers<kWidth> shift = {};
    if (beta != nullptr) shift = load_numbers<kWidth>(beta + pack * kWidth);
    Numbers<kWidth> made;
    for (int k = 0; k < kWidth; ++k) made.of[k] = (to_float(values.of[k]) - mean) * inverse * scale.of[k] + shift.of[k];
    store_rounded(y + begin + pack * kWidth, made);
  });
  if (!inside || thread > 0) return;
  means[row] = mean;
  inverses[row] = inverse;
}

// A row's dx = inverse · (g − mean(g) − x̂ · mean(g · x̂)) with g = dy · gamma, x̂ = (x − mean) · inverse, + what dx holds
// where `add`. Otherwise dx may be dy.
template <int kTeam, int kHeld, int kWidth, class T>
__global__ void __launch_bounds__(kTeamBlock<kTeam>)
    layer_norm_grad_input(std::int64_t rows, std::int64_t packs, const T* x, const T* dy, const float* gamma,
                          const float* means, const float* inverses, bool add, T* dx) {
  const int thread = static_cast<int>(threadIdx.x) % kTeam;
  const std::int64_t row = row_of_team<kTeam>(), begin = row * packs * kWidth;
  const bool inside = row < rows;
  const Share<kTeam, kHeld, kWidth, T> of_x(x + begin, inside ? packs : 0, thread);
  const Share<kTeam, kHeld, kWidth, T> of_dy(dy + begin, inside ? packs : 0, thread);
  const float mean = inside ? means[row] : 0.0f, inverse = inside ? inverses[row] : 0.0f;
  const float one_of = 1.0f / static_cast<float>(packs * kWidth);
  float sum = 0.0f, product = 0.0f;
  of_x.each([&](int i, std::int64_t pack) {
    const auto values = of_x.get(i, pack), gradients = of_dy.get(i, pack);
    const Numbers<kWidth> scale = load_numbers<kWidth>(gamma + pack * kWidth);
    for (int k = 0; k < kWidth; ++k) {
      const float gradient = to_float(gradients.of[k]) * scale.of[k];
      sum += gradient;
      product += gradient * ((to_float(values.of[k]) - mean) * inverse);
    }
  });
  const float mean_of_g = team_sum<kTeam>(sum) * one_of;
  const float mean_of_products = team_sum<kTeam>(product) * one_of;
  of_x.each([&](int i, std::int64_t pack) {
    const auto values = of_x.get(i, pack), gradients = of_dy.get(i, pack);
    const Numbers<kWidth> scale = load_numbers<kWidth>(gamma + pack * kWidth);
    Pack<T, kWidth> before = {};
    if (add) before = load_pack<kWidth>(dx + begin + pack * kWidth);
    Numbers<kWidth> made;
    for (int k = 0; k < kWidth; ++k) {
      const float hat = (to_float(values.of[k]) - mean) * inverse;
      const float gradient = to_float(gradients.of[k]) * scale.of[k];
      const float of_row = inverse * (gradient - mean_of_g - hat * mean_of_products);
      made.of[k] = add ? to_float(before.of[k]) + of_row : of_row;
    }
    store_rounded(dx + begin + pack * kWidth, made);
  });
}

// `to` (C) becomes the sum over the block's teams, in their order, of what each thread has for its packs. All threads
// of the block take part.
template <int kTeam, int kPacks, int kWidth>
__device__ void leave_sum_of_teams(std::int64_t packs, const float (&mine)[kPacks][kWidth], float* to) {
  constexpr int kTeams = kTeamBlock<kTeam> / kTeam;
  const int t = static_cast<int>(threadIdx.x);
  const auto store_mine = [&](float* at) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const std::int64_t pack = t % kTeam + std::int64_t{i} * kTeam;
      if (pack < packs) store_numbers(at + pack * kWidth, mine[i]);
    }
  };
  if constexpr (kTeams == 1) {
    store_mine(to);
  } else {
    alignas(kVectorBytes) __shared__ float left[kTeams][kTeam * kPacks * kWidth];
    __syncthreads();  // what a call before this one left has been read
    store_mine(left[t / kTeam]);
    __syncthreads();
    for (std::int64_t column = t; column < packs * kWidth; column += kTeamBlock<kTeam>) {
      float sum = 0.0f;
      for (int team = 0; team < kTeams; ++team) sum += left[team][column];
      to[column] = sum;
    }
  }
}

// Both of backward, for rows in registers: x and dy are read once. A block has `chunk` rows, of which each of its teams
// goes over its own, some of them at once. parts as sums_of_chunks() has them.
template <int kTeam, int kHeld, int kWidth, class T>
__global__ void __launch_bounds__(kTeamBlock<kTeam>, kHeld == kFew ? kBlock * 2 / kTeamBlock<kTeam> : 1)
    differentiate_rows(std::int64_t rows, std::int64_t chunk, std::int64_t packs, const T* x, const T* dy,
                       const float* gamma, const float* means, const float* inverses, bool add, T* dx, float* parts) {
  static_assert(kHeld > 0);
  constexpr int kPacks = kPacksOf<kHeld, kWidth>, kTeams = kTeamBlock<kTeam> / kTeam;
  const int thread = static_cast<int>(threadIdx.x) % kTeam, team = static_cast<int>(threadIdx.x) / kTeam;
  const std::int64_t columns = packs * kWidth, first = blockIdx.x * chunk, end = at_most(first + chunk, rows);
  const float one_of = 1.0f / static_cast<float>(columns);
  // Where a thread has no pack it reads x's first one, as nothing, and x again where there is nothing to add to: so
  // loads depend on nothing.
  std::int64_t places[kPacks];
  const T *of_dy[kPacks], *of_dx[kPacks];
  Numbers<kWidth> scale[kPacks] = {};
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const bool used = thread + i * kTeam < packs;
    places[i] = used ? (thread + i * kTeam) * kWidth : 0;
    of_dy[i] = (used ? dy : x) + places[i];
    of_dx[i] = (used && add ? dx : x) + places[i];
    if (used) scale[i] = load_numbers<kWidth>(gamma + places[i]);
  }
  float products[kPacks][kWidth] = {}, sums[kPacks][kWidth] = {};
  const auto visit = [&](auto n, std::int64_t row) {
    constexpr int kRows = decltype(n)::value;
    Pack<T, kWidth> values[kRows][kPacks], gradients[kRows][kPacks], before[kRows][kPacks];
    float mean[kRows], inverse[kRows], of_rows[2 * kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t begin = (row + r * kTeams) * columns;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        values[r][i] = load_pack<kWidth>(x + begin + places[i]);
        gradients[r][i] = load_pack<kWidth>(of_dy[i] + begin);
        before[r][i] = load_pack<kWidth>(of_dx[i] + begin);
      }
      mean[r] = means[row + r * kTeams];
      inverse[r] = inverses[row + r * kTeams];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        for (int k = 0; k < kWidth; ++k) {
          const float hat = (to_float(values[r][i].of[k]) - mean[r]) * inverse[r];
          const float of_y = to_float(gradients[r][i].of[k]), gradient = of_y * scale[i].of[k];
          of_rows[2 * r] += gradient;
          of_rows[2 * r + 1] += gradient * hat;
          products[i][k] += of_y * hat;
          sums[i][k] += of_y;
        }
    team_sums<kTeam>(of_rows);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float mean_of_g = of_rows[2 * r] * one_of, mean_of_products = of_rows[2 * r + 1] * one_of;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (thread + i * kTeam >= packs) continue;
        Numbers<kWidth> made;
        for (int k = 0; k < kWidth; ++k) {
          const float hat = (to_float(values[r][i].of[k]) - mean[r]) * inverse[r];
          const float gradient = to_float(gradients[r][i].of[k]) * scale[i].of[k];
          made.of[k] = inverse[r] * (gradient - mean_of_g - hat * mean_of_products);
          if (add) made.of[k] += to_float(before[r][i].of[k]);
        }
        store_rounded(dx + (row + r * kTeams) * columns + places[i], made);
      }
    }
  };
  constexpr int kRows = kBackRows<kHeld, kWidth>;
  std::int64_t row = first + team;
  for (; row + (kRows - 1) * kTeams < end; row += kRows * kTeams) visit(std::integral_constant<int, kRows>{}, row);
  if constexpr (kRows > 1)
    for (; row < end; row += kTeams) visit(std::integral_constant<int, 1>{}, row);
  leave_sum_of_teams<kTeam>(packs, products, parts + blockIdx.x * 2 * columns);
  leave_sum_of_teams<kTeam>(packs, sums, parts + (blockIdx.x * 2 + 1) * columns);
}

// parts (chunks, 2, C): Σ dy · (x − mean) · inverse and Σ dy of each chunk of rows.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock)
    sums_of_chunks(ColumnPlan plan, const T* x, const T* dy, const float* means, const float* inverses, float* parts) {
  const Place at = place_in(plan);
  const std::int64_t columns = plan.packs * kWidth, column = at.pack * kWidth;
  float sums[2][kWidth] = {};
  if (at.pack < plan.packs) {
    for (std::int64_t row = at.row; row < at.end; row += kLayerNormRows * plan.lines) {
      Pack<T, kWidth> values[kLayerNormRows] = {}, gradients[kLayerNormRows] = {};
      float mean[kLayerNormRows] = {}, inverse[kLayerNormRows] = {};
      for (int i = 0; i < kLayerNormRows; ++i) {
        const std::int64_t r = row + i * plan.lines;
        if (r >= at.end) continue;
        values[i] = load_pack<kWidth>(x + r * columns + column);
        gradients[i] = load_pack<kWidth>(dy + r * columns + column);
        mean[i] = means[r];
        inverse[i] = inverses[r];
      }
      for (int i = 0; i < kLayerNormRows; ++i) {
        if (row + i * plan.lines >= at.end) continue;
        for (int k = 0; k < kWidth; ++k) {
          const float gradient = to_float(gradients[i].of[k]);
          sums[0][k] += gradient * ((to_float(values[i].of[k]) - mean[i]) * inverse[i]);
          sums[1][k] += gradient;
        }
      }
    }
  }
  leave_sums(plan, sums, parts);
}

__global__ void __launch_bounds__(kJoinBlock)
    layer_norm_gradients(std::int64_t chunks, std::int64_t columns, const float* parts, bool accumulate_gamma,
                         float* dgamma, bool accumulate_beta, float* dbeta) {
  const JoinPlace at = join_place();
  const Numbers<2> sums = join_sums<2>(chunks, columns, parts);
  if (at.line > 0 || at.column >= columns) return;
  if (dgamma != nullptr) dgamma[at.column] = accumulate_gamma ? dgamma[at.column] + sums.of[0] : sums.of[0];
  if (dbeta != nullptr) dbeta[at.column] = accumulate_beta ? dbeta[at.column] + sums.of[1] : sums.of[1];
}

class CudaLayerNorm final : public LayerNormKernels {
 public:
  explicit CudaLayerNorm(Context& context) : context_(context) {}

  void forward(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y,
               const Tensor& mean, const Tensor& inverse) override {
    const OpProfileScope scope(context_, "layer normalisation", {&x, &gamma, &beta, &y, &mean, &inverse});
    normalise<false>(x, Tensor(), gamma, beta, eps, Tensor(), y, mean, inverse);
  }

  void forward_added(const Tensor& x, const Tensor& residual, const Tensor& gamma, const Tensor& beta, double eps,
                     const Tensor& sum, const Tensor& y, const Tensor& mean, const Tensor& inverse) override {
    const OpProfileScope scope(context_, "adding and layer normalisation",
                               {&x, &residual, &gamma, &beta, &sum, &y, &mean, &inverse});
    normalise<true>(x, residual, gamma, beta, eps, sum, y, mean, inverse);
  }

  void backward_input(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean, const Tensor& inverse,
                      const Tensor& dx) override {
    const OpProfileScope scope(context_, "layer normalisation's backward", {&x, &dy, &gamma, &mean, &inverse, &dx});
    differentiate(x, dy, gamma, mean, inverse, false, dx);
  }

  bool adds_to_gradients() const override { return true; }
  void backward_input_added(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                            const Tensor& inverse, const Tensor& dx) override {
    const OpProfileScope scope(context_, "layer normalisation's backward",
                               {&x, &dy, &gamma, &mean, &inverse, &dx, &dx});
    differentiate(x, dy, gamma, mean, inverse, true, dx);
  }

  void backward_parameters(const Tensor& x, const Tensor& dy, const Tensor& mean, const Tensor& inverse,
                           bool accumulate_gamma, const Tensor& dgamma, bool accumulate_beta,
                           const Tensor& dbeta) override {
    const Tensor none;
    const OpProfileScope scope(context_, "layer normalisation's backward",
                               {&x, &dy, &mean, &inverse, &dgamma, accumulate_gamma ? &dgamma : &none, &dbeta,
                                accumulate_beta ? &dbeta : &none});
    if (!dgamma.defined() && !dbeta.defined()) return;
    const std::int64_t columns = dgamma.defined() ? dgamma.count() : dbeta.count();
    if (columns == 0) return;
    with_float_type(x.dtype(), [&]<class T>(T) {
      const bool wide =
          columns % kPartWide == 0 && fits_packs(x.data<T>(), kPartWide) && fits_packs(dy.data<T>(), kPartWide);
      with_width<kPartWide>(wide, [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        const ColumnPlan plan = plan_columns(x.count() / columns, columns / kWidth, kPartBlocks, kLayerNormRows);
        LOCKSTEP_ASSERT(plan.tiles <= kMostBlocks, "layer normalisation of {} packs", plan.packs);
        const Tensor parts = Tensor::empty(context_.allocator, {plan.chunks, 2, columns});
        launch("layer normalisation's backward", sums_of_chunks<kWidth, T>,
               dim3(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.chunks)), dim3(kBlock),
               context_.stream, plan, x.data<T>(), dy.data<T>(), mean.f32(), inverse.f32(), parts.f32());
        join_parts(plan.chunks, columns, parts, accumulate_gamma, dgamma, accumulate_beta, dbeta);
      });
    });
  }

  bool backward_reads_once(std::int64_t columns) const override { return columns <= kBlockRow; }
  void backward(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean, const Tensor& inverse,
                bool add, const Tensor& dx, bool accumulate_gamma, const Tensor& dgamma, bool accumulate_beta,
                const Tensor& dbeta) override {
    const std::int64_t columns = gamma.count();
    if (!backward_reads_once(columns) || (!dgamma.defined() && !dbeta.defined()))
      return LayerNormKernels::backward(x, dy, gamma, mean, inverse, add, dx, accumulate_gamma, dgamma, accumulate_beta,
                                        dbeta);
    const Tensor none;
    const OpProfileScope scope(context_, "layer normalisation's backward",
                               {&x, &dy, &gamma, &mean, &inverse, &dx, add ? &dx : &none, &dgamma,
                                accumulate_gamma ? &dgamma : &none, &dbeta, accumulate_beta ? &dbeta : &none});
    if (columns == 0) return;
    LOCKSTEP_ASSERT(dy.count() == x.count() && dx.count() == x.count() && dy.dtype() == x.dtype());
    const std::int64_t rows = x.count() / columns;
    with_float_type(x.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(columns, gamma, {&x, &dy, &dx}), [&](auto width) {
        with_team(columns, [&](auto team, auto held) {
          constexpr int kTeam = decltype(team)::value, kHeld = decltype(held)::value, kWidth = decltype(width)::value;
          if constexpr (kHeld > 0) {
            const SumPlan plan = plan_sum(rows, kTeamBlock<kTeam> / kTeam * kBackRows<kHeld, kWidth>,
                                          kHeld == kFew ? kPartBlocks : kBackwardBlocks);
            const Tensor parts = Tensor::empty(context_.allocator, {plan.chunks, 2, columns});
            launch("layer normalisation's backward", differentiate_rows<kTeam, kHeld, kWidth, T>,
                   dim3(static_cast<unsigned>(plan.chunks)), dim3(kTeamBlock<kTeam>), context_.stream, rows, plan.chunk,
                   columns / kWidth, x.data<T>(), dy.data<T>(), gamma.f32(), mean.f32(), inverse.f32(), add,
                   dx.data<T>(), parts.f32());
            join_parts(plan.chunks, columns, parts, accumulate_gamma, dgamma, accumulate_beta, dbeta);
          }
        });
      });
    });
  }

 private:
  // Without kAdded `residual` and `sum` are undefined.
  template <bool kAdded>
  void normalise(const Tensor& x, const Tensor& residual, const Tensor& gamma, const Tensor& beta, double eps,
                 const Tensor& sum, const Tensor& y, const Tensor& mean, const Tensor& inverse) {
    const std::int64_t columns = gamma.count();
    if (x.count() == 0) return;
    LOCKSTEP_ASSERT(x.count() % columns == 0 && y.count() == x.count() && y.dtype() == x.dtype());
    LOCKSTEP_ASSERT(!kAdded || (residual.count() == x.count() && residual.dtype() == x.dtype() &&
                                sum.count() == x.count() && sum.dtype() == x.dtype()));
    const std::int64_t rows = x.count() / columns;
    const float* const shift = beta.defined() ? beta.f32() : nullptr;
    const Tensor& added = kAdded ? residual : x;
    const Tensor& to = kAdded ? sum : y;
    with_float_type(x.dtype(), [&]<class T>(T) {
      const bool wide = takes_packs<T>(columns, gamma, {&x, &added, &to, &y}) && fits_packs(shift, 4);
      with_width<kVector<T>>(wide, [&](auto width) {
        with_team(columns, [&](auto team, auto held) {
          constexpr int kTeam = decltype(team)::value, kWidth = decltype(width)::value;
          launch("layer normalisation", normalise_rows<kTeam, decltype(held)::value, kWidth, kAdded, T>,
                 blocks_of(rows, kTeamBlock<kTeam> / kTeam), dim3(kTeamBlock<kTeam>), context_.stream, rows,
                 columns / kWidth, x.data<T>(), added.data<T>(), to.data<T>(), gamma.f32(), shift, eps, y.data<T>(),
                 mean.f32(), inverse.f32());
        });
      });
    });
  }

  void join_parts(std::int64_t chunks, std::int64_t columns, const Tensor& parts, bool accumulate_gamma,
                  const Tensor& dgamma, bool accumulate_beta, const Tensor& dbeta) {
    launch("layer normalisation's backward", layer_norm_gradients,
           dim3(static_cast<unsigned>(ceil_div(columns, kJoinColumns))), dim3(kJoinBlock), context_.stream, chunks,
           columns, parts.f32(), accumulate_gamma, dgamma.defined() ? dgamma.f32() : nullptr, accumulate_beta,
           dbeta.defined() ? dbeta.f32() : nullptr);
  }

  void differentiate(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean, const Tensor& inverse,
                     bool add, const Tensor& dx) {
    const std::int64_t columns = gamma.count();
    if (x.count() == 0) return;
    LOCKSTEP_ASSERT(dy.count() == x.count() && dx.count() == x.count() && dy.dtype() == x.dtype());
    const std::int64_t rows = x.count() / columns;
    with_float_type(x.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(columns, gamma, {&x, &dy, &dx}), [&](auto width) {
        with_team(columns, [&](auto team, auto held) {
          constexpr int kTeam = decltype(team)::value, kWidth = decltype(width)::value;
          launch("layer normalisation's backward", layer_norm_grad_input<kTeam, decltype(held)::value, kWidth, T>,
                 blocks_of(rows, kTeamBlock<kTeam> / kTeam), dim3(kTeamBlock<kTeam>), context_.stream, rows,
                 columns / kWidth, x.data<T>(), dy.data<T>(), gamma.f32(), mean.f32(), inverse.f32(), add,
                 dx.data<T>());
        });
      });
    });
  }

  // Calls run(team, held) for rows of so many elements.
  template <class F>
  static void with_team(std::int64_t columns, F&& run) {
    const auto start = [&]<int kTeam, int kHeld>() {
      run(std::integral_constant<int, kTeam>{}, std::integral_constant<int, kHeld>{});
    };
    if (columns <= kWarpRow)
      start.template operator()<kWarp, kFew>();
    else if (columns <= kWarpsRow)
      start.template operator()<kFourWarps, kFew>();
    else if (columns <= kBlockRow)
      start.template operator()<kBlock, kMany>();
    else
      start.template operator()<kBlock, 0>();
  }

  static dim3 blocks_of(std::int64_t rows, int rows_of_block) {
    const std::int64_t blocks = ceil_div(rows, rows_of_block);
    LOCKSTEP_ASSERT(blocks <= kMostBlocks, "layer normalisation of {} rows", rows);
    return dim3(static_cast<unsigned>(blocks));
  }

  template <class T>
  static bool takes_packs(std::int64_t columns, const Tensor& gamma, std::initializer_list<const Tensor*> tensors) {
    return columns % kVector<T> == 0 && fits_packs(gamma.f32(), 4) &&
           std::ranges::all_of(tensors, [](const Tensor* tensor) { return fits_packs(tensor->data<T>(), kVector<T>); });
  }

  Context& context_;
};

}  // namespace

std::unique_ptr<LayerNormKernels> make_layer_norm_kernels(Context& context) {
  return std::make_unique<CudaLayerNorm>(context);
}

}  // namespace lockstep::nn::cuda
