// The registry of losses. A loss is a `LossFamily` in nn/losses/losses.cpp, and its place in the list there. Nobody
// else knows one by its name.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/settings.h"
#include "lockstep/nn/autograd/functions.h"

namespace lockstep::nn {

/// What there is to know of a loss.
struct LossFamily {
  std::string name;
  std::string about;                       // for help: what its targets are
  std::vector<std::string> synonyms = {};  // other names that people type: "mse"
  /// Those of Role::kTraining are for training alone: evaluations measure with their defaults, so that one of a weights
  /// file needs no settings of the training that it comes from.
  std::vector<SettingSpec> settings = {};
  bool takes_numbers = false;  // its targets are numbers, and not labels
  bool takes_labels = true;
  bool takes_probabilities = false;  // f32 of the outputs' shape in place of labels: of mixed samples (data::Mixing)
  double least_target = -SettingSpec::kMost, most_target = SettingSpec::kMost;  // of numbers
  /// The label of which rows count for nothing (TargetRule::ignored): means are over the others. Of complete settings.
  std::function<std::optional<std::int32_t>(const Settings& settings)> ignored = {};
  /// `settings` are complete, and there during the call. The result is copied, may outlive the family, and is called on
  /// several threads (LossFunction).
  std::function<LossFunction(const Settings& settings)> make = {};
};

/// Families are there as long as the process; the list grows with register_loss().
const std::vector<const LossFamily*>& loss_families();
/// Adds a program's own, as register_model() does a model. UsageError without LossFamily::make.
void register_loss(LossFamily family);
/// Where nothing else is asked for.
const LossFamily& usual_loss();
/// Throws UsageError for another name, with the nearest right one.
const LossFamily& loss_family(const std::string& name);
std::vector<std::string> loss_names();
/// Throws UsageError for settings that the loss does not have. Both need not outlive what is returned.
LossFunction make_loss(const LossFamily& family = usual_loss(), const Settings& settings = {});

}  // namespace lockstep::nn
