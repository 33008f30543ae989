#include "lockstep/nn/ops/loss.h"

#include <limits>

#include "base/error.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/reduce.cuh"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

constexpr int kSmallRow = 1024;  // classes: one warp
constexpr int kLargeRow = 16384;
// Two teams of a multiprocessor have 64 bytes on their way to each of their threads, and their rows, which are read
// again for the gradient, stay in the second cache: 264 rows of 50,257 bf16 are 27 MB.
constexpr int kLargeTeam = 512;
constexpr int kMostParts = 4096, kMostTotalParts = 1024;

// The largest logit so far and the sum of exp(logit − largest). NaN is never the largest, but makes the sum NaN.
struct Softmax {
  float largest;
  int at;
  float sum;
};
__device__ Softmax softmax_of_none() { return {-kInfinity, std::numeric_limits<int>::max(), 0.0f}; }

__device__ bool comes_first(float value, int at, float other, int other_at) {
  return value > other || (value == other && at < other_at);
}

// A multiprocessor has 30 instructions to read and write a logit of 16 bits at the full speed of memory. Of such logits
// an error of some 1e-6 is far below their rounding.
constexpr float kLog2OfE = 1.44269504f;
template <class T>
__device__ float exp_of(float x) {
  if constexpr (sizeof(T) == 2)
    return fast_exp2(kLog2OfE * x);
  else
    return expf(x);
}

// Those of a thread come in their order.
template <int kWidth, class T>
__device__ void take(Softmax& softmax, const Pack<T, kWidth>& logits, int at) {
  float most = to_float(logits.of[0]);
  for (int i = 1; i < kWidth; ++i) most = fmaxf(most, to_float(logits.of[i]));
  if (most > softmax.largest) {
    softmax.sum *= exp_of<T>(softmax.largest - most);
    softmax.largest = most;
    for (int i = kWidth - 1; i >= 0; --i)
      if (to_float(logits.of[i]) == most) softmax.at = at + i;
  }
  const float base = softmax.largest == -kInfinity ? 0.0f : softmax.largest;  // −∞ − −∞ would be NaN
  for (int i = 0; i < kWidth; ++i) softmax.sum += exp_of<T>(to_float(logits.of[i]) - base);
}

// Of a warp's lanes: the same in all of them.
__device__ void join_lanes(Softmax& softmax) {
  const float own = softmax.largest;
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, softmax.largest, step);
    const int other_at = __shfl_xor_sync(kAllLanes, softmax.at, step);
    if (!comes_first(other, other_at, softmax.largest, softmax.at)) continue;
    softmax.largest = other;
    softmax.at = other_at;
  }
  if (own < softmax.largest) softmax.sum *= expf(own - softmax.largest);
  softmax.sum = warp_sum(softmax.sum);
}

// Calls visit(pack, index) for the packs and single elements of a row that are this thread's. Several are on their way
// before the first is looked at: a large row has a multiprocessor for itself.
template <int kTeam, int kWidth, class T, class F>
__device__ void for_own(const Stretch& row, int thread, const T* from, F&& visit) {
  constexpr int kAtOnce = 4;
  if constexpr (kWidth > 1)
    if (thread < row.head) visit(load_pack<1>(from + thread), thread);
  const int packs = static_cast<int>(row.packs);
  int pack = thread;
  for (; pack + (kAtOnce - 1) * kTeam < packs; pack += kAtOnce * kTeam) {
    Pack<T, kWidth> held[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) held[i] = load_pack<kWidth>(from + row.head + (pack + i * kTeam) * kWidth);
    for (int i = 0; i < kAtOnce; ++i) visit(held[i], row.head + (pack + i * kTeam) * kWidth);
  }
  for (; pack < packs; pack += kTeam)
    visit(load_pack<kWidth>(from + row.head + pack * kWidth), row.head + pack * kWidth);
  if constexpr (kWidth > 1) {
    const int left = row.head + static_cast<int>(row.packs) * kWidth + thread;
    if (thread < row.tail) visit(load_pack<1>(from + left), left);
  }
}

constexpr std::int64_t kNoLabel = std::numeric_limits<std::int64_t>::max();  // none is ignored

// What rows are to be: labels, of which `ignored` is none, or else probabilities (rows, classes).
struct Targets {
  const std::int32_t* labels = nullptr;
  const float* probabilities = nullptr;
  const float* weights = nullptr;  // (classes), or nullptr: 1 each
  std::int64_t ignored = kNoLabel;
  float smoothing = 0.0f;
};

// The place of the largest of a row's probabilities, which is the first of equal ones.
template <int kTeam>
__device__ int likeliest_of(const float* p, int classes, int thread) {
  Softmax most = softmax_of_none();
  for (int c = thread; c < classes; c += kTeam)
    if (comes_first(p[c], c, most.largest, most.at)) most.largest = p[c], most.at = c;
  join_lanes(most);
  if constexpr (kTeam > kWarp) {
    __shared__ Softmax of_warps[kTeam / kWarp];
    if (thread % kWarp == 0) of_warps[thread / kWarp] = most;
    __syncthreads();
    most = thread % kWarp < kTeam / kWarp ? of_warps[thread % kWarp] : softmax_of_none();
    join_lanes(most);
  }
  return most.at;
}

// kTeam threads a row; rows of the logits and of their gradient are `pitch` elements apart. `parts` (blocks, 2)
// receives loss and correct predictions of each block's rows. Where a label is no class, and not the one that is
// ignored, the row's loss and gradient are NaN. Gradients are scaled by `times` too, where that is no nullptr. dlogits
// may be nullptr, and may be the logits; its rows are filled up with zeros until they are `filled` elements long.
// kShares: classes are to have shares, of probabilities or with weights; else of a label alone.
template <int kTeam, int kWidth, bool kShares, class T>
__global__ void __launch_bounds__(kTeam < kBlock ? kBlock : kTeam, 1024 / (kTeam < kBlock ? kBlock : kTeam))
    softmax_rows(std::int64_t rows, int classes, int filled, std::int64_t pitch, const T* logits, Targets targets,
                 float scale, const float* times, double* parts, T* dlogits) {
  constexpr int kThreads = kTeam < kBlock ? kBlock : kTeam;
  constexpr int kRows = kThreads / kTeam, kWarps = kTeam / kWarp;
  __shared__ float losses[kRows], correct[kRows];
  const int team = static_cast<int>(threadIdx.x) / kTeam, thread = static_cast<int>(threadIdx.x) % kTeam;
  const std::int64_t i = std::int64_t{blockIdx.x} * kRows + team;
  const bool inside = i < rows;
  const T* const from = logits + i * pitch;
  const bool soft = kShares && targets.labels == nullptr;
  const float* const p = soft && inside ? targets.probabilities + i * classes : nullptr;
  int label = inside && !soft ? targets.labels[i] : 0;
  if constexpr (kShares)
    if (soft) label = likeliest_of<kTeam>(p, inside ? classes : 0, thread);
  const bool counted = soft || label != targets.ignored;
  const bool known = soft || (label >= 0 && label < classes);
  const float smoothing = targets.smoothing, kept = 1.0f - smoothing;
  const auto share_wanted = [&](int c) {
    const float of_class = soft ? p[c] : c == label ? 1.0f : 0.0f;
    const float q = kept * of_class + smoothing / static_cast<float>(classes);
    return targets.weights != nullptr ? targets.weights[c] * q : q;
  };
  const auto ahead = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(from) / sizeof(T) % kWidth);
  const Stretch row = stretch_of(ahead, inside ? classes : 0, kWidth);
  const float wanted = !kShares && inside && known ? to_float(from[label]) : std::numeric_limits<float>::quiet_NaN();

  Softmax softmax = softmax_of_none();
  for_own<kTeam, kWidth>(row, thread, from, [&](const auto& pack, int at) { take(softmax, pack, at); });
  join_lanes(softmax);
  if constexpr (kWarps > 1) {
    __shared__ Softmax of_warps[kWarps];
    if (thread % kWarp == 0) of_warps[thread / kWarp] = softmax;
    __syncthreads();
    softmax = thread % kWarp < kWarps ? of_warps[thread % kWarp] : softmax_of_none();
    join_lanes(softmax);
  }

  if constexpr (kWarps == 1) __syncwarp();  // all lanes have read the label's logit, where dlogits may lie

  const auto team_sum = [](float sum) {
    if constexpr (kWarps > 1)
      return block_sum<kTeam>(sum);
    else
      return warp_sum(sum);
  };
  float apart = 0.0f, all = 1.0f;  // all: the sum of what the classes are to be
  if constexpr (kShares) {
    float weighted = 0.0f, shares = 0.0f;
    for_own<kTeam, kWidth>(row, thread, from, [&]<int kCount>(const Pack<T, kCount>& pack, int at) {
      for (int k = 0; k < kCount; ++k) {
        const float q = share_wanted(at + k);
        // A class that nobody asks for adds nothing, also where its logit is −∞.
        if (q != 0.0f) weighted += q * (to_float(pack.of[k]) - softmax.largest);
        shares += q;
      }
    });
    apart = team_sum(weighted);
    all = team_sum(shares);
    if (!known) apart = std::numeric_limits<float>::quiet_NaN();
  } else {
    apart = wanted - softmax.largest;
    if (smoothing > 0.0f) {
      float sum = 0.0f;
      for_own<kTeam, kWidth>(row, thread, from, [&](const auto& pack, int) {
        for (const auto& value : pack.of) sum += to_float(value) - softmax.largest;
      });
      apart = kept * apart + smoothing * (team_sum(sum) / static_cast<float>(classes));
    }
  }

  if (inside && dlogits != nullptr) {
    if (times != nullptr) scale *= *times;
    T* const to = dlogits + i * pitch;
    const float even = scale * smoothing / static_cast<float>(classes), of_label = scale * kept + even;
    const float factor = known ? scale * all / softmax.sum : std::numeric_limits<float>::quiet_NaN();
    for_own<kTeam, kWidth>(row, thread, from, [&]<int kCount>(const Pack<T, kCount>& pack, int at) {
      const auto share_of = [&](int k) { return exp_of<T>(to_float(pack.of[k]) - softmax.largest) * factor; };
      Numbers<kCount> made;
      if constexpr (kShares) {
        for (int k = 0; k < kCount; ++k) made.of[k] = counted ? share_of(k) - scale * share_wanted(at + k) : 0.0f;
      } else {
        for (int k = 0; k < kCount; ++k) made.of[k] = counted ? share_of(k) - even : 0.0f;
        if (counted && label >= at && label < at + kCount)
          for (int k = 0; k < kCount; ++k)
            if (at + k == label) made.of[k] = share_of(k) - of_label;
      }
      store_rounded(to + at, made);
    });
    for (int c = classes + thread; c < filled; c += kTeam) to[c] = from_float<T>(0.0f);
  }

  if (thread == 0) {
    losses[team] = inside && counted ? all * logf(softmax.sum) - apart : 0.0f;
    correct[team] = inside && counted && softmax.at == label ? 1.0f : 0.0f;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  double loss = 0.0, right = 0.0;
  for (int r = 0; r < kRows; ++r) {
    loss += static_cast<double>(losses[r]);
    right += static_cast<double>(correct[r]);
  }
  parts[2 * std::int64_t{blockIdx.x}] = loss;
  parts[2 * std::int64_t{blockIdx.x} + 1] = right;
}

// totals (2) = the sums of parts (n, 2), or of parts (n) and `counted`.
template <bool kPairs>
__global__ void __launch_bounds__(kSumBlock)
    add_losses(std::int64_t n, const double* parts, float counted, float* totals) {
  double first = 0.0, second = 0.0;
  for (std::int64_t i = threadIdx.x; i < n; i += kSumBlock) {
    first += parts[kPairs ? 2 * i : i];
    if constexpr (kPairs) second += parts[2 * i + 1];
  }
  first = block_sum<kSumBlock>(first);
  if constexpr (kPairs) second = block_sum<kSumBlock>(second);
  if (threadIdx.x > 0) return;
  totals[0] = static_cast<float>(first);
  totals[1] = kPairs ? static_cast<float>(second) : counted;
}

// parts (chunks) = the sum of each chunk.
__global__ void __launch_bounds__(kBlock)
    total_of_chunks(SumPlan plan, std::int64_t count, const float* x, double* parts) {
  const std::int64_t begin = std::int64_t{blockIdx.x} * plan.chunk, end = at_most(begin + plan.chunk, count);
  double sum = 0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kBlock) sum += static_cast<double>(x[i]);
  sum = block_sum<kBlock>(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// parts (chunks) = Σ (x − target)² of each chunk; dx = (x − target) · factor, unless it is nullptr.
template <int kWidth>
__global__ void __launch_bounds__(kBlock)
    squares_of_chunks(SumPlan plan, std::int64_t count, const float* x, const float* target, float factor,
                      const float* times, double* parts, float* dx) {
  double sum = 0.0;
  if (times != nullptr) factor *= *times;
  const std::int64_t begin = blockIdx.x * plan.chunk, end = at_most(begin + plan.chunk, count);
  const auto visit = [&](auto width, std::int64_t at) {
    constexpr int kCount = decltype(width)::value;
    auto values = load_pack<kCount>(x + at);
    const auto targets = load_pack<kCount>(target + at);
    for (int k = 0; k < kCount; ++k) {
      const double apart = static_cast<double>(values.of[k]) - static_cast<double>(targets.of[k]);
      sum += apart * apart;
      values.of[k] = (values.of[k] - targets.of[k]) * factor;
    }
    if (dx != nullptr) store_pack(dx + at, values);
  };
  const std::int64_t packs = (end - begin) / kWidth;
  for (std::int64_t pack = threadIdx.x; pack < packs; pack += kBlock)
    visit(std::integral_constant<int, kWidth>{}, begin + pack * kWidth);
  if constexpr (kWidth > 1)
    if (const std::int64_t left = begin + packs * kWidth + threadIdx.x; left < end)
      visit(std::integral_constant<int, 1>{}, left);
  sum = block_sum<kBlock>(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// One block: an evaluation has few rows at a time. A warp takes a row.
template <class T>
__global__ void __launch_bounds__(kBlock)
    count_rows_in_top(std::int64_t rows, std::int64_t classes, std::int64_t pitch, const T* logits,
                      const std::int32_t* labels, std::int64_t ignored, std::int64_t k, float* total) {
  constexpr int kWarps = kBlock / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  int inside = 0;
  for (std::int64_t row = warp; row < rows; row += kWarps) {
    const T* const from = logits + row * pitch;
    const std::int64_t label = labels[row];
    const bool known = label >= 0 && label < classes && label != ignored;
    const float own = known ? to_float(from[label]) : 0.0f;
    int before = 0;
    for (std::int64_t j = lane; j < classes; j += kWarp) {
      const float other = to_float(from[j]);
      before += other > own || (other == own && j < label) ? 1 : 0;
    }
    before = warp_sum(before);
    if (lane == 0) inside += known && before < k && !isnan(own) ? 1 : 0;
  }
  inside = block_sum<kBlock>(inside);
  if (threadIdx.x == 0) *total = static_cast<float>(inside);
}

class CudaLoss final : public LossKernels {
 public:
  explicit CudaLoss(Context& context) : context_(context) {}

  void cross_entropy(const Tensor& logits, const Tensor& labels, const LossScale& scale, const TargetRule& rule,
                     const Tensor& totals, const Tensor& dlogits) override {
    const OpProfileScope scope(context_, "cross entropy", {&logits, &labels, &totals, &dlogits});
    LOCKSTEP_ASSERT(labels.count() == logits.size(0));
    Targets targets = {.labels = labels.data<std::int32_t>()};
    if (rule.ignored) targets.ignored = *rule.ignored;
    rule.weights.defined() ? with_team<true>(logits, targets, scale, rule, totals, dlogits)
                           : with_team<false>(logits, targets, scale, rule, totals, dlogits);
  }

  void soft_cross_entropy(const Tensor& logits, const Tensor& probabilities, const LossScale& scale,
                          const TargetRule& rule, const Tensor& totals, const Tensor& dlogits) override {
    const OpProfileScope scope(context_, "soft cross entropy", {&logits, &probabilities, &totals, &dlogits});
    LOCKSTEP_ASSERT(probabilities.count() == logits.count());
    with_team<true>(logits, {.probabilities = probabilities.f32()}, scale, rule, totals, dlogits);
  }

  void count_in_top(const Tensor& logits, const Tensor& labels, std::int64_t k, const Tensor& total,
                    std::optional<std::int32_t> ignored) override {
    const OpProfileScope scope(context_, "counting correct ones", {&logits, &labels, &total});
    with_float_type(logits.dtype(), [&]<class T>(T) {
      launch("counting what is among the largest", count_rows_in_top<T>, dim3(1), dim3(kBlock), context_.stream,
             logits.size(0), logits.size(1), logits.pitch(), logits.rows<T>(), labels.data<std::int32_t>(),
             ignored ? std::int64_t{*ignored} : kNoLabel, k, total.f32());
    });
  }

  void squared_error(const Tensor& x, const Tensor& target, const LossScale& scale, const Tensor& totals,
                     const Tensor& dx) override {
    const OpProfileScope scope(context_, "squared error", {&x, &target, &totals, &dx});
    const std::int64_t count = x.count();
    LOCKSTEP_ASSERT(target.count() == count && (!dx.defined() || dx.count() == count));
    const SumPlan plan = plan_sum(count, kBlock * kPacksPerThread * kVector<float>, kMostParts);
    const Tensor parts = Tensor::empty(context_.allocator, {plan.chunks}, DType::kF64);
    float* const to = dx.defined() ? dx.f32() : nullptr;
    constexpr int kWide = kVector<float>;
    with_width<kWide>(fits_packs(x.f32(), kWide) && fits_packs(target.f32(), kWide) && fits_packs(to, kWide),
                      [&](auto width) {
                        launch("squared error", squares_of_chunks<decltype(width)::value>,
                               dim3(static_cast<unsigned>(plan.chunks)), dim3(kBlock), context_.stream, plan, count,
                               x.f32(), target.f32(), 2.0f * scale.constant, scale.times(), parts.data<double>(), to);
                      });
    launch("squared error", add_losses<false>, dim3(1), dim3(kSumBlock), context_.stream, plan.chunks,
           parts.data<double>(), 0.0f, totals.f32());
  }

  void total(const Tensor& x, const Tensor& totals) override {
    const OpProfileScope scope(context_, "a sum", {&x, &totals});
    const SumPlan plan = plan_sum(x.count(), kBlock * kElementsPerThread, kMostTotalParts);
    const Tensor parts = Tensor::empty(context_.allocator, {plan.chunks}, DType::kF64);
    if (plan.chunks > 0)
      launch("a sum", total_of_chunks, dim3(static_cast<unsigned>(plan.chunks)), dim3(kBlock), context_.stream, plan,
             x.count(), x.f32(), parts.data<double>());
    launch("a sum", add_losses<false>, dim3(1), dim3(kSumBlock), context_.stream, plan.chunks, parts.data<double>(),
           std::numeric_limits<float>::quiet_NaN(), totals.f32());
  }

 private:
  static constexpr std::int64_t kMostClasses = std::int64_t{1} << 30;

  template <bool kShares>
  void with_team(const Tensor& logits, Targets targets, const LossScale& scale, const TargetRule& rule,
                 const Tensor& totals, const Tensor& dlogits) {
    const std::int64_t classes = logits.size(1);
    LOCKSTEP_ASSERT(classes >= 1 && classes <= kMostClasses, "cross entropy of {} classes", classes);
    targets.smoothing = rule.smoothing;
    if (rule.weights.defined()) targets.weights = rule.weights.f32();
    with_float_type(logits.dtype(), [&]<class T>(T) {
      if (classes <= kSmallRow)
        start<kWarp, kShares, T>(logits, targets, scale, totals, dlogits);
      else if (classes <= kLargeRow)
        start<kBlock, kShares, T>(logits, targets, scale, totals, dlogits);
      else
        start<kLargeTeam, kShares, T>(logits, targets, scale, totals, dlogits);
    });
  }

  template <int kTeam, bool kShares, class T>
  void start(const Tensor& logits, const Targets& targets, const LossScale& scale, const Tensor& totals,
             const Tensor& dlogits) {
    const std::int64_t rows = logits.size(0), classes = logits.size(1);
    LOCKSTEP_ASSERT(!dlogits.defined() || dlogits.count() == logits.count());
    constexpr int kThreads = kTeam < kBlock ? kBlock : kTeam;
    const std::int64_t blocks = ceil_div(rows, kThreads / kTeam);
    LOCKSTEP_ASSERT(blocks <= kMostBlocks, "cross entropy of {} rows", rows);
    const Tensor parts = Tensor::empty(context_.allocator, {blocks, 2}, DType::kF64);
    const std::int64_t pitch = logits.pitch();
    LOCKSTEP_ASSERT(!dlogits.defined() || dlogits.pitch() == pitch, "a gradient's rows {} apart, of {}",
                    dlogits.pitch(), pitch);
    T* const to = dlogits.defined() ? dlogits.rows<T>() : nullptr;
    const std::int64_t filled = dlogits.between_rows() == Tensor::Between::kOthers ? classes : pitch;
    // Rows begin anywhere, but those of both at the same distance from a boundary.
    const bool in_phase =
        to == nullptr ||
        (reinterpret_cast<std::uintptr_t>(logits.rows<T>()) - reinterpret_cast<std::uintptr_t>(to)) % kVectorBytes == 0;
    with_width<kVector<T>>(in_phase, [&](auto width) {
      launch("cross entropy", softmax_rows<kTeam, decltype(width)::value, kShares, T>,
             dim3(static_cast<unsigned>(blocks)), dim3(kThreads), context_.stream, rows, classes, filled, pitch,
             logits.rows<T>(), targets, scale.constant, scale.times(), parts.data<double>(), to);
    });
    launch("cross entropy", add_losses<true>, dim3(1), dim3(kSumBlock), context_.stream, blocks, parts.data<double>(),
           0.0f, totals.f32());
  }

  Context& context_;
};

}  // namespace

std::unique_ptr<LossKernels> make_loss_kernels(Context& context) { return std::make_unique<CudaLoss>(context); }

}  // namespace lockstep::nn::cuda
