#include "nn/ops/norm.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "nn/ops/cpu/column_moments.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/onednn_versions.h"

namespace lockstep::nn::cpu {
namespace {

using dnnl::memory;
using Tag = memory::format_tag;
using Flags = dnnl::normalization_flags;

class CpuNorm final : public NormKernels {
 public:
  explicit CpuNorm(OneDnn& onednn) : onednn_(onednn) {}

  void forward_train(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y,
                     const Tensor& mean, const Tensor& variance) override {
    auto& norm = primitive(kTrain, x, eps);
    norm.bind(DNNL_ARG_MEAN, mean);
    norm.bind(DNNL_ARG_VARIANCE, variance);
    run_forward(norm, x, gamma, beta, y);
  }

  void forward_infer(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                     const Tensor& variance, double eps, const Tensor& y) override {
    if (x.count() == 0) return;
    auto& norm = primitive(kInfer, x, eps);
    norm.bind(DNNL_ARG_MEAN, mean);
    norm.bind(DNNL_ARG_VARIANCE, variance);
    run_forward(norm, x, gamma, beta, y);
  }

  void backward(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean, const Tensor& variance,
                bool given_statistics, double eps, const Tensor& dx, const Tensor& dgamma,
                const Tensor& dbeta) override {
    if (x.count() == 0) {
      std::fill_n(dgamma.f32(), dgamma.count(), 0.0f);
      std::fill_n(dbeta.f32(), dbeta.count(), 0.0f);
      return;
    }
    auto& norm = primitive(given_statistics ? kBackwardInfer : kBackwardTrain, x, eps);
    norm.bind(DNNL_ARG_SRC, x);
    norm.bind(DNNL_ARG_MEAN, mean);
    norm.bind(DNNL_ARG_VARIANCE, variance);
    norm.bind(DNNL_ARG_DIFF_DST, dy);
    norm.bind(DNNL_ARG_SCALE, gamma);
    if (kNormBackwardTakesShift) norm.bind(DNNL_ARG_SHIFT, gamma);  // any (C) array will do
    norm.bind(DNNL_ARG_DIFF_SRC, dx);
    norm.bind(DNNL_ARG_DIFF_SCALE, dgamma);
    norm.bind(DNNL_ARG_DIFF_SHIFT, dbeta);
    norm.run();
  }

  void update_running(const Tensor& mean, const Tensor& variance, std::int64_t rows, double momentum,
                      const Tensor& running_mean, const Tensor& running_variance) override {
    move_running(mean, variance, static_cast<double>(rows), momentum, running_mean, running_variance);
  }

  void moments(const Tensor& x, const Tensor& part) override {
    const std::int64_t columns = part.count() / 2, rows = columns == 0 ? 0 : x.count() / columns;
    column_moments(x.f32(), rows, columns, part.f32(), part.f32() + columns);
    part.f32()[2 * columns] = static_cast<float>(rows);
  }

  void join_moments(const Tensor& parts, double momentum, const Tensor& mean, const Tensor& variance,
                    const Tensor& rows, const Tensor& running_mean, const Tensor& running_variance) override {
    const std::int64_t columns = mean.count(), stride = parts.size(1);
    double all = 0;
    for (std::int64_t r = 0; r < parts.size(0); ++r) all += double{parts.f32()[r * stride + 2 * columns]};
    for (std::int64_t c = 0; c < columns; ++c) {
      double count = 0, middle = 0, squares = 0;
      for (std::int64_t r = 0; r < parts.size(0); ++r) {
        const float* const part = parts.f32() + r * stride;
        const double more = double{part[2 * columns]};
        if (more == 0) continue;
        const double apart = double{part[c]} - middle, share = more / (count + more);
        middle += apart * share;
        squares += double{part[columns + c]} + apart * apart * count * share;
        count += more;
      }
      mean.f32()[c] = static_cast<float>(middle);
      variance.f32()[c] = all > 0 ? static_cast<float>(squares / all) : 0.0f;
    }
    rows.f32()[0] = static_cast<float>(all);
    if (all > 0) move_running(mean, variance, all, momentum, running_mean, running_variance);
  }

  void backward_sums(const Tensor& x, const Tensor& dy, const Tensor& mean, const Tensor& variance, double eps,
                     const Tensor& sums) override {
    const std::int64_t columns = mean.count(), rows = columns == 0 ? 0 : x.count() / columns;
    column_products(x.f32(), dy.f32(), mean.f32(), rows, columns, sums.f32(), sums.f32() + columns);
    for (std::int64_t c = 0; c < columns; ++c) sums.f32()[c] *= one_of_deviation(variance, c, eps);
  }

  void backward_input(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                      const Tensor& variance, const Tensor& rows, const Tensor& sums, double eps,
                      const Tensor& dx) override {
    if (x.count() == 0) return;
    const std::int64_t columns = mean.count();
    const auto n = static_cast<std::size_t>(columns);
    per_column_.resize(3 * n);
    float *const scale = per_column_.data(), *const offset = scale + n, *const slope = offset + n;
    const float one_of_rows = 1.0f / rows.f32()[0];
    for (std::int64_t c = 0; c < columns; ++c) {
      const float inverse = one_of_deviation(variance, c, eps);
      scale[c] = gamma.f32()[c] * inverse;
      slope[c] = sums.f32()[c] * one_of_rows * inverse;
      offset[c] = sums.f32()[columns + c] * one_of_rows;
    }
    spread_columns(x.f32(), dy.f32(), mean.f32(), scale, offset, slope, x.count() / columns, columns, dx.f32());
  }

 private:
  static float one_of_deviation(const Tensor& variance, std::int64_t c, double eps) {
    return 1.0f / std::sqrt(variance.f32()[c] + static_cast<float>(eps));
  }

  static void move_running(const Tensor& mean, const Tensor& variance, double rows, double momentum,
                           const Tensor& running_mean, const Tensor& running_variance) {
    const auto m = static_cast<float>(momentum), keep = static_cast<float>(1.0 - momentum);
    const float unbias = rows > 1 ? static_cast<float>(rows / (rows - 1.0)) : 1.0f;
    for (std::int64_t c = 0; c < mean.count(); ++c) {
      running_mean.f32()[c] = keep * running_mean.f32()[c] + m * mean.f32()[c];
      running_variance.f32()[c] = keep * running_variance.f32()[c] + m * unbias * variance.f32()[c];
    }
  }

  enum Which : std::int64_t { kTrain, kInfer, kBackwardTrain, kBackwardInfer };

  void run_forward(HeldPrimitive& norm, const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& y) {
    norm.bind(DNNL_ARG_SRC, x);
    norm.bind(DNNL_ARG_SCALE, gamma);
    norm.bind(DNNL_ARG_SHIFT, beta);
    norm.bind(DNNL_ARG_DST, y);
    norm.run();
  }

  HeldPrimitive& primitive(Which which, const Tensor& x, double eps) {
    const std::int64_t channels = x.size(x.shape().size() - 1), rows = x.count() / channels;
    PrimitiveKey key{};
    key[0] = which;
    key[1] = rows;
    key[2] = channels;
    key[3] = std::bit_cast<std::int64_t>(eps);
    auto& held = primitives_[key];
    if (!held) held = make(which, rows, channels, static_cast<float>(eps));
    return held;
  }

  HeldPrimitive make(Which which, std::int64_t rows, std::int64_t channels, float eps) {
    // Rows stand where oneDNN expects images: one image of `rows` by 1 pixels.
    const auto x = f32_desc({1, channels, rows, 1}, Tag::nhwc);
    const auto c = f32_desc({channels}, Tag::x);
    const bool given_statistics = which == kInfer || which == kBackwardInfer;
    auto flags = Flags::use_scale | Flags::use_shift;
    if (given_statistics) flags = flags | Flags::use_global_stats;
    const auto forward_kind = which == kInfer ? dnnl::prop_kind::forward_inference : dnnl::prop_kind::forward_training;
    const auto forward = describe_norm(onednn_.engine(), user_scratchpad(), forward_kind, x, eps, flags);
    if (which == kTrain || which == kInfer)
      return {onednn_,
              dnnl::batch_normalization_forward(forward),
              {{DNNL_ARG_SRC, x},
               {DNNL_ARG_MEAN, c},
               {DNNL_ARG_VARIANCE, c},
               {DNNL_ARG_SCALE, c},
               {DNNL_ARG_SHIFT, c},
               {DNNL_ARG_DST, x}},
              forward.scratchpad_desc()};
    const auto backward = describe_norm_backward(onednn_.engine(), user_scratchpad(), forward, x, eps, flags);
    return {onednn_,
            dnnl::batch_normalization_backward(backward),
            {{DNNL_ARG_SRC, x},
             {DNNL_ARG_MEAN, c},
             {DNNL_ARG_VARIANCE, c},
             {DNNL_ARG_DIFF_DST, x},
             {DNNL_ARG_SCALE, c},
             {DNNL_ARG_SHIFT, kNormBackwardTakesShift ? c : memory::desc()},
             {DNNL_ARG_DIFF_SRC, x},
             {DNNL_ARG_DIFF_SCALE, c},
             {DNNL_ARG_DIFF_SHIFT, c}},
            backward.scratchpad_desc()};
  }

  OneDnn& onednn_;
  PrimitiveMap<HeldPrimitive> primitives_;
  std::vector<float> per_column_;  // of one backward_input()
};

}  // namespace

std::unique_ptr<NormKernels> make_norm_kernels(OneDnn& onednn) { return std::make_unique<CpuNorm>(onednn); }

}  // namespace lockstep::nn::cpu
