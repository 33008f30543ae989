#include "nn/autograd/parameter.h"

namespace lockstep::nn {

void Parameter::bind_gradient(const Tensor& storage) {
  LOCKSTEP_ASSERT(storage.shape() == value_.shape(), "gradient {} of parameter {}", to_string(storage.shape()),
                  to_string(value_.shape()));
  gradient_ = storage;
  has_gradient_ = false;
}

Parameter::Target Parameter::contribute() {
  if (!gradient_.defined()) gradient_ = backend_->empty(value_.shape());
  const bool accumulate = has_gradient_;
  has_gradient_ = true;
  return {gradient_, accumulate};
}

}  // namespace lockstep::nn
