#include "lockstep/nn/autograd/parameter.h"

#include <atomic>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {

std::uint64_t Parameter::next_version() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

const Tensor& Parameter::as(DType dtype) {
  if (dtype == value_.dtype()) return value();
  LOCKSTEP_ASSERT(is_half(dtype), "a parameter as {}", name_of(dtype));
  if (!copy_.defined() || copy_.dtype() != dtype) {
    copy_ = backend_->empty_parameter(value_.shape(), dtype);
    copy_version_ = kNoVersion;
  }
  if (copy_version_ != version_) {
    backend_->pointwise().cast(value(), copy_);
    copy_version_ = version_;
  }
  return copy_;
}

void Parameter::quantize_rows() {
  LOCKSTEP_ASSERT(value_.shape().size() == 2, "rows of {}", to_string(value_.shape()));
  if (!int8_rows_.values.defined())
    int8_rows_ = {.values = backend_->empty(value_.shape(), DType::kU8), .scales = backend_->empty({value_.size(0)})};
  backend_->linear().to_int8_rows(value(), int8_rows_);
  int8_version_ = version_;
}

void Parameter::share_value(const Parameter& other) {
  if (other.value_.shape() != value_.shape() || other.value_.dtype() != value_.dtype())
    throw UsageError(
        fmt::format("a parameter {} {} that shares the value of one {} {}", name_of(value_.dtype()),
                    to_string(value_.shape()), name_of(other.value_.dtype()), to_string(other.value_.shape())),
        "build both by one factory");
  value_ = other.value();
  changed();
}

void Parameter::move_value(const Tensor& storage) {
  if (storage.shape() != value_.shape() || storage.dtype() != value_.dtype() || !storage.is_contiguous())
    throw UsageError(fmt::format("a parameter {} {} is given {} {} for its value", name_of(value_.dtype()),
                                 to_string(value_.shape()), name_of(storage.dtype()), to_string(storage.shape())),
                     "give memory of the parameter's type and shape, in one piece");
  backend_->pointwise().copy(value(), storage);
  value_ = storage;
  changed();
}

void Parameter::bind_gradient(const Tensor& storage) {
  if ((!storage.defined() && value_.count() > 0) || storage.shape() != value_.shape() ||
      storage.dtype() != value_.dtype() || !storage.is_contiguous())
    throw UsageError(fmt::format("a parameter {} {} is given {} {} for its gradient{}", name_of(value_.dtype()),
                                 to_string(value_.shape()), storage.defined() ? name_of(storage.dtype()) : "no memory,",
                                 to_string(storage.shape()), storage.is_contiguous() ? "" : ", whose rows lie apart"),
                     "give memory of the parameter's type and shape, in one piece");
  gradient_ = storage;
  has_gradient_ = false;
}

Parameter::Target Parameter::contribute() {
  if (!gradient_.defined()) gradient_ = backend_->empty(value_.shape());
  const bool accumulate = has_gradient_;
  has_gradient_ = true;
  touched_ = true;
  return {gradient_, accumulate};
}

namespace {

class VariableNode final : public Node {
 public:
  VariableNode(Var output, Parameter& parameter) : Node(output, {&parameter}) {}
  void backward(Tape& tape) override {
    const Tensor& dy = tape.grad(output());
    const auto [gradient, accumulate] = parameters()[0]->contribute();
    if (accumulate)
      tape.backend().pointwise().add_to(dy, 1.0f, gradient);
    else
      tape.backend().pointwise().cast(dy, gradient);
  }
};

}  // namespace

Var variable(Tape& tape, Parameter& parameter) { return variable(tape, parameter, tape.activations()); }

Var variable(Tape& tape, Parameter& parameter, DType dtype) {
  check_parameter(tape, parameter, "variable");
  const Tape::OpScope scope(tape, "variable", &parameter);
  const Var out = tape.make_var(parameter.as(dtype), parameter.requires_grad());
  tape.record<VariableNode>(out, parameter);
  return out;
}

}  // namespace lockstep::nn
