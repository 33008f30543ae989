#include "nn/ops/cuda/weight_gradients.h"

#include <array>
#include <string>
#include <utility>

#include "base/error.h"
#include "nn/ops/cuda/odd_sizes.h"
#include "nn/ops/cuda/plan_choices.h"

namespace lockstep::nn::cuda {
namespace {

constexpr std::int64_t kWide = 64, kLeastWide = 1024;
constexpr std::array kNames = {"in one product", "in two products", "padded"};  // by Way

// Of rows of dw from `first` on.
ProductArrays arrays_of(const Tensor& x, const Tensor& dy, const Tensor& dw, std::int64_t first = 0) {
  const auto* const from = static_cast<const std::byte*>(dy.raw_rows());
  return {x.raw(), from + static_cast<std::size_t>(first) * size_of(dy.dtype()), dw.f32() + first * x.size(1)};
}

std::int64_t wide_rows(const Tensor& dy) { return dy.size(1) / kWide * kWide; }

}  // namespace

std::vector<WeightGradients::Way> WeightGradients::ways_for(const Tensor& dy) {
  const std::int64_t out = dy.size(1);
  if (out % kEven == 0) return {Way::kWhole};
  if (out >= kLeastWide) return {Way::kInParts, Way::kWhole};
  if (may_be_padded(dy)) return {Way::kWhole, Way::kPadded};
  return {Way::kWhole};
}

void WeightGradients::compute(const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw) {
  const std::int64_t option = (accumulate ? 1 : 0) + (may_be_padded(dy) ? 2 : 0);
  const PlanKey key =
      product_key(x.size(0), x.size(1), dy.size(1), dy.pitch(), x.dtype(), option, arrays_of(x, dy, dw));
  run(find(plans_, key, [&] { return choose(x, dy, accumulate, dw); }), x, dy, accumulate, dw);
}

void WeightGradients::run(Plan& plan, const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw) {
  if (plan.way != Way::kPadded) {
    products_.run(plan.product, arrays_of(x, dy, dw));
    if (plan.rest) products_.run(*plan.rest, arrays_of(x, dy, dw, wide_rows(dy)));
    return;
  }
  clear_between_rows(context_, dy);
  const Tensor padded = Tensor::empty(context_.allocator, {dy.pitch(), x.size(1)});
  products_.run(plan.product, arrays_of(x, dy, padded));
  const Tensor made = padded.slice(0, dw.size(0));
  if (accumulate)
    pointwise_.add_to(made, 1.0f, dw);
  else
    pointwise_.copy(made, dw);
}

WeightGradients::Plan WeightGradients::make(const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw,
                                            Way way) {
  const std::int64_t out = dy.size(1), wide = wide_rows(dy);
  const ProductOptions options = {.input = x.dtype(), .accumulate = accumulate && way != Way::kPadded};
  const auto rows = [&](std::int64_t first, std::int64_t end, const Tensor& to) {
    return products_.make(backward_weight_product(x.size(0), x.size(1), end - first, dy.pitch()), options,
                          arrays_of(x, dy, to, first));
  };
  if (way == Way::kInParts) return {way, rows(0, wide, dw), rows(wide, out, dw)};
  if (way == Way::kWhole) return {way, rows(0, out, dw)};
  return {way, rows(0, dy.pitch(), Tensor::empty(context_.allocator, {dy.pitch(), x.size(1)}))};
}

WeightGradients::Plan WeightGradients::choose(const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw) {
  const std::vector<Way> ways = ways_for(dy);
  if (ways.size() == 1 || context_.choices == nullptr) return make(x, dy, accumulate, dw, ways.front());
  // Their own kernels are chosen before: choices are made one at a time.
  std::vector<Plan> plans;
  std::vector<std::string> names;
  for (const Way way : ways) {
    plans.push_back(make(x, dy, accumulate, dw, way));
    names.emplace_back(kNames[static_cast<std::size_t>(way)]);
  }
  const Product product = backward_weight_product(x.size(0), x.size(1), dy.size(1), dy.pitch());
  const ProductOptions options = {.input = x.dtype(), .accumulate = accumulate, .tf32 = context_.tf32};
  const std::string problem =
      fmt::format("cuBLASLt {}: odd {}", cublaslt().version(), describe(product, options, arrays_of(x, dy, dw)));
  const std::size_t best = choose_kernel(context_, problem, names, [&](std::size_t i) {
    const Tensor sums = Tensor::empty(context_.allocator, dw.shape());
    return seconds_of(context_, [&] { run(plans[i], x, dy, accumulate, sums); });
  });
  return std::move(plans[best]);
}

}  // namespace lockstep::nn::cuda
