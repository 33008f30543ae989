// Gradients of the weights of fully connected layers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/nn/ops/pointwise.h"
#include "nn/ops/cuda/products.h"

namespace lockstep::nn::cuda {

/// dw (O, I) = dyᵀ (O, N) · x (N, I). Where O is no multiple of 8 (Note [Odd sizes]) there are other ways than one
/// product: two, one up to the last multiple of 64 and a small one, where O is large; and one of as many rows as dy's
/// pitch, with zeros, into other memory, from which dw is copied or added to. The fastest is timed where kernels are.
class WeightGradients {
 public:
  WeightGradients(Context& context, Products& products, PointwiseKernels& pointwise)
      : context_(context), products_(products), pointwise_(pointwise) {}

  /// x and dy of one type, dw f32; dy has rows. Added to what dw holds when `accumulate`.
  void compute(const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw);
  /// Whether one product is the wrong guess for such a dy.
  static bool splits(const Tensor& dy) { return ways_for(dy).front() != Way::kWhole; }

 private:
  enum class Way : std::uint8_t { kWhole, kInParts, kPadded };
  struct Plan {
    Way way;
    ProductPlan product;
    std::optional<ProductPlan> rest = std::nullopt;  // of kInParts: of the last rows
  };

  /// The best guess first.
  static std::vector<Way> ways_for(const Tensor& dy);
  Plan make(const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw, Way way);
  Plan choose(const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw);
  void run(Plan& plan, const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw);

  Context& context_;
  Products& products_;
  PointwiseKernels& pointwise_;
  PlanMap<Plan> plans_;
};

}  // namespace lockstep::nn::cuda
