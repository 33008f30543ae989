// In place of nn/ops/cuda/fused_attention.cpp, because cuDNN's graphs need a GPU. Where Machine::fused_attention says
// so it is a cuDNN in software, for what the real one takes; else it has no kernel for anything, and ours do all.
#include "nn/ops/cuda/fused_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "nn/ops/cuda/backend.h"
#include "tests/soft_cuda/streams.h"

namespace lockstep::nn::cuda {
namespace {

// Queries, keys and values of one head, or what is made of them.
template <class T>
struct HeadOf {
  const T* data;
  std::int64_t stride, width;

  float at(std::int64_t row, std::int64_t column) const { return data[row * stride + column].to_float(); }
};
template <class T>
struct Problem {
  std::int64_t samples, tokens, heads, width;
  const T* parts[3];  // queries, keys, values
  std::int64_t pitch;
  bool causal;
  const std::int32_t* lengths;

  std::int64_t tokens_of(std::int64_t sample) const { return lengths != nullptr ? lengths[sample] : tokens; }
  // How many keys a query sees.
  std::int64_t seen(std::int64_t sample, std::int64_t query) const { return causal ? query + 1 : tokens_of(sample); }
  HeadOf<T> part(std::int64_t which, std::int64_t sample, std::int64_t head) const {
    return {parts[which] + sample * tokens * pitch + head * width, pitch, width};
  }
  HeadOf<T> of_result(const T* y, std::int64_t sample, std::int64_t head) const {
    return {y + (sample * tokens * heads + head) * width, heads * width, width};
  }
  float score(const HeadOf<T>& q, const HeadOf<T>& k, std::int64_t query, std::int64_t key) const {
    float sum = 0.0f;
    for (std::int64_t c = 0; c < width; ++c) sum += q.at(query, c) * k.at(key, c);
    return sum / std::sqrt(static_cast<float>(width));
  }
};

template <class T, class F>
void for_heads(const Problem<T>& problem, F&& run) {
  for (std::int64_t sample = 0; sample < problem.samples; ++sample)
    for (std::int64_t head = 0; head < problem.heads; ++head) run(sample, head);
}

template <class T>
void attend(const Problem<T>& problem, T* y, float* log_sums) {
  for_heads(problem, [&](std::int64_t sample, std::int64_t head) {
    const HeadOf<T> q = problem.part(0, sample, head), k = problem.part(1, sample, head);
    const HeadOf<T> v = problem.part(2, sample, head);
    for (std::int64_t query = 0; query < problem.tokens_of(sample); ++query) {
      std::vector<float> weights;
      const std::int64_t seen = problem.seen(sample, query);
      for (std::int64_t key = 0; key < seen; ++key) weights.push_back(problem.score(q, k, query, key));
      const float largest = std::ranges::max(weights);
      float sum = 0.0f;
      for (float& weight : weights) sum += weight = std::exp(weight - largest);
      for (std::int64_t c = 0; c < problem.width; ++c) {
        float result = 0.0f;
        for (std::int64_t key = 0; key < seen; ++key)
          result += weights[static_cast<std::size_t>(key)] / sum * v.at(key, c);
        y[((sample * problem.tokens + query) * problem.heads + head) * problem.width + c] = T::from_float(result);
      }
      log_sums[(sample * problem.heads + head) * problem.tokens + query] = largest + std::log(sum);
    }
  });
}

template <class T>
void differentiate(const Problem<T>& problem, const T* y, const float* log_sums, const T* dy,
                   const std::array<T*, 3>& gradients) {
  const std::int64_t width = problem.width;
  for_heads(problem, [&](std::int64_t sample, std::int64_t head) {
    const HeadOf<T> q = problem.part(0, sample, head), k = problem.part(1, sample, head);
    const HeadOf<T> v = problem.part(2, sample, head);
    const HeadOf<T> result = problem.of_result(y, sample, head), gradient = problem.of_result(dy, sample, head);
    std::vector<float> sums(static_cast<std::size_t>(problem.tokens * 3 * width));  // (tokens, 3, width)
    const auto sum = [&](std::int64_t token, std::int64_t which, std::int64_t c) -> float& {
      return sums[static_cast<std::size_t>((token * 3 + which) * width + c)];
    };
    for (std::int64_t query = 0; query < problem.tokens_of(sample); ++query) {
      float mean = 0.0f;
      for (std::int64_t c = 0; c < width; ++c) mean += result.at(query, c) * gradient.at(query, c);
      for (std::int64_t key = 0; key < problem.seen(sample, query); ++key) {
        const float weight = std::exp(problem.score(q, k, query, key) -
                                      log_sums[(sample * problem.heads + head) * problem.tokens + query]);
        float of_weight = 0.0f;
        for (std::int64_t c = 0; c < width; ++c) of_weight += gradient.at(query, c) * v.at(key, c);
        const float of_score = weight * (of_weight - mean) / std::sqrt(static_cast<float>(width));
        for (std::int64_t c = 0; c < width; ++c) {
          sum(query, 0, c) += of_score * k.at(key, c);
          sum(key, 1, c) += of_score * q.at(query, c);
          sum(key, 2, c) += weight * gradient.at(query, c);
        }
      }
    }
    for (std::int64_t token = 0; token < problem.tokens_of(sample); ++token)  // cuDNN leaves padding as it is
      for (std::int64_t which = 0; which < 3; ++which)
        for (std::int64_t c = 0; c < width; ++c)
          gradients[static_cast<std::size_t>(which)][(sample * problem.tokens + token) * problem.pitch + head * width +
                                                     c] = T::from_float(sum(token, which, c));
  });
}

template <class T>
Problem<T> problem_of(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options) {
  return {x.q.size(0),
          x.q.size(1),
          heads,
          x.q.size(2) / heads,
          {x.q.rows<T>(), x.k.rows<T>(), x.v.rows<T>()},
          x.q.pitch(),
          options.causal,
          options.lengths.defined() ? options.lengths.data<std::int32_t>() : nullptr};
}

template <class F>
void with_half(DType dtype, F&& run) {
  dtype == DType::kF16 ? run(Float16{}) : run(BFloat16{});
}

// As the real one asks.
bool is_taken(Context& context, const char* operation, std::int64_t heads, const Tensor& y,
              std::initializer_list<const Tensor*> arrays) {
  if (!soft_cuda::machine().fused_attention || !is_half(y.dtype())) return false;
  const std::int64_t width = y.size(2) / heads;
  const bool lie_well = std::ranges::all_of(
      arrays, [](const Tensor* array) { return reinterpret_cast<std::uintptr_t>(array->raw_rows()) % 16 == 0; });
  if (width % 8 != 0 || width > 256 || !lie_well) {
    context.engines.fall_back(operation, "lockstep's own kernels", "no kernel of cuDNN's takes it");
    return false;
  }
  context.engines.use(operation, "cuDNN in software");
  soft_cuda::count_fused_attention();
  return true;
}

}  // namespace

struct FusedAttention::Held {};

FusedAttention::FusedAttention(Context& context) : context_(context) {}
FusedAttention::~FusedAttention() = default;

bool FusedAttention::forward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options,
                             const Tensor& y, const Tensor& log_sums) {
  const char* const operation = y.dtype() == DType::kF16 ? "attention, f16" : "attention, bf16";
  if (!is_taken(context_, operation, heads, y, {&x.q, &x.k, &x.v, &y, &log_sums})) return false;
  with_half(y.dtype(), [&]<class T>(T) {
    const auto problem = problem_of<T>(x, heads, options);
    check_cuda(soft_cuda::submit(native(context_.stream),
                                 [problem, to = y.data<T>(), sums = log_sums.f32()] { attend(problem, to, sums); }),
               "attention");
  });
  return true;
}

bool FusedAttention::backward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options,
                              const Tensor& y, const Tensor& log_sums, const Tensor& dy, const AttentionInputs& dx) {
  const char* const operation = y.dtype() == DType::kF16 ? "attention backward, f16" : "attention backward, bf16";
  if (!is_taken(context_, operation, heads, y, {&x.q, &x.k, &x.v, &y, &log_sums, &dy, &dx.q, &dx.k, &dx.v}))
    return false;
  with_half(y.dtype(), [&]<class T>(T) {
    const auto problem = problem_of<T>(x, heads, options);
    const std::array<T*, 3> to = {dx.q.rows<T>(), dx.k.rows<T>(), dx.v.rows<T>()};
    check_cuda(
        soft_cuda::submit(native(context_.stream), [problem, y = y.data<T>(), sums = log_sums.f32(), dy = dy.data<T>(),
                                                    to] { differentiate(problem, y, sums, dy, to); }),
        "attention backward");
  });
  return true;
}

}  // namespace lockstep::nn::cuda
