#include "lockstep/nn/ops/linear.h"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "nn/ops/cuda/epilogue_probes.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/memory.h"
#include "nn/ops/cuda/odd_sizes.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/own_kernels.h"
#include "nn/ops/cuda/products.h"
#include "nn/ops/cuda/weight_gradients.h"
#include "nn/ops/elementwise_rules.h"

namespace lockstep::nn::cuda {
namespace {

/// Of a product whose rows are `rows`, or their gradient, with a weight like `w` (out, in).
double flops_of(const Tensor& rows, const Tensor& w) { return 2.0 * static_cast<double>(rows.count() * w.size(1)); }

class CudaLinear final : public LinearKernels {
 public:
  CudaLinear(Context& context, PointwiseKernels& pointwise)
      : context_(context),
        pointwise_(pointwise),
        products_(context),
        weight_gradients_(context, products_, pointwise) {}

  void forward(const Tensor& x, const Tensor& w, const Tensor& b, Epilogue epilogue, const Tensor& y) override {
    const OpProfileScope scope(context_, "product", {&x, &w, &b, &y}, flops_of(y, w));
    if (y.count() == 0) return;
    check_types({&x, &w, &y}, b.defined() ? &b : nullptr);
    LOCKSTEP_ASSERT(y.is_contiguous() || epilogue == Epilogue::kNone, "an activation in rows that lie apart");
    if (copies_inputs(x.size(0), x.size(1), w.size(0)))
      return forward(widened(context_, x), widened(context_, w), b, epilogue, y);
    const ProductArrays arrays = {w.raw(), x.raw(), y.raw_rows(), b.raw(), nullptr};
    const std::int64_t n = x.size(0), in = x.size(1), out = padded_out(y, w, b), pitch = y.pitch();
    Forward& held = find(forwards_, product_key(n, in, out, pitch, x.dtype(), option_of(epilogue), arrays), [&] {
      return make_forward(forward_product(n, in, out, pitch), x.dtype(), epilogue, y, arrays);
    });
    products_.run(held.plan, arrays);
    if (held.bias_apart) add_to_rows(context_, b, y);
    if (held.apart == Epilogue::kRelu) pointwise_.unary(UnaryOp::kRelu, y, y);
    if (held.apart == Epilogue::kGelu) pointwise_.unary(UnaryOp::kGeluTanh, y, y);
  }

  void backward_input(const Tensor& dy, const Tensor& w, const Tensor& dx) override {
    const OpProfileScope scope(context_, "product's backward to its input", {&dy, &w, &dx}, flops_of(dy, w));
    if (dx.count() == 0) return;
    check_types({&dy, &w, &dx});
    if (copies_inputs(dx.size(0), dx.size(1), w.size(0))) {
      const Tensor wide = Tensor::empty(context_.allocator, {dx.size(0), even_inputs(dx.size(1))}, dx.dtype());
      backward_input(dy, widened(context_, w), wide);
      return narrow_into(context_, wide, dx);
    }
    const ProductArrays arrays = {w.raw(), dy.raw_rows(), dx.raw(), nullptr, nullptr};
    const std::int64_t n = dy.size(0), in = w.size(1), out = padded_out(dy, w), pitch = dy.pitch();
    if (out > dy.size(1)) clear_between_rows(context_, dy);
    products_.run(find(backward_inputs_, product_key(n, in, out, pitch, dy.dtype(), 0, arrays),
                       [&] {
                         return products_.make(backward_input_product(n, in, out, pitch),
                                               {.input = dy.dtype(), .output = dx.dtype()}, arrays);
                       }),
                  arrays);
  }

  void backward_weight(const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw) override {
    const OpProfileScope scope(context_, "product's backward to its weight", {&x, &dy, &dw}, flops_of(dy, dw));
    if (dy.count() == 0) {
      if (!accumulate) pointwise_.fill(dw, 0.0f);
      return;
    }
    check_types({&x, &dy});
    if (!copies_inputs(x.size(0), x.size(1), dy.size(1))) return weight_gradients_.compute(x, dy, accumulate, dw);
    const Tensor wide = Tensor::empty(context_.allocator, {dw.size(0), even_inputs(dw.size(1))});
    weight_gradients_.compute(widened(context_, x), dy, false, wide);
    if (!accumulate) return narrow_into(context_, wide, dw);
    const Tensor added = Tensor::empty(context_.allocator, dw.shape());
    narrow_into(context_, wide, added);
    pointwise_.add_to(added, 1.0f, dw);
  }

  // cuBLASLt counts a batch in 31 bits.
  void multiply(const Tensor& a, bool a_turned, const Tensor& b, bool b_turned, const Tensor& c) override {
    const std::int64_t n = c.size(0), rows = c.size(1), columns = c.size(2), depth = a.size(a_turned ? 1 : 2);
    const OpProfileScope scope(context_, "product of variables", {&a, &b, &c},
                               2.0 * static_cast<double>(c.count()) * static_cast<double>(depth));
    if (c.count() == 0) return;
    if (depth == 0) return pointwise_.fill(c, 0.0f);
    check_types({&a, &b, &c});
    LOCKSTEP_ASSERT(n <= std::numeric_limits<std::int32_t>::max(), "{} products", n);
    const ProductArrays arrays = {b.raw(), a.raw(), c.raw(), nullptr, nullptr};
    const PlanKey key = {n,
                         rows,
                         depth,
                         columns,
                         static_cast<std::int64_t>(a.dtype()),
                         (a_turned ? 2 : 0) + (b_turned ? 1 : 0),
                         alignment_of(arrays.a),
                         alignment_of(arrays.b),
                         alignment_of(arrays.d)};
    products_.run(find(batches_, key,
                       [&] {
                         return products_.make(batch_product(n, rows, depth, columns, a_turned, b_turned),
                                               {.input = a.dtype(), .output = c.dtype()}, arrays);
                       }),
                  arrays);
  }

  SavedPreactivation saved_preactivation_of(Epilogue epilogue, std::int64_t samples, std::int64_t out,
                                            DType dtype) const override {
    if (epilogue == Epilogue::kRelu) return {{samples, mask_pitch_of(out) / 8}, DType::kU8};
    if (epilogue == Epilogue::kGelu && out % kEven == 0) return {{samples, out}, dtype};
    return {};
  }

  void forward_saved_preactivation(const Tensor& x, const Tensor& w, const Tensor& b, Epilogue epilogue,
                                   const Tensor& y, const Tensor& saved_preactivation) override {
    const OpProfileScope scope(context_, "product", {&x, &w, &b, &y, &saved_preactivation}, flops_of(y, w));
    if (y.count() == 0) return;
    check_types({&x, &w, &y}, b.defined() ? &b : nullptr);
    if (copies_inputs(x.size(0), x.size(1), w.size(0)))
      return forward_saved_preactivation(widened(context_, x), widened(context_, w), b, epilogue, y,
                                         saved_preactivation);
    const ProductArrays arrays = {w.raw(), x.raw(), y.raw(), b.raw(), saved_preactivation.raw()};
    auto& plan = find(saved_preactivation_forwards_,
                      product_key(x.size(0), x.size(1), w.size(0), w.size(0), x.dtype(), option_of(epilogue), arrays),
                      [&] { return make_saved_preactivation_forward(x, w, epilogue, y, arrays); });
    if (plan) return products_.run(*plan, arrays);
    if (epilogue == Epilogue::kGelu) {
      forward(x, w, b, Epilogue::kNone, saved_preactivation);
      return pointwise_.unary(UnaryOp::kGeluTanh, saved_preactivation, y);
    }
    forward(x, w, b, Epilogue::kNone, y);
    relu_with_mask(context_, y, saved_preactivation);
  }

  void backward_input_through(const Tensor& dy, const Tensor& w, Epilogue epilogue, const Tensor& saved_preactivation,
                              const Tensor& dx) override {
    const OpProfileScope scope(context_, "product's backward to its input", {&dy, &w, &saved_preactivation, &dx},
                               flops_of(dy, w));
    if (dx.count() == 0) return;
    check_types({&dy, &w, &dx});
    if (copies_inputs(dx.size(0), dx.size(1), w.size(0)))
      return go_back_apart(dy, w, epilogue, saved_preactivation, dx);
    const ProductArrays arrays = {w.raw(), dy.raw_rows(), dx.raw(), nullptr, saved_preactivation.raw()};
    const std::int64_t n = dy.size(0), in = w.size(1), out = padded_out(dy, w), pitch = dy.pitch();
    if (out > dy.size(1)) clear_between_rows(context_, dy);
    auto& plan = find(through_backward_inputs_, product_key(n, in, out, pitch, dy.dtype(), option_of(epilogue), arrays),
                      [&] { return make_through(dy, w, epilogue, saved_preactivation, dx, out, arrays); });
    if (plan) return products_.run(*plan, arrays);
    go_back_apart(dy, w, epilogue, saved_preactivation, dx);
  }

  // Note [Bias gradients]
  // cuBLASLt can sum up dy while it multiplies it for the weight's gradient (CUBLASLT_EPILOGUE_BGRADB), which saves
  // reading it once more. That cannot add to what db holds. Its kernels for that are few: where kernels are timed (Note
  // [Autotuning]), so is the product without, with a kernel of ours beside it.
  void backward_weight_and_bias(const Tensor& x, const Tensor& dy, bool accumulate_w, const Tensor& dw,
                                bool accumulate_b, const Tensor& db) override {
    const OpProfileScope scope(context_, "product's backward to its weight", {&x, &dy, &dw, &db}, flops_of(dy, dw));
    if (!accumulate_b && !accumulate_w && dy.count() > 0 && !weight_gradients_.splits(dy) &&
        !copies_inputs(x.size(0), x.size(1), dy.size(1))) {
      check_types({&x, &dy});
      const ProductArrays arrays = {x.raw(), dy.raw_rows(), dw.f32(), db.f32(), nullptr};
      const std::int64_t n = x.size(0), in = x.size(1), out = dy.size(1), pitch = dy.pitch();
      auto& plan = find(backward_weights_and_biases_, product_key(n, in, out, pitch, x.dtype(), 0, arrays),
                        [&] { return make_weight_and_bias(x, dy, dw, db, arrays); });
      if (plan) return products_.run(*plan, arrays);
    }
    backward_bias(dy, accumulate_b, db);
    backward_weight(x, dy, accumulate_w, dw);
  }

  void backward_bias(const Tensor& dy, bool accumulate, const Tensor& db) override {
    const OpProfileScope scope(context_, "gradient of a bias", {&dy, &db});
    sum_columns(context_, dy, accumulate, db);
  }

 private:
  struct Forward {
    ProductPlan plan;
    bool bias_apart = false;  // in a kernel of ours after it
    Epilogue apart = Epilogue::kNone;
  };

  static std::int64_t option_of(Epilogue epilogue) { return static_cast<std::int64_t>(epilogue); }

  static void check_types(std::initializer_list<const Tensor*> tensors, const Tensor* bias = nullptr) {
    const DType dtype = (*tensors.begin())->dtype();
    for (const Tensor* const tensor : tensors)
      LOCKSTEP_ASSERT(tensor->dtype() == dtype, "{} and {}", name_of(dtype), name_of(tensor->dtype()));
    LOCKSTEP_ASSERT(bias == nullptr || bias->dtype() == dtype, "{} and {}", name_of(dtype), name_of(bias->dtype()));
  }

  Forward make_forward(const Product& product, DType dtype, Epilogue epilogue, const Tensor& y,
                       const ProductArrays& arrays) {
    ProductOptions options = {.input = dtype, .output = dtype};
    const bool bias = arrays.bias != nullptr;
    if (epilogue == Epilogue::kRelu && bias) {  // see Note [Probing ReLU]; a ReLU alone could not be tried
      options.epilogue = CUBLASLT_EPILOGUE_RELU_BIAS;
      if (auto plan = products_.try_to_make(product, options, arrays); plan && keeps_non_finite(*plan, y, arrays))
        return {std::move(*plan)};
    }
    if (epilogue == Epilogue::kGelu && bias && agrees(epilogue, dtype)) {
      options.epilogue = CUBLASLT_EPILOGUE_GELU_BIAS;
      if (auto plan = products_.try_to_make(product, options, arrays)) return {std::move(*plan)};
    }
    if (bias) {
      options.epilogue = CUBLASLT_EPILOGUE_BIAS;
      if (auto plan = products_.try_to_make(product, options, arrays)) return {std::move(*plan), false, epilogue};
    }
    options.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return {products_.make(product, options, arrays), bias, epilogue};
  }

  // Nothing where the library cannot, or where both by themselves are faster.
  std::optional<ProductPlan> make_weight_and_bias(const Tensor& x, const Tensor& dy, const Tensor& dw, const Tensor& db,
                                                  const ProductArrays& arrays) {
    const Product product = backward_weight_product(x.size(0), x.size(1), dy.size(1), dy.pitch());
    const ProductOptions options = {.input = x.dtype(), .epilogue = CUBLASLT_EPILOGUE_BGRADB};
    auto plan = products_.try_to_make(product, options, arrays);
    if (!plan) return plan;
    const auto apart = [&] {
      backward_bias(dy, false, db);
      backward_weight(x, dy, false, dw);
    };
    return products_.is_faster("bias gradient", product, options, arrays, *plan, apart) ? std::move(plan)
                                                                                        : std::nullopt;
  }

  // backward_input_through() in two kernels.
  void go_back_apart(const Tensor& dy, const Tensor& w, Epilogue epilogue, const Tensor& saved_preactivation,
                     const Tensor& dx) {
    backward_input(dy, w, dx);
    if (epilogue == Epilogue::kGelu)
      pointwise_.unary_backward(UnaryOp::kGeluTanh, saved_preactivation, {}, dx, dx);
    else
      apply_mask(context_, saved_preactivation, dx);
  }

  // Nothing where the library cannot, makes something else of it, or is slower than both kernels.
  std::optional<ProductPlan> make_through(const Tensor& dy, const Tensor& w, Epilogue epilogue,
                                          const Tensor& saved_preactivation, const Tensor& dx, std::int64_t out,
                                          const ProductArrays& arrays) {
    if (!agrees(epilogue, dy.dtype())) return std::nullopt;
    const Product product = backward_input_product(dy.size(0), w.size(1), out, dy.pitch());
    const ProductOptions options = through_options(epilogue, dy.dtype(), w.size(1));
    auto plan = products_.try_to_make(product, options, arrays);
    if (!plan) return plan;
    const auto apart = [&] { go_back_apart(dy, w, epilogue, saved_preactivation, dx); };
    return products_.is_faster("activation", product, options, arrays, *plan, apart) ? std::move(plan) : std::nullopt;
  }

  // Nothing where the library cannot, or makes something else of it.
  std::optional<ProductPlan> make_saved_preactivation_forward(const Tensor& x, const Tensor& w, Epilogue epilogue,
                                                              const Tensor& y, const ProductArrays& arrays) {
    if (arrays.bias == nullptr || !agrees(epilogue, x.dtype())) return std::nullopt;
    auto plan = products_.try_to_make(forward_product(x.size(0), x.size(1), w.size(0), w.size(0)),
                                      saved_preactivation_options(epilogue, x.dtype(), w.size(0)), arrays);
    if (epilogue == Epilogue::kGelu) return plan;
    return plan && keeps_non_finite(*plan, y, arrays) ? std::move(plan) : std::nullopt;
  }

  static ProductOptions saved_preactivation_options(Epilogue epilogue, DType dtype, std::int64_t out) {
    const bool gelu = epilogue == Epilogue::kGelu;
    return {.input = dtype,
            .output = dtype,
            .epilogue = gelu ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_RELU_AUX_BIAS,
            .saved_preactivation_pitch = gelu ? out : mask_pitch_of(out)};
  }

  static ProductOptions through_options(Epilogue epilogue, DType dtype, std::int64_t in) {
    const bool gelu = epilogue == Epilogue::kGelu;
    return {.input = dtype,
            .output = dtype,
            .epilogue = gelu ? CUBLASLT_EPILOGUE_DGELU : CUBLASLT_EPILOGUE_DRELU,
            .saved_preactivation_pitch = gelu ? in : mask_pitch_of(in)};
  }

  bool agrees(Epilogue epilogue, DType dtype) {
    auto& known = (epilogue == Epilogue::kGelu ? gelu_agrees_ : masks_agree_)[dtype];
    if (!known) {
      const bool gelu = epilogue == Epilogue::kGelu;
      known = gelu ? try_gelu(dtype) : try_masks(dtype);
      const std::string operation =
          fmt::format("product with {}, {}", gelu ? "GELU" : "ReLU, whose mask is kept", name_of(dtype));
      if (*known)
        context_.engines.use(operation, "cuBLASLt");
      else
        context_.engines.fall_back(operation, "cuBLASLt and kernels of lockstep after it",
                                   gelu ? "cuBLASLt has no GELU that is exact enough" : "cuBLASLt has other masks");
    }
    return *known;
  }

  Tensor filled(const Shape& shape, DType dtype, float value) {
    Tensor made = Tensor::empty(context_.allocator, shape, dtype);
    pointwise_.fill(made, value);
    return made;
  }

  std::vector<float> values_of(const Tensor& tensor) {
    const Tensor f32 = Tensor::empty(context_.allocator, {tensor.count()});
    pointwise_.cast(tensor, f32);
    std::vector<float> values(static_cast<std::size_t>(tensor.count()));
    copy_to_host(context_, f32, std::as_writable_bytes(std::span(values)));
    return values;
  }

  // See Note [Probing GELU]. Tried once, on biases after a product that is 0, and on gradients of 1. Waits for the GPU.
  bool try_gelu(DType dtype) {
    constexpr std::int64_t kSamples = 8, kIn = 16, kOut = kGeluProbes;
    const Tensor x = filled({kSamples, kIn}, dtype, 0.0f), w = filled({kOut, kIn}, dtype, 0.0f);
    const Tensor b = upload_as(context_, gelu_probes(), dtype), y = filled({kSamples, kOut}, dtype, 0.0f);
    const Tensor saved_preactivation = filled({kSamples, kOut}, dtype, 0.0f);
    const ProductArrays arrays = {w.raw(), x.raw(), y.raw(), b.raw(), saved_preactivation.raw()};
    auto forward = products_.try_to_make(forward_product(kSamples, kIn, kOut, kOut),
                                         saved_preactivation_options(Epilogue::kGelu, dtype, kOut), arrays);
    if (!forward) return false;
    products_.run(*forward, arrays);
    const auto probes = values_of(b);  // as they are rounded
    if (!gelu_results_agree(probes, values_of(saved_preactivation), values_of(y), dtype, context_.tf32)) return false;

    const Tensor dy = filled({kSamples, kIn}, dtype, 0.25f), v = filled({kIn, kOut}, dtype, 0.25f);  // products of 1
    const ProductArrays back = {v.raw(), dy.raw(), y.raw(), nullptr, saved_preactivation.raw()};
    auto backward = products_.try_to_make(backward_input_product(kSamples, kOut, kIn, kIn),
                                          through_options(Epilogue::kGelu, dtype, kOut), back);
    if (!backward) return true;  // forward alone
    products_.run(*backward, back);
    return gelu_gradients_agree(probes, values_of(y), dtype, context_.tf32);
  }

  // Whether the library's masks are ours: see Note [Masks]. Tried once, on a bias whose signs are mixed, after a
  // product that is 0. Waits for the GPU.
  bool try_masks(DType dtype) {
    constexpr std::int64_t kSamples = 8, kIn = 16, kOut = 256;
    // x, w and the bias in one piece: the product's operands are 0, the signs have no period below the whole.
    constexpr std::int64_t kOfX = kSamples * kIn, kOfW = kOut * kIn;
    std::vector<float> values(kOfX + kOfW + kOut);
    for (std::size_t c = 0; c < kOut; ++c)
      values[kOfX + kOfW + c] = ((std::popcount(c) | std::popcount(c * c)) & 1) != 0 ? 1.0f : -1.0f;
    const Tensor operands = upload_as(context_, values, dtype);
    const Tensor y = Tensor::empty(context_.allocator, {kSamples, kOut}, dtype);
    const Tensor masks = Tensor::empty(context_.allocator, {2 * kSamples, mask_pitch_of(kOut) / 8}, DType::kU8);
    const Tensor theirs = masks.slice(0, kSamples), ours = masks.slice(kSamples, 2 * kSamples);
    const ProductArrays arrays = {operands.slice(kOfX, kOfX + kOfW).raw(), operands.slice(0, kOfX).raw(), y.raw(),
                                  operands.slice(kOfX + kOfW, operands.count()).raw(), theirs.raw()};
    auto plan = products_.try_to_make(forward_product(kSamples, kIn, kOut, kOut),
                                      saved_preactivation_options(Epilogue::kRelu, dtype, kOut), arrays);
    if (!plan) return false;
    products_.run(*plan, arrays);
    relu_with_mask(context_, y, ours);
    std::vector<std::byte> bytes(masks.bytes());
    copy_to_host(context_, masks, bytes);
    return std::equal(bytes.begin(), bytes.begin() + std::ssize(bytes) / 2, bytes.begin() + std::ssize(bytes) / 2);
  }

  bool keeps_non_finite(ProductPlan& plan, const Tensor& y, ProductArrays arrays) {
    return relu_keeps_non_finite(context_, y.size(1), y, [&](const Tensor& bias) {
      arrays.bias = bias.raw();
      products_.run(plan, arrays);
    });
  }

  Context& context_;
  PointwiseKernels& pointwise_;
  Products products_;
  WeightGradients weight_gradients_;
  PlanMap<Forward> forwards_;
  PlanMap<ProductPlan> backward_inputs_, batches_;
  PlanMap<std::optional<ProductPlan>> saved_preactivation_forwards_, through_backward_inputs_,
      backward_weights_and_biases_;                                 // nothing: in kernels of ours
  std::map<DType, std::optional<bool>> masks_agree_, gelu_agrees_;  // by the activations' type
};

}  // namespace

std::unique_ptr<LinearKernels> make_linear_kernels(Context& context, PointwiseKernels& pointwise) {
  return std::make_unique<CudaLinear>(context, pointwise);
}

}  // namespace lockstep::nn::cuda
