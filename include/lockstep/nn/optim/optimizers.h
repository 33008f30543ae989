// The registries of optimizers and of learning-rate schedules. An optimizer is one file in this directory, which
// declares an `OptimizerFamily`, and its rules with a row of the list in nn/ops/update_rules.h; a schedule is a row of
// the table in schedules.cpp. Nobody else knows one by its name.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/settings.h"
#include "lockstep/nn/optim/optimizer.h"

namespace lockstep::nn {

struct OptimizerFamily {
  std::string name;                        // "sgd"
  std::vector<SettingSpec> settings = {};  // beside learning rate and weight decay, which all of them have
  // Where neither the user nor the model says anything.
  double lr = 1e-3;
  double weight_decay = 0;
  /// Moves matrices as a whole: no rank has slices of them (Note [Matrices]).
  bool whole_matrices = false;
  /// `settings` are complete. Throws UsageError for those that PyTorch refuses.
  UpdateMethod (*method)(const Settings& settings, double weight_decay) = nullptr;
  /// Flags with which it remembers nothing of a parameter; empty: there are none.
  std::string leanest = {};
  /// What its state on disk is: a run resumes with the same. nullptr: its name.
  std::string (*state)(const Settings& settings) = nullptr;
};

/// They are there as long as the process.
const std::vector<const OptimizerFamily*>& optimizer_families();
/// Throws UsageError for another name, with the nearest right one.
const OptimizerFamily& optimizer_family(const std::string& name);
std::vector<std::string> optimizer_names();
/// Throws UsageError for an unknown name and for settings that it does not have. `share`: Note [Slices].
std::unique_ptr<Optimizer> make_optimizer(const std::string& name, std::vector<NamedParameter> parameters,
                                          const Settings& settings, double weight_decay,
                                          const std::vector<ParameterGroup>& groups = {}, OptimizerShare share = {});

/// What Adam and its kin have in common: torch.optim.Adam's (Kingma and Ba, "Adam: A Method for Stochastic
/// Optimization", 2015).
struct AdamConstants {
  double beta1 = 0.9, beta2 = 0.999;  // decay of the two moments
  double eps = 1e-8;
};
std::vector<SettingSpec> adam_settings();
/// `settings` are complete.
AdamConstants adam_constants(const Settings& settings);

/// --momentum, up to 1.
SettingSpec momentum_setting(double fallback);
/// What LAMB and LARS have in common: parameters without weight decay (biases, normalisations) move as without norms,
/// unless `always-adapt` is set. Throws UsageError where none would: `plain` is what `name` would be then.
SettingSpec always_adapt_setting();
void check_adapts(const std::string& name, const std::string& plain, double weight_decay, bool always);

/// A step after warm-up, as a schedule sees it; all count from the beginning of the run, from 0.
struct ScheduleStep {
  std::int64_t step = 0, warmup = 0, steps = 0;
  std::int64_t reductions = 0;  // how often evaluations have had it lowered (ScheduleFamily::follows_evaluations)
  /// The share of the steps after warm-up that are over, 0 to 1.
  double done() const;
};

struct ScheduleFamily {
  std::string name;   // "cosine"
  std::string about;  // what becomes of the rate, for people
  std::vector<SettingSpec> settings = {};
  /// The rate in that step. `settings` are complete.
  double (*at)(const ScheduleStep& at, double lr, const Settings& settings) = nullptr;
  /// The optimizer's momentum in that step (StepOptions). nullptr, or nothing: it stays.
  std::optional<double> (*momentum)(const ScheduleStep& at, const Settings& settings) = nullptr;
  /// It is lowered when evaluations get no better, as the settings kPlateauPatience and kPlateauThreshold say.
  bool follows_evaluations = false;
};
inline constexpr const char *kPlateauPatience = "plateau-patience", *kPlateauThreshold = "plateau-threshold",
                            *kCycleMomentum = "cycle-momentum";

/// They are there as long as the process.
const std::vector<const ScheduleFamily*>& schedule_families();
/// Throws UsageError for another name, with the nearest right one.
const ScheduleFamily& schedule_family(const std::string& name);
std::vector<std::string> schedule_names();

/// The learning rates of `total_steps` steps, and momenta, if the schedule moves them. A pure function; steps count
/// from 0. During the first `warmup` steps lr · (step + 1) / warmup; then what the schedule says. `settings` are
/// complete. Several threads may ask it at once.
class LearningRate {
 public:
  /// `schedule` must outlive it and its copies.
  LearningRate(const ScheduleFamily& schedule, Settings settings, double lr, std::int64_t warmup,
               std::int64_t total_steps)
      : schedule_(schedule), settings_(std::move(settings)), lr_(lr), warmup_(warmup), total_steps_(total_steps) {}
  double at(std::int64_t step, std::int64_t reductions = 0) const;
  /// In warm-up that of the first step after it.
  std::optional<double> momentum_at(std::int64_t step) const;

 private:
  const ScheduleFamily& schedule_;
  Settings settings_;
  double lr_;
  std::int64_t warmup_, total_steps_;
};

/// The one of that name. Throws UsageError for an unknown one, and for settings that it does not have.
LearningRate make_schedule(const std::string& name, double lr, std::int64_t total_steps, std::int64_t warmup = 0,
                           const Settings& settings = {});
/// From `lr` to `min_lr` along half a cosine, after `warmup` steps in which it rises (Loshchilov and Hutter, "SGDR",
/// 2017; PyTorch's CosineAnnealingLR).
LearningRate cosine(double lr, std::int64_t total_steps, std::int64_t warmup = 0, double min_lr = 0);

}  // namespace lockstep::nn
