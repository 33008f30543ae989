// Squared error, summed over all numbers of the targets: PyTorch's MSELoss.
#include "lockstep/nn/losses/losses.h"

namespace lockstep::nn {

const LossFamily& squared_error_family() {
  static const LossFamily family = {.name = "squared_error",
                                    .about = "a number for each output, for data of a program's own",
                                    .takes_numbers = true,
                                    .takes_labels = false,
                                    .make = [](const Settings&) -> LossFunction {
                                      return [](Tape& tape, Var outputs, const Tensor& targets, float scale) {
                                        return squared_error(tape, outputs, targets, scale);
                                      };
                                    }};
  return family;
}

}  // namespace lockstep::nn
