#include "trainer/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/error.h"
#include "base/text.h"
#include "nn/io/weights.h"
#include "nn/models/models.h"
#include "nn/optim/optimizers.h"
#include "trainer/device_request.h"
#include "trainer/options.h"

namespace lockstep::trainer {
namespace {

void require(bool ok, const std::string& what, const std::string& remedy) {
  if (!ok) throw UsageError(what, remedy);
}

}  // namespace

void check_log_level(const std::string& level) {
  const std::vector<std::string> levels = {"debug", "info", "warn", "error"};
  if (std::ranges::find(levels, level) == levels.end())
    throw UsageError(fmt::format("unknown log level '{}'", level), "use debug, info, warn or error");
}

namespace {

void validate_device(const TrainConfig& config) {
  const DeviceRequest request = parse_device(config.device);
  for (auto at = request.indices.begin(); at != request.indices.end(); ++at)
    require(config.share_devices || std::find(request.indices.begin(), at, *at) == at,
            fmt::format("--device {} names {} {} twice", config.device,
                        request.kind == DeviceRequest::Kind::kCpu ? "CPU device" : "GPU", *at),
            config.parallel == Parallel::kDp
                ? "name each device once"
                : "name each one once, or add --share-devices: ranks that share a device take turns");
  check_cpu_numbers(config.device, request);
  if (config.parallel == Parallel::kDp) {
    require(!request.most_free, "--device cuda:free with --parallel dp, which takes all GPUs or those that are named",
            "name the GPUs: --device cuda:0,1");
    require(!config.share_devices, "--share-devices with --parallel dp, which has one rank", "leave it out");
    require(!config.sync_batchnorm,
            "--sync-batchnorm with --parallel dp, where each device normalises its own piece of the batch",
            "leave it out, or use --parallel ddp");
  }
  if (request.kind == DeviceRequest::Kind::kAuto) return;
  check_kind(config, request.kind == DeviceRequest::Kind::kCpu ? DeviceKind::kCpu : DeviceKind::kCuda);
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

double learning_rate_of(const TrainConfig& config, int world_size) {
  if (config.lr) return *config.lr;
  if (const auto* model = model_defaults(config); model != nullptr && model->lr_per_256)
    return *model->lr_per_256 * static_cast<double>(global_batch_of(config, world_size)) / 256;
  return nn::optimizer_family(optimizer_of(config)).lr;
}

double weight_decay_of(const TrainConfig& config) {
  if (config.weight_decay) return *config.weight_decay;
  if (const auto* model = model_defaults(config); model != nullptr && model->weight_decay) return *model->weight_decay;
  return nn::optimizer_family(optimizer_of(config)).weight_decay;
}

Settings optimizer_settings_of(const TrainConfig& config) {
  const std::string name = optimizer_of(config);
  return resolve(nn::optimizer_family(name).settings, config.optimizer_settings, "optimizer " + name);
}

Settings schedule_settings_of(const TrainConfig& config) {
  return resolve(nn::schedule_family(config.schedule).settings, config.schedule_settings,
                 "schedule " + config.schedule);
}

double dropout_of(const ModelConfig& model) {
  const SettingValue* const given = model.settings.find("dropout");
  return given != nullptr ? std::get<double>(given->any()) : 0.0;
}

std::int64_t global_batch_of(const TrainConfig& config, int world_size) {
  return config.global_batch.value_or(config.batch.value_or(kDefaultBatch) * world_size * config.accumulate);
}

const char* name_of(Parallel parallel) { return parallel == Parallel::kDdp ? "ddp" : "dp"; }

const char* name_of(sampler::Tail tail) {
  switch (tail) {
    case sampler::Tail::kExact: return "exact";
    case sampler::Tail::kPad: return "pad";
    case sampler::Tail::kDrop: return "drop";
  }
  return "?";
}

const char* name_of(Precision precision) { return precision == Precision::kF32 ? "f32" : "bf16"; }

void check_kind(const TrainConfig& config, DeviceKind kind, const std::string& why) {
  const std::string because = why.empty() ? std::string() : fmt::format(" ({})", why);
  if (kind == DeviceKind::kCpu) {
    require(config.backend != Backend::kNccl,
            fmt::format("--backend nccl adds up what is on GPUs, and this run is on the CPU{}", because),
            "leave --backend out, or use --device cuda");
    require(config.precision == Precision::kF32,
            fmt::format("bf16 is computed on GPUs only, in this version, and this run is on the CPU{}", because),
            "use --precision f32, or --device cuda");
    require(!config.tf32, fmt::format("--tf32 is for GPUs, and this run is on the CPU{}", because),
            "leave --tf32 out, or use --device cuda");
    require(config.graphs != true, fmt::format("--graphs yes is for GPUs, and this run is on the CPU{}", because),
            "leave --graphs out, or use --device cuda");
    return;
  }
  require(config.backend == Backend::kAuto || config.backend == Backend::kNccl,
          fmt::format("--backend {} on GPUs: gradients on a GPU travel over NCCL",
                      config.backend == Backend::kMpi ? "mpi" : "shm"),
          "leave --backend out, or use --device cpu");
}

void validate(const TrainConfig& config) {
  require(!config.model.name.empty(), "no model was named", "name one of " + join(nn::model_names(), ", "));
  nn::check_model_name(config.model.name);
  require(!config.data.empty(), "no data was named", "give --data digits, for example");
  require(!(config.batch && config.global_batch), "both --batch and --global-batch were given", "give one of them");
  TrainConfig same = config;  // options are bound to what they can change
  train_options(same).check();
  const double lr = learning_rate_of(config, 1);  // the least, of all numbers of ranks
  if (const SettingValue* const least = config.schedule_settings.find("min-lr"))
    require(std::get<double>(least->any()) <= lr, fmt::format("--min-lr {} is above --lr {}", to_string(*least), lr),
            "give a smaller --min-lr");
  validate_device(config);
  require(!config.checkpoint_dir.empty() || config.resume != "auto",
          "--resume auto goes on from the newest checkpoint, and nothing says where they are",
          "add --checkpoint-dir DIR, or give --resume PATH");
  for (const std::string& file : {config.save, config.metrics, config.trace})
    require(file.empty() || file.back() != '/', fmt::format("'{}' is a directory", file), "give a file's path");
  if (!config.save.empty()) nn::check_weights_path(config.save);
  check_log_level(config.log_level);
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
  return facts;
}

void check_encryption(const TrainConfig& config, DeviceKind kind, bool several_hosts) {
  if (config.encrypt && kind == DeviceKind::kCuda && several_hosts)
    throw UsageError(
        "--encrypt: gradients on GPUs travel between hosts over NCCL, which does not encrypt",
        "leave it out and connect the hosts by a network that encrypts (WireGuard, IPsec), or use --device cpu");
}

}  // namespace lockstep::trainer
