// The configuration of a training run, as plain values. cli/ fills it from flags, environment and file;
// programs that embed lockstep fill it themselves.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/settings.h"
#include "lockstep/checkpoint/options.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/optim/optimizers.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/sampler/sampler.h"
#include "lockstep/session/session.h"

namespace lockstep::trainer {

enum class Parallel {
  kDdp,  // a process for each device; one alone is a world of one
  kDp,   // one process for all devices (trainer/build.h)
};

inline constexpr std::int64_t kDefaultBatch = 32;  // samples per rank
inline constexpr int kMostParts = 1 << 20;         // of a rank's share of a step

using nn::ModelConfig;

inline constexpr const char* kAllBlocks = "blocks";  // of a model: TrainConfig::recompute

inline constexpr const char *kSplitTrain = "train", *kSplitValidation = "val", *kSplitTest = "test", *kSplitAll = "all";

/// The options of a session, of DistributedDataParallel, of checkpoints and of weights, which it starts from, are a
/// part of it. train() decides by itself on those without a flag: all_devices, default_threads, spare_core,
/// defer_unused_check, tree, shards_at_once, shard_backend.
struct TrainConfig : session::SessionOptions,
                     parallel::DistributedDataParallel::Options,
                     checkpoint::CheckpointOptions,
                     checkpoint::WeightsOptions {
  ModelConfig model;

  // Data. At most one of batch and global_batch; neither means batch = kDefaultBatch.
  std::string data;            // "digits", "mnist:DIR", "random:SHAPE,LEN", … (lockstep/data/open.h)
  Settings data_settings;      // that its family declares
  std::optional<int> classes;  // default: what the data has
  std::string split;           // of an evaluation: kSplits; empty: all of what has no parts, else "val"
  std::string vocabulary;  // of word pieces, vocab.txt; default: the weights', or learned. Of byte pairs, vocab.json
  bool save_directory = false;  // `save` lies in a directory that gets what Hugging Face's from_pretrained() reads, too
  std::string merges;           // of byte pairs; default: merges.txt beside the vocabulary, or a tokenizer.json's own
  std::optional<std::int64_t> vocabulary_size;  // the most pieces that are learned
  std::optional<bool> cased;  // texts keep capital letters and accents; default: what the vocabulary says, learned: no
  std::optional<std::int64_t> batch;         // samples per rank per part of a step, or per shard
  std::optional<std::int64_t> global_batch;  // samples per step of all ranks together
  int accumulate = 1;                        // parts in which a rank computes its share of a step, one after the other
  /// Parts of a step that are summed along a binary tree, each computed with `threads` threads (default here: 1): then
  /// a run has the same bits at any number of ranks up to that. 0: none. `batch` is then the samples of a shard.
  std::int64_t shards = 0;
  /// Ranks that are not equally fast have different numbers of shards, or, without shards, of samples: "auto",
  /// "speeds:2,1"; "none".
  std::string balance = "none";
  sampler::Tail tail = sampler::Tail::kExact;
  /// A recurrent model of texts carries its state from each row to the next: samples come in the order of columns
  /// (sampler: Note [Columns]), and each epoch begins with zeros.
  bool stateful = false;
  int workers = 1;  // loader threads per rank; 0: the training thread assembles batches
  /// What happens if a rank cannot read its part of a batch, or, on CPUs, the loss is not finite: "stop"; "skip",
  /// "skip:N": all ranks leave the batch out, at most N (10) times in this process.
  std::string on_bad_batch = "stop";
  /// What happens if training diverges: "stop"; "rewind", "rewind:K": it goes back to the newest checkpoint and
  /// continues with the data that follow, at most K (3) times in this process.
  std::string on_divergence = "stop";
  /// With shards, on CPUs: the share of steps that two ranks compute each part of, and compare bit by bit; 0: none.
  double audit = 0;

  // Length. steps wins over epochs when given.
  std::int64_t epochs = 10;
  std::optional<std::int64_t> steps;
  std::int64_t eval_every = 1;  // epochs; 0: only at the end
  std::int64_t eval_steps = 0;  // steps between evaluations, instead of epochs; 0: epochs count
  /// By which `save` has the best evaluation's weights instead of the last step's: "accuracy", "loss:min"; empty: the
  /// last step's.
  std::string save_best;
  /// Evaluations in a row without a better one (by save_best, or else the loss) after which a run ends; 0: none ends
  /// it.
  std::int64_t patience = 0;

  // Optimisation.
  std::string loss;                    // one of nn::loss_names(); default: nn::usual_loss()
  Settings loss_settings;              // that it declares
  std::string optimizer;               // one of nn::optimizer_names(); default: the model's
  Settings optimizer_settings;         // that it declares
  std::optional<double> lr;            // default: learning_rate_of()
  std::optional<double> weight_decay;  // default: weight_decay_of()
  std::string no_decay;                // patterns of parameters without weight decay, with commas between: "*.bias"
  std::string schedule = "constant";   // one of nn::schedule_names()
  Settings schedule_settings;          // that it declares
  std::int64_t warmup = 0;             // steps over which the rate rises linearly from 0
  double clip_norm = 0.0;              // largest L2 norm of all gradients together; 0: no clipping
  double clip_value = 0.0;             // largest magnitude of a gradient's element; 0: no clipping
  /// What losses are multiplied by in fp16 (nn::GradScaler): "dynamic", also where it is empty, or a number that stays.
  std::string loss_scale;
  std::optional<double> ema;  // decay of the parameters' moving average, which is evaluated and saved; or none
  std::uint64_t seed = 1;

  // Processes and devices.
  Parallel parallel = Parallel::kDdp;
  std::optional<bool> graphs;      // steps that repeat are recorded and run as a whole; default: where a device can
  std::string comm_hook = "none";  // what carries gradients (ddp::make_comm_hook()): "bf16", "powersgd:4", …
  std::string recompute;           // kAllBlocks or a number of blocks to recompute in backward; empty: none
  std::int64_t local_sgd = 0;      // steps that ranks take alone before they average; 0: gradients are summed
  bool sync_batchnorm = false;     // batch statistics are those of all ranks' samples
  /// Every so many steps, beside checkpoints and the end, all ranks' parameters are compared.
  std::int64_t check_replicas = 0;

  // Before it takes any, a run finds out what memory it needs: model and loss are run on shapes alone.
  bool estimate_memory = true;

  // What the metrics say of its settings.
  std::string command;  // as it was typed; empty: a program has filled this
  /// Of those that were given: "command line", the environment variable's name, "run.toml:3".
  std::map<std::string, std::string> places;

  // Files and reports.
  bool reset_head = false;  // reinitialize the last layer: the file's is ignored
  std::string freeze;       // patterns of parameters that are not trained, with commas between: "conv1.*,bn1.*"
  std::string save;         // weights to write at the end (nn::write_weights), also onto `weights`
  std::string config_file;  // where settings come from: nothing may be written there
  std::string metrics;      // JSON lines
  bool report = false;      // of an evaluation: the figures of each class
  bool json = false;        // of an evaluation: it prints JSON lines
  std::string predictions;  // of an evaluation: a file of what is predicted of each sample, .csv or .jsonl
  std::string trace;        // what all ranks did when, for Chrome's and Perfetto's trace viewers
  std::string tensorboard;  // directory for a file of events that TensorBoard reads
  std::int64_t histogram_steps = 0;  // steps between histograms for it of parameters and gradients; 0: none
  std::optional<int> status_port;    // where rank 0 answers who asks how the run is doing; 0: a free one
  std::string status_address;        // of this host; empty: loopback. Another one needs a token
  std::string status_token_file;     // a file with that; empty: LOCKSTEP_STATUS_TOKEN, if it is set
  std::int64_t log_every = 50;       // steps between plain progress lines
};

/// "ddp" or "dp".
const char* name_of(Parallel parallel);
/// "exact", "pad" or "drop".
const char* name_of(sampler::Tail tail);

/// Defaults for an incomplete configuration: the model's (nn::TrainingDefaults), and the optimizer's own. All throw
/// UsageError for an unknown model or optimizer.
std::string optimizer_of(const TrainConfig& config);
double learning_rate_of(const TrainConfig& config, int world_size);
/// Of a run of `total_steps`.
nn::LearningRate schedule_of(const TrainConfig& config, std::int64_t total_steps, int world_size = 1);
double weight_decay_of(const TrainConfig& config);
/// The loss's name.
std::string loss_of(const TrainConfig& config);
/// The optimizer's and the schedule's settings, with the defaults of those that are not given.
Settings optimizer_settings_of(const TrainConfig& config);
Settings schedule_settings_of(const TrainConfig& config);
/// The probability with which the model drops elements in training; 0: it does not.
double dropout_of(const ModelConfig& model);
/// Whether its passes may draw random numbers, and so need a Tape::dropout_state(): with dropout, or where nobody
/// knows.
bool is_random(const ModelConfig& model);
/// With which each shard is computed, where there are any.
int threads_of_a_shard(const TrainConfig& config);
/// Samples per step of all ranks together.
std::int64_t global_batch_of(const TrainConfig& config, int world_size);

/// Throws UsageError for values that contradict each other or are out of range, for an unknown model, and for settings
/// that would have no effect (trainer/options.h). Data is checked where it is opened, and what the device does
/// when `auto` has become one.
void validate(const TrainConfig& config);

/// Looks at --save, --metrics, --trace, --tensorboard and --checkpoint-dir. Throws UsageError if two of them are one
/// file, if one is the file of --config, --data or --resume, lies in a checkpoint, or is standard output or error, and
/// for "-".
/// --weights may be what --save replaces: it is read before, and the new file takes its place as a whole; nothing else
/// may. For the rank that writes: others may see another disk.
void check_output_files(const TrainConfig& config);

/// Throws UsageError for what a device of this kind does not do in training, beside session::check_kind().
void check_gpu_options(const TrainConfig& config, DeviceKind kind, const std::string& why = {});

/// Names and values of all that must be the same on every rank, in a fixed order: what the ranks compare before step 1.
/// Left out is what may differ: paths (rank 0's weights become everyone's, and it alone writes), verbosity, patience,
/// and the numbers of threads and workers: a rank's threads change the rounding of its own gradients, not the sums that
/// all ranks share. (With shards they change what a run is promised to repeat: threads_of_a_shard() is compared.)
std::vector<std::pair<std::string, std::string>> describe(const TrainConfig& config);

}  // namespace lockstep::trainer
