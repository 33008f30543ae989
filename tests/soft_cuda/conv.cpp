// In place of nn/ops/cuda/conv.cpp, because cuDNN's graphs cannot be looked into: plain loops in f32.
#include "lockstep/nn/ops/conv.h"

#include <utility>
#include <vector>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "nn/ops/cuda/kernels.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::nn::cuda {
namespace {

// A tensor's place, type and shape, without a share in its memory: what work in a stream may keep.
struct Array {
  explicit Array(const Tensor& tensor) : data(tensor.raw()), dtype(tensor.dtype()), shape(tensor.shape()) {}

  float get(std::int64_t i) const {
    if (dtype == DType::kF16) return static_cast<const Float16*>(data)[i].to_float();
    return dtype == DType::kF32 ? static_cast<const float*>(data)[i] : static_cast<const BFloat16*>(data)[i].to_float();
  }
  void set(std::int64_t i, float value) const {
    if (dtype == DType::kF32)
      static_cast<float*>(data)[i] = value;
    else if (dtype == DType::kF16)
      static_cast<Float16*>(data)[i] = Float16::from_float(value);
    else
      static_cast<BFloat16*>(data)[i] = BFloat16::from_float(value);
  }
  std::vector<float> all() const {
    std::vector<float> values(static_cast<std::size_t>(shape.count()));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = get(static_cast<std::int64_t>(i));
    return values;
  }

  void* data;
  DType dtype;
  Shape shape;
};

// Calls visit(x's pixel, the place in a filter, y's pixel) for each of these that a convolution puts together, those of
// one pixel of y together.
template <class Visit>
void for_each_tap(const Shape& xs, const Shape& ws, const Shape& ys, const Window& window, const Visit& visit) {
  for (std::int64_t n = 0; n < ys[0]; ++n)
    for (std::int64_t i = 0; i < ys[1]; ++i)
      for (std::int64_t j = 0; j < ys[2]; ++j)
        for (std::int64_t a = 0; a < ws[1]; ++a)
          for (std::int64_t b = 0; b < ws[2]; ++b) {
            const std::int64_t h = i * window.stride[0] + a - window.padding[0];
            const std::int64_t v = j * window.stride[1] + b - window.padding[1];
            if (h < 0 || h >= xs[1] || v < 0 || v >= xs[2]) continue;
            visit((n * xs[1] + h) * xs[2] + v, a * ws[2] + b, (n * ys[1] + i) * ys[2] + j);
          }
}

void add_multiple(float factor, const float* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

class SoftConv final : public ConvKernels {
 public:
  SoftConv(Context& context, PointwiseKernels& pointwise, LinearKernels& linear)
      : context_(context), pointwise_(pointwise), linear_(linear) {}

  void forward(const Tensor& x_tensor, const Tensor& w_tensor, std::uint64_t, const Tensor& b_tensor,
               const Window& window, Epilogue epilogue, const Tensor& y_tensor) override {
    check({&x_tensor, &w_tensor, &y_tensor}, b_tensor);
    if (y_tensor.count() == 0) return;
    submit([=, x = Array(x_tensor), w = Array(w_tensor), b = Array(b_tensor), y = Array(y_tensor)] {
      const std::int64_t channels = x.shape[3], filters = y.shape[3], taps = w.shape[1] * w.shape[2];
      const std::vector<float> xs = x.all();
      std::vector<float> ws(static_cast<std::size_t>(w.shape.count()));  // one filter's value after another's
      for (std::int64_t i = 0; i < w.shape.count(); ++i)
        ws[static_cast<std::size_t>(i % (taps * channels) * filters + i / (taps * channels))] = w.get(i);
      std::vector<float> sums(static_cast<std::size_t>(y.shape.count()));
      for_each_tap(x.shape, w.shape, y.shape, window, [&](std::int64_t from, std::int64_t tap, std::int64_t to) {
        for (std::int64_t c = 0; c < channels; ++c)
          add_multiple(xs.data()[from * channels + c], ws.data() + (tap * channels + c) * filters, filters,
                       sums.data() + to * filters);
      });
      for (std::int64_t i = 0; i < y.shape.count(); ++i) {
        float value = sums[static_cast<std::size_t>(i)];
        if (b.data != nullptr) value += b.get(i % y.shape[3]);
        y.set(i, epilogue == Epilogue::kRelu && value < 0 ? 0.0f : value);
      }
    });
  }

  void backward_input(const Tensor& dy_tensor, const Tensor& w_tensor, std::uint64_t, const Window& window,
                      const Tensor& dx_tensor) override {
    check({&dy_tensor, &w_tensor, &dx_tensor}, Tensor());
    if (dx_tensor.count() == 0) return;
    submit([=, dx = Array(dx_tensor), w = Array(w_tensor), dy = Array(dy_tensor)] {
      const std::int64_t channels = dx.shape[3], filters = dy.shape[3], taps = w.shape[1] * w.shape[2];
      const std::vector<float> dys = dy.all(), ws = w.all();
      std::vector<float> sums(static_cast<std::size_t>(dx.shape.count()));
      for_each_tap(dx.shape, w.shape, dy.shape, window, [&](std::int64_t to, std::int64_t tap, std::int64_t from) {
        for (std::int64_t o = 0; o < filters; ++o)
          add_multiple(dys.data()[from * filters + o], ws.data() + (o * taps + tap) * channels, channels,
                       sums.data() + to * channels);
      });
      for (std::int64_t i = 0; i < dx.shape.count(); ++i) dx.set(i, sums[static_cast<std::size_t>(i)]);
    });
  }

  void backward_weight(const Tensor& x_tensor, const Tensor& dy_tensor, const Window& window, bool accumulate_w,
                       const Tensor& dw_tensor, bool accumulate_b, const Tensor& db) override {
    check({&x_tensor, &dy_tensor}, Tensor());
    LOCKSTEP_ASSERT(dw_tensor.dtype() == DType::kF32, "a gradient of {}", name_of(dw_tensor.dtype()));
    if (dy_tensor.count() == 0) {
      if (!accumulate_w) pointwise_.fill(dw_tensor, 0.0f);
    } else {
      submit([=, x = Array(x_tensor), dw = Array(dw_tensor), dy = Array(dy_tensor)] {
        const std::int64_t channels = x.shape[3], filters = dy.shape[3], taps = dw.shape[1] * dw.shape[2];
        const std::vector<float> xs = x.all(), dys = dy.all();
        std::vector<float> sums(static_cast<std::size_t>(dw.shape.count()));
        for_each_tap(x.shape, dw.shape, dy.shape, window, [&](std::int64_t xi, std::int64_t tap, std::int64_t yi) {
          for (std::int64_t o = 0; o < filters; ++o)
            add_multiple(dys.data()[yi * filters + o], xs.data() + xi * channels, channels,
                         sums.data() + (o * taps + tap) * channels);
        });
        for (std::int64_t i = 0; i < dw.shape.count(); ++i)
          dw.set(i, sums[static_cast<std::size_t>(i)] + (accumulate_w ? dw.get(i) : 0.0f));
      });
    }
    if (!db.defined()) return;
    const std::int64_t channels = dy_tensor.size(3);
    linear_.backward_bias(dy_tensor.reshaped({dy_tensor.count() / channels, channels}), accumulate_b, db);
  }

 private:
  static void check(std::initializer_list<const Tensor*> tensors, const Tensor& bias) {
    const DType dtype = (*tensors.begin())->dtype();
    for (const Tensor* const tensor : tensors)
      LOCKSTEP_ASSERT(tensor->dtype() == dtype, "{} and {}", name_of(dtype), name_of(tensor->dtype()));
    LOCKSTEP_ASSERT(!bias.defined() || bias.dtype() == dtype, "{} and {}", name_of(dtype), name_of(bias.dtype()));
  }

  template <class Work>
  void submit(Work work) {
    check_cuda(soft_cuda::submit(native(context_.stream), std::move(work)), "a convolution");
  }

  Context& context_;
  PointwiseKernels& pointwise_;
  LinearKernels& linear_;
};

}  // namespace

std::unique_ptr<ConvKernels> make_conv_kernels(Context& context, PointwiseKernels& pointwise, LinearKernels& linear) {
  return std::make_unique<SoftConv>(context, pointwise, linear);
}

}  // namespace lockstep::nn::cuda
