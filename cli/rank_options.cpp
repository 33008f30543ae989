#include "cli/rank_options.h"

#include <cstdio>

#include "cli/model_options.h"
#include "cli/option_sources.h"
#include "cli/values.h"
#include "data/images.h"
#include "trainer/applicability.h"

namespace lockstep::cli {
namespace {

constexpr Range kFraction = {.low = 0, .high = 1};
constexpr Range kBucketMib = {.low = 0, .high = trainer::kMostBucketMib, .open_low = true};

using trainer::TrainConfig;

}  // namespace

void add_model_options(OptionTable& table, TrainConfig& config) {
  add_model_name(table, config.model);
  table.group("Model and data");
  table.add({.name = "data",
             .placeholder = "DATA[:PATH]",
             .help = "digits (shipped), mnist:DIR (IDX files, plain or .gz), cifar10:DIR (binary version), images:DIR "
                     "(JPEG and PNG, a folder a class), text:FILE, tokens:FILE (16-bit) or random:SHAPE,LEN",
             .set = text(config.data)});
  table.add({.name = "classes",
             .placeholder = "K",
             .help = "classes of the last layer",
             .default_text = "what the data has",
             .set = integer(config.classes, 1, 1 << 24)});
  table.add({.name = "image-size",
             .placeholder = "N",
             .help = "images: height and width of a sample, in pixels",
             .default_text = fmt::format("what the weights say, or {}, of resnet18-cifar 32", data::kDefaultImageSize),
             .set = integer(config.image_size, 1, data::kMostImageSize)});
  table.add({.name = "most-damaged",
             .placeholder = "N",
             .help = "images: files that cannot be read and are replaced by others, before a rank gives up",
             .default_text = fmt::to_string(data::kDefaultMostDamaged),
             .set = integer(config.most_damaged, 0, kMost)});
  table.add({.name = "in",
             .placeholder = "N",
             .help = "linear: input features",
             .default_text = "5, or what the data has",
             .set = integer(config.model.in, 1, 1 << 24)});
  table.add({.name = "out",
             .placeholder = "N",
             .help = "linear: output features",
             .default_text = "2, or what the data has",
             .set = integer(config.model.out, 1, 1 << 24)});
  add_model_sizes(table, config.model,
                  {.hidden = "1024,1024",
                   .layers = "4, of gpt2 12, of lstm 2",
                   .heads = "4, of gpt2 12",
                   .width = "256, of gpt2 768",
                   .context = "256, of gpt2 1024"});
}

void add_training_options(OptionTable& table, TrainConfig& config) {
  table.add({.name = "augment",
             .placeholder = "yes|no",
             .help = "cifar10, images: training samples are cropped and mirrored at random",
             .default_text = "yes",
             .set = boolean(config.augment)});
  table.add({.name = "zero-init-residual",
             .kind = OptionKind::kFlag,
             .help = "ResNets: each block starts as the identity",
             .set = boolean(config.model.zero_init_residual)});
  table.add({.name = "dropout",
             .placeholder = "P",
             .help = "gpt, lstm: probability with which an element is dropped in training",
             .default_text = fmt::to_string(config.model.dropout),
             .set = number(config.model.dropout, kFraction)});
}

void add_weight_file(OptionTable& table, TrainConfig& config) {
  add_weight_file(table, {config.weights, config.non_strict, config.keep_prefix}, "file to start from");
}

void add_tuning_options(OptionTable& table, TrainConfig& config) {
  table.add({.name = "save",
             .placeholder = "FILE",
             .help = "weights to write at the end: safetensors, or for .pt, .pth and .bin what torch.load() reads",
             .set = text(config.save)});
  table.add({.name = "reset-head",
             .kind = OptionKind::kFlag,
             .help = "the last layer starts anew: the file's is not used, and may be of another size",
             .set = boolean(config.reset_head)});
  table.add({.name = "freeze",
             .kind = OptionKind::kList,
             .placeholder = "PATTERN,…",
             .help = "parameters that are not trained, by their names; * stands for any characters",
             .set = text(config.freeze)});
}

namespace {

void add_workers_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "workers",
             .placeholder = "N",
             .help = "threads a rank that prepare batches; 0: the training thread does it",
             .default_text = fmt::to_string(config.workers),
             .set = integer(config.workers, 0, 256)});
}

void add_metrics_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "metrics",
             .placeholder = "FILE.jsonl",
             .help = "file for measurements, one JSON object a line",
             .set = text(config.metrics)});
}

void add_log_level_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "log-level",
             .placeholder = "debug|info|warn|error",
             .help = "what goes to stderr; debug: also when each bucket of each step started and ended",
             .default_text = config.log_level,
             .set = text(config.log_level)});
}

}  // namespace

void add_eval_batch_options(OptionTable& table, TrainConfig& config) {
  table.group("Batches");
  table.add({.name = "batch",
             .synonyms = {"batch-size"},
             .placeholder = "B",
             .help = "samples that a rank looks at together",
             .default_text = "32",
             .set = integer(config.batch, 1, 1 << 30)});
  add_workers_option(table, config);
}

void add_eval_report_options(OptionTable& table, TrainConfig& config) {
  table.group("Reports");
  add_metrics_option(table, config);
  add_log_level_option(table, config);
  add_config_option(table, config.config_file);
}

void add_batch_options(OptionTable& table, TrainConfig& config) {
  table.group("Batches and length");
  table.add({.name = "batch",
             .synonyms = {"batch-size"},
             .placeholder = "B",
             .help = "samples a rank and step",
             .default_text = "32",
             .set = integer(config.batch, 1, 1 << 30)});
  table.add({.name = "global-batch",
             .placeholder = "G",
             .help = "samples of all ranks together and step",
             .set = integer(config.global_batch, 1, std::int64_t{1} << 40)});
  table.exclusive({"batch", "global-batch"});
}

void add_accumulate_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "accumulate",
             .placeholder = "A",
             .help = "parts of a step that a rank computes one after the other, in less memory; --batch is then the "
                     "samples of one, and the global batch is B · A · ranks",
             .default_text = fmt::to_string(config.accumulate),
             .set = integer(config.accumulate, 1, trainer::kMostParts)});
}

void add_length_options(OptionTable& table, TrainConfig& config) {
  table.add({.name = "epochs",
             .placeholder = "E",
             .help = "passes over the training data",
             .default_text = fmt::to_string(config.epochs),
             .set = integer(config.epochs, 1, 1 << 30)});
  table.add({.name = "steps",
             .synonyms = {"max-steps"},
             .placeholder = "S",
             .help = "steps, instead of epochs",
             .set = integer(config.steps, 1, kMost)});
  table.exclusive({"epochs", "steps"});
  table.add({.name = "eval-every",
             .placeholder = "E",
             .help = "epochs between evaluations; 0: only at the end",
             .default_text = fmt::to_string(config.eval_every),
             .set = integer(config.eval_every, 0, 1 << 30)});
  table.add({.name = "tail",
             .placeholder = "exact|pad|drop",
             .help = "an epoch's last samples: a short step, filled up by repeating some, or left out",
             .default_text = "exact",
             .set = choice(
                 config.tail,
                 {{"exact", sampler::Tail::kExact}, {"pad", sampler::Tail::kPad}, {"drop", sampler::Tail::kDrop}})});
  add_workers_option(table, config);
}

void add_update_options(OptionTable& table, TrainConfig& config) {
  table.group("Optimisation");
  table.add(
      {.name = "optimizer",
       .synonyms = {"opt"},
       .placeholder = "sgd|adamw",
       .help = "update rule",
       .default_text = "adamw, for ResNets sgd",
       .set = choice(config.optimizer, {{"sgd", trainer::Optimizer::kSgd}, {"adamw", trainer::Optimizer::kAdamW}})});
  table.add({.name = "lr",
             .placeholder = "X",
             .help = "learning rate",
             .default_text = "0.001; for ResNets 0.1 * global batch / 256",
             .set = number(config.lr, {})});
  table.add({.name = "momentum",
             .placeholder = "X",
             .help = "sgd: momentum",
             .default_text = fmt::to_string(trainer::kDefaultMomentum),
             .set = number(config.momentum, kFraction)});
  table.add({.name = "nesterov",
             .kind = OptionKind::kFlag,
             .help = "sgd: Nesterov's momentum",
             .set = boolean(config.nesterov)});
  table.add({.name = "betas",
             .kind = OptionKind::kList,
             .placeholder = "A,B",
             .help = "adamw: decay of the two moments",
             .default_text = fmt::format("{},{}", trainer::kDefaultBetas.first, trainer::kDefaultBetas.second),
             .set = number_pair(config.betas, kFraction)});
  table.add({.name = "weight-decay",
             .placeholder = "X",
             .help = "weight decay",
             .default_text = "0 for sgd, 0.01 for adamw, 0.0001 for ResNets",
             .set = number(config.weight_decay, {})});
  table.add({.name = "clip-norm",
             .placeholder = "X",
             .help = "largest L2 norm of all gradients together; 0: no clipping",
             .default_text = fmt::to_string(config.clip_norm),
             .set = number(config.clip_norm, {})});
  table.add({.name = "seed",
             .placeholder = "N",
             .help = "of initial parameters and sample order",
             .default_text = fmt::to_string(config.seed),
             .set = integer(config.seed, 0, kMost)});
}

void add_schedule_options(OptionTable& table, TrainConfig& config) {
  table.add({.name = "min-lr",
             .placeholder = "X",
             .help = "cosine, step: learning rate that the schedule ends at",
             .default_text = fmt::to_string(config.min_lr),
             .set = number(config.min_lr, {})});
  table.add({.name = "schedule",
             .placeholder = "constant|cosine|step",
             .help = "course of the learning rate",
             .default_text = "constant",
             .set = choice(config.schedule, {{"constant", trainer::Schedule::kConstant},
                                             {"cosine", trainer::Schedule::kCosine},
                                             {"step", trainer::Schedule::kStep}})});
  table.add({.name = "warmup",
             .placeholder = "STEPS",
             .help = "steps over which the learning rate rises from 0",
             .default_text = fmt::to_string(config.warmup),
             .set = integer(config.warmup, 0, kMost)});
}

void add_backend_option(OptionTable& table, comm::GroupOptions::Backend& backend) {
  using Backend = comm::GroupOptions::Backend;
  table.add({.name = "backend",
             .placeholder = "auto|shm|mpi",
             .help = "what carries the collectives: memory inside a host and sockets between hosts; memory alone; MPI",
             .default_text = "auto",
             .set = choice(backend, {{"auto", Backend::kAuto}, {"shm", Backend::kShm}, {"mpi", Backend::kMpi}})});
}

void add_timeout_option(OptionTable& table, double& seconds) {
  table.add({.name = "timeout-seconds",
             .placeholder = "S",
             .help = "longest wait for another rank, in seconds",
             .default_text = fmt::to_string(seconds),
             .set = number(seconds, {.low = 0, .high = comm::kMostTimeoutSeconds, .open_low = true})});
}

void add_stall_option(OptionTable& table, double& seconds) {
  table.add({.name = "stall-warning-seconds",
             .placeholder = "S",
             .help = "a wait for another rank that lasts so long is mentioned, with the rank that is waited for, and "
                     "again after twice as long, and so on; 0: never",
             .default_text = fmt::to_string(seconds),
             .set = number(seconds, {.low = 0, .high = comm::kMostTimeoutSeconds})});
}

void add_encrypt_option(OptionTable& table, bool& encrypt) {
  table.add({.name = "encrypt",
             .kind = OptionKind::kFlag,
             .help = "encrypt all that ranks of different hosts say to each other; on all ranks or none",
             .set = boolean(encrypt)});
}

void add_device_options(OptionTable& table, TrainConfig& config) {
  table.group("Ranks and devices");
  table.add({.name = "device",
             .placeholder = "auto|cpu|cpu:0,1|cuda|cuda:0,3|cuda:free",
             .help = "what to compute on: the CPU, or of the GPUs that CUDA_VISIBLE_DEVICES leaves the one with the "
                     "local rank's number, the local rank's in the list, or those with most free memory; auto: a GPU "
                     "each where there is one for every rank, else the CPU",
             .default_text = config.device,
             .set = text(config.device)});
  table.add({.name = "share-devices",
             .kind = OptionKind::kFlag,
             .help = "several ranks may compute on one GPU, taking turns",
             .set = boolean(config.share_devices)});
  using Backend = comm::GroupOptions::Backend;
  table.add(
      {.name = "backend",
       .placeholder = "auto|nccl|mpi|shm",
       .help = "what carries the gradients: NCCL on GPUs; on the CPU memory inside a host and sockets between hosts; "
               "memory alone; MPI",
       .default_text = "auto",
       .set = choice(
           config.backend,
           {{"auto", Backend::kAuto}, {"nccl", Backend::kNccl}, {"mpi", Backend::kMpi}, {"shm", Backend::kShm}})});
  table.add(
      {.name = "precision",
       .placeholder = "f32|bf16",
       .help = "what GPUs compute in; parameters, gradients and sums stay f32",
       .default_text = name_of(config.precision),
       .set = choice(config.precision, {{"f32", trainer::Precision::kF32}, {"bf16", trainer::Precision::kBF16}})});
  table.add({.name = "tf32",
             .kind = OptionKind::kFlag,
             .help = "GPUs multiply f32 with 10 bits of mantissa, which is several times faster",
             .set = boolean(config.tf32)});
  table.add({.name = "threads",
             .placeholder = "N",
             .help = "compute threads a device, on the CPU",
             .default_text = "its share of the cores",
             .set = integer(config.threads, 1, 4096)});
  add_timeout_option(table, config.timeout_seconds);
  add_stall_option(table, config.stall_warning_seconds);
  add_encrypt_option(table, config.encrypt);
}

void add_graphs_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "graphs",
             .placeholder = "yes|no",
             .help = "GPUs run a step that repeats as one CUDA graph",
             .default_text = "yes",
             .set = boolean(config.graphs)});
}

void add_parallel_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "parallel",
             .placeholder = "ddp|dp",
             .help = "ddp: a process for each device; dp: this one shares each batch out to all devices that --device "
                     "names",
             .default_text = trainer::name_of(config.parallel),
             .set = choice(config.parallel, {{"ddp", trainer::Parallel::kDdp}, {"dp", trainer::Parallel::kDp}})});
}

void add_bucket_options(OptionTable& table, TrainConfig& config) {
  table.add({.name = "bucket-mb",
             .placeholder = "X",
             .help = "size of a gradient bucket, in MiB",
             .default_text = "25, between hosts on the CPU 4",
             .set = number(config.bucket_mb, kBucketMib)});
  table.add({.name = "first-bucket-mb",
             .placeholder = "X",
             .help = "size of the bucket that is ready first, in MiB",
             .default_text = fmt::to_string(config.first_bucket_mb),
             .set = number(config.first_bucket_mb, kBucketMib)});
}

void add_ddp_options(OptionTable& table, TrainConfig& config) {
  table.add({.name = "find-unused",
             .kind = OptionKind::kFlag,
             .help = "parameters may have no gradient in a step; those that no rank has used are left alone",
             .set = boolean(config.find_unused)});
  table.add({.name = "no-broadcast-buffers",
             .kind = OptionKind::kFlag,
             .help = "running statistics stay each rank's own, else they are rank 0's",
             .set = boolean(config.no_broadcast_buffers)});
  table.add({.name = "sync-batchnorm",
             .kind = OptionKind::kFlag,
             .help = "batch normalisation over the samples of all ranks",
             .set = boolean(config.sync_batchnorm)});
}

void add_check_options(OptionTable& table, TrainConfig& config) {
  table.add({.name = "check-replicas",
             .placeholder = "STEPS",
             .help = "every so many steps, stop unless all ranks' parameters are bitwise equal; 0: only at checkpoints "
                     "and the end",
             .default_text = fmt::to_string(config.check_replicas),
             .set = integer(config.check_replicas, 0, kMost)});
}

void add_checkpoint_options(OptionTable& table, TrainConfig& config) {
  table.group("Checkpoints");
  table.add({.name = "checkpoint-dir",
             .placeholder = "DIR",
             .help = "directory for all that training goes on from; SIGTERM then saves it there and exits with 75",
             .set = text(config.checkpoint_dir)});
  table.add({.name = "checkpoint-every",
             .placeholder = "STEPS",
             .help = "steps between checkpoints; 0: only at the end and when asked to stop",
             .default_text = "an epoch",
             .set = integer(config.checkpoint_every, 0, kMost)});
  table.add({.name = "keep",
             .placeholder = "K",
             .help = "checkpoints that are kept, the newest ones; 0: all",
             .default_text = fmt::to_string(trainer::kDefaultKeep),
             .set = integer(config.keep, 0, kMost)});
  table.add({.name = "resume",
             .placeholder = "auto|PATH",
             .help = "go on from this checkpoint; auto: from the newest whole one in --checkpoint-dir, if there is one",
             .set = text(config.resume)});
}

void add_report_options(OptionTable& table, TrainConfig& config) {
  table.group("Reports");
  add_metrics_option(table, config);
  table.add({.name = "trace",
             .placeholder = "FILE.json",
             .help = "file for what all ranks did when: open it in ui.perfetto.dev or chrome://tracing",
             .set = text(config.trace)});
  table.add({.name = "log-every",
             .placeholder = "STEPS",
             .help = "steps between lines where stdout is no terminal",
             .default_text = fmt::to_string(config.log_every),
             .set = integer(config.log_every, 1, kMost)});
  add_log_level_option(table, config);
  table.add({.name = "quiet",
             .kind = OptionKind::kFlag,
             .help = "no progress, only the summary and errors",
             .set = boolean(config.quiet)});
  table.exclusive({"log-every", "quiet"});
  add_config_option(table, config.config_file);
}

void refuse_inapplicable(OptionTable& table, const TrainConfig& config) {
  table.applicability([&config](const std::string& name, bool) -> std::optional<Complaint> {
    const auto found = trainer::inapplicable(config, name);
    if (!found) return std::nullopt;
    return Complaint{found->why, found->remedy};
  });
}

bool parse_or_refuse(const OptionTable& table, const Sources& sources, const ForeignFlags& foreign,
                     std::optional<UsageError>& refusal) {
  try {
    if (!parse_options(table, sources, foreign).help) return false;
    std::fputs(table.help().c_str(), stdout);
    return true;
  } catch (const UsageError& error) {
    refusal = error;
    return false;
  }
}

}  // namespace lockstep::cli
