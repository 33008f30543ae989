// Training of a program's own model, data and loss: they become families of the registries, so that a run finds them as
// it does lockstep's.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "lockstep/data/families.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/trainer/train.h"
#include "options/sources.h"
#include "trainer/best.h"
#include "trainer/build.h"
#include "trainer/options.h"

namespace lockstep::trainer {
namespace {

/// Names what `own` has in `config`.
void register_own(TrainConfig& config, const OwnTraining& own) {
  check_usage(own.model != nullptr, "training without a model",
              "give OwnTraining::model a factory: nn::factory<Net>(…)");
  check_usage(own.data.train != nullptr, "training without data", "give OwnTraining::data a data set to train on");
  check_usage(config.model.name.empty() && config.data.empty(),
              "a configuration that names a model or data, beside a program's own",
              "leave TrainConfig::model and data out");
  config.model.name = own.name;
  nn::register_model(
      {.variants = {{.name = own.name}},
       .takes_vectors = true,
       .takes_images = true,
       .takes_tokens = true,
       .blocks = true,      // nobody knows
       .batch_norm = true,  // nor this
       .attention = true,
       .random = true,
       .any_samples = true,
       .build = [model = own.model](nn::Context& context, const nn::ModelSpec&) { return model(context); }});
  config.data = "own";
  data::register_dataset({.name = config.data,
                          .about = "the program's own",
                          .open = [splits = own.data](const std::string&, const std::string&,
                                                      const data::OpenOptions&) { return splits; }});
  set_own_metrics(own.hooks.metrics);
  if (own.loss == nullptr) return;
  check_usage(config.loss.empty(), "a configuration that names a loss, beside a program's own",
              "leave TrainConfig::loss out");
  config.loss = "own";
  nn::register_loss({.name = config.loss,
                     .about = "the program's own",
                     .takes_numbers = true,
                     .make = [loss = own.loss](const Settings&) { return loss; }});
}

/// What a run refuses where its learning rates come from both.
std::optional<UsageError> twice_given_rates(const TrainConfig& config, const TrainHooks& hooks) {
  if (!hooks.learning_rate || (!config.lr && config.warmup == 0 && config.schedule == TrainConfig().schedule &&
                               config.schedule_settings.empty()))
    return std::nullopt;
  return UsageError("--lr, --warmup or --schedule, where the program decides learning rates itself",
                    "leave them out: TrainHooks::learning_rate says every step's rate");
}

}  // namespace

double rate_of(const TrainHooks& hooks, const nn::LearningRate& schedule, std::int64_t step, std::int64_t total_steps,
               const BestWatch* watch) {
  if (!hooks.learning_rate) return schedule.at(step, watch != nullptr ? watch->history().reductions : 0);
  const double rate = hooks.learning_rate(step, total_steps);
  if (std::isfinite(rate) && rate >= 0) return rate;
  throw UsageError(fmt::format("a learning rate of {} for step {}", rate, step + 1),
                   "TrainHooks::learning_rate returns a number of at least 0");
}

int train(TrainConfig config, const OwnTraining& own) {
  register_own(config, own);
  return run_training(config, twice_given_rates(config, own.hooks), own.hooks);
}

int train(int argc, char** argv, TrainConfig config, const OwnTraining& own) {
  register_own(config, own);
  const std::string program = argc > 0 ? std::filesystem::path(argv[0]).filename().string() : own.name;
  const bool evaluates = argc > 1 && std::string_view(argv[1]) == "eval";
  const int first = std::min(argc, evaluates ? 2 : 1);
  const OptionTable table =
      evaluates ? own_evaluation_options(config, program + " eval") : own_training_options(config, program);
  std::optional<UsageError> refusal;
  try {
    const auto parsed = parse_options(table, options::process_sources({argv + first, argv + argc}));
    if (parsed.help) {
      std::fputs(table.help().c_str(), stdout);
      return 0;
    }
    config.places = parsed.places;
  } catch (const UsageError& error) {
    refusal = error;
  }
  if (evaluates) return evaluate(config, refusal);
  return run_training(config, refusal ? refusal : twice_given_rates(config, own.hooks), own.hooks);
}

}  // namespace lockstep::trainer
