// Training of a program's own model, data and loss: they become families of the registries, so that a run finds them as
// it does lockstep's.
#include <cstdio>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "lockstep/data/families.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/trainer/train.h"
#include "options/sources.h"
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
  if (own.loss == nullptr) return;
  check_usage(config.loss.empty(), "a configuration that names a loss, beside a program's own",
              "leave TrainConfig::loss out");
  config.loss = "own";
  nn::register_loss({.name = config.loss,
                     .about = "the program's own",
                     .takes_numbers = true,
                     .make = [loss = own.loss](const Settings&) { return loss; }});
}

}  // namespace

int train(TrainConfig config, const OwnTraining& own) {
  register_own(config, own);
  return train(std::as_const(config));
}

int train(int argc, char** argv, TrainConfig config, const OwnTraining& own) {
  register_own(config, own);
  const std::string program = argc > 0 ? std::filesystem::path(argv[0]).filename().string() : own.name;
  const OptionTable table = own_training_options(config, program);
  std::optional<UsageError> refusal;
  try {
    if (parse_options(table, options::process_sources({argv + std::min(argc, 1), argv + argc})).help) {
      std::fputs(table.help().c_str(), stdout);
      return 0;
    }
  } catch (const UsageError& error) {
    refusal = error;
  }
  return train(std::as_const(config), refusal);
}

}  // namespace lockstep::trainer
