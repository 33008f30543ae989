#include "nn/autograd/operands.h"

#include "base/error.h"

namespace lockstep::nn {

void refuse_operand(const Tape& tape, Var x, const char* op) {
  static_cast<void>(x.needs_grad());  // throws for one that is no longer valid
  if (!tape.has(x))
    throw UsageError(fmt::format("{} on a tape was given a value of another tape", op),
                     "compute on the tape that the value is on, or give its tensor to Tape::input() as a constant");
  if (x.walked())
    throw UsageError(fmt::format("{} of a value that backward has walked already", op),
                     "compute all that a pass needs before its backward, or record another pass");
  throw UsageError(fmt::format("{} was given {} of {}", op, to_string(x.shape()), name_of(x.dtype())),
                   "it computes with f32, or bf16 or f16 where the device does; tokens go to an Embedding");
}

void refuse_parameter(const Tape& tape, const Parameter& parameter, const char* op) {
  const Device there = parameter.backend().device(), here = tape.backend().device();
  if (there == here)
    throw UsageError(
        fmt::format("{} has its parameters on one backend of {}, and the tape is on another one", op, to_string(here)),
        "make the tape with the backend that the module was built with");
  throw UsageError(
      fmt::format("{} has its parameters on {}, and the tape is on {}", op, to_string(there), to_string(here)),
      "make the tape and its inputs with the backend that the module was built with");
}

void refuse_shape(const Tensor& value, const Shape& wanted, const char* what, const char* op) {
  throw UsageError(
      fmt::format("{} with {} of {} where {} belongs", op, what, to_string(value.shape()), to_string(wanted)),
      "give it one that fits the weight");
}

void refuse_tensor(const Tape& tape, const Tensor& tensor, DType wanted, const char* what) {
  const auto place = tensor.device();
  if (place && *place != tape.backend().device())
    throw UsageError(
        fmt::format("{} on {}, and the tape is on {}", what, to_string(*place), to_string(tape.backend().device())),
        "move them with nn::to_device(), or make them with the tape's backend");
  check_usage(tensor.defined() || tensor.count() == 0, "an operator was given a tensor that holds nothing",
              "give it labels, a target or numbers");
  throw UsageError(fmt::format("{} {} of {}, where {} is wanted", what, to_string(tensor.shape()),
                               name_of(tensor.dtype()), name_of(wanted)),
                   "give them that type");
}

}  // namespace lockstep::nn
