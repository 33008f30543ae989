#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/nn/optim/optimizers.h"

namespace lockstep::nn {
namespace {

SettingSpec setting(const char* name, double fallback, const char* help, const char* placeholder = "X") {
  return {.name = name,
          .fallback = fallback,
          .help = help,
          .role = SettingSpec::Role::kTraining,
          .placeholder = placeholder};
}

SettingSpec min_lr() {
  SettingSpec spec = setting("min-lr", 0.0, "learning rate at the end");
  spec.neutral = 0.0;
  return spec;
}

SettingSpec gamma() {
  SettingSpec spec = setting("gamma", 0.1, "factor of the learning rate at each fall", "F");
  spec.open_low = true;
  spec.high = 1;
  return spec;
}

SettingSpec end_factor(double fallback, bool above_zero) {
  SettingSpec spec = setting("end-factor", fallback, "factor of the learning rate at the end", "F");
  spec.open_low = above_zero;
  spec.high = 1;
  return spec;
}

SettingSpec count(const char* name, std::int64_t fallback, const char* help, double least = 1) {
  return {.name = name,
          .fallback = fallback,
          .help = help,
          .role = SettingSpec::Role::kTraining,
          .low = least,
          .high = 1e9};
}

double constant(const ScheduleStep&, double lr, const Settings&) { return lr; }

/// min_lr + (lr − min_lr) · (1 + cos(π t)) / 2 (Loshchilov and Hutter, 2017).
double along_half_a_cosine(double t, double lr, double least) {
  return least + (lr - least) * 0.5 * (1.0 + std::cos(std::numbers::pi * t));
}

double cosine_at(const ScheduleStep& at, double lr, const Settings& settings) {
  return along_half_a_cosine(at.done(), lr, settings.number("min-lr"));
}

// PyTorch's CosineAnnealingWarmRestarts: n cycles, each m times as long as the one before, the first of
// steps / (1 + m + … + m^(n − 1)).
double cosine_restarts(const ScheduleStep& at, double lr, const Settings& settings) {
  const std::int64_t cycles = settings.integer("cycles"), longer = settings.integer("cycle-factor");
  double all = 0, length = 1;
  for (std::int64_t i = 0; i < cycles; ++i, length *= static_cast<double>(longer)) all += length;
  double left = at.done() * all;  // in lengths of the first cycle
  length = 1;
  for (std::int64_t i = 1; i < cycles && left >= length; ++i, length *= static_cast<double>(longer)) left -= length;
  return along_half_a_cosine(std::min(left / length, 1.0), lr, settings.number("min-lr"));
}

// PyTorch's StepLR(step_size = steps / stages, gamma), never below min_lr.
double step(const ScheduleStep& at, double lr, const Settings& settings) {
  const double stages = static_cast<double>(settings.integer("stages"));
  const double falls = std::floor(stages * std::min(at.done(), 0.999999));
  return std::max(settings.number("min-lr"), lr * std::pow(settings.number("gamma"), falls));
}

// PyTorch's MultiStepLR(milestones, gamma), whose milestones are shares of the steps here.
double multi_step(const ScheduleStep& at, double lr, const Settings& settings) {
  const auto& milestones = settings.numbers("milestones");
  const auto passed = std::ranges::count_if(milestones, [&](double share) { return at.done() >= share; });
  return lr * std::pow(settings.number("gamma"), static_cast<double>(passed));
}

// PyTorch's LinearLR(start_factor=1, end_factor, total_iters=the steps after warm-up):
// lr · (1 + (end_factor − 1) · t).
double linear(const ScheduleStep& at, double lr, const Settings& settings) {
  return lr * (1.0 + (settings.number("end-factor") - 1.0) * at.done());
}

// PyTorch's ExponentialLR(gamma = end_factor^(1 / steps)).
double exponential(const ScheduleStep& at, double lr, const Settings& settings) {
  return lr * std::pow(settings.number("end-factor"), at.done());
}

// PyTorch's PolynomialLR(total_iters = steps, power), down to min_lr.
double polynomial(const ScheduleStep& at, double lr, const Settings& settings) {
  const double least = settings.number("min-lr");
  return least + (lr - least) * std::pow(1.0 - at.done(), settings.number("power"));
}

// lr · sqrt(T / (T + steps since warm-up)) (Vaswani et al., "Attention Is All You Need", 2017, whose T is the warm-up).
double inverse_sqrt(const ScheduleStep& at, double lr, const Settings& settings) {
  constexpr double kWithoutWarmup = 10'000;
  double timescale = static_cast<double>(settings.integer("timescale"));
  if (timescale == 0) timescale = at.warmup > 0 ? static_cast<double>(at.warmup) : kWithoutWarmup;
  return lr * std::sqrt(timescale / (timescale + static_cast<double>(at.step - at.warmup)));
}

// PyTorch's OneCycleLR (Smith and Topin, "Super-Convergence", 2018): along half a cosine from `first` to `top` in the
// first `rise` of the steps, and to `last` in the others.
double along_a_cycle(const ScheduleStep& at, const Settings& settings, double first, double top, double last) {
  const auto step = static_cast<double>(at.step - at.warmup), steps = static_cast<double>(at.steps - at.warmup);
  const double turn = settings.number("rise") * steps - 1, end = steps - 1;
  if (step <= turn) return along_half_a_cosine(turn > 0 ? step / turn : 1, first, top);
  return along_half_a_cosine(end > turn ? std::min(1.0, (step - turn) / (end - turn)) : 1, top, last);
}

double one_cycle(const ScheduleStep& at, double lr, const Settings& settings) {
  const double first = lr / settings.number("start-divisor");
  return along_a_cycle(at, settings, first, lr, first / settings.number("end-divisor"));
}

// The other way round.
std::optional<double> momentum_of_one_cycle(const ScheduleStep& at, const Settings& settings) {
  const auto& ends = settings.numbers(kCycleMomentum);
  if (ends.empty()) return std::nullopt;
  return along_a_cycle(at, settings, ends[0], ends[1], ends[0]);
}

// PyTorch's ReduceLROnPlateau, which multiplies the rate itself, down to a least one.
double plateau(const ScheduleStep& at, double lr, const Settings& settings) {
  const double least = std::min(lr, settings.number("min-lr"));
  return std::max(least, lr * std::pow(settings.number("gamma"), static_cast<double>(at.reductions)));
}

SettingSpec plateau_threshold() {
  SettingSpec spec =
      setting(kPlateauThreshold, 1e-4, "share by which a loss is lower than the least one to be better", "F");
  spec.high = 1;
  spec.open_high = true;
  return spec;
}

SettingSpec divisor(const char* name, double fallback, const char* help) {
  SettingSpec spec = setting(name, fallback, help, "D");
  spec.low = 1;
  return spec;
}

SettingSpec rise() {
  SettingSpec spec = setting("rise", 0.3, "share of the steps in which it rises", "F");
  spec.high = 1;
  spec.open_low = spec.open_high = true;
  return spec;
}

const Registry<ScheduleFamily>& schedule_registry() {
  static const ScheduleFamily rows[] = {
      {.name = "constant", .about = "as it is", .at = constant},
      {.name = "cosine", .about = "down to --min-lr along half a cosine", .settings = {min_lr()}, .at = cosine_at},
      {.name = "restarts",
       .about = "the cosine several times",
       .settings = {min_lr(), count("cycles", 3, "descents"),
                    count("cycle-factor", 1, "length of a descent in that of the one before")},
       .at = cosine_restarts},
      {.name = "step",
       .about = "a tenth after each third, or --gamma times itself after each of --stages equal parts",
       .settings = {min_lr(), gamma(), count("stages", 3, "parts of the run")},
       .at = step},
      {.name = "multi-step",
       .about = "--gamma times itself at each of --milestones",
       .settings = {gamma(),
                    {.name = "milestones",
                     .fallback = std::vector<double>{0.5, 0.75},
                     .help = "shares of the steps after warm-up at which it falls (epoch 30 of 90: 0.3333)",
                     .role = SettingSpec::Role::kTraining,
                     .high = 1,
                     .open_low = true,
                     .open_high = true,
                     .placeholder = "F,F",
                     .least_many = 1}},
       .at = multi_step},
      {.name = "linear",
       .about = "linearly to --end-factor times itself",
       .settings = {end_factor(0.0, false)},
       .at = linear},
      {.name = "exponential",
       .about = "by the same factor in each step, to --end-factor times itself",
       .settings = {end_factor(0.01, true)},
       .at = exponential},
      {.name = "polynomial",
       .about = "down to --min-lr as the --power of the share of steps that are left",
       .settings = {min_lr(), setting("power", 1.0, "exponent")},
       .at = polynomial},
      {.name = "one-cycle",
       .about = "up along half a cosine, and down to next to nothing",
       .settings = {rise(),
                    divisor("start-divisor", 25, "the rate at the beginning is so many times smaller"),
                    divisor("end-divisor", 1e4, "the rate at the end is so many times smaller than that"),
                    {.name = kCycleMomentum,
                     .fallback = std::vector<double>{},
                     .help = "momentum at both ends, and at the top: it moves as the rate does, the other way round; "
                             "of Adam the first beta",
                     .role = SettingSpec::Role::kTraining,
                     .high = 1,
                     .open_high = true,
                     .placeholder = "A,B",
                     .default_text = "it stays",
                     .least_many = 2,
                     .most_many = 2}},
       .at = one_cycle,
       .momentum = momentum_of_one_cycle},
      {.name = "plateau",
       .about = "--gamma times itself whenever more than --plateau-patience evaluations in a row had no lower loss",
       .settings = {min_lr(), gamma(), count(kPlateauPatience, 10, "evaluations that may be no better", 0),
                    plateau_threshold()},
       .at = plateau,
       .follows_evaluations = true},
      {.name = "inverse-sqrt",
       .about = "as one over the root of the steps since warm-up and --timescale together",
       .settings = {count("timescale", 0,
                          "steps in which it falls to 0.71 of itself; 0: as many as the warm-up has, "
                          "or 10000",
                          0)},
       .at = inverse_sqrt},
  };
  static const Registry<ScheduleFamily> schedules("schedule", [] {
    std::vector<const ScheduleFamily*> all;
    for (const auto& row : rows) all.push_back(&row);
    return all;
  }());
  return schedules;
}

}  // namespace

const std::vector<const ScheduleFamily*>& schedule_families() { return schedule_registry().all(); }
std::vector<std::string> schedule_names() { return schedule_registry().names(); }
const ScheduleFamily& schedule_family(const std::string& name) { return schedule_registry().named(name); }

LearningRate make_schedule(const std::string& name, double lr, std::int64_t total_steps, std::int64_t warmup,
                           const Settings& settings) {
  check_usage(lr >= 0 && total_steps >= 0 && warmup >= 0,
              "a learning-rate schedule with a negative rate or number of steps");
  const ScheduleFamily& family = schedule_family(name);
  return {family, resolve(family.settings, settings, "schedule " + name), lr, warmup, total_steps};
}

LearningRate cosine(double lr, std::int64_t total_steps, std::int64_t warmup, double min_lr) {
  return make_schedule("cosine", lr, total_steps, warmup, {{"min-lr", min_lr}});
}

double ScheduleStep::done() const {
  if (steps <= warmup) return 0.0;
  return std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(steps - warmup));
}

double LearningRate::at(std::int64_t step, std::int64_t reductions) const {
  if (step < warmup_) return lr_ * static_cast<double>(step + 1) / static_cast<double>(warmup_);
  return schedule_.at({.step = step, .warmup = warmup_, .steps = total_steps_, .reductions = reductions}, lr_,
                      settings_);
}

std::optional<double> LearningRate::momentum_at(std::int64_t step) const {
  if (schedule_.momentum == nullptr) return std::nullopt;
  return schedule_.momentum({.step = std::max(step, warmup_), .warmup = warmup_, .steps = total_steps_}, settings_);
}

}  // namespace lockstep::nn
