#include "lockstep/trainer/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/io/weights.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/optim/optimizers.h"
#include "session/device_choice.h"
#include "session/opening.h"
#include "trainer/best.h"
#include "trainer/options.h"

namespace lockstep::trainer {
namespace {

using session::DeviceRequest;

void require(bool ok, const std::string& what, const std::string& remedy) {
  if (!ok) throw UsageError(what, remedy);
}

void validate_device(const TrainConfig& config) {
  const DeviceRequest request = session::parse_device(config.device);
  if (!config.share_devices)
    session::check_named_once(
        config.device, request,
        config.parallel == Parallel::kDp
            ? "name each device once"
            : "name each one once, or add --share-devices: a device alternates between its ranks");
  session::check_cpu_numbers(config.device, request);
  if (config.parallel == Parallel::kDp) {
    require(!config.share_devices, "--share-devices with --parallel dp, which has one rank", "leave it out");
    require(!config.sync_batchnorm,
            "--sync-batchnorm with --parallel dp, where each device normalises its own piece of the batch",
            "leave it out, or use --parallel ddp");
  }
  if (request.kind == DeviceRequest::Kind::kAuto) return;
  const DeviceKind kind = request.kind == DeviceRequest::Kind::kCpu ? DeviceKind::kCpu : DeviceKind::kCuda;
  session::check_kind(config, kind);
  check_gpu_options(config, kind);
}

}  // namespace

std::string optimizer_of(const TrainConfig& config) {
  return config.optimizer.empty() ? nn::model_family(config.model.name).training.optimizer : config.optimizer;
}

namespace {

/// What the model is trained with, where that is with this optimizer.
const nn::TrainingDefaults* model_defaults(const TrainConfig& config) {
  const nn::TrainingDefaults& training = nn::model_family(config.model.name).training;
  return training.optimizer == optimizer_of(config) ? &training : nullptr;
}

}  // namespace

nn::LearningRate schedule_of(const TrainConfig& config, std::int64_t total_steps, int world_size) {
  return {nn::schedule_family(config.schedule), schedule_settings_of(config), learning_rate_of(config, world_size),
          config.warmup, total_steps};
}

double learning_rate_of(const TrainConfig& config, int world_size) {
  if (config.lr) return *config.lr;
  if (const auto* model = model_defaults(config); model != nullptr) {
    if (model->lr_per_256) return *model->lr_per_256 * static_cast<double>(global_batch_of(config, world_size)) / 256;
    if (model->lr) return *model->lr;
  }
  return nn::optimizer_family(optimizer_of(config)).lr;
}

double weight_decay_of(const TrainConfig& config) {
  if (config.weight_decay) return *config.weight_decay;
  if (const auto* model = model_defaults(config); model != nullptr && model->weight_decay) return *model->weight_decay;
  return nn::optimizer_family(optimizer_of(config)).weight_decay;
}

std::string loss_of(const TrainConfig& config) { return config.loss.empty() ? nn::usual_loss().name : config.loss; }

Settings optimizer_settings_of(const TrainConfig& config) {
  const std::string name = optimizer_of(config);
  return resolve(nn::optimizer_family(name).settings, config.optimizer_settings, "optimizer " + name);
}

Settings schedule_settings_of(const TrainConfig& config) {
  return resolve(nn::schedule_family(config.schedule).settings, config.schedule_settings,
                 "schedule " + config.schedule);
}

double dropout_of(const ModelConfig& model) {
  constexpr const char* kDropout = "dropout";
  if (const SettingValue* const given = model.settings.find(kDropout)) return std::get<double>(given->any());
  const auto specs = nn::model_family(model.name).settings_of(model.name);
  const SettingSpec* const declared = find_setting(specs, kDropout);
  return declared != nullptr ? std::get<double>(declared->fallback.any()) : 0.0;
}

bool is_random(const ModelConfig& model) { return nn::model_family(model.name).random || dropout_of(model) > 0; }

std::int64_t global_batch_of(const TrainConfig& config, int world_size) {
  const std::int64_t parts = config.shards > 0 ? config.shards : std::int64_t{world_size} * config.accumulate;
  return config.global_batch.value_or(config.batch.value_or(kDefaultBatch) * parts);
}

int threads_of_a_shard(const TrainConfig& config) { return config.threads > 0 ? config.threads : 1; }

const char* name_of(Parallel parallel) { return parallel == Parallel::kDdp ? "ddp" : "dp"; }

const char* name_of(sampler::Tail tail) {
  switch (tail) {
    case sampler::Tail::kExact: return "exact";
    case sampler::Tail::kPad: return "pad";
    case sampler::Tail::kDrop: return "drop";
  }
  return "?";
}

namespace {

// One scale for all that computes a step, and one decision for all that moves.
void check_scaled_losses(const TrainConfig& config) {
  require(config.parallel == Parallel::kDdp,
          "--precision fp16 with --parallel dp: the scale of losses is on one GPU, and its replicas' are on others",
          "use --parallel ddp, or --precision bf16");
  require(
      config.local_sgd == 0,
      "--precision fp16 with --local-sgd: ranks that skip different steps would average parameters of different steps",
      "leave --local-sgd out, or use --precision bf16");
}

}  // namespace

void check_gpu_options(const TrainConfig& config, DeviceKind kind, const std::string& why) {
  const std::string because = why.empty() ? std::string() : fmt::format(" ({})", why);
  require(config.autotune != true || kind != DeviceKind::kCpu,
          fmt::format("--autotune yes is for GPUs, and this run is on the CPU{}", because),
          "leave --autotune out, or use --device cuda");
  require(
      kind == DeviceKind::kCpu || ddp::comm_hook_family(config.comm_hook).on_gpus,
      fmt::format("--comm-hook {} is for the CPU, and this run is on a GPU{}: its arithmetic is the host's, which a "
                  "GPU would wait for",
                  config.comm_hook, because),
      "use --comm-hook bf16 or fp16, or --device cpu");
  require(config.graphs != true || kind != DeviceKind::kCpu,
          fmt::format("--graphs yes is for GPUs, and this run is on the CPU{}", because),
          "leave --graphs out, or use --device cuda");
}

namespace {

/// Optimizers whose momentum a schedule may move.
std::vector<std::string> with_moving_momentum() {
  std::vector<std::string> names;
  for (const auto* family : nn::optimizer_families())
    if (family->method(resolve(family->settings, {}, family->name), family->weight_decay).momentum)
      names.push_back(family->name);
  return names;
}

}  // namespace

void validate(const TrainConfig& config) {
  require(!config.model.name.empty(), "no model was named", "name one of " + join(nn::model_names(), ", "));
  nn::check_model_name(config.model.name);
  require(!config.data.empty(), "no data was named", "give --data digits, for example");
  require(!(config.batch && config.global_batch), "both --batch and --global-batch were given", "give one of them");
  TrainConfig same = config;  // options are bound to what they can change
  train_options(same).check();
  require(
      config.zero <= 1,
      fmt::format(
          "--zero {}: backward writes gradients into the buckets that the ranks sum, and each rank has all of these{}",
          config.zero, config.zero > 2 ? ", and its kernels read whole parameters" : ""),
      "use --zero 1, which shards updates and the optimizer's state");
  const auto& optimizer = nn::optimizer_family(optimizer_of(config));
  require(
      config.zero == 0 || !optimizer.whole_matrices,
      fmt::format("--zero {} with --optimizer {}, which moves matrices as a whole: a rank would have a part of each",
                  config.zero, optimizer.name),
      "leave --zero out, or use another optimizer");
  require(
      !config.tune_bucket_mb || config.zero == 0,
      fmt::format("--bucket-mb auto with --zero {}, whose parameters lie in the buckets and cannot move", config.zero),
      "give a number, or leave --bucket-mb out");
  require(!config.tune_bucket_mb || config.local_sgd <= 1,
          "--bucket-mb auto with --local-sgd, whose steps send no gradients: no size would be faster",
          "leave --bucket-mb out");
  const double lr = learning_rate_of(config, 1);  // the least, of all numbers of ranks
  if (const SettingValue* const least = config.schedule_settings.find("min-lr"))
    require(std::get<double>(least->any()) <= lr, fmt::format("--min-lr {} is above --lr {}", to_string(*least), lr),
            "give a smaller --min-lr");
  if (const SettingValue* const momenta = config.schedule_settings.find(nn::kCycleMomentum)) {
    require(optimizer.method(optimizer_settings_of(config), weight_decay_of(config)).momentum.has_value(),
            fmt::format("--{} {} with --optimizer {}, {}", nn::kCycleMomentum, to_string(*momenta), optimizer.name,
                        "which has no momentum, or a constant one"),
            fmt::format("leave it out, or use {}, with their momentum", listed(with_moving_momentum(), "or")));
  }
  validate_device(config);
  if (config.precision == Precision::kFp16) check_scaled_losses(config);
  require(!config.checkpoint_dir.empty() || config.resume != "auto",
          "--resume auto resumes from the newest checkpoint, but no directory of checkpoints is given",
          "add --checkpoint-dir DIR, or give --resume PATH");
  for (const std::string& file : {config.metrics, config.trace})
    require(file.empty() || file.back() != '/', fmt::format("'{}' is a directory", file), "give a file's path");
  if (config.save_directory || config.save.ends_with('/')) {
    const auto has_config = [](const nn::ModelFamily& family) { return family.config.text != nullptr; };
    require(has_config(nn::model_family(config.model.name)),
            fmt::format("--save of a directory: there is no config.json of {} that from_pretrained() reads",
                        config.model.name),
            fmt::format("give a file, or another model: {}", nn::models_that(has_config)));
  }
  if (!config.save.empty()) nn::check_weights_path(config.save);
  if (watches_evaluations(config)) static_cast<void>(BestWatch(config));
  require(!nn::schedule_family(config.schedule).follows_evaluations || config.eval_every > 0 || config.eval_steps > 0,
          fmt::format("--schedule {} with --eval-every 0: it follows evaluations, and there is one alone, at the end",
                      config.schedule),
          "give --eval-every or --eval-steps, or another schedule");
  require(config.eval_steps == 0 || !config.stateful,
          "--eval-steps with --stateful, whose state an evaluation amid an epoch would replace",
          "leave --eval-steps out: evaluations come at the ends of epochs");
  require(config.eval_steps == 0 || config.local_sgd <= 1 || config.eval_steps % config.local_sgd == 0,
          fmt::format("--eval-steps {} with --local-sgd {}: between averagings each rank has parameters of its own",
                      config.eval_steps, config.local_sgd),
          "give a multiple of --local-sgd");
  require(config.keep_best == 0 || config.keep != 0, "--keep-best with --keep 0, which keeps all checkpoints",
          "leave one of them out");
  session::check_log_level(config.log_level);
}

std::vector<std::pair<std::string, std::string>> describe(const TrainConfig& config) {
  std::vector<std::pair<std::string, std::string>> facts = {{"model", config.model.name}};
  TrainConfig same = config;
  const OptionTable table = train_options(same);
  for (const auto& option : table.options()) {
    if (option.agree == Agree::kNo) continue;
    const std::string text = option.value.text();
    facts.emplace_back(option.name, option.agree == Agree::kValue ? text : text.empty() ? "no" : "yes");
  }
  if (config.shards > 0) facts.emplace_back("threads of a shard", fmt::to_string(threads_of_a_shard(config)));
  return facts;
}

}  // namespace lockstep::trainer
