// In place of nn/ops/cuda/cudnn.cpp, because cuDNN's graphs need a GPU: convolutions and attention in plain loops, in
// f32. Where Machine::fused_attention does not say so, it has no kernel for attention. Arrays that are misaligned are
// refused, as the real one does (Note [Alignment for cuDNN]).
#include "nn/ops/cuda/cudnn.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "tests/soft_cuda/streams.h"

namespace lockstep::nn::cuda {
namespace {

using What = ConvProblem::What;

constexpr std::size_t kWorkspace = 256;  // that all plans want, and fill with garbage

void refuse_misaligned(const char* what, std::span<void* const> places, void* workspace) {
  const auto lies_at = [](const void* place, std::uintptr_t multiple) {
    return reinterpret_cast<std::uintptr_t>(place) % multiple == 0;
  };
  if (workspace == nullptr || !lies_at(workspace, kWorkspace))
    throw CudaError(fmt::format("{} failed in software: CUDNN_STATUS_BAD_PARAM_NULL_POINTER", what), "");
  if (!std::ranges::all_of(places, [&](const void* place) { return lies_at(place, 16); }))
    throw CudaError(fmt::format("{} failed in software: CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER", what), "");
}

template <class T>
T float_as(float value) {
  if constexpr (std::is_same_v<T, float>)
    return value;
  else
    return T::from_float(value);
}
float as_float(float value) { return value; }
template <class Half>
float as_float(Half value) {
  return value.to_float();
}

template <class F>
void with_type(DType dtype, F&& run) {
  if (dtype == DType::kF32)
    run(0.0f);
  else if (dtype == DType::kF16)
    run(Float16{});
  else
    run(BFloat16{});
}

template <class T>
std::vector<float> floats_of(const void* data, const Shape& shape) {
  std::vector<float> values(static_cast<std::size_t>(shape.count()));
  std::transform(static_cast<const T*>(data), static_cast<const T*>(data) + values.size(), values.begin(),
                 [](T value) { return as_float(value); });
  return values;
}

// Calls visit(x's pixel, the place in a filter, y's pixel) for each of these that a convolution puts together, those of
// one pixel of y together.
template <class Visit>
void for_each_tap(const ConvProblem& p, const Visit& visit) {
  for (std::int64_t n = 0; n < p.y[0]; ++n)
    for (std::int64_t i = 0; i < p.y[1]; ++i)
      for (std::int64_t j = 0; j < p.y[2]; ++j)
        for (std::int64_t a = 0; a < p.w[1]; ++a)
          for (std::int64_t b = 0; b < p.w[2]; ++b) {
            const std::int64_t h = i * p.window.stride[0] + a - p.window.padding[0];
            const std::int64_t v = j * p.window.stride[1] + b - p.window.padding[1];
            if (h < 0 || h >= p.x[1] || v < 0 || v >= p.x[2]) continue;
            visit((n * p.x[1] + h) * p.x[2] + v, a * p.w[2] + b, (n * p.y[1] + i) * p.y[2] + j);
          }
}

void add_multiple(float factor, const float* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

template <class T>
void convolve(const ConvProblem& p, const ConvArrays& arrays) {
  // A group's channels of x and, below, its filters; a filter sees those of x from first_of() on.
  const std::int64_t channels = p.w[3], filters = p.y[3], taps = p.w[1] * p.w[2], groups = groups_of(p.x, p.w);
  const std::int64_t of_group = filters / groups;
  const auto first_of = [&](std::int64_t pixel, std::int64_t o) { return pixel * p.x[3] + o / of_group * channels; };
  const auto store = [](const std::vector<float>& sums, void* to) {
    std::ranges::transform(sums, static_cast<T*>(to), float_as<T>);
  };
  const auto zeros = [](const Shape& shape) { return std::vector<float>(static_cast<std::size_t>(shape.count())); };
  switch (p.what) {
    case What::kForward: {
      const auto xs = floats_of<T>(arrays.x, p.x), ws = floats_of<T>(arrays.w, p.w);
      auto turned = zeros(p.w), sums = zeros(p.y);  // one filter's value after another's
      for (std::int64_t i = 0; i < p.w.count(); ++i)
        turned[static_cast<std::size_t>(i % (taps * channels) * filters + i / (taps * channels))] =
            ws[static_cast<std::size_t>(i)];
      for_each_tap(p, [&](std::int64_t from, std::int64_t tap, std::int64_t to) {
        for (std::int64_t o = 0; o < filters; o += of_group)
          for (std::int64_t c = 0; c < channels; ++c)
            add_multiple(xs.data()[first_of(from, o) + c], turned.data() + (tap * channels + c) * filters + o, of_group,
                         sums.data() + to * filters + o);
      });
      for (std::size_t i = 0; i < sums.size(); ++i) {
        if (p.bias) sums[i] += as_float(static_cast<const T*>(arrays.b)[i % static_cast<std::size_t>(filters)]);
        if (p.relu && sums[i] < 0) sums[i] = 0.0f;
      }
      return store(sums, arrays.y);
    }
    case What::kBackwardInput: {
      const auto dys = floats_of<T>(arrays.y, p.y), ws = floats_of<T>(arrays.w, p.w);
      auto sums = zeros(p.x);
      for_each_tap(p, [&](std::int64_t to, std::int64_t tap, std::int64_t from) {
        for (std::int64_t o = 0; o < filters; ++o)
          add_multiple(dys.data()[from * filters + o], ws.data() + (o * taps + tap) * channels, channels,
                       sums.data() + first_of(to, o));
      });
      return store(sums, arrays.x);
    }
    case What::kBackwardWeight: {
      const auto xs = floats_of<T>(arrays.x, p.x), dys = floats_of<T>(arrays.y, p.y);
      auto sums = zeros(p.w);
      for_each_tap(p, [&](std::int64_t xi, std::int64_t tap, std::int64_t yi) {
        for (std::int64_t o = 0; o < filters; ++o)
          add_multiple(dys.data()[yi * filters + o], xs.data() + first_of(xi, o), channels,
                       sums.data() + (o * taps + tap) * channels);
      });
      return store(sums, arrays.w);
    }
  }
}

// Queries, keys and values of one head, or what is made of them.
template <class T>
struct HeadOf {
  const T* data;
  std::int64_t stride, width;

  float at(std::int64_t row, std::int64_t column) const { return data[row * stride + column].to_float(); }
};
template <class T>
struct Heads {
  Heads(const AttentionProblem& p, const AttentionArrays& arrays)
      : samples(p.samples),
        tokens(p.tokens),
        heads(p.heads),
        width(p.width),
        parts{static_cast<const T*>(arrays.q), static_cast<const T*>(arrays.k), static_cast<const T*>(arrays.v)},
        pitch(p.pitch),
        causal(p.causal),
        lengths(p.padded ? static_cast<const std::int32_t*>(arrays.lengths) : nullptr) {}

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
void for_heads(const Heads<T>& problem, F&& run) {
  for (std::int64_t sample = 0; sample < problem.samples; ++sample)
    for (std::int64_t head = 0; head < problem.heads; ++head) run(sample, head);
}

template <class T>
void attend(const Heads<T>& problem, T* y, float* log_sums) {
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
void differentiate(const Heads<T>& problem, const T* y, const float* log_sums, const T* dy,
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

}  // namespace

struct ConvPlan::Chosen {
  ConvProblem problem;
};

ConvPlan::ConvPlan(std::unique_ptr<Chosen> chosen) : chosen_(std::move(chosen)) {}
ConvPlan::ConvPlan(ConvPlan&&) noexcept = default;
ConvPlan& ConvPlan::operator=(ConvPlan&&) noexcept = default;
ConvPlan::~ConvPlan() = default;

std::size_t ConvPlan::workspace_bytes() const { return kWorkspace; }

std::string ConvPlan::describe() const { return "in software"; }

void ConvPlan::run(const Cudnn& cudnn, const ConvArrays& arrays, void* workspace) const {
  const std::array<void*, 4> places = {arrays.x, arrays.w, arrays.y, arrays.b};
  refuse_misaligned("a convolution", places, workspace);
  check_cuda(soft_cuda::submit(static_cast<cudaStream_t>(cudnn.handle_),
                               [=, problem = chosen_->problem] {
                                 std::memset(workspace, 0xee, kWorkspace);
                                 with_type(problem.dtype, [&]<class T>(T) { convolve<T>(problem, arrays); });
                               }),
             "a convolution");
}

struct ConvKernelList::Listed {
  ConvProblem problem;
  std::vector<std::string> names;
};

ConvKernelList::ConvKernelList(std::unique_ptr<Listed> listed) : listed_(std::move(listed)) {}
ConvKernelList::ConvKernelList(ConvKernelList&&) noexcept = default;
ConvKernelList& ConvKernelList::operator=(ConvKernelList&&) noexcept = default;
ConvKernelList::~ConvKernelList() = default;

const std::vector<std::string>& ConvKernelList::names() const { return listed_->names; }

ConvPlan ConvKernelList::build(std::size_t) { return ConvPlan(std::make_unique<ConvPlan::Chosen>(listed_->problem)); }

struct AttentionPlan::Chosen {
  AttentionProblem problem;
};

AttentionPlan::AttentionPlan(std::unique_ptr<Chosen> chosen) : chosen_(std::move(chosen)) {}
AttentionPlan::AttentionPlan(AttentionPlan&&) noexcept = default;
AttentionPlan& AttentionPlan::operator=(AttentionPlan&&) noexcept = default;
AttentionPlan::~AttentionPlan() = default;

std::size_t AttentionPlan::workspace_bytes() const { return kWorkspace; }

std::string AttentionPlan::describe() const { return "in software"; }

bool AttentionPlan::is_noted_nondeterministic() const { return false; }

void AttentionPlan::run(const Cudnn& cudnn, const AttentionArrays& arrays, void* workspace) {
  void* const places[] = {arrays.q,  arrays.k,  arrays.v,  arrays.y,  arrays.log_sums,
                          arrays.dy, arrays.dq, arrays.dk, arrays.dv, arrays.lengths};
  refuse_misaligned("attention", places, workspace);
  soft_cuda::count_fused_attention();
  const auto work = [=, problem = chosen_->problem]<class T>(T) {
    std::memset(workspace, 0xee, kWorkspace);
    const Heads<T> heads(problem, arrays);
    auto* const sums = static_cast<float*>(arrays.log_sums);
    if (problem.what == AttentionProblem::What::kForward)
      attend(heads, static_cast<T*>(arrays.y), sums);
    else
      differentiate(heads, static_cast<const T*>(arrays.y), sums, static_cast<const T*>(arrays.dy),
                    {static_cast<T*>(arrays.dq), static_cast<T*>(arrays.dk), static_cast<T*>(arrays.dv)});
  };
  check_cuda(soft_cuda::submit(
                 static_cast<cudaStream_t>(cudnn.handle_),
                 [work, dtype = chosen_->problem.dtype] { dtype == DType::kF16 ? work(Float16{}) : work(BFloat16{}); }),
             "attention");
}

Cudnn::Cudnn(StreamView stream) : handle_(native(stream)) {}
Cudnn::~Cudnn() = default;

ConvPlan Cudnn::plan(const ConvProblem& problem) const { return ConvPlan(std::make_unique<ConvPlan::Chosen>(problem)); }

// One, so that nothing is timed.
ConvKernelList Cudnn::kernels(const ConvProblem& problem, int) const {
  return ConvKernelList(std::make_unique<ConvKernelList::Listed>(problem, std::vector{plan(problem).describe()}));
}

AttentionPlan Cudnn::plan(const AttentionProblem& problem) const {
  if (!soft_cuda::machine().fused_attention)
    throw CudaError(fmt::format("{} has no kernel in software", problem.describe()), "");
  return AttentionPlan(std::make_unique<AttentionPlan::Chosen>(problem));
}

std::string Cudnn::version() { return "in software"; }

}  // namespace lockstep::nn::cuda
