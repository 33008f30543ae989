#include "nn/ops/cuda/products.h"

#include <string>
#include <utility>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "nn/ops/cuda/attention_tiled.h"
#include "nn/ops/cuda/odd_sizes.h"
#include "nn/ops/cuda/plan_choices.h"

namespace lockstep::nn::cuda {
namespace {

// What NVIDIA recommends for Hopper; older kernels need less.
constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

}  // namespace

PlanKey product_key(std::int64_t n, std::int64_t in, std::int64_t out, std::int64_t pitch, DType dtype,
                    std::int64_t option, const ProductArrays& arrays) {
  return {n,
          in,
          out,
          pitch,
          static_cast<std::int64_t>(dtype),
          option,
          arrays.bias != nullptr ? 1 : 0,
          alignment_of(arrays.a),
          alignment_of(arrays.b),
          alignment_of(arrays.d),
          alignment_of(arrays.bias),
          alignment_of(arrays.saved_preactivation)};
}

Products::Products(Context& context) : context_(context), handle_(make_cublaslt_handle()) {
  ++context_.primitives_created;
}

std::optional<ProductPlan> Products::try_to_make(const Product& product, ProductOptions options,
                                                 const ProductArrays& arrays) {
  options.tf32 = context_.tf32 && options.input == DType::kF32;
  auto plan = ProductPlan::make(handle_.get(), product, options, arrays, kWorkspaceBytes,
                                context_.choices != nullptr ? PlanChoices::kCandidates : 1);
  if (!plan) return plan;
  ++context_.primitives_created;
  if (context_.choices != nullptr) choose(*plan, product, options, arrays);
  take_workspace(*plan);
  return plan;
}

ProductPlan Products::make(const Product& product, const ProductOptions& options, const ProductArrays& arrays) {
  auto plan = try_to_make(product, options, arrays);
  if (!plan)
    throw CudaError(
        fmt::format("cuBLASLt has no kernel for a {} by {} result of {} products of {}", product.d.rows,
                    product.d.columns, product.turn_a ? product.a.rows : product.a.columns, name_of(options.input)),
        "compute in f32, or use another size");
  return std::move(*plan);
}

void Products::run(ProductPlan& plan, const ProductArrays& arrays) {
  plan.run(handle_.get(), arrays, plan.workspace_bytes() > 0 ? workspace_.raw() : nullptr, context_.stream);
}

void Products::take_workspace(const ProductPlan& plan) {
  if (plan.workspace_bytes() > 0 && !workspace_.defined())
    workspace_ = Tensor::empty(context_.allocator, {static_cast<std::int64_t>(kWorkspaceBytes)}, DType::kU8);
}

void Products::choose(ProductPlan& plan, const Product& product, const ProductOptions& options,
                      const ProductArrays& arrays) {
  const auto names = plan.kernels();
  const std::string problem = fmt::format("cuBLASLt {}: {}", cublaslt().version(), describe(product, options, arrays));
  Tensor sums;
  const auto seconds = [&](std::size_t kernel) {
    plan.take(kernel);
    take_workspace(plan);
    ProductArrays timed = arrays;
    if (options.accumulate) {
      if (!sums.defined())
        sums = Tensor::empty(context_.allocator, {product.batch, product.d.columns, product.d.pitch}, options.output);
      timed.d = sums.raw();
    }
    return seconds_of(context_, [&] { run(plan, timed); });
  };
  plan.take(choose_kernel(context_, problem, names, seconds));
}

bool Products::is_faster(const char* what, const Product& product, const ProductOptions& options,
                         const ProductArrays& arrays, ProductPlan& fused, FunctionRef<void()> apart) {
  if (context_.choices == nullptr) return true;
  apart();
  const std::string problem =
      fmt::format("cuBLASLt {}: {} of {}", cublaslt().version(), what, describe(product, options, arrays));
  return choose_kernel(context_, problem, {"fused", "apart"}, [&](std::size_t way) {
           return seconds_of(context_, [&] { way == 0 ? run(fused, arrays) : apart(); });
         }) == 0;
}

Tensor widened(Context& context, const Tensor& rows) {
  const std::int64_t count = rows.size(0), in = rows.size(1), wide = even_inputs(in);
  const Tensor whole = Tensor::empty(context.allocator, {count + rows.zero_rows(), wide}, rows.dtype());
  check_cuda(cudaMemsetAsync(whole.raw(), 0, whole.bytes(), native(context.stream)), "clearing rows");
  const Tensor made = whole.slice(0, count);
  copy_rows(context, rows.dtype(), 1, count, in, {rows.raw(), 0, in}, {made.raw(), 0, wide});
  return made.with_zero_rows(rows.zero_rows());
}

void narrow_into(Context& context, const Tensor& rows, const Tensor& to) {
  copy_rows(context, rows.dtype(), 1, to.size(0), to.size(1), {rows.raw(), 0, rows.size(1)}, {to.raw(), 0, to.size(1)});
}

}  // namespace lockstep::nn::cuda
