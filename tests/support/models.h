// For tests of several models: their settings, and a module of two inputs and two outputs with its loss.
#pragma once

#include <string>

#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::testing {

/// x (N, 6) and a mask (N, 8) of its hidden features → logits (N, 3) and numbers (N, 2).
class Fusion final : public nn::Module {
 public:
  static constexpr std::int64_t kFeatures = 6, kHidden = 8, kClasses = 3, kNumbers = 2;
  explicit Fusion(nn::Context& context)
      : hidden_(register_module<nn::Linear>("hidden", context, kFeatures, kHidden)),
        classes_(register_module<nn::Linear>("classes", context, kHidden, kClasses)),
        numbers_(register_module<nn::Linear>("numbers", context, kHidden, kNumbers)) {}
  nn::Vars forward_all(nn::Tape& tape, const nn::Vars& inputs) override {
    const auto [x, mask] = take<2>(inputs);
    const nn::Var hidden = nn::mul(tape, hidden_(tape, x), mask);
    return {classes_(tape, hidden), numbers_(tape, hidden)};
  }

 private:
  nn::Linear &hidden_, &classes_, &numbers_;
};

/// Cross entropy of the first output, and the square of the second.
inline nn::Loss joint_loss(nn::Tape& tape, const nn::Vars& outputs, const nn::Tensor& labels, float scale) {
  const auto [logits, numbers] = outputs.as<2>();
  return {nn::add(tape, nn::cross_entropy(tape, logits, labels, scale).value,
                  nn::sum(tape, nn::square(tape, numbers), scale).value)};
}

/// Settings for tests that run several models or optimizers in the same way: those of `all` that `model` has.
inline Settings settings_of(const std::string& model, const Settings& all) {
  Settings its;
  for (const auto& [name, value] : all)
    if (find_setting(nn::model_family(model).settings, name) != nullptr) its.set(name, value);
  return its;
}

}  // namespace lockstep::testing
