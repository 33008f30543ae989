#include "lockstep/nn/losses/losses.h"

#include "base/error.h"
#include "base/text.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {
namespace {

// Softmax cross entropy, with labels smoothed as in Szegedy et al., "Rethinking the Inception Architecture for Computer
// Vision" (2016).
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

// Squared error, summed over all numbers of the targets: PyTorch's MSELoss.
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

Registry<LossFamily>& loss_registry() {
  static Registry<LossFamily> losses("loss", {&cross_entropy_family(), &squared_error_family()});
  return losses;
}

}  // namespace

const std::vector<const LossFamily*>& loss_families() { return loss_registry().all(); }

void register_loss(LossFamily family) {
  check_usage(family.make != nullptr, "a loss without a way to make it", "give LossFamily::make");
  loss_registry().add(std::move(family));
}

const LossFamily& usual_loss() { return cross_entropy_family(); }

std::vector<std::string> loss_names() { return loss_registry().names(); }

const LossFamily& loss_family(const std::string& name) { return loss_registry().named(name); }

LossFunction make_loss(const LossFamily& family, const Settings& settings) {
  return family.make(resolve(family.settings, settings, "loss " + family.name));
}

}  // namespace lockstep::nn
