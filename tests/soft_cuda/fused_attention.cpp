// In place of nn/ops/cuda/fused_attention.cpp, because cuDNN's graphs need a GPU. Where Machine::fused_attention says
// so it is a cuDNN in software, for what the real one takes; else it has no kernel for anything, and ours do all.
#include "nn/ops/cuda/fused_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "nn/ops/cuda/backend.h"
#include "tests/soft_cuda/streams.h"

namespace lockstep::nn::cuda {
namespace {

// Queries, keys and values of one head, or what is made of them.
struct HeadOf {
  const BFloat16* data;
  std::int64_t stride, width;

  float at(std::int64_t row, std::int64_t column) const { return data[row * stride + column].to_float(); }
};
struct Problem {
  std::int64_t samples, tokens, heads, width;
  const BFloat16* qkv;

  std::int64_t row() const { return 3 * heads * width; }
  // 0: queries, 1: keys, 2: values
  HeadOf part(std::int64_t which, std::int64_t sample, std::int64_t head) const {
    return {qkv + sample * tokens * row() + (which * heads + head) * width, row(), width};
  }
  HeadOf of_result(const BFloat16* y, std::int64_t sample, std::int64_t head) const {
    return {y + (sample * tokens * heads + head) * width, heads * width, width};
  }
  float score(const HeadOf& q, const HeadOf& k, std::int64_t query, std::int64_t key) const {
    float sum = 0.0f;
    for (std::int64_t c = 0; c < width; ++c) sum += q.at(query, c) * k.at(key, c);
    return sum / std::sqrt(static_cast<float>(width));
  }
};

template <class F>
void for_heads(const Problem& problem, F&& run) {
  for (std::int64_t sample = 0; sample < problem.samples; ++sample)
    for (std::int64_t head = 0; head < problem.heads; ++head) run(sample, head);
}

void attend(const Problem& problem, BFloat16* y, float* log_sums) {
  for_heads(problem, [&](std::int64_t sample, std::int64_t head) {
    const HeadOf q = problem.part(0, sample, head), k = problem.part(1, sample, head);
    const HeadOf v = problem.part(2, sample, head);
    for (std::int64_t query = 0; query < problem.tokens; ++query) {
      std::vector<float> weights;
      for (std::int64_t key = 0; key <= query; ++key) weights.push_back(problem.score(q, k, query, key));
      const float largest = std::ranges::max(weights);
      float sum = 0.0f;
      for (float& weight : weights) sum += weight = std::exp(weight - largest);
      for (std::int64_t c = 0; c < problem.width; ++c) {
        float result = 0.0f;
        for (std::int64_t key = 0; key <= query; ++key)
          result += weights[static_cast<std::size_t>(key)] / sum * v.at(key, c);
        y[((sample * problem.tokens + query) * problem.heads + head) * problem.width + c] =
            BFloat16::from_float(result);
      }
      log_sums[(sample * problem.heads + head) * problem.tokens + query] = largest + std::log(sum);
    }
  });
}

void differentiate(const Problem& problem, const BFloat16* y, const float* log_sums, const BFloat16* dy,
                   BFloat16* dqkv) {
  const std::int64_t row = problem.row(), width = problem.width;
  for_heads(problem, [&](std::int64_t sample, std::int64_t head) {
    const HeadOf q = problem.part(0, sample, head), k = problem.part(1, sample, head);
    const HeadOf v = problem.part(2, sample, head);
    const HeadOf result = problem.of_result(y, sample, head), gradient = problem.of_result(dy, sample, head);
    std::vector<float> sums(static_cast<std::size_t>(problem.tokens * 3 * width));  // (tokens, 3, width)
    const auto sum = [&](std::int64_t token, std::int64_t which, std::int64_t c) -> float& {
      return sums[static_cast<std::size_t>((token * 3 + which) * width + c)];
    };
    for (std::int64_t query = 0; query < problem.tokens; ++query) {
      float mean = 0.0f;
      for (std::int64_t c = 0; c < width; ++c) mean += result.at(query, c) * gradient.at(query, c);
      for (std::int64_t key = 0; key <= query; ++key) {
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
    for (std::int64_t token = 0; token < problem.tokens; ++token)
      for (std::int64_t which = 0; which < 3; ++which)
        for (std::int64_t c = 0; c < width; ++c)
          dqkv[(sample * problem.tokens + token) * row + (which * problem.heads + head) * width + c] =
              BFloat16::from_float(sum(token, which, c));
  });
}

Problem problem_of(const Tensor& qkv, std::int64_t heads) {
  return {qkv.size(0), qkv.size(1), heads, qkv.size(2) / (3 * heads), qkv.data<BFloat16>()};
}

// As the real one asks.
bool is_taken(Context& context, const char* operation, const Tensor& qkv, std::int64_t heads,
              std::initializer_list<const Tensor*> arrays) {
  if (!soft_cuda::machine().fused_attention || qkv.dtype() != DType::kBF16) return false;
  const std::int64_t width = qkv.size(2) / (3 * heads);
  const bool lie_well = std::ranges::all_of(
      arrays, [](const Tensor* array) { return reinterpret_cast<std::uintptr_t>(array->raw()) % 16 == 0; });
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

bool FusedAttention::forward(const Tensor& qkv, std::int64_t heads, const Tensor& y, const Tensor& log_sums) {
  if (!is_taken(context_, "attention, bf16", qkv, heads, {&qkv, &y, &log_sums})) return false;
  const auto problem = problem_of(qkv, heads);
  check_cuda(soft_cuda::submit(native(context_.stream), [problem, to = y.data<BFloat16>(),
                                                         sums = log_sums.f32()] { attend(problem, to, sums); }),
             "attention");
  return true;
}

bool FusedAttention::backward(const Tensor& qkv, std::int64_t heads, const Tensor& y, const Tensor& log_sums,
                              const Tensor& dy, const Tensor& dqkv) {
  if (!is_taken(context_, "attention backward, bf16", qkv, heads, {&qkv, &y, &log_sums, &dy, &dqkv})) return false;
  const auto problem = problem_of(qkv, heads);
  check_cuda(soft_cuda::submit(native(context_.stream),
                               [problem, y = y.data<BFloat16>(), sums = log_sums.f32(), dy = dy.data<BFloat16>(),
                                to = dqkv.data<BFloat16>()] { differentiate(problem, y, sums, dy, to); }),
             "attention backward");
  return true;
}

}  // namespace lockstep::nn::cuda
