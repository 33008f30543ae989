// Softmax cross entropy, with labels smoothed as in Szegedy et al., "Rethinking the Inception Architecture for Computer
// Vision" (2016).
#include "lockstep/nn/losses/losses.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {

const LossFamily& cross_entropy_family() {
  static const LossFamily family = {.name = "cross_entropy",
                                    .about = "a class for each output",
                                    .settings = {{.name = "label-smoothing",
                                                  .fallback = 0.0,
                                                  .help = "share of each label to spread evenly over all classes",
                                                  .role = SettingSpec::Role::kTraining,
                                                  .high = 1,
                                                  .open_high = true,
                                                  .placeholder = "E",
                                                  .neutral = 0.0}},
                                    .make = [](const Settings& settings) -> LossFunction {
                                      return [smoothing = static_cast<float>(settings.number("label-smoothing"))](
                                                 Tape& tape, Var outputs, const Tensor& targets, float scale) {
                                        return cross_entropy(tape, outputs, targets, scale, smoothing, Outputs::kTaken);
                                      };
                                    }};
  return family;
}

}  // namespace lockstep::nn
