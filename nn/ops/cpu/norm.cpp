#include "nn/ops/norm.h"

#include <algorithm>
#include <bit>

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
    const auto m = static_cast<float>(momentum), keep = static_cast<float>(1.0 - momentum);
    const float unbias =
        rows > 1 ? static_cast<float>(static_cast<double>(rows) / static_cast<double>(rows - 1)) : 1.0f;
    for (std::int64_t c = 0; c < mean.count(); ++c) {
      running_mean.f32()[c] = keep * running_mean.f32()[c] + m * mean.f32()[c];
      running_variance.f32()[c] = keep * running_variance.f32()[c] + m * unbias * variance.f32()[c];
    }
  }

 private:
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
};

}  // namespace

std::unique_ptr<NormKernels> make_norm_kernels(OneDnn& onednn) { return std::make_unique<CpuNorm>(onednn); }

}  // namespace lockstep::nn::cpu
