// Functions of elements, and where elements lie, as nodes.
#include <algorithm>

#include "base/error.h"
#include "nn/onnx/kernels.h"
#include "nn/ops/elementwise_rules.h"
#include "nn/ops/strided.h"

namespace lockstep::nn::onnx {
namespace {

class PointwiseNodes final : public PointwiseKernels, NodeMaker {
 public:
  using NodeMaker::NodeMaker;

  void fill(const Tensor& y, float value) override {
    if (y.dtype() != DType::kF32) r_.refuse(fmt::format("it fills a tensor of {}", name_of(y.dtype())));
    r_.set(y, Content::broadcast(y.shape(), g_.scalar(value)));
  }
  void copy(const Tensor& x, const Tensor& y) override { r_.set(y, r_.content(x.reshaped(y.shape()))); }
  void copy_rows(const Tensor& x, const Tensor& y) override { r_.set(y, r_.content(x)); }
  void cast(const Tensor& x, const Tensor& y) override {
    if (x.dtype() != y.dtype())
      r_.refuse(fmt::format("it computes in {}", name_of(is_half(x.dtype()) ? x.dtype() : y.dtype())));
    copy(x, y);
  }
  void increment(const Tensor&) override { r_.refuse("it counts its calls"); }
  void add_to(const Tensor& x, float alpha, const Tensor& y) override {
    const Id more = r_.value(x.reshaped(y.shape()));
    set_plain(y, g_.map("Add", {r_.value(y), alpha == 1.0f ? more : g_.map("Mul", {more, g_.scalar(alpha)})}));
  }
  void dropout(const Tensor&, double, const Tensor&, std::int64_t, const Tensor&) override {
    r_.refuse("it drops elements");
  }
  void normal(const Tensor&, std::int64_t, const Tensor&) override { r_.refuse("it draws random numbers"); }

  void unary(UnaryOp op, const Tensor& x, const Tensor& y) override {
    Content content = r_.content(x);
    if (content.forms.empty()) {  // as many of each as there will be
      content.small = of_each(op, content.small);
      return r_.set(y, content);
    }
    const Content::Form from = content.forms.front();
    set_like(y, content, from, of_each(op, from.id));
  }

  void binary(BinaryOp op, const Tensor& x, const Tensor& y, const Tensor& z) override {
    Content left = r_.content(x), right = r_.content(y.reshaped(x.shape()));
    // An order that both are there in, or else that of one of them.
    const auto shared =
        std::ranges::find_if(left.forms, [&](const Content::Form& form) { return right.find(form.order) != kNone; });
    const Order order = shared != left.forms.end() ? shared->order
                        : !left.forms.empty()      ? left.forms.front().order
                        : !right.forms.empty()     ? right.forms.front().order
                                                   : plain_order(left.shape.size());
    const auto value_of = [&](Content& of, bool may_be_small) {
      const bool small = may_be_small && of.forms.empty() && order == plain_order(of.shape.size());
      return small ? of.small : in_order(g_, of, order);
    };
    const Id a = value_of(left, !right.forms.empty()), b = value_of(right, true);
    Extents extents;
    for (const int axis : order) extents.push_back(left.shape[axis]);
    r_.set(z, Content(left.shape, order, of_both(op, a, b, extents)));
  }

  void select(const Tensor& mask, const Tensor& x, const Tensor& y, const Tensor& z) override {
    const auto value_of = [&](const Tensor& of) {
      return of.defined() ? r_.value(of.reshaped(z.shape())) : g_.scalar(0.0f);
    };
    const Id condition =
        g_.map("Cast", {r_.value(mask.reshaped(z.shape()))}, {{"to", static_cast<std::int64_t>(Element::kBool)}});
    set_plain(z, g_.add("Where", {condition, value_of(x), value_of(y)}, extents_of(z.shape())));
  }

  void swap_last_axes(const Tensor& x, const Tensor& y) override {
    Content content = r_.content(x);
    r_.set(y, permuted(g_, content, {0, 2, 1}));
  }

  void copy_strided(const Tensor& x, const Strides& from, const Tensor& y, const Strides& to,
                    const Shape& shape) override {
    const Strides dense = dense_strides(y.shape());
    if (y.shape().size() != shape.size()) refuse_strides();
    int part = -1;  // the axis of which y is a part
    for (int axis = 0; axis < shape.size(); ++axis) {
      if (to.of[at(axis)] != dense.of[at(axis)] || (shape[axis] != y.size(axis) && part >= 0)) refuse_strides();
      if (shape[axis] != y.size(axis)) part = axis;
    }
    Content content = strided(x, from, shape);
    if (part < 0 && to.offset == 0) return r_.set(y, std::move(content));
    if (part < 0 || to.offset % dense.of[at(part)] != 0) refuse_strides();
    r_.set_part(y, part, to.offset / dense.of[at(part)], std::move(content));
  }

 private:
  [[noreturn]] void refuse_strides() {
    r_.refuse("it copies elements in steps that are no slice, permutation or joint");
  }

  // Elements of x at each index of `shape`: a slice, with its axes in another order, and repeated along those of step
  // 0.
  Content strided(const Tensor& x, const Strides& from, const Shape& shape) {
    const int axes = x.shape().size();
    const Strides dense = dense_strides(x.shape());
    Extents begin(at(axes)), end(at(axes));
    std::int64_t offset = from.offset;
    for (int axis = 0; axis < axes; ++axis) {
      const std::int64_t step = dense.of[at(axis)];
      begin[at(axis)] = std::min(offset / step, x.size(axis) - 1);
      offset -= begin[at(axis)] * step;
      end[at(axis)] = begin[at(axis)] + 1;
    }
    if (offset != 0) refuse_strides();
    Order order;        // axes of x, as they follow each other in the result
    Shape few = shape;  // of which axes are repeated from one index
    for (int axis = 0; axis < shape.size(); ++axis) {
      if (shape[axis] == 1) continue;
      if (from.of[at(axis)] == 0) {
        few[axis] = 1;
        continue;
      }
      int own = 0;
      while (own < axes && (dense.of[at(own)] != from.of[at(axis)] || x.size(own) == 1)) ++own;
      if (own == axes || std::ranges::find(order, own) != order.end() || begin[at(own)] + shape[axis] > x.size(own))
        refuse_strides();
      end[at(own)] = begin[at(own)] + shape[axis];
      order.push_back(own);
    }
    for (int axis = 0; axis < axes; ++axis)
      if (std::ranges::find(order, axis) == order.end()) order.push_back(axis);  // of one index
    Content whole = r_.content(x);
    Content some = sliced(g_, whole, begin, end);
    Content turned = permuted(g_, some, order);
    if (few == shape) return reshaped(g_, turned, shape);
    int first = 0;  // axes of one index before it are broadcast all the same
    while (turned.shape != few && first < few.size() && few[first] == 1) ++first;
    Content small = reshaped(g_, turned, Shape(few.dims().subspan(at(first))));
    return Content::broadcast(shape, in_plain_order(g_, small));
  }

  Id of_each(UnaryOp op, Id x) {
    switch (op) {
      case UnaryOp::kAbs: return g_.map("Abs", {x});
      case UnaryOp::kExp: return g_.map("Exp", {x});
      case UnaryOp::kLog: return g_.map("Log", {x});
      case UnaryOp::kSqrt: return g_.map("Sqrt", {x});
      case UnaryOp::kSquare: return g_.map("Mul", {x, x});
      case UnaryOp::kSin: return g_.map("Sin", {x});
      case UnaryOp::kCos: return g_.map("Cos", {x});
      case UnaryOp::kTanh: return g_.map("Tanh", {x});
      case UnaryOp::kSigmoid: return g_.map("Sigmoid", {x});
      case UnaryOp::kSoftplus: return g_.map("Softplus", {x});
      case UnaryOp::kRelu: return relu(x);
      case UnaryOp::kRelu6: return relu6(x);
      case UnaryOp::kSilu: return g_.map("Mul", {x, g_.map("Sigmoid", {x})});
      case UnaryOp::kGeluErf: return gelu_erf(x);
      case UnaryOp::kGeluTanh: return gelu_tanh(x);
    }
    r_.refuse("it is a function of elements that has no nodes");
  }

  Id of_both(BinaryOp op, Id a, Id b, const Extents& shape) {
    switch (op) {
      case BinaryOp::kSub: return g_.add("Sub", {a, b}, shape);
      case BinaryOp::kMul: return g_.add("Mul", {a, b}, shape);
      case BinaryOp::kDiv: return g_.add("Div", {a, b}, shape);
      case BinaryOp::kMin: return g_.add("Min", {a, b}, shape);
      case BinaryOp::kMax: return g_.add("Max", {a, b}, shape);
      case BinaryOp::kAdd: return g_.add("Add", {a, b}, shape);
      case BinaryOp::kAddRelu: return relu(g_.add("Add", {a, b}, shape));
    }
    r_.refuse("it is a function of two elements that has no nodes");
  }
};

}  // namespace

std::unique_ptr<PointwiseKernels> make_pointwise_nodes(Recorder& recorder) {
  return std::make_unique<PointwiseNodes>(recorder);
}

}  // namespace lockstep::nn::onnx
