#include "trainer/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::trainer {
namespace {

void require(bool ok, const std::string& what, const std::string& remedy) {
  if (!ok) throw UsageError(what, remedy);
}

std::string text_of(const std::optional<std::int64_t>& value) { return value ? fmt::to_string(*value) : "default"; }

}  // namespace

void validate(const TrainConfig& config) {
  require(!config.model.name.empty(), "no model was named", "name one: linear, mlp or cnn");
  require(!config.data.empty(), "no data was named", "give --data digits, for example");
  require(!(config.batch && config.global_batch), "both --batch and --global-batch were given", "give one of them");
  require(config.lr >= 0 && config.min_lr >= 0, "a learning rate is negative", "give --lr and --min-lr of 0 or more");
  require(config.min_lr <= config.lr, fmt::format("--min-lr {} is above --lr {}", config.min_lr, config.lr),
          "give a smaller --min-lr");
  require(!config.nesterov || (config.optimizer == Optimizer::kSgd && config.momentum > 0),
          "--nesterov needs --optimizer sgd with a momentum above 0",
          "add --optimizer sgd --momentum 0.9, or leave --nesterov out");
  require(config.betas.first < 1 && config.betas.second < 1, "--betas must be below 1", "use 0.9,0.999");
  require(!config.weight_decay || *config.weight_decay >= 0, "--weight-decay is negative", "give 0 or more");
  require(config.clip_norm >= 0, "--clip-norm is negative", "give 0 (no clipping) or more");
  for (const std::string& file : {config.save, config.metrics})
    require(file.empty() || file.back() != '/', fmt::format("'{}' is a directory", file), "give a file's path");
  constexpr const char* kLevels[] = {"debug", "info", "warn", "error"};
  require(std::find(std::begin(kLevels), std::end(kLevels), config.log_level) != std::end(kLevels),
          fmt::format("unknown log level '{}'", config.log_level), "use debug, info, warn or error");
}

std::vector<std::pair<std::string, std::string>> describe(const TrainConfig& config) {
  std::vector<std::string> hidden;
  for (const int width : config.model.hidden) hidden.push_back(fmt::to_string(width));
  return {
      {"model", config.model.name},
      {"hidden", join(hidden, ",")},
      {"data", config.data},
      {"classes", config.classes ? fmt::to_string(*config.classes) : "default"},
      {"batch", text_of(config.batch)},
      {"global-batch", text_of(config.global_batch)},
      {"tail", fmt::to_string(static_cast<int>(config.tail))},
      {"epochs", fmt::to_string(config.epochs)},
      {"steps", text_of(config.steps)},
      {"eval-every", fmt::to_string(config.eval_every)},
      {"optimizer", config.optimizer == Optimizer::kSgd ? "sgd" : "adamw"},
      {"lr", fmt::to_string(config.lr)},
      {"min-lr", fmt::to_string(config.min_lr)},
      {"momentum", fmt::to_string(config.momentum)},
      {"nesterov", fmt::to_string(config.nesterov)},
      {"betas", fmt::format("{},{}", config.betas.first, config.betas.second)},
      {"weight-decay", config.weight_decay ? fmt::to_string(*config.weight_decay) : "default"},
      {"schedule", fmt::to_string(static_cast<int>(config.schedule))},
      {"warmup", fmt::to_string(config.warmup)},
      {"clip-norm", fmt::to_string(config.clip_norm)},
      {"seed", fmt::to_string(config.seed)},
      {"bucket-mb", fmt::to_string(config.bucket_mb)},
      {"first-bucket-mb", fmt::to_string(config.first_bucket_mb)},
      {"check-replicas", fmt::to_string(config.check_replicas)},
  };
}

}  // namespace lockstep::trainer
