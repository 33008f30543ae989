#include "lockstep/nn/ops/optim.h"

#include "base/error.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/reduce.cuh"
#include "nn/ops/cuda/update_chunk.h"
#include "nn/ops/cuda/vector.cuh"
#include "nn/ops/update_rules.h"

namespace lockstep::nn::cuda {
namespace {

constexpr int kUpdateWide = kVector<float>;
constexpr int kPerThread = 8;  // elements, of updates
constexpr int kUpdated = kBlock * kPerThread;
static_assert(kUpdated == kNormBlock, "a block of threads has a block of elements: Note [Norm blocks]");
constexpr int kNormPacks = kUpdated / (kBlock * kUpdateWide);  // of a thread

// Whether packs may lie at all arrays' beginnings. A block's own place is a multiple of them further on.
__device__ bool takes_packs(const UpdateArrays& a) {
  const auto bits = reinterpret_cast<std::uintptr_t>(a.gradient) | reinterpret_cast<std::uintptr_t>(a.parameter) |
                    reinterpret_cast<std::uintptr_t>(a.first) | reinterpret_cast<std::uintptr_t>(a.second);
  return bits % kVectorBytes == 0 &&
         reinterpret_cast<std::uintptr_t>(a.copy.data) % sizeof(Pack<std::uint16_t, kUpdateWide>) == 0;
}

template <class T, int kWidth>
__device__ void store_rounded(void* copy, std::int64_t at, const Pack<float, kWidth>& values) {
  Pack<T, kWidth> rounded;
  for (int k = 0; k < kWidth; ++k) rounded.of[k] = from_float<T>(values.of[k]);
  store_pack(static_cast<T*>(copy) + at, rounded);
}
template <int kWidth>
__device__ void store_copy(const UpdateArrays& a, std::int64_t at, const Pack<float, kWidth>& values) {
  if (a.copy.data == nullptr) return;
  if (a.copy.dtype == DType::kF16)
    store_rounded<Float16>(a.copy.data, at, values);
  else
    store_rounded<BFloat16>(a.copy.data, at, values);
}

// See Note [Update rules]. `factor` is of rules with norms.
template <class Rule>
__device__ void move(const Rule& rule, const float* control, float factor, float g, float& p, float& first,
                     float& second) {
  if constexpr (RuleWithNorms<Rule>)
    rule(control, factor, g, p, first, second);
  else
    rule(control, g, p, first, second);
}

template <int kWidth, class Rule>
__device__ void update(const Rule& rule, const float* control, float factor, const UpdateArrays& a, std::int64_t begin,
                       int count) {
  constexpr int kPacks = kPerThread / kWidth;
  Pack<float, kWidth> g[kPacks], p[kPacks], first[kPacks], second[kPacks];
  const int packs = count / kWidth, thread = static_cast<int>(threadIdx.x);
  for (int i = 0; i < kPacks; ++i) {
    if (thread + i * kBlock >= packs) continue;
    const std::int64_t at = begin + (thread + i * kBlock) * kWidth;
    g[i] = load_pack<kWidth>(a.gradient + at);
    p[i] = load_pack<kWidth>(a.parameter + at);
    if constexpr (Rule::kMoments > 0) first[i] = load_pack<kWidth>(a.first + at);
    if constexpr (Rule::kMoments > 1) second[i] = load_pack<kWidth>(a.second + at);
  }
  for (int i = 0; i < kPacks; ++i) {
    if (thread + i * kBlock >= packs) continue;
    const std::int64_t at = begin + (thread + i * kBlock) * kWidth;
    for (int k = 0; k < kWidth; ++k)
      move(rule, control, factor, g[i].of[k], p[i].of[k], first[i].of[k], second[i].of[k]);
    store_pack(a.parameter + at, p[i]);
    if constexpr (Rule::kMoments > 0) store_pack(a.first + at, first[i]);
    if constexpr (Rule::kMoments > 1) store_pack(a.second + at, second[i]);
    store_copy(a, at, p[i]);
  }
}

template <class Rule>
__global__ void __launch_bounds__(kBlock)
    update_all(UpdateChunk chunk, Rule rule, const float* control, const float* factors) {
  if (control[StepControl::kApply] == 0.0f) return;
  float held[StepControl::kSize];
  for (std::size_t i = 0; i < StepControl::kSize; ++i) held[i] = control[i];
  const int i = chunk.array_of(blockIdx.x);
  const UpdateArrays& a = chunk.arrays[i];
  const float factor = RuleWithNorms<Rule> ? factors[i] : 1.0f;
  const std::int64_t begin = std::int64_t{blockIdx.x - chunk.first_block[i]} * kUpdated;
  const auto count = static_cast<int>(at_most(a.count - begin, kUpdated));
  if (!takes_packs(a)) {
    update<1>(rule, held, factor, a, begin, count);
    return;
  }
  update<kUpdateWide>(rule, held, factor, a, begin, count);
  // Less than a pack may be left, at the end of an array.
  const int whole = count / kUpdateWide * kUpdateWide, left = whole + static_cast<int>(threadIdx.x);
  if (left >= count) return;
  const std::int64_t at = begin + left;
  float p = a.parameter[at], first = Rule::kMoments > 0 ? a.first[at] : 0.0f;
  float second = Rule::kMoments > 1 ? a.second[at] : 0.0f;
  move(rule, held, factor, a.gradient[at], p, first, second);
  a.parameter[at] = p;
  if constexpr (Rule::kMoments > 0) a.first[at] = first;
  if constexpr (Rule::kMoments > 1) a.second[at] = second;
  store_copy(a, at, Pack<float, 1>{{p}});
}

// The sum over all threads of the block of what each has of it. A thread has the same elements, in the same order,
// wherever they lie.
__device__ double squares_of(const Pack<float, kUpdateWide> (&values)[kNormPacks]) {
  double sum = 0.0;
  for (int u = 0; u < kNormPacks; ++u)
    for (int k = 0; k < kUpdateWide; ++k) {
      const auto value = static_cast<double>(values[u].of[k]);
      sum += value * value;
    }
  return block_sum<kBlock>(sum);
}

__global__ void __launch_bounds__(kBlock) squares_of_blocks(UpdateChunk chunk) {
  const int i = chunk.array_of(blockIdx.x);
  const std::uint32_t block = blockIdx.x - chunk.first_block[i];
  const std::int64_t begin = std::int64_t{block} * kUpdated;
  const float* const from = chunk.arrays[i].gradient + begin;
  const auto count = static_cast<int>(at_most(chunk.arrays[i].count - begin, kUpdated));
  const bool aligned = reinterpret_cast<std::uintptr_t>(from) % kVectorBytes == 0;
  Pack<float, kUpdateWide> values[kNormPacks];
  for (int u = 0; u < kNormPacks; ++u) {
    const int at = (static_cast<int>(threadIdx.x) + u * kBlock) * kUpdateWide;
    if (aligned && at + kUpdateWide <= count) {
      values[u] = load_pack<kUpdateWide>(from + at);
    } else {
      for (int k = 0; k < kUpdateWide; ++k) values[u].of[k] = at + k < count ? from[at + k] : 0.0f;
    }
  }
  const double sum = squares_of(values);
  if (threadIdx.x == 0) chunk.arrays[i].sums[block] = sum;
}

// See Note [Norm blocks]. A thread has single elements, kBlock apart, wherever the arrays lie.
template <class Rule>
__global__ void __launch_bounds__(kBlock) prepare_all(UpdateChunk chunk, Rule rule, const float* control) {
  if (control[StepControl::kApply] == 0.0f) return;
  float held[StepControl::kSize];
  for (std::size_t i = 0; i < StepControl::kSize; ++i) held[i] = control[i];
  const int i = chunk.array_of(blockIdx.x);
  const UpdateArrays& a = chunk.arrays[i];
  const std::uint32_t block = blockIdx.x - chunk.first_block[i];
  const std::int64_t begin = std::int64_t{block} * kUpdated;
  const auto count = static_cast<int>(at_most(a.count - begin, kUpdated));
  double x = 0.0, y = 0.0;
  for (int place = static_cast<int>(threadIdx.x); place < count; place += kBlock) {
    const std::int64_t at = begin + place;
    float first = Rule::kMoments > 0 ? a.first[at] : 0.0f, second = Rule::kMoments > 1 ? a.second[at] : 0.0f;
    const NormedPair pair = rule.prepare(held, a.gradient[at], a.parameter[at], first, second);
    if constexpr (Rule::kMoments > 0) a.first[at] = first;
    if constexpr (Rule::kMoments > 1) a.second[at] = second;
    x += static_cast<double>(pair.x) * static_cast<double>(pair.x);
    y += static_cast<double>(pair.y) * static_cast<double>(pair.y);
  }
  x = block_sum<kBlock>(x);
  y = block_sum<kBlock>(y);
  if (threadIdx.x != 0) return;
  a.sums[2 * block] = x;
  a.sums[2 * block + 1] = y;
}

// A block of threads for each parameter.
template <class Rule>
__global__ void __launch_bounds__(kBlock) factors_of(UpdateChunk chunk, Rule rule, float* factors) {
  const UpdateArrays& a = chunk.arrays[blockIdx.x];
  double x = 0.0, y = 0.0;
  for (std::int64_t b = threadIdx.x; b < norm_blocks(a.count); b += kBlock) {
    x += a.sums[2 * b];
    y += a.sums[2 * b + 1];
  }
  x = block_sum<kBlock>(x);
  y = block_sum<kBlock>(y);
  if (threadIdx.x == 0) factors[blockIdx.x] = rule.factor(x, y);
}

__global__ void __launch_bounds__(kSumBlock) sum_of_parts(std::int64_t n, const double* parts, double* to) {
  double sum = 0.0;
  for (std::int64_t i = threadIdx.x; i < n; i += kSumBlock) sum += parts[i];
  sum = block_sum<kSumBlock>(sum);
  if (threadIdx.x == 0) *to = sum;
}

__global__ void update_scale(const float* loss, const double* squares, double clip_norm, float* control) {
  const double norm = clip_norm > 0.0 ? sqrt(*squares) : 0.0;
  const bool apply = isfinite(*loss) && isfinite(norm);
  control[StepControl::kApply] = apply ? 1.0f : 0.0f;
  double scale = 1.0;
  if (apply && clip_norm > 0.0) {
    const double wanted = clip_norm / (norm + 1e-6);
    if (wanted < 1.0) scale = wanted;
  }
  control[StepControl::kGradientScale] = static_cast<float>(scale);
}

// One thread.
__global__ void scaled_update(const float* loss, const double* squares, double clip_norm, const std::int64_t* steps,
                              std::int64_t missed, const double* rates, RateCorrections corrections, float* scaler,
                              float* control) {
  compute_scaled_control(*loss, *squares, clip_norm, static_cast<double>(*steps - missed + 1), rates, corrections,
                         scaler, control);
}

__global__ void count_one_step(const float* control, std::int64_t* steps) {
  if (control[StepControl::kApply] != 0.0f) ++*steps;
}

__global__ void move_loss_scale(LossScaleRule rule, float* scaler) { rule(scaler); }

/// What an update has to read and write.
double bytes_of(std::span<const UpdateArrays> all) {
  double bytes = 0;
  for (const UpdateArrays& one : all) {
    int of_an_element = 4 + 8;  // the gradient is read, the parameter read and written
    for (const float* moment : {one.first, one.second}) of_an_element += moment != nullptr ? 8 : 0;
    if (one.copy) of_an_element += 2;
    bytes += static_cast<double>(one.count) * of_an_element;
  }
  return bytes;
}

class CudaOptim final : public OptimKernels {
 public:
  explicit CudaOptim(Context& context) : context_(context) {}

  void update(const UpdateRule& rule, const Tensor& control, std::span<const UpdateArrays> all, const Tensor& factors,
              std::span<const std::ptrdiff_t> replicas) override {
    LOCKSTEP_ASSERT(replicas.empty(), "{} further copies of parameters on a GPU", replicas.size());
    const OpProfileScope scope(context_, "update", bytes_of(all));
    std::visit([&](const auto& by) { start(by, control, all, factors.defined() ? factors.f32() : nullptr); }, rule);
  }

  void prepare(const UpdateRule& rule, const Tensor& control, std::span<const UpdateArrays> all) override {
    const OpProfileScope scope(context_, "norms of an update", bytes_of(all));
    std::visit(
        [&]<class Rule>(const Rule& by) {
          if constexpr (RuleWithNorms<Rule>)
            for_chunks(all, kUpdated, [&](const UpdateChunk& chunk) {
              launch("norms of an update", prepare_all<Rule>, dim3(chunk.blocks()), dim3(kBlock), context_.stream,
                     chunk, by, control.f32());
            });
        },
        rule);
  }

  void compute_factors(const UpdateRule& rule, std::span<const UpdateArrays> all, const Tensor& factors) override {
    float* to = factors.f32();
    std::visit(
        [&]<class Rule>(const Rule& by) {
          if constexpr (RuleWithNorms<Rule>)
            for_chunks(all, kUpdated, [&](const UpdateChunk& chunk) {
              launch("factors of an update", factors_of<Rule>, dim3(static_cast<unsigned>(chunk.size)), dim3(kBlock),
                     context_.stream, chunk, by, to);
              to += chunk.size;
            });
        },
        rule);
  }

  void squares(std::span<const UpdateArrays> all) override {
    std::int64_t elements = 0;
    for (const UpdateArrays& arrays : all) elements += arrays.count;
    const OpProfileScope scope(context_, "the gradients' norm", 4.0 * static_cast<double>(elements));
    for_chunks(all, kUpdated, [&](const UpdateChunk& chunk) {
      launch("the gradients' norm", squares_of_blocks, dim3(chunk.blocks()), dim3(kBlock), context_.stream, chunk);
    });
  }

  void add_up(const Tensor& parts, const Tensor& to) override {
    launch("the gradients' norm", sum_of_parts, dim3(1), dim3(kSumBlock), context_.stream, parts.count(),
           parts.data<double>(), to.data<double>());
  }

  void compute_update_scale(const Tensor& loss, const Tensor& squares, double clip_norm,
                            const Tensor& control) override {
    launch("looking at the loss", update_scale, dim3(1), dim3(1), context_.stream, loss.f32(),
           squares.defined() ? squares.data<double>() : nullptr, clip_norm, control.f32());
  }

  void compute_scaled_update(const ScaledStep& step, const Tensor& scaler, const Tensor& control) override {
    launch("whether the gradients are finite", scaled_update, dim3(1), dim3(1), context_.stream, step.loss.f32(),
           step.squares.data<double>(), step.clip_norm, step.steps.data<std::int64_t>(), step.missed,
           step.rates.data<double>(), step.corrections, scaler.f32(), control.f32());
  }

  void count_step(const Tensor& control, const Tensor& steps) override {
    launch("counting steps", count_one_step, dim3(1), dim3(1), context_.stream, control.f32(),
           steps.data<std::int64_t>());
  }

  void update_loss_scale(const LossScaleRule& rule, const Tensor& scaler) override {
    launch("the loss scale", move_loss_scale, dim3(1), dim3(1), context_.stream, rule, scaler.f32());
  }

 private:
  template <class Rule>
  void start(const Rule& rule, const Tensor& control, std::span<const UpdateArrays> all, const float* factors) {
    static_assert(sizeof(UpdateChunk) + sizeof(Rule) + 2 * sizeof(float*) <= 4096);
    for_chunks(all, kUpdated, [&](const UpdateChunk& chunk) {
      launch(Rule::kName, update_all<Rule>, dim3(chunk.blocks()), dim3(kBlock), context_.stream, chunk, rule,
             control.f32(), factors);
      if (factors != nullptr) factors += chunk.size;
    });
  }

  Context& context_;
};

}  // namespace

std::unique_ptr<OptimKernels> make_optim_kernels(Context& context) { return std::make_unique<CudaOptim>(context); }

}  // namespace lockstep::nn::cuda
