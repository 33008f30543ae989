// Layers as nodes: products, convolutions, pooling, normalisation, operators of rows.
#include "nn/onnx/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "base/error.h"

namespace lockstep::nn::onnx {
namespace {

std::vector<std::int64_t> both_sides(const std::array<std::int64_t, 2>& padding) {
  return {padding[0], padding[1], padding[0], padding[1]};
}

Attributes attributes_of(const Window& window, std::int64_t groups = 1) {
  Attributes attributes = {{"kernel_shape", Extents(window.kernel.begin(), window.kernel.end())},
                           {"strides", Extents(window.stride.begin(), window.stride.end())},
                           {"pads", both_sides(window.padding)}};
  if (groups > 1) attributes.emplace_back("group", groups);
  return attributes;
}

class LinearNodes final : public LinearKernels, NodeMaker {
 public:
  using NodeMaker::NodeMaker;

  void forward(const Tensor& x, const Tensor& w, const Tensor& b, Epilogue epilogue, const Tensor& y) override {
    Content rows = r_.natural_content(x, 1), weight = r_.content(w);
    const auto is_last = [&](const auto& form) { return form.order.back() == rows.shape.size() - 1; };
    if (std::ranges::none_of(rows.forms, is_last)) rows = r_.content(x);
    const Content::Form from = some_form(g_, rows, /*last=*/true);
    Extents extents = g_.shape(from.id);
    extents.back() = w.size(0);
    Id made = kNone;
    if (extents.size() == 2) {
      const Id turned = weight.find({1, 0});
      std::vector<Operand> operands = {from.id, turned != kNone ? turned : in_plain_order(g_, weight)};
      if (b.defined()) operands.emplace_back(r_.value(b));
      made = g_.add("Gemm", std::move(operands), extents, {{"transB", std::int64_t{turned != kNone ? 0 : 1}}});
    } else {
      made = g_.add("MatMul", {from.id, in_order(g_, weight, {1, 0})}, extents);
      if (b.defined()) made = g_.map("Add", {made, r_.value(b)});
    }
    rows.shape[rows.shape.size() - 1] = w.size(0);
    set_like(y, rows, from, activated(made, epilogue));
  }

  void multiply(const Tensor& a, bool a_turned, const Tensor& b, bool b_turned, const Tensor& c) override {
    // Two axes of `a` and one matrix for all, or as many matrices of both.
    const bool one = b.size(0) == 1;
    Content left = r_.natural_content(a, 2), right = r_.natural_content(b, 2);
    const auto leading = [](const Content& of) { return Shape(of.shape.dims().first(of.shape.dims().size() - 2)); };
    if (!one && leading(left) != leading(right)) {
      left = r_.content(a);
      right = r_.content(b);
    }
    if (one) right = r_.content(b.reshaped({b.size(1), b.size(2)}));
    const auto turned = [](Content& of, bool turn) {
      Order order = plain_order(of.shape.size());
      if (turn) std::swap(order[order.size() - 1], order[order.size() - 2]);
      return order;
    };
    Shape shape = left.shape;
    shape[shape.size() - 2] = c.size(1);
    shape[shape.size() - 1] = c.size(2);
    const Id product =
        g_.add("MatMul", {in_order(g_, left, turned(left, a_turned)), in_order(g_, right, turned(right, b_turned))},
               extents_of(shape));
    r_.set(c, Content::plain(shape, product));
  }

  // A sum over rows, in forward passes too.
  void backward_bias(const Tensor& dy, bool accumulate, const Tensor& db) override {
    if (accumulate) r_.refuse("it adds up gradients");
    set_plain(
        db, g_.add("ReduceSum", {r_.value(dy), Numbers{{0}}}, extents_of(db.shape()), {{"keepdims", std::int64_t{0}}}));
  }

  void to_int8_rows(const Tensor&, const Int8Rows&) override { r_.refuse("it has weights of int8"); }
  void forward_int8_rows(const Tensor&, const Int8Rows&, const Tensor&, Epilogue, const Tensor&) override {
    r_.refuse("it has weights of int8");
  }
  void forward_saved_preactivation(const Tensor&, const Tensor&, const Tensor&, Epilogue, const Tensor&,
                                   const Tensor&) override {
    r_.refuse("it computes for training");
  }
};

class ConvNodes final : public ConvKernels, NodeMaker {
 public:
  using NodeMaker::NodeMaker;

  void forward(const Tensor& x, const Tensor& w, std::uint64_t, const Tensor& b, const Window& window,
               Epilogue epilogue, const Tensor& y) override {
    Attributes attributes = attributes_of(window, groups_of(x.shape(), w.shape()));
    set_image(y, activated(g_.add("Conv", operands(x, w, b), image_extents(y), std::move(attributes)), epilogue));
  }
  // Forward of the transposed convolution.
  void backward_input(const Tensor& dy, const Tensor& w, std::uint64_t, const Window& window,
                      const Tensor& dx) override {
    Attributes attributes = attributes_of(window, groups_of(dx.shape(), w.shape()));
    Extents more;
    for (int axis = 0; axis < 2; ++axis) {
      const auto a = static_cast<std::size_t>(axis);
      more.push_back(dx.size(axis + 1) -
                     ((dy.size(axis + 1) - 1) * window.stride[a] - 2 * window.padding[a] + window.kernel[a]));
    }
    attributes.emplace_back("output_padding", more);
    set_image(dx, g_.add("ConvTranspose", operands(dy, w, {}), image_extents(dx), std::move(attributes)));
  }

 private:
  std::vector<Operand> operands(const Tensor& x, const Tensor& w, const Tensor& b) {
    Content image = r_.content(x), weight = r_.content(w);
    std::vector<Operand> all = {in_order(g_, image, channels_second(4)), in_order(g_, weight, channels_second(4))};
    if (b.defined()) all.emplace_back(r_.value(b));
    return all;
  }
};

class PoolNodes final : public PoolKernels, NodeMaker {
 public:
  using NodeMaker::NodeMaker;

  void max_forward(const Tensor& x, const Window& window, Epilogue epilogue, const Tensor& y,
                   const Tensor& choices) override {
    if (choices.defined()) r_.refuse("it computes for training");
    set_image(y, activated(g_.add("MaxPool", {image(x)}, image_extents(y), attributes_of(window)), epilogue));
  }
  void average_forward(const Tensor& x, const Window& window, const Tensor& y) override {
    if (window.kernel == std::array{x.size(1), x.size(2)} && window.padding == std::array<std::int64_t, 2>{0, 0}) {
      set_image(y, g_.add("GlobalAveragePool", {image(x)}, image_extents(y)));
      return;
    }
    Attributes attributes = attributes_of(window);
    attributes.emplace_back("count_include_pad", std::int64_t{1});
    set_image(y, g_.add("AveragePool", {image(x)}, image_extents(y), std::move(attributes)));
  }
  void adaptive_average_forward(const Tensor& x, const Tensor& y) override {
    if (x.shape() == y.shape()) return r_.set(y, r_.content(x));
    Id made = image(x);
    if (x.size(1) % y.size(1) == 0 && x.size(2) % y.size(2) == 0) {
      const Extents stretch = {x.size(1) / y.size(1), x.size(2) / y.size(2)};
      made = g_.add("AveragePool", {made}, image_extents(y), {{"kernel_shape", stretch}, {"strides", stretch}});
    } else {
      // Stretches of several lengths: a product along each axis.
      made = g_.add("MatMul", {made, averages(x.size(2), y.size(2), /*turned=*/true)},
                    {x.size(0), x.size(3), x.size(1), y.size(2)});
      made = g_.add("MatMul", {averages(x.size(1), y.size(1), /*turned=*/false), made}, image_extents(y));
    }
    set_image(y, made);
  }

 private:
  Id image(const Tensor& x) {
    Content content = r_.content(x);
    return in_order(g_, content, channels_second(4));
  }
  // (out, in), or turned: what each element of the axis is the average of.
  Id averages(std::int64_t in, std::int64_t out, bool turned) {
    std::vector<float> values(static_cast<std::size_t>(in * out));
    for (std::int64_t o = 0; o < out; ++o) {
      const auto [begin, end] = adaptive_stretch(o, out, in);
      for (std::int64_t i = begin; i < end; ++i)
        values[static_cast<std::size_t>(turned ? i * out + o : o * in + i)] = 1.0f / static_cast<float>(end - begin);
    }
    const auto bytes = std::as_bytes(std::span(values));
    return g_.add_constant(Element::kF32, turned ? Extents{in, out} : Extents{out, in}, {bytes.begin(), bytes.end()});
  }
};

class NormNodes final : public NormKernels, NodeMaker {
 public:
  using NodeMaker::NodeMaker;

  void forward_infer(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                     const Tensor& variance, double eps, const Tensor& y) override {
    Content content = r_.content(x);
    const Order order = channels_second(content.shape.size());
    const Id from = in_order(g_, content, order);
    const Id made =
        g_.map("BatchNormalization", {from, r_.value(gamma), r_.value(beta), r_.value(mean), r_.value(variance)},
               {{"epsilon", static_cast<float>(eps)}});
    r_.set(y, Content(content.shape, order, made));
  }

  void forward_train(const Tensor&, const Tensor&, const Tensor&, double, const Tensor&, const Tensor&,
                     const Tensor&) override {
    refuse_training();
  }
  void forward_train_relu(const Tensor&, const Tensor&, const Tensor&, double, Epilogue, const Tensor&, const Tensor&,
                          const Tensor&, const Tensor&) override {
    refuse_training();
  }
  void update_running(const Tensor&, const Tensor&, std::int64_t, double, const Tensor&, const Tensor&) override {
    refuse_training();
  }
  void moments(const Tensor&, const Tensor&) override { refuse_training(); }
  void join_moments(const Tensor&, double, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                    const Tensor&) override {
    refuse_training();
  }

 private:
  void refuse_training() { r_.refuse("it computes the statistics of a batch"); }
};

class LayerNormNodes final : public LayerNormKernels, NodeMaker {
 public:
  using NodeMaker::NodeMaker;

  void forward(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y, const Tensor&,
               const Tensor&) override {
    Content content = r_.content(x);
    normalise(content, gamma, beta, eps, y);
  }
  void forward_added(const Tensor& x, const Tensor& residual, const Tensor& gamma, const Tensor& beta, double eps,
                     const Tensor& sum, const Tensor& y, const Tensor&, const Tensor&) override {
    Content content = r_.content(x), more = r_.content(residual.reshaped(x.shape()));
    const Content::Form from = some_form(g_, content, /*last=*/true);
    // What is broadcast is added as it is.
    const bool small = more.forms.empty() && from.order == plain_order(content.shape.size());
    Content both(content.shape, from.order,
                 g_.map("Add", {from.id, small ? more.small : in_order(g_, more, from.order)}));
    r_.set(sum, both);
    normalise(both, gamma, beta, eps, y);
  }

 private:
  void normalise(Content& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y) {
    const Content::Form from = some_form(g_, x, /*last=*/true);
    std::vector<Operand> operands = {from.id, r_.value(gamma)};
    if (beta.defined()) operands.emplace_back(r_.value(beta));
    set_like(y, x, from,
             g_.map("LayerNormalization", std::move(operands),
                    {{"axis", std::int64_t{-1}}, {"epsilon", static_cast<float>(eps)}}));
  }
};

class OperatorNodes final : public OperatorKernels, NodeMaker {
 public:
  using NodeMaker::NodeMaker;

  void forward(const Operator& op, const Tensor& x, const Tensor& y) override {
    Content content = r_.content(x);
    const Content::Form from = some_form(g_, content, /*last=*/true);
    std::visit([&](const auto& one) { make(one, content, from, y); }, op);
  }

 private:
  // (…, C) → (…)
  void set_reduced(const Tensor& y, const Content& x, Content::Form from, const char* op) {
    Extents extents = g_.shape(from.id);
    extents.pop_back();
    from.order.pop_back();  // the last axis
    std::vector<Operand> operands = {from.id};
    Attributes attributes = {{"keepdims", std::int64_t{0}}};
    if (std::string_view(op) == "ReduceSum")
      operands.emplace_back(Numbers{{-1}});
    else
      attributes.emplace_back("axes", Extents{-1});
    r_.set(y, Content(Shape(x.shape.dims().first(from.order.size())), from.order,
                      g_.add(op, std::move(operands), extents, std::move(attributes))));
  }

  void make(const Affine& op, const Content& x, const Content::Form& from, const Tensor& y) {
    Id made = from.id;
    if (op.scale != 1.0f) made = g_.map("Mul", {made, g_.scalar(op.scale)});
    if (op.shift != 0.0f) made = g_.map("Add", {made, g_.scalar(op.shift)});
    set_like(y, x, from, made);
  }
  void make(const SumLast&, const Content& x, const Content::Form& from, const Tensor& y) {
    set_reduced(y, x, from, "ReduceSum");
  }
  void make(const MaxLast&, const Content& x, const Content::Form& from, const Tensor& y) {
    set_reduced(y, x, from, "ReduceMax");
  }
  void make(const SpreadLast&, Content x, const Content::Form&, const Tensor& y) {
    const Id plain = in_plain_order(g_, x);
    Extents extents = g_.shape(plain);
    extents.push_back(1);
    r_.set(y, Content::broadcast(y.shape(), g_.add("Unsqueeze", {plain, Numbers{{-1}}}, extents)));
  }
  void make(const SoftmaxLast&, const Content& x, const Content::Form& from, const Tensor& y) {
    set_like(y, x, from, g_.map("Softmax", {from.id}, {{"axis", std::int64_t{-1}}}));
  }
  void make(const LogSoftmaxLast&, const Content& x, const Content::Form& from, const Tensor& y) {
    set_like(y, x, from, g_.map("LogSoftmax", {from.id}, {{"axis", std::int64_t{-1}}}));
  }
  void make(const NormalizeLast& op, const Content& x, const Content::Form& from, const Tensor& y) {
    Extents ones = g_.shape(from.id);
    ones.back() = 1;
    const auto mean = [&](Id of) {
      return g_.add("ReduceMean", {of}, ones, {{"axes", Extents{-1}}, {"keepdims", std::int64_t{1}}});
    };
    const Id centred = op.centered ? g_.map("Sub", {from.id, mean(from.id)}) : from.id;
    const Id variance = mean(g_.map("Mul", {centred, centred}));
    const Id deviation = g_.map("Sqrt", {g_.map("Add", {variance, g_.scalar(op.eps)})});
    set_like(y, x, from, g_.map("Div", {centred, deviation}));
  }
  void make(const Pow& op, const Content& x, const Content::Form& from, const Tensor& y) {
    set_like(y, x, from, g_.map("Pow", {from.id, g_.scalar(op.exponent)}));
  }
  void make(const Clamp& op, const Content& x, const Content::Form& from, const Tensor& y) {
    set_like(y, x, from, g_.map("Clip", {from.id, g_.scalar(op.low), g_.scalar(op.high)}));
  }
};

class LossNodes final : public LossKernels, NodeMaker {
 public:
  using NodeMaker::NodeMaker;

  void cross_entropy(const Tensor&, const Tensor&, const LossScale&, const TargetRule&, const Tensor&,
                     const Tensor&) override {
    r_.refuse("it is a loss");
  }
  void soft_cross_entropy(const Tensor&, const Tensor&, const LossScale&, const TargetRule&, const Tensor&,
                          const Tensor&) override {
    r_.refuse("it is a loss");
  }
  void count_in_top(const Tensor&, const Tensor&, std::int64_t, const Tensor&, std::optional<std::int32_t>) override {
    r_.refuse("it is a metric");
  }
  void total(const Tensor&, const Tensor&) override { r_.refuse("it is a loss"); }
  void squared_error(const Tensor&, const Tensor&, const LossScale&, const Tensor&, const Tensor&) override {
    r_.refuse("it is a loss");
  }
};

class RecordingBackend final : public Backend, NodeMaker {
 public:
  explicit RecordingBackend(Recorder& recorder)
      : NodeMaker(recorder),
        linear_(recorder),
        conv_(recorder),
        pool_(recorder),
        norm_(recorder),
        layer_norm_(recorder),
        operators_(recorder),
        loss_(recorder) {}

  Device device() const override { return r_.like().device(); }
  std::string describe() const override { return "a graph of ONNX"; }
  CachingAllocator& allocator() override { return r_.allocator(); }
  // Chains of kernels take a batch as a whole.
  std::size_t cache_block_bytes() const override { return std::numeric_limits<std::size_t>::max(); }
  LinearKernels& linear() override { return linear_; }
  ConvKernels& conv() override { return conv_; }
  PoolKernels& pool() override { return pool_; }
  NormKernels& norm() override { return norm_; }
  LayerNormKernels& layer_norm() override { return layer_norm_; }
  EmbeddingKernels& embedding() override { return *embedding_; }
  AttentionKernels& attention() override { return *attention_; }
  RnnKernels& rnn() override { return *rnn_; }
  PointwiseKernels& pointwise() override { return *pointwise_; }
  OperatorKernels& operators() override { return operators_; }
  LossKernels& loss() override { return loss_; }
  OptimKernels& optim() override { return optim_; }

  Tensor contiguous(const Tensor& x) override {
    if (x.is_contiguous()) return x;
    Tensor made = empty(x.shape(), x.dtype());
    r_.set(made, r_.content(x));
    return made;
  }
  std::unique_ptr<Backend> make_stream(int) override { r_.refuse("it asks for another stream"); }
  std::uint64_t primitives_created() const override { return 0; }
  StreamView stream() override { return {}; }
  int steps_ahead() const override { return 0; }
  bool computes_in(DType dtype) const override { return dtype == DType::kF32; }
  Tensor stage(void*, const Shape&, DType, int) override { r_.refuse("it reads a batch of its own"); }
  void finish_inputs() override {}
  std::shared_ptr<MemorySource> staging_memory() override { r_.refuse("it reads a batch of its own"); }
  void upload(std::span<const std::byte> from, const Tensor& to) override { r_.set_constant(to, from); }
  void write(std::span<const std::byte> from, const Tensor& to) override { r_.set_constant(to, from); }
  void download(const Tensor&, std::span<std::byte>) override { r_.refuse("it looks at numbers"); }
  std::unique_ptr<AsyncDownload> make_async_download(std::size_t) override { r_.refuse("it looks at numbers"); }

 private:
  LinearNodes linear_;
  ConvNodes conv_;
  PoolNodes pool_;
  NormNodes norm_;
  LayerNormNodes layer_norm_;
  OperatorNodes operators_;
  LossNodes loss_;
  OptimKernels optim_;
  std::unique_ptr<EmbeddingKernels> embedding_ = make_embedding_nodes(r_);
  std::unique_ptr<AttentionKernels> attention_ = make_attention_nodes(r_);
  std::unique_ptr<RnnKernels> rnn_ = make_rnn_nodes(r_);
  std::unique_ptr<PointwiseKernels> pointwise_ = make_pointwise_nodes(r_);
};

}  // namespace

Id NodeMaker::gelu_tanh(Id x) {
  const auto scaled = [&](Id of, float by) { return g_.map("Mul", {of, g_.scalar(by)}); };
  const Id cube = g_.map("Mul", {g_.map("Mul", {x, x}), x});
  const auto scale = static_cast<float>(std::sqrt(2.0 / std::numbers::pi));
  const Id inner = scaled(g_.map("Add", {x, scaled(cube, 0.044715f)}), scale);
  const Id gate = g_.map("Add", {g_.map("Tanh", {inner}), g_.scalar(1.0f)});
  return scaled(g_.map("Mul", {x, gate}), 0.5f);
}

Id NodeMaker::gelu_erf(Id x) {
  const Id inner = g_.map("Div", {x, g_.scalar(static_cast<float>(std::numbers::sqrt2))});
  const Id gate = g_.map("Add", {g_.map("Erf", {inner}), g_.scalar(1.0f)});
  return g_.map("Mul", {g_.map("Mul", {x, gate}), g_.scalar(0.5f)});
}

Id NodeMaker::activated(Id x, Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kNone: return x;
    case Epilogue::kRelu: return relu(x);
    case Epilogue::kRelu6: return relu6(x);
    case Epilogue::kGelu: return gelu_tanh(x);
  }
  r_.refuse("it has an activation that is none of ONNX's");
}

Id NodeMaker::range(std::int64_t count) {
  const auto scalar = [](std::int64_t value) { return Numbers{{value}, Numbers::As::kScalar}; };
  return g_.add("Range", {scalar(0), scalar(count), scalar(1)}, {count}, {}, Element::kI64);
}

std::unique_ptr<Backend> make_recording_backend(Recorder& recorder) {
  return std::make_unique<RecordingBackend>(recorder);
}

}  // namespace lockstep::nn::onnx
