// Everything that a training run is told, as plain values. cli/ fills it from flags, environment and file;
// programs that embed lockstep fill it themselves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/device.h"
#include "base/settings.h"
#include "comm/make_group.h"
#include "sampler/sampler.h"

namespace lockstep::trainer {

enum class Parallel {
  kDdp,  // a process for each device; one alone is a world of one
  kDp,   // one process for all devices (trainer/data_parallel.h)
};
enum class Precision { kF32, kBF16 };  // of activations; parameters, gradients and statistics are f32
using Backend = comm::GroupOptions::Backend;

inline constexpr std::int64_t kDefaultBatch = 32;  // samples a rank
inline constexpr std::int64_t kDefaultKeep = 3;    // checkpoints
inline constexpr int kMostParts = 1 << 20;         // of a rank's share of a step

/// A model, and what was said of it: settings that its family declares (nn/models/models.h).
struct ModelConfig {
  std::string name;  // one of nn::model_names()
  Settings settings;
};

struct TrainConfig {
  ModelConfig model;

  // Data. At most one of batch and global_batch; neither means batch = kDefaultBatch.
  std::string data;                          // "digits", "mnist:DIR", "random:SHAPE,LEN", … (data/open.h)
  Settings data_settings;                    // that its family declares
  std::optional<int> classes;                // default: what the data has
  std::optional<std::int64_t> batch;         // samples a rank and part of a step
  std::optional<std::int64_t> global_batch;  // samples of all ranks together and step
  int accumulate = 1;                        // parts in which a rank computes its share of a step, one after the other
  sampler::Tail tail = sampler::Tail::kExact;
  int workers = 1;  // loader threads a rank; 0: the training thread assembles batches

  // Length. steps wins over epochs when given.
  std::int64_t epochs = 10;
  std::optional<std::int64_t> steps;
  std::int64_t eval_every = 1;  // epochs; 0: only at the end

  // Optimisation.
  std::string optimizer;               // one of nn::optimizer_names(); default: the model's
  Settings optimizer_settings;         // that it declares
  std::optional<double> lr;            // default: learning_rate_of()
  std::optional<double> weight_decay;  // default: weight_decay_of()
  std::string schedule = "constant";   // one of nn::schedule_names()
  Settings schedule_settings;          // that it declares
  std::int64_t warmup = 0;             // steps over which the rate rises linearly from 0
  double clip_norm = 0.0;              // largest L2 norm of all gradients together; 0: no clipping
  std::uint64_t seed = 1;

  // Processes and devices.
  Parallel parallel = Parallel::kDdp;
  std::string device = "auto";  // auto, cpu, cpu:0,1, cuda, cuda:0,3, cuda:free (trainer/device_request.h)
  bool share_devices = false;   // several ranks may compute on one GPU
  Backend backend = Backend::kAuto;
  Precision precision = Precision::kF32;
  bool tf32 = false;                  // f32 products of GPUs on matrix units, with 10 bits of mantissa
  std::optional<bool> graphs;         // steps that repeat are recorded and run as a whole; default: where a device can
  int threads = 0;                    // compute threads a device; 0: its share of the cores
  double timeout_seconds = 300;       // longest wait for another rank
  double stall_warning_seconds = 10;  // after which a wait is mentioned; 0: never
  bool encrypt = false;               // what ranks of different hosts say to each other
  std::optional<double> bucket_mb;    // MiB of gradients in a bucket; default: ProcessGroup::preferred_bucket_bytes()
  double first_bucket_mb = 1;         // MiB in the bucket that is ready first
  bool find_unused = false;           // parameters may have no gradient in a step
  bool no_broadcast_buffers = false;  // each rank keeps running statistics of its own
  bool sync_batchnorm = false;        // batch statistics are those of all ranks' samples
  std::int64_t check_replicas =
      0;  // every so many steps, beside checkpoints and the end, compare all ranks' parameters

  // Files and reports.
  std::string weights;       // to start from: safetensors, or what torch.save() has written
  bool non_strict = false;   // weights that are missing or unexpected are left alone
  bool keep_prefix = false;  // names in weight files are taken as they are (nn::LoadOptions)
  bool reset_head = false;   // the last layer starts anew: its weights are not taken from the file
  std::string freeze;        // patterns of parameters that are not trained, with commas between: "conv1.*,bn1.*"
  std::string save;          // weights to write at the end (nn::write_weights), also onto `weights`
  std::string config_file;   // where settings come from: nothing may be written there
  // Checkpoints of training (trainer/checkpoint/), to go on from.
  std::string checkpoint_dir;                    // empty: none are written
  std::optional<std::int64_t> checkpoint_every;  // steps; 0: only at the end; default: at the end of each epoch
  std::optional<std::int64_t> keep;              // the newest ones; 0: all; default: kDefaultKeep
  std::string resume;                            // auto, or the path of a checkpoint; empty: start anew
  std::string metrics;                           // JSON lines
  std::string trace;                             // what all ranks did when, for Chrome's and Perfetto's trace viewers
  std::int64_t log_every = 50;                   // steps between plain progress lines
  std::string log_level = "info";  // debug: also when each bucket of each step was ready, started and ended
  bool quiet = false;
};

/// "f32" or "bf16".
const char* name_of(Precision precision);
/// "ddp" or "dp".
const char* name_of(Parallel parallel);
/// "exact", "pad" or "drop".
const char* name_of(sampler::Tail tail);

/// What holds where the configuration says nothing: what the model is trained with (nn::TrainingDefaults), and the
/// optimizer's own. All throw UsageError for an unknown model or optimizer.
std::string optimizer_of(const TrainConfig& config);
double learning_rate_of(const TrainConfig& config, int world_size);
double weight_decay_of(const TrainConfig& config);
/// The optimizer's and the schedule's settings, with the defaults of those that are not given.
Settings optimizer_settings_of(const TrainConfig& config);
Settings schedule_settings_of(const TrainConfig& config);
/// The probability with which the model drops elements in training; 0: it does not.
double dropout_of(const ModelConfig& model);
/// Samples of all ranks together and step.
std::int64_t global_batch_of(const TrainConfig& config, int world_size);

/// Throws UsageError for values that contradict each other or are out of range, for an unknown model, and for settings
/// that would have no effect (trainer/options.h). Data is checked where it is opened, and check_kind() comes when
/// `auto` has become a device.
void validate(const TrainConfig& config);

/// Throws UsageError for another level than debug, info, warn and error.
void check_log_level(const std::string& level);

/// Throws UsageError for what a device of this kind does not do. `why`: why it is one of this kind; empty where
/// config.device says so.
void check_kind(const TrainConfig& config, DeviceKind kind, const std::string& why = {});

/// What only the ranks together know: throws UsageError where --encrypt cannot hold for GPUs that `several_hosts` have.
void check_encryption(const TrainConfig& config, DeviceKind kind, bool several_hosts);

/// Names and values of all that must be the same on every rank, in a fixed order: what the ranks compare before step 1.
/// Left out is what may differ: paths (rank 0's weights become everyone's, and it alone writes), verbosity, patience,
/// and the numbers of threads and workers: a rank's threads change the rounding of its own gradients, not the sums that
/// all ranks share.
std::vector<std::pair<std::string, std::string>> describe(const TrainConfig& config);

}  // namespace lockstep::trainer
