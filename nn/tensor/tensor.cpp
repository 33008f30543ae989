#include "lockstep/nn/tensor/tensor.h"

#include "base/error.h"

namespace lockstep::nn {

void Tensor::refuse_type(DType wanted) const {
  throw UsageError(fmt::format("a tensor of {} {} read as {}", name_of(dtype_), to_string(shape_), name_of(wanted)),
                   "read it as its own type (Tensor::dtype()), or give one of the wanted type");
}

void Tensor::refuse_nothing() const {
  check_usage(
      data_ == nullptr, "a model or a loss looks at numbers, and is run on shapes alone to estimate its memory",
      "compute with operators (nn/autograd/functions.h); set TrainConfig::estimate_memory to false where it has "
      "to look");
  throw UsageError("a tensor that holds nothing is read",
                   "ask Tensor::defined() before; gradients are there after backward, and only where some has flowed");
}

void Tensor::refuse_pitch() const {
  throw UsageError(
      fmt::format("rows of {} are {} elements apart and are read as contiguous ones", to_string(shape_), pitch_),
      "copy it with Backend::contiguous() before");
}

void Tensor::refuse_shape(const Shape& wanted) const {
  throw UsageError(fmt::format("{} does not hold the elements of {}", to_string(wanted), to_string(shape_)),
                   "give a shape of as many elements");
}

void Tensor::refuse_rows(std::int64_t begin, std::int64_t end) const {
  throw UsageError(fmt::format("rows {} to {} of {}", begin, end, to_string(shape_)),
                   "give a range within the first axis");
}

}  // namespace lockstep::nn
