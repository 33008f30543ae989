#include "lockstep/nn/losses/losses.h"

#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {
namespace {

SettingSpec class_weights() {
  return {.name = "class-weights",
          .fallback = std::vector<double>{},
          .help = "by how much each class counts",
          .role = SettingSpec::Role::kTraining,
          .low = 0,
          .placeholder = "W,W,…",
          .default_text = "1 each",
          .most_many = 1 << 16,
          .neutral = std::vector<double>{}};
}

std::int64_t classes_of(Var outputs) { return outputs.shape()[outputs.shape().size() - 1]; }

/// (K), a weight for each of the classes; undefined where there are none.
Tensor weights_of_classes(Tape& tape, const std::vector<double>& weights, std::int64_t classes) {
  if (weights.empty()) return {};
  if (static_cast<std::int64_t>(weights.size()) != classes)
    throw UsageError(fmt::format("--class-weights with {} numbers for outputs of {} classes", weights.size(), classes),
                     "give one for each class, in the order of their numbers");
  const std::vector<float> values(weights.begin(), weights.end());
  Tensor all = tape.backend().empty({classes});
  tape.backend().write(std::as_bytes(std::span(values)), all);
  return all;
}

std::optional<std::int32_t> ignored_of(const Settings& settings) {
  const auto& given = settings.integers("ignore-index");
  return given.empty() ? std::nullopt : std::optional(static_cast<std::int32_t>(given[0]));
}

// Softmax cross entropy, with labels smoothed as in Szegedy et al., "Rethinking the Inception Architecture for Computer
// Vision" (2016).
const LossFamily& cross_entropy_family() {
  static const LossFamily family = {
      .name = "cross_entropy",
      .about = "a class for each output",
      .settings = {{.name = "label-smoothing",
                    .fallback = 0.0,
                    .help = "share of each label to spread evenly over all classes",
                    .role = SettingSpec::Role::kTraining,
                    .high = 1,
                    .open_high = true,
                    .placeholder = "E",
                    .neutral = 0.0},
                   class_weights(),
                   {.name = "ignore-index",
                    .fallback = std::vector<std::int64_t>{},
                    .help = "label that counts for nothing, in evaluations neither",
                    .low = std::numeric_limits<std::int32_t>::min(),
                    .high = std::numeric_limits<std::int32_t>::max(),
                    .placeholder = "I",
                    .default_text = "none",
                    .most_many = 1,
                    .neutral = std::vector<std::int64_t>{}}},
      .takes_probabilities = true,
      .ignored = ignored_of,
      .make = [](const Settings& settings) -> LossFunction {
        return [smoothing = static_cast<float>(settings.number("label-smoothing")),
                weights = settings.numbers("class-weights"),
                ignored = ignored_of(settings)](Tape& tape, Var outputs, const Tensor& targets, float scale) {
          return cross_entropy(tape, outputs, targets, scale,
                               {smoothing, ignored, weights_of_classes(tape, weights, classes_of(outputs))},
                               Outputs::kTaken);
        };
      }};
  return family;
}

// (1 − p)^γ · −log p of the label's probability p (Lin et al., "Focal Loss for Dense Object Detection", 2017, of
// several classes): what is classified well counts little.
const LossFamily& focal_family() {
  static const LossFamily family = {
      .name = "focal",
      .about = "a class for each output; what is classified well counts less",
      .settings = {{.name = "focusing",
                    .fallback = 2.0,
                    .help = "how much less: the exponent gamma of the paper",
                    .role = SettingSpec::Role::kTraining,
                    .low = 0,
                    .placeholder = "G"},
                   class_weights()},
      .takes_probabilities = true,
      .make = [](const Settings& settings) -> LossFunction {
        return [gamma = static_cast<float>(settings.number("focusing")), weights = settings.numbers("class-weights")](
                   Tape& tape, Var outputs, const Tensor& targets, float scale) {
          const auto loss_of = [&](Var log_p) {
            // Above 0: where gamma is below 1 the power's slope at 0 is not finite.
            constexpr float kLeast = 1e-12f;
            const Var missing = clamp(tape, affine(tape, exp(tape, log_p), -1, 1), kLeast, 1);
            return mul(tape, pow(tape, missing, gamma), affine(tape, log_p, -1));
          };
          const Var log_p = log_softmax(tape, to_f32(tape, outputs));
          const Tensor of_classes = weights_of_classes(tape, weights, classes_of(outputs));
          if (targets.dtype() == DType::kF32) {
            const Var each = mul(tape, tape.input(targets), loss_of(log_p));
            return sum(tape, of_classes.defined() ? mul(tape, each, tape.input(of_classes)) : each, scale);
          }
          Shape column = log_p.shape();
          const std::int64_t classes = std::exchange(column[column.size() - 1], 1);
          const Var each = loss_of(gather(tape, log_p, -1, targets.reshaped(column)));
          if (!of_classes.defined()) return sum(tape, each, scale);
          const Var of_labels =
              index_select(tape, tape.input(of_classes.reshaped({classes, 1})), targets.reshaped({targets.count()}));
          return sum(tape, mul(tape, reshape(tape, of_labels, column), each), scale);
        };
      }};
  return family;
}

// Squared error, summed over all numbers of the targets: PyTorch's MSELoss.
const LossFamily& squared_error_family() {
  static const LossFamily family = {.name = "squared_error",
                                    .about = "a number for each output: PyTorch's MSELoss",
                                    .synonyms = {"mse"},
                                    .takes_numbers = true,
                                    .takes_labels = false,
                                    .make = [](const Settings&) -> LossFunction {
                                      return [](Tape& tape, Var outputs, const Tensor& targets, float scale) {
                                        return squared_error(tape, outputs, targets, scale);
                                      };
                                    }};
  return family;
}

// A loss of targets that are numbers: the sum of `of` over all of them. Both operands are f32, of one shape.
template <class Of>
LossFunction sum_of(Of of) {
  return [of](Tape& tape, Var outputs, const Tensor& targets, float scale) {
    return sum(tape, of(tape, outputs, tape.input(targets.reshaped(outputs.shape()))), scale);
  };
}

// PyTorch's L1Loss.
const LossFamily& l1_family() {
  static const LossFamily family = {
      .name = "l1",
      .about = "the absolute error of a number for each output",
      .takes_numbers = true,
      .takes_labels = false,
      .make = [](const Settings&) {
        return sum_of([](Tape& tape, Var y, Var t) { return abs(tape, sub(tape, y, t)); });
      }};
  return family;
}

// PyTorch's HuberLoss: d²/2 of an error d up to delta, beyond it delta · (|d| − delta/2) (Huber, "Robust estimation of
// a location parameter", 1964). With m = min(|d|, delta) both are m · (|d| − m/2).
const LossFamily& huber_family() {
  static const LossFamily family = {
      .name = "huber",
      .about = "squared up to an error of --delta, and absolute beyond",
      .settings = {{.name = "delta",
                    .fallback = 1.0,
                    .help = "the error up to which it is squared",
                    .role = SettingSpec::Role::kTraining,
                    .low = 0,
                    .open_low = true,
                    .placeholder = "D"}},
      .takes_numbers = true,
      .takes_labels = false,
      .make = [](const Settings& settings) {
        return sum_of([delta = static_cast<float>(settings.number("delta"))](Tape& tape, Var y, Var t) {
          const Var d = abs(tape, sub(tape, y, t));
          const Var m = affine(tape, relu(tape, affine(tape, d, -1, delta)), -1, delta);
          return mul(tape, m, sub(tape, d, affine(tape, m, 0.5f)));
        });
      }};
  return family;
}

// PyTorch's BCEWithLogitsLoss: outputs are logits, targets probabilities; a target of 1 counts pos-weight times.
const LossFamily& bce_family() {
  static const LossFamily family = {
      .name = "bce",
      .about = "a probability for each output, which is a logit",
      .settings = {{.name = "pos-weight",
                    .fallback = 1.0,
                    .help = "by how much more targets of 1 count than targets of 0",
                    .role = SettingSpec::Role::kTraining,
                    .low = 0,
                    .open_low = true,
                    .placeholder = "W",
                    .neutral = 1.0}},
      .takes_numbers = true,
      .takes_labels = false,
      .least_target = 0,
      .most_target = 1,
      .make = [](const Settings& settings) {
        return sum_of([weight = static_cast<float>(settings.number("pos-weight"))](Tape& tape, Var y, Var t) {
          const Var wrong = softplus(tape, affine(tape, y, -1));  // log(1 + e⁻ʸ)
          return add(tape, mul(tape, affine(tape, t, -1, 1), y), mul(tape, affine(tape, t, weight - 1, 1), wrong));
        });
      }};
  return family;
}

Registry<LossFamily>& loss_registry() {
  static Registry<LossFamily> losses("loss", {&cross_entropy_family(), &focal_family(), &squared_error_family(),
                                              &l1_family(), &huber_family(), &bce_family()});
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
