#include "trainer/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "base/error.h"
#include "base/text.h"
#include "nn/io/weights.h"
#include "nn/models/models.h"
#include "trainer/applicability.h"
#include "trainer/device_request.h"

namespace lockstep::trainer {
namespace {

void require(bool ok, const std::string& what, const std::string& remedy) {
  if (!ok) throw UsageError(what, remedy);
}

/// NaN is in no range.
template <class T>
void require_range(const char* flag, T value, T low, T high = std::numeric_limits<T>::max()) {
  require(value >= low && value <= high, fmt::format("{} {} is out of range", flag, value),
          high == std::numeric_limits<T>::max() ? fmt::format("give a finite number of at least {}", low)
                                                : fmt::format("give {} to {}", low, high));
}

template <class T>
std::string text_of(const std::optional<T>& value) {
  return value ? fmt::to_string(*value) : "default";
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

namespace {

constexpr double kLearningRate = 1e-3;

}  // namespace

Optimizer optimizer_of(const TrainConfig& config) {
  return config.optimizer.value_or(nn::is_resnet(config.model.name) ? Optimizer::kSgd : Optimizer::kAdamW);
}

double momentum_of(const TrainConfig& config) { return config.momentum.value_or(kDefaultMomentum); }

double learning_rate_of(const TrainConfig& config, int world_size) {
  if (config.lr) return *config.lr;
  if (!nn::is_resnet(config.model.name) || optimizer_of(config) != Optimizer::kSgd) return kLearningRate;
  return 0.1 * static_cast<double>(global_batch_of(config, world_size)) / 256;
}

double weight_decay_of(const TrainConfig& config) {
  if (config.weight_decay) return *config.weight_decay;
  if (optimizer_of(config) == Optimizer::kAdamW) return 0.01;
  return nn::is_resnet(config.model.name) ? 1e-4 : 0.0;
}

std::int64_t global_batch_of(const TrainConfig& config, int world_size) {
  return config.global_batch.value_or(config.batch.value_or(kDefaultBatch) * world_size * config.accumulate);
}

const char* name_of(Parallel parallel) { return parallel == Parallel::kDdp ? "ddp" : "dp"; }

const char* name_of(Optimizer optimizer) { return optimizer == Optimizer::kSgd ? "sgd" : "adamw"; }

const char* name_of(Schedule schedule) {
  switch (schedule) {
    case Schedule::kConstant: return "constant";
    case Schedule::kCosine: return "cosine";
    case Schedule::kStep: return "step";
  }
  return "?";
}

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
  constexpr std::int64_t kNone = 0, kOne = 1, kMostBatch = std::int64_t{1} << 40;
  require_range("--batch", config.batch.value_or(1), kOne, kMostBatch);
  require_range("--global-batch", config.global_batch.value_or(1), kOne, kMostBatch);
  require_range("--accumulate", config.accumulate, 1, kMostParts);
  require_range("--workers", config.workers, 0);
  require_range("--most-damaged", config.most_damaged.value_or(0), kNone);
  require_range("--epochs", config.epochs, kOne);
  require_range("--steps", config.steps.value_or(1), kOne);
  require_range("--eval-every", config.eval_every, kNone);
  require_range("--warmup", config.warmup, kNone);
  require_range("--threads", config.threads, 0);
  require_range("--check-replicas", config.check_replicas, kNone);
  require(config.model.dropout >= 0 && config.model.dropout < 1,
          fmt::format("--dropout {} is not in [0, 1)", config.model.dropout), "use --dropout 0.1, for example");
  require_range("--log-every", config.log_every, kOne);
  require_range("--lr", config.lr.value_or(0.0), 0.0);
  require_range("--min-lr", config.min_lr, 0.0);
  const double lr = learning_rate_of(config, 1);  // the least, of all numbers of ranks
  require(config.min_lr <= lr, fmt::format("--min-lr {} is above --lr {}", config.min_lr, lr),
          "give a smaller --min-lr");
  require_range("--momentum", momentum_of(config), 0.0, 1.0);
  const auto betas = config.betas.value_or(kDefaultBetas);
  for (const double beta : {betas.first, betas.second})
    require(beta >= 0 && beta < 1, fmt::format("a beta of {} is not in [0, 1)", beta), "use --betas 0.9,0.999");
  require_range("--weight-decay", config.weight_decay.value_or(0.0), 0.0);
  require_range("--clip-norm", config.clip_norm, 0.0);
  constexpr double kLeastBucketMib = std::numeric_limits<double>::min();
  require_range("--bucket-mb", config.bucket_mb.value_or(1), kLeastBucketMib, kMostBucketMib);
  require_range("--first-bucket-mb", config.first_bucket_mb, kLeastBucketMib, kMostBucketMib);
  validate_device(config);
  require_range("--checkpoint-every", config.checkpoint_every.value_or(0), kNone);
  require_range("--keep", config.keep.value_or(kDefaultKeep), kNone);
  require(!config.checkpoint_dir.empty() || config.resume != "auto",
          "--resume auto goes on from the newest checkpoint, and nothing says where they are",
          "add --checkpoint-dir DIR, or give --resume PATH");
  for (const std::string& file : {config.save, config.metrics, config.trace})
    require(file.empty() || file.back() != '/', fmt::format("'{}' is a directory", file), "give a file's path");
  if (!config.save.empty()) nn::check_weights_path(config.save);
  check_log_level(config.log_level);
  check_applicability(config);
}

std::vector<std::pair<std::string, std::string>> describe(const TrainConfig& config) {
  std::vector<std::string> hidden;
  for (const int width : config.model.hidden) hidden.push_back(fmt::to_string(width));
  const auto betas = config.betas.value_or(kDefaultBetas);
  return {
      {"model", config.model.name},
      {"hidden", join(hidden, ",")},
      {"gpt", fmt::format("{} layers, {} heads, width {}, context {}", text_of(config.model.layers),
                          text_of(config.model.heads), text_of(config.model.width), text_of(config.model.context))},
      {"zero-init-residual", fmt::to_string(config.model.zero_init_residual)},
      {"dropout", fmt::to_string(config.model.dropout)},
      {"freeze", config.freeze},
      {"data", config.data},
      {"classes", config.classes ? fmt::to_string(*config.classes) : "default"},
      {"augment", text_of(config.augment)},
      {"image-size", text_of(config.image_size)},
      {"batch", text_of(config.batch)},
      {"global-batch", text_of(config.global_batch)},
      {"accumulate", fmt::to_string(config.accumulate)},
      {"tail", name_of(config.tail)},
      {"epochs", fmt::to_string(config.epochs)},
      {"steps", text_of(config.steps)},
      {"eval-every", fmt::to_string(config.eval_every)},
      {"optimizer", name_of(optimizer_of(config))},
      {"lr", config.lr ? fmt::to_string(*config.lr) : "default"},
      {"min-lr", fmt::to_string(config.min_lr)},
      {"momentum", fmt::to_string(momentum_of(config))},
      {"nesterov", fmt::to_string(config.nesterov)},
      {"betas", fmt::format("{},{}", betas.first, betas.second)},
      {"weight-decay", config.weight_decay ? fmt::to_string(*config.weight_decay) : "default"},
      {"schedule", name_of(config.schedule)},
      {"warmup", fmt::to_string(config.warmup)},
      {"clip-norm", fmt::to_string(config.clip_norm)},
      {"seed", fmt::to_string(config.seed)},
      {"parallel", name_of(config.parallel)},
      {"precision", name_of(config.precision)},
      {"tf32", fmt::to_string(config.tf32)},
      {"graphs", fmt::to_string(config.graphs.value_or(true))},
      {"bucket-mb", config.bucket_mb ? fmt::to_string(*config.bucket_mb) : "default"},
      {"first-bucket-mb", fmt::to_string(config.first_bucket_mb)},
      {"find-unused", fmt::to_string(config.find_unused)},
      {"no-broadcast-buffers", fmt::to_string(config.no_broadcast_buffers)},
      {"sync-batchnorm", fmt::to_string(config.sync_batchnorm)},
      {"check-replicas", fmt::to_string(config.check_replicas)},
      {"checkpoints", config.checkpoint_dir.empty() ? "no" : "yes"},
      {"checkpoint-every", text_of(config.checkpoint_every)},
      {"resume", config.resume.empty() ? "no" : "yes"},
      {"trace", config.trace.empty() ? "no" : "yes"},  // it compares the ranks' clocks
  };
}

}  // namespace lockstep::trainer
