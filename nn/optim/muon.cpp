// Muon (Jordan et al., 2024) for matrices, AdamW for all else (nn/optim/orthogonal.h).
#include <memory>

#include "base/error.h"
#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {

const OptimizerFamily& muon_family() {
  static const OptimizerFamily family = {
      .name = "muon",
      .settings =
          [] {
            auto settings = adam_settings();
            settings.push_back(momentum_setting(0.95));
            return settings;
          }(),
      .weight_decay = 0.1,
      .whole_matrices = true,
      .method = [](const Settings& settings, double weight_decay) -> UpdateMethod {
        const double momentum = settings.number("momentum");
        check_usage(momentum < 1, "Muon with a momentum of 1, where no gradient counts", "give a smaller one");
        auto adamw = std::make_shared<UpdateMethod>(optimizer_family("adamw").method(
            {{"betas", settings.numbers("betas")}, {"eps", settings.number("eps")}}, weight_decay));
        return {.weight_decay = weight_decay,
                .rule = [momentum](double) -> UpdateRule {
                  return MuonRule{.momentum = static_cast<float>(momentum), .rest = static_cast<float>(1.0 - momentum)};
                },
                .rates = [](double lr, double decay, double) -> std::array<double, StepControl::kRates> {
                  return {lr, 1.0 - lr * decay};
                },
                .moments = adamw->moments,
                .otherwise = adamw};
      }};
  return family;
}

}  // namespace lockstep::nn
