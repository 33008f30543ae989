#include "lockstep/nn/optim/optimizers.h"

#include "base/error.h"
#include "base/text.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {

#define LOCKSTEP_DECLARE_FAMILY(name, ...) const OptimizerFamily& name##_family();
LOCKSTEP_OPTIMIZERS(LOCKSTEP_DECLARE_FAMILY)
#undef LOCKSTEP_DECLARE_FAMILY

namespace {

const Registry<OptimizerFamily>& optimizer_registry() {
#define LOCKSTEP_FAMILY(name, ...) &name##_family(),
  static const Registry<OptimizerFamily> optimizers("optimizer", {LOCKSTEP_OPTIMIZERS(LOCKSTEP_FAMILY)});
#undef LOCKSTEP_FAMILY
  return optimizers;
}

}  // namespace

const std::vector<const OptimizerFamily*>& optimizer_families() { return optimizer_registry().all(); }
std::vector<std::string> optimizer_names() { return optimizer_registry().names(); }
const OptimizerFamily& optimizer_family(const std::string& name) { return optimizer_registry().named(name); }

std::unique_ptr<Optimizer> make_optimizer(const std::string& name, std::vector<NamedParameter> parameters,
                                          const Settings& settings, double weight_decay,
                                          const std::vector<ParameterGroup>& groups, OptimizerShare share) {
  const OptimizerFamily& family = optimizer_family(name);
  UpdateMethod method = family.method(resolve(family.settings, settings, "optimizer " + name), weight_decay);
  return std::make_unique<Optimizer>(std::move(parameters), std::move(method), groups, std::move(share));
}

std::vector<SettingSpec> adam_settings() {
  const AdamConstants usual;
  return {{.name = "betas",
           .fallback = {usual.beta1, usual.beta2},
           .help = "decay of the two moments",
           .role = SettingSpec::Role::kTraining,
           .high = 1,
           .open_high = true,
           .placeholder = "A,B",
           .least_many = 2,
           .most_many = 2},
          {.name = "eps",
           .fallback = usual.eps,
           .help = "added to the root of the second moment",
           .role = SettingSpec::Role::kTraining,
           .placeholder = "X"}};
}

SettingSpec momentum_setting(double fallback) {
  return {.name = "momentum",
          .fallback = fallback,
          .help = "momentum",
          .role = SettingSpec::Role::kTraining,
          .high = 1,
          .placeholder = "X"};
}

SettingSpec always_adapt_setting() {
  return {.name = "always-adapt",
          .fallback = false,
          .help = "also scale updates of parameters without weight decay by their norms",
          .role = SettingSpec::Role::kTraining};
}

void check_adapts(const std::string& name, const std::string& plain, double weight_decay, bool always) {
  if (weight_decay > 0 || always) return;
  throw UsageError(fmt::format("--optimizer {} without weight decay, where no parameter moves by its norm", name),
                   fmt::format("add --always-adapt, give a --weight-decay, or use --optimizer {}", plain));
}

AdamConstants adam_constants(const Settings& settings) {
  const auto& betas = settings.numbers("betas");
  return {.beta1 = betas[0], .beta2 = betas[1], .eps = settings.number("eps")};
}

}  // namespace lockstep::nn
