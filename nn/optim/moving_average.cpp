#include "lockstep/nn/optim/moving_average.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "base/error.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {

MovingAverage::MovingAverage(std::vector<NamedParameter> parameters, double decay) {
  if (!(decay > 0 && decay < 1))
    throw UsageError(fmt::format("a moving average with a decay of {}", decay), "give one between 0 and 1: 0.999");
  rule_ = std::make_unique<UpdateRule>(BlendRule::average(decay));
  check_parameters(parameters, "a moving average");
  if (parameters.empty()) return;
  backend_ = &parameters.front().parameter->backend();
  std::int64_t largest = 0;
  for (auto& [name, parameter] : parameters) {
    const Tensor value = backend_->empty(parameter->value().shape());
    backend_->pointwise().copy(parameter->value(), value);
    largest = std::max(largest, value.count());
    lifetimes_.push_back(parameter->lifetime());
    values_.push_back({std::move(name), parameter, value});
  }
  arrays_.reserve(values_.size());
  held_ = backend_->empty({largest});
  control_ = backend_->empty({StepControl::kSize});
  std::array<float, StepControl::kSize> control{};
  control[StepControl::kApply] = 1.0f;
  backend_->write(std::as_bytes(std::span(control)), control_);
}

MovingAverage::~MovingAverage() = default;

void MovingAverage::check_there() const {
  for (std::size_t i = 0; i < values_.size(); ++i)
    if (!lifetimes_[i].alive()) [[unlikely]]
      throw UsageError(fmt::format("a moving average's parameter {} is no longer there", values_[i].name),
                       "keep the module as long as its average");
}

const std::vector<NamedMoment>& MovingAverage::values() const {
  check_there();
  return values_;
}

void MovingAverage::update() { update(control_); }

void MovingAverage::update(const Tensor& control) {
  check_there();
  if (backend_ == nullptr) return;
  arrays_.clear();
  for (const auto& [name, parameter, value] : values_)
    arrays_.push_back({.count = value.count(), .gradient = parameter->value().f32(), .parameter = value.f32()});
  backend_->optim().update(*rule_, control, arrays_, {});
}

void MovingAverage::exchange() {
  check_there();
  for (const auto& [name, parameter, value] : values_) {
    const Tensor held = Tensor::view_of(held_.raw(), value.shape());
    backend_->pointwise().copy(value, held);
    backend_->pointwise().copy(parameter->value(), value);
    backend_->pointwise().copy(held, parameter->value());
    parameter->changed();
  }
}

// Where a device has failed its memory is lost, and whatever comes next on it says so.
MovingAverage::InPlace::~InPlace() {
  try {
    average_.exchange();
  } catch (const Error&) {
    return;
  }
}

}  // namespace lockstep::nn
