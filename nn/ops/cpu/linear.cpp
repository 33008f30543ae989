#include "lockstep/nn/ops/linear.h"

#include "base/cpu.h"
#include "nn/ops/cpu/column_moments.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/onednn_versions.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cpu/products.h"
#include "nn/ops/elementwise_rules.h"

namespace lockstep::nn::cpu {
namespace {

using dnnl::memory;
using Tag = memory::format_tag;

// Returns the scale; a row of zeros has 1.
LOCKSTEP_SIMD_CLONES
float quantize_row(const float* w, std::int64_t in, std::int8_t* to) {
  const float largest = lane_max(in, [&](std::int64_t i) { return w[i] < 0.0f ? -w[i] : w[i]; });
  const float scale = largest > 0.0f ? largest / 127.0f : 1.0f;
  for (std::int64_t i = 0; i < in; ++i) to[i] = static_cast<std::int8_t>(__builtin_rintf(w[i] / scale));
  return scale;
}

LOCKSTEP_SIMD_CLONES
void widen_row(const std::int8_t* from, float scale, std::int64_t in, float* to) {
  for (std::int64_t i = 0; i < in; ++i) to[i] = static_cast<float>(from[i]) * scale;
}

// Where x is bf16, y may be f32, and then b is, too: what recurrent layers ask for.
class CpuLinear final : public LinearKernels {
 public:
  CpuLinear(OneDnn& onednn, CachingAllocator& allocator, PointwiseKernels& pointwise)
      : onednn_(onednn), allocator_(allocator), pointwise_(pointwise) {}

  void forward(const Tensor& x, const Tensor& w, const Tensor& b, Epilogue epilogue, const Tensor& y) override {
    const std::int64_t n = x.size(0), in = x.size(1), out = w.size(0);
    if (n == 0) return;
    if (n == 1) return forward_row(x, w, b, epilogue, y);
    if (multiplies_rows(x, y)) {
      multiply_rows(x.f32(), w.f32(), false, b.defined() ? b.f32() : nullptr, in, n, out, y.f32(), allocator_);
      return activate(epilogue, y);
    }
    auto& matmul = product(kForward, x, y, {n, in, out, b.defined()}, [&] {
      return make(desc_of(x.dtype(), {n, in}, Tag::ab), desc_of(w.dtype(), {in, out}, Tag::ba), b, false,
                  desc_of(y.dtype(), {n, out}, Tag::ab));
    });
    matmul.bind(DNNL_ARG_SRC, x);
    matmul.bind(DNNL_ARG_WEIGHTS, w);
    if (b.defined()) matmul.bind(DNNL_ARG_BIAS, b);
    matmul.bind(DNNL_ARG_DST, y);
    matmul.run();
    activate(epilogue, y);
  }

  void backward_input(const Tensor& dy, const Tensor& w, const Tensor& dx) override {
    const std::int64_t n = dy.size(0), in = w.size(1), out = w.size(0);
    if (n == 0) return;
    if (multiplies_rows(dy, dx))
      return multiply_rows(dy.f32(), w.f32(), true, nullptr, out, n, in, dx.f32(), allocator_);
    auto& matmul = product(kBackwardInput, dy, dx, {n, in, out, 0}, [&] {
      return make(desc_of(dy.dtype(), {n, out}, Tag::ab), desc_of(w.dtype(), {out, in}, Tag::ab), {}, false,
                  desc_of(dx.dtype(), {n, in}, Tag::ab));
    });
    matmul.bind(DNNL_ARG_SRC, dy);
    matmul.bind(DNNL_ARG_WEIGHTS, w);
    matmul.bind(DNNL_ARG_DST, dx);
    matmul.run();
  }

  void backward_weight(const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw) override {
    const std::int64_t n = x.size(0), in = x.size(1), out = dy.size(1);
    if (n == 0) {
      if (!accumulate) pointwise_.fill(dw, 0.0f);
      return;
    }
    if (x.dtype() == DType::kF32 && computes_with_avx2())  // see Note [Products with AVX2]
      return multiply_columns(dy.f32(), x.f32(), n, out, in, accumulate, dw.f32(), allocator_);
    auto& matmul = product(kBackwardWeight, dy, dw, {n, in, out, accumulate}, [&] {
      return make(desc_of(dy.dtype(), {out, n}, Tag::ba), desc_of(x.dtype(), {n, in}, Tag::ab), {}, accumulate,
                  f32_desc({out, in}, Tag::ab));
    });
    matmul.bind(DNNL_ARG_SRC, dy);
    matmul.bind(DNNL_ARG_WEIGHTS, x);
    matmul.bind(DNNL_ARG_DST, dw);
    matmul.run();
  }

  void backward_bias(const Tensor& dy, bool accumulate, const Tensor& db) override {
    with_type(dy.dtype(),
              [&](auto type) { sum_rows(dy.data<decltype(type)>(), dy.size(0), dy.size(1), accumulate, db.f32()); });
  }

  void multiply(const Tensor& a, bool a_turned, const Tensor& b, bool b_turned, const Tensor& c) override {
    if (c.count() == 0) return;
    const std::int64_t n = c.size(0), rows = c.size(1), columns = c.size(2), depth = a.size(a_turned ? 1 : 2);
    if (depth == 0) return pointwise_.fill(c, 0.0f);
    PrimitiveKey key{kBatch, static_cast<std::int64_t>(a.dtype()), n, rows, depth, columns, a_turned, b_turned};
    auto& matmul = products_[key];
    if (!matmul) {
      const Tag whole = Tag::abc, turned = Tag::acb;
      matmul = make(desc_of(a.dtype(), {n, rows, depth}, a_turned ? turned : whole),
                    desc_of(b.dtype(), {n, depth, columns}, b_turned ? turned : whole), {}, false,
                    desc_of(c.dtype(), {n, rows, columns}, whole));
    }
    matmul.bind(DNNL_ARG_SRC, a);
    matmul.bind(DNNL_ARG_WEIGHTS, b);
    matmul.bind(DNNL_ARG_DST, c);
    matmul.run();
  }

  bool multiplies_int8_rows() const override { return true; }

  void to_int8_rows(const Tensor& w, const Int8Rows& rows) override {
    const std::int64_t in = w.size(1);
    auto* const to = reinterpret_cast<std::int8_t*>(rows.values.data<std::uint8_t>());
    parallel_for(w.size(0), 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t o = begin; o < end; ++o) rows.scales.f32()[o] = quantize_row(w.f32() + o * in, in, to + o * in);
    });
  }

  // One row is as fast as memory is. For several, weights become f32 again, some rows at a time, for oneDNN.
  void forward_int8_rows(const Tensor& x, const Int8Rows& w, const Tensor& b, Epilogue epilogue,
                         const Tensor& y) override {
    const std::int64_t n = x.size(0), in = x.size(1), out = w.values.size(0);
    if (n == 0) return;
    const auto* const values = reinterpret_cast<const std::int8_t*>(w.values.data<std::uint8_t>());
    if (n == 1) {
      multiply_int8_row(x.f32(), values, w.scales.f32(), b.defined() ? b.f32() : nullptr, in, out, y.f32());
      return activate(epilogue, y);
    }
    const Tensor wide_w = Tensor::empty(allocator_, w.values.shape());
    parallel_for(out, 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t o = begin; o < end; ++o)
        widen_row(values + o * in, w.scales.f32()[o], in, wide_w.f32() + o * in);
    });
    forward(x, wide_w, b, epilogue, y);
  }

 private:
  // See Note [Products with AVX2].
  static bool multiplies_rows(const Tensor& from, const Tensor& to) {
    return from.size(0) >= kFewestRows && from.dtype() == DType::kF32 && to.dtype() == DType::kF32 &&
           computes_with_avx2();
  }

  void forward_row(const Tensor& x, const Tensor& w, const Tensor& b, Epilogue epilogue, const Tensor& y) {
    const auto multiply = [&](auto of_x, auto of_y) {
      using X = decltype(of_x);
      using Y = decltype(of_y);
      multiply_row<X, Y>(x.data<X>(), w.data<X>(), b.defined() ? b.data<Y>() : nullptr, w.size(1), w.size(0),
                         y.data<Y>());
    };
    if (x.dtype() == DType::kF32)
      multiply(float(), float());
    else
      with_type(y.dtype(), [&](auto of_y) { multiply(BFloat16(), of_y); });
    activate(epilogue, y);
  }

  void activate(Epilogue epilogue, const Tensor& y) {
    if (epilogue == Epilogue::kRelu) pointwise_.unary(UnaryOp::kRelu, y, y);  // see Note [ReLU apart]
    if (epilogue == Epilogue::kGelu) pointwise_.unary(UnaryOp::kGeluTanh, y, y);
  }

  enum Which : std::int64_t { kForward, kBackwardInput, kBackwardWeight, kBatch };

  template <class Make>
  HeldPrimitive& product(Which which, const Tensor& from, const Tensor& to, std::array<std::int64_t, 4> shape,
                         const Make& make_it) {
    PrimitiveKey key{which, static_cast<std::int64_t>(from.dtype()), static_cast<std::int64_t>(to.dtype())};
    std::copy(shape.begin(), shape.end(), key.begin() + 3);
    auto& held = products_[key];
    if (!held) held = make_it();
    return held;
  }

  HeldPrimitive make(const memory::desc& a, const memory::desc& b, const Tensor& add, bool accumulate,
                     const memory::desc& c) {
    const bool bias = add.defined();
    auto attributes = user_scratchpad();
    dnnl::post_ops post;
    if (accumulate) post.append_sum(1.0f);
    attributes.set_post_ops(post);
    const auto bias_desc = desc_of(add.dtype(), {1, dims_of(c)[1]}, Tag::ab);
    const auto described = bias ? describe<dnnl::matmul>(onednn_.engine(), attributes, a, b, bias_desc, c)
                                : describe<dnnl::matmul>(onednn_.engine(), attributes, a, b, c);
    const dnnl::matmul primitive(described);
    if (bias)
      return {onednn_,
              primitive,
              {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_BIAS, bias_desc}, {DNNL_ARG_DST, c}},
              described.scratchpad_desc()};
    return {
        onednn_, primitive, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}}, described.scratchpad_desc()};
  }

  OneDnn& onednn_;
  CachingAllocator& allocator_;
  PointwiseKernels& pointwise_;
  PrimitiveMap<HeldPrimitive> products_;
};

}  // namespace

std::unique_ptr<LinearKernels> make_linear_kernels(OneDnn& onednn, CachingAllocator& allocator,
                                                   PointwiseKernels& pointwise) {
  return std::make_unique<CpuLinear>(onednn, allocator, pointwise);
}

}  // namespace lockstep::nn::cpu
