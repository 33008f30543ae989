#include "lockstep/nn/ops/optim.h"

#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/reduce.cuh"
#include "nn/ops/cuda/update_chunk.h"
#include "nn/ops/cuda/vector.cuh"
#include "nn/ops/cuda/work.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn::cuda {
namespace {

constexpr int kUpdateWide = kVector<float>;
constexpr int kPerThread = 8;  // elements, of updates
constexpr int kUpdated = kBlock * kPerThread;
constexpr int kSquaredPacks = 8;  // of a thread
constexpr int kSquared = kBlock * kSquaredPacks * kUpdateWide;

// Whether packs may lie at all arrays' beginnings. A block's own place is a multiple of them further on.
__device__ bool takes_packs(const UpdateArrays& a) {
  const auto bits = reinterpret_cast<std::uintptr_t>(a.gradient) | reinterpret_cast<std::uintptr_t>(a.parameter) |
                    reinterpret_cast<std::uintptr_t>(a.first) | reinterpret_cast<std::uintptr_t>(a.second);
  return bits % kVectorBytes == 0 &&
         reinterpret_cast<std::uintptr_t>(a.copy) % sizeof(Pack<BFloat16, kUpdateWide>) == 0;
}

// See Note [Update rules].
template <int kWidth, class Rule>
__device__ void update(const Rule& rule, const float* control, const UpdateArrays& a, std::int64_t begin, int count) {
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
    for (int k = 0; k < kWidth; ++k) rule(control, g[i].of[k], p[i].of[k], first[i].of[k], second[i].of[k]);
    store_pack(a.parameter + at, p[i]);
    if constexpr (Rule::kMoments > 0) store_pack(a.first + at, first[i]);
    if constexpr (Rule::kMoments > 1) store_pack(a.second + at, second[i]);
    if (a.copy != nullptr) {
      Pack<BFloat16, kWidth> rounded;
      for (int k = 0; k < kWidth; ++k) rounded.of[k] = from_float<BFloat16>(p[i].of[k]);
      store_pack(a.copy + at, rounded);
    }
  }
}

template <class Rule>
__global__ void __launch_bounds__(kBlock) update_all(UpdateChunk chunk, Rule rule, const float* control) {
  if (control[StepControl::kApply] == 0.0f) return;
  float held[StepControl::kSize];
  for (std::size_t i = 0; i < StepControl::kSize; ++i) held[i] = control[i];
  const int i = chunk.array_of(blockIdx.x);
  const UpdateArrays& a = chunk.arrays[i];
  const std::int64_t begin = std::int64_t{blockIdx.x - chunk.first_block[i]} * kUpdated;
  const auto count = static_cast<int>(at_most(a.count - begin, kUpdated));
  if (!takes_packs(a)) {
    update<1>(rule, held, a, begin, count);
    return;
  }
  update<kUpdateWide>(rule, held, a, begin, count);
  // Less than a pack may be left, at the end of an array.
  const int whole = count / kUpdateWide * kUpdateWide, left = whole + static_cast<int>(threadIdx.x);
  if (left >= count) return;
  const std::int64_t at = begin + left;
  float p = a.parameter[at], first = Rule::kMoments > 0 ? a.first[at] : 0.0f;
  float second = Rule::kMoments > 1 ? a.second[at] : 0.0f;
  rule(held, a.gradient[at], p, first, second);
  a.parameter[at] = p;
  if constexpr (Rule::kMoments > 0) a.first[at] = first;
  if constexpr (Rule::kMoments > 1) a.second[at] = second;
  if (a.copy != nullptr) a.copy[at] = from_float<BFloat16>(p);
}

// parts[block] = Σ g² of a block's elements. A thread has the same elements, in the same order, wherever they lie.
__global__ void __launch_bounds__(kBlock) squares_of_blocks(UpdateChunk chunk, double* parts) {
  const int i = chunk.array_of(blockIdx.x);
  const std::int64_t begin = std::int64_t{blockIdx.x - chunk.first_block[i]} * kSquared;
  const float* const from = chunk.arrays[i].gradient + begin;
  const auto count = static_cast<int>(at_most(chunk.arrays[i].count - begin, kSquared));
  const bool aligned = reinterpret_cast<std::uintptr_t>(from) % kVectorBytes == 0;
  Pack<float, kUpdateWide> values[kSquaredPacks];
  for (int u = 0; u < kSquaredPacks; ++u) {
    const int at = (static_cast<int>(threadIdx.x) + u * kBlock) * kUpdateWide;
    if (aligned && at + kUpdateWide <= count) {
      values[u] = load_pack<kUpdateWide>(from + at);
    } else {
      for (int k = 0; k < kUpdateWide; ++k) values[u].of[k] = at + k < count ? from[at + k] : 0.0f;
    }
  }
  double sum = 0.0;
  for (int u = 0; u < kSquaredPacks; ++u)
    for (int k = 0; k < kUpdateWide; ++k) {
      const auto value = static_cast<double>(values[u].of[k]);
      sum += value * value;
    }
  sum = block_sum<kBlock>(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kSumBlock) sum_squares(std::int64_t n, const double* parts, double* squares) {
  double sum = 0.0;
  for (std::int64_t i = threadIdx.x; i < n; i += kSumBlock) sum += parts[i];
  sum = block_sum<kSumBlock>(sum);
  if (threadIdx.x == 0) *squares += sum;
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

/// What an update has to read and write.
double bytes_of(std::span<const UpdateArrays> all) {
  double bytes = 0;
  for (const UpdateArrays& one : all) {
    int of_an_element = 4 + 8;  // the gradient is read, the parameter read and written
    for (const float* moment : {one.first, one.second}) of_an_element += moment != nullptr ? 8 : 0;
    if (one.copy != nullptr) of_an_element += 2;
    bytes += static_cast<double>(one.count) * of_an_element;
  }
  return bytes;
}

class CudaOptim final : public OptimKernels {
 public:
  explicit CudaOptim(Context& context) : context_(context) {}

  void update(const UpdateRule& rule, const Tensor& control, std::span<const UpdateArrays> all) override {
    const Work work(context_, "update", bytes_of(all));
    std::visit([&](const auto& by) { start(by, control, all); }, rule);
  }

  void add_squares(std::span<const UpdateArrays> all, const Tensor& squares) override {
    std::int64_t blocks = 0, elements = 0;
    for (const UpdateArrays& arrays : all) elements += arrays.count;
    const Work work(context_, "the gradients' norm", 4.0 * static_cast<double>(elements));
    for (const UpdateArrays& arrays : all) blocks += ceil_div(arrays.count, kSquared);
    if (blocks == 0) return;
    const Tensor parts = Tensor::empty(context_.allocator, {blocks}, DType::kF64);
    double* to = parts.data<double>();
    for_chunks(all, kSquared, [&](const UpdateChunk& chunk) {
      launch("the gradients' norm", squares_of_blocks, dim3(chunk.blocks()), dim3(kBlock), context_.stream, chunk, to);
      to += chunk.blocks();
    });
    launch("the gradients' norm", sum_squares, dim3(1), dim3(kSumBlock), context_.stream, blocks, parts.data<double>(),
           squares.data<double>());
  }

  void compute_update_scale(const Tensor& loss, const Tensor& squares, double clip_norm,
                            const Tensor& control) override {
    launch("looking at the loss", update_scale, dim3(1), dim3(1), context_.stream, loss.f32(),
           squares.defined() ? squares.data<double>() : nullptr, clip_norm, control.f32());
  }

 private:
  template <class Rule>
  void start(const Rule& rule, const Tensor& control, std::span<const UpdateArrays> all) {
    static_assert(sizeof(UpdateChunk) + sizeof(Rule) + sizeof(float*) <= 4096);
    for_chunks(all, kUpdated, [&](const UpdateChunk& chunk) {
      launch(Rule::kName, update_all<Rule>, dim3(chunk.blocks()), dim3(kBlock), context_.stream, chunk, rule,
             control.f32());
    });
  }

  Context& context_;
};

}  // namespace

std::unique_ptr<OptimKernels> make_optim_kernels(Context& context) { return std::make_unique<CudaOptim>(context); }

}  // namespace lockstep::nn::cuda
