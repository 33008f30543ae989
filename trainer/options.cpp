#include "trainer/options.h"

#include "base/text.h"
#include "checkpoint/checkpoints.h"
#include "checkpoint/model_options.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/families.h"
#include "lockstep/nn/models/models.h"
#include "options/sources.h"
#include "options/values.h"
#include "session/opening.h"
#include "trainer/best.h"
#include "trainer/build.h"

namespace lockstep::trainer {
namespace {

using options::Applies;
using options::boolean;
using options::choice;
using options::integer;
using options::kMost;
using options::number;
using options::Option;
using options::OptionKind;
using options::Range;
using options::text;
using options::when;

constexpr Range kDecay = {.low = 0, .high = 1, .open_low = true, .open_high = true};

Applies to_checkpoints(const std::string& directory) {
  return {.to = "a directory of checkpoints",
          .unless = [&directory] { return when(directory.empty(), "there is none"); },
          .remedy = "add --checkpoint-dir DIR, or leave it out"};
}

/// --save, and what is trained of the weights.
void add_tuning_options(OptionTable& table, TrainConfig& config) {
  table.add({.name = "save",
             .placeholder = "FILE|DIR/",
             .help = "file for the trained weights: safetensors; .pt, .pth and .bin are written for torch.load(). A "
                     "directory, with a slash at its end, gets model.safetensors, config.json and the vocabulary, for "
                     "Hugging Face's from_pretrained()",
             .value = text(config.save)});
  table.add({.name = "save-best",
             .placeholder = join(metric_names(), "|") + "[:min|max]",
             .help = "--save has the weights of the best evaluation: the file is replaced when one is better",
             .value = text(config.save_best),
             .applies = {.to = "a file of weights, --patience and --keep-best",
                         .unless =
                             [&config] {
                               return when(config.save.empty() && config.patience == 0 && config.keep_best == 0,
                                           "there are none");
                             },
                         .remedy = "add --save FILE, or leave it out"},
             .agree = Agree::kValue});
  table.add({.name = "reset-head",
             .kind = OptionKind::kFlag,
             .help = "reinitialize the last layer; the file's is ignored and its size may differ",
             .value = boolean(config.reset_head),
             .applies = checkpoint::to_weights(config.weights)});
  table.add({.name = "freeze",
             .kind = OptionKind::kList,
             .placeholder = "PATTERN,…",
             .help = "parameters not to train, by name; * stands for any characters",
             .value = text(config.freeze),
             .agree = Agree::kValue,
             .identity = "frozen"});
}

void add_workers_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "workers",
             .synonyms = {"num-workers", "j"},
             .placeholder = "N",
             .help = "threads per rank that prepare batches; 0: the training thread does it",
             .default_text = fmt::to_string(config.workers),
             .value = integer(config.workers, 0, 256)});
}

constexpr std::int64_t kMostBatch = std::int64_t{1} << 40;

Option batch_option(TrainConfig& config, const char* help) {
  return {.name = "batch",
          .synonyms = {"batch-size", "b"},
          .placeholder = "B",
          .help = help,
          .default_text = fmt::to_string(kDefaultBatch),
          .value = integer(config.batch, 1, kMostBatch),
          .agree = Agree::kValue};
}

void add_split_option(OptionTable& table, TrainConfig& config) {
  const std::vector<std::string> splits = {kSplitTrain, kSplitValidation, kSplitTest, kSplitAll};
  table.add({.name = "split",
             .placeholder = join(splits, "|"),
             .help = "part of the data to evaluate on; data without parts are split into train and val as in training",
             .default_text = "val; all if the data have no parts",
             .value = options::choice_of_names(config.split, splits),
             .agree = Agree::kValue});
}

void add_accumulate_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "accumulate",
             .placeholder = "A",
             .help = "parts of a step that each rank computes one after another, to save memory; --batch is then the "
                     "samples of one part, and the global batch is B · A · ranks",
             .default_text = fmt::to_string(config.accumulate),
             .value = integer(config.accumulate, 1, kMostParts),
             .agree = Agree::kValue,
             .may_change = true});
}

void add_recompute_option(OptionTable& table, TrainConfig& config) {
  const auto has_blocks = [](const nn::ModelFamily& family) { return family.blocks; };
  Applies applies = to_models_that(config.model, has_blocks, "models with blocks");
  applies.to += ", without --sync-batchnorm";
  applies.unless = [&config, other = std::move(applies.unless)]() -> std::optional<std::string> {
    if (config.sync_batchnorm) return "--sync-batchnorm would send the statistics of a block twice";
    return other();
  };
  const auto complaint = [](const std::string& value) -> std::optional<options::Complaint> {
    std::int64_t ignored = 0;
    if (value.empty() || value == kAllBlocks || !options::parse_integer(value, 1, kMost, ignored)) return std::nullopt;
    return options::Complaint{fmt::format("{} is neither the word blocks nor a number of them", value),
                              "give blocks, or a number from 1"};
  };
  options::Binding value = text(config.recompute);
  value.set = [&config, complaint](const std::string& given) {
    auto wrong = complaint(given);
    if (!wrong) config.recompute = given;
    return wrong;
  };
  value.check = [&config, complaint] { return complaint(config.recompute); };
  table.add({.name = "recompute",
             .placeholder = "blocks|N",
             .help = "blocks whose activations are recomputed in backward instead of stored: all, or the first N; same "
                     "bits, less memory, more time",
             .value = std::move(value),
             .applies = std::move(applies),
             .agree = Agree::kNo});
}

void add_stateful_option(OptionTable& table, TrainConfig& config) {
  std::vector<std::string> texts;
  for (const auto* family : data::dataset_families())
    if (family->consecutive) texts.push_back(family->name);
  const auto carries = [](const nn::ModelFamily& family) { return family.carries_state; };
  table.add({.name = "stateful",
             .kind = OptionKind::kFlag,
             .help = "start each row of a text with the final state of the row before: each position of the batch "
                     "reads consecutive rows, and nothing is shuffled",
             .value = boolean(config.stateful),
             .applies = {.to = fmt::format("{} over {}", nn::models_that(carries), listed(texts)),
                         .unless = [&config, carries]() -> std::optional<std::string> {
                           if (const auto* model = nn::find_model_family(config.model.name);
                               model != nullptr && !carries(*model))
                             return "the model is " + config.model.name;
                           if (const auto* family = data::find_dataset_family(config.data);
                               family != nullptr && !family->consecutive)
                             return "the data is " + config.data;
                           if (config.accumulate > 1)
                             return fmt::format("--accumulate {} computes a batch in parts", config.accumulate);
                           if (config.parallel == Parallel::kDp) return "--parallel dp shares batches out to devices";
                           return when(config.tail == sampler::Tail::kPad,
                                       "--tail pad repeats rows of the epoch's beginning");
                         }},
             .agree = Agree::kValue,
             .identity = "stateful",
             .not_in_identity = "false"});
}

void add_average_option(OptionTable& table, TrainConfig& config) {
  options::Binding ema = number(config.ema, kDecay);
  ema.text = [&config] { return config.ema ? fmt::to_string(*config.ema) : std::string("none"); };
  table.add({.name = "ema",
             .synonyms = {"model-ema-decay"},
             .placeholder = "D",
             .help = "decay per step of a moving average of the parameters; it is evaluated too, and --save writes it",
             .value = std::move(ema),
             .agree = Agree::kValue,
             .identity = "moving average",
             .not_in_identity = "none"});
}

/// How long, and how the data is walked through.
void add_length_options(OptionTable& table, TrainConfig& config) {
  table.add({.name = "epochs",
             .placeholder = "E",
             .help = "passes over the training data",
             .default_text = fmt::to_string(config.epochs),
             .value = integer(config.epochs, 1, kMost),
             .agree = Agree::kValue});
  table.add({.name = "steps",
             .synonyms = {"max-steps"},
             .placeholder = "S",
             .help = "steps, instead of epochs",
             .value = integer(config.steps, 1, kMost),
             .agree = Agree::kValue});
  table.exclusive({"epochs", "steps"});
  table.add({.name = "eval-every",
             .placeholder = "E",
             .help = "epochs between evaluations; 0: only at the end",
             .default_text = fmt::to_string(config.eval_every),
             .value = integer(config.eval_every, 0, kMost),
             .agree = Agree::kValue});
  table.add({.name = "eval-steps",
             .placeholder = "S",
             .help = "steps between evaluations, instead of epochs; 0: epochs count",
             .default_text = fmt::to_string(config.eval_steps),
             .value = integer(config.eval_steps, 0, kMost),
             .agree = Agree::kValue});
  table.exclusive({"eval-every", "eval-steps"});
  table.add({.name = "patience",
             .placeholder = "N",
             .help =
                 "end after so many evaluations in a row without a better one, by --save-best or else by the loss; 0: "
                 "none ends the run",
             .default_text = fmt::to_string(config.patience),
             .value = integer(config.patience, 0, kMost),
             .agree = Agree::kValue});
  using sampler::Tail;
  table.add({.name = "tail",
             .placeholder = "exact|pad|drop",
             .help = "an epoch's last samples: a shorter step, a full step with repeated samples, or left out",
             .default_text = name_of(config.tail),
             .value = choice(config.tail, {{"exact", Tail::kExact}, {"pad", Tail::kPad}, {"drop", Tail::kDrop}}),
             .agree = Agree::kValue,
             .identity = "tail"});
  add_stateful_option(table, config);
  add_workers_option(table, config);
}

}  // namespace

void add_batch_options(OptionTable& table, TrainConfig& config) {
  table.group("Batches and length");
  table.add(batch_option(config, "samples per rank per step"));
  table.add({.name = "global-batch",
             .placeholder = "G",
             .help = "samples per step of all ranks together",
             .value = integer(config.global_batch, 1, kMostBatch),
             .agree = Agree::kValue});
  table.exclusive({"batch", "global-batch"});
}

void add_deterministic_option(OptionTable& table, TrainConfig& config) {
  options::Binding deterministic = boolean(config.deterministic);
  deterministic.asked = [&config] { return !config.deterministic; };
  table.add({.name = "deterministic",
             .placeholder = "yes|no",
             .help = "no: compute attention's gradient by the fastest kernel; a repeated run then has other bits",
             .default_text = "yes",
             .value = std::move(deterministic),
             .applies = {.to = "attention in bf16 or fp16 on GPUs, without --dropout",
                         .unless = [&config]() -> std::optional<std::string> {
                           if (session::is_on_cpu(config.device)) return session::device_text(config.device);
                           const auto* const family = nn::find_model_family(config.model.name);
                           if (family != nullptr && !family->attention) return "the model is " + config.model.name;
                           if (config.precision == Precision::kF32) return "this run has --precision f32";
                           return when(family != nullptr && dropout_of(config.model) > 0, "this run has --dropout");
                         }},
             .agree = Agree::kValue,
             .may_change = true});
}

void add_autotune_option(OptionTable& table, TrainConfig& config) {
  options::Binding autotune = boolean(config.autotune);
  autotune.text = [&config] { return fmt::to_string(config.autotune.value_or(true)); };
  table.add({.name = "autotune",
             .placeholder = "yes|no",
             .help = "on GPUs, time the libraries' kernels for each new shape, and store the fastest in a file for "
                     "this and other runs",
             .default_text = "yes",
             .value = std::move(autotune),
             .applies = session::to_gpus(config.device),
             .agree = Agree::kValue,
             .may_change = true});
}

void add_graphs_option(OptionTable& table, TrainConfig& config) {
  options::Binding graphs = boolean(config.graphs);
  graphs.text = [&config] { return fmt::to_string(config.graphs.value_or(true)); };
  table.add({.name = "graphs",
             .placeholder = "yes|no",
             .help = "on GPUs, run repeated steps as one CUDA graph",
             .default_text = "yes",
             .value = std::move(graphs),
             .applies = {.to = "GPUs, without --find-unused, --ignore-index and --parallel dp",
                         .unless = [&config]() -> std::optional<std::string> {
                           if (session::is_on_cpu(config.device)) return session::device_text(config.device);
                           if (config.find_unused_parameters) return "this run has --find-unused";
                           if (ignored_label_of(config)) return "this run has --ignore-index";
                           return when(config.parallel == Parallel::kDp, "this run has --parallel dp");
                         }},
             .agree = Agree::kValue,
             .may_change = true});
}

namespace {

/// Where and how often training is saved, and whether it resumes; opens a group.
void add_checkpoint_options(OptionTable& table, TrainConfig& config) {
  table.group("Checkpoints");
  table.add({.name = "checkpoint-dir",
             .placeholder = "DIR",
             .help = "directory for checkpoints to resume from; SIGTERM then saves one there and exits with 75",
             .value = text(config.checkpoint_dir),
             .agree = Agree::kPresence});
  table.add({.name = "checkpoint-every",
             .placeholder = "STEPS",
             .help = "steps between checkpoints; 0: only at the end and when asked to stop",
             .default_text = "an epoch",
             .value = integer(config.checkpoint_every, 0, kMost),
             .applies = to_checkpoints(config.checkpoint_dir),
             .agree = Agree::kValue});
  table.add({.name = "keep",
             .placeholder = "K",
             .help = "newest checkpoints to keep; 0: all",
             .default_text = fmt::to_string(checkpoint::kDefaultKeep),
             .value = integer(config.keep, 0, kMost),
             .applies = to_checkpoints(config.checkpoint_dir)});
  table.add({.name = "keep-best",
             .placeholder = "K",
             .help =
                 "besides, keep those of the K best evaluations, by --save-best or else by the loss; each evaluation "
                 "then has a checkpoint",
             .default_text = fmt::to_string(config.keep_best),
             .value = integer(config.keep_best, 0, kMost),
             .applies = to_checkpoints(config.checkpoint_dir),
             .agree = Agree::kValue});
  table.add({.name = "checkpoint-mirror",
             .placeholder = "HOST:DIR|DIR",
             .help = "directory on another host (DIR alone: any other) for a second copy of each checkpoint; --resume "
                     "auto finds it too; if all ranks are on one host: on another file system there",
             .value = text(config.checkpoint_mirror),
             .applies = to_checkpoints(config.checkpoint_dir),
             .agree = Agree::kValue});
  table.add({.name = "resume",
             .placeholder = "auto|PATH",
             .help = "checkpoint to resume from; auto: the newest complete one in --checkpoint-dir, if any",
             .value = text(config.resume),
             .agree = Agree::kPresence});
  table.add({.name = "resume-data-changed",
             .kind = OptionKind::kFlag,
             .help = "resume even if class names or the samples' bytes differ from the checkpoint's",
             .value = boolean(config.resume_data_changed),
             .applies = {.to = "a run that resumes",
                         .unless = [&config] { return when(config.resume.empty(), "this one does not resume"); },
                         .remedy = "add --resume auto|PATH, or leave it out"},
             .agree = Agree::kValue});
}

/// Metrics, trace, logs; opens a group. Adds --config.
void add_report_options(OptionTable& table, TrainConfig& config, bool training) {
  table.group("Reports");
  table.add({.name = "metrics",
             .placeholder = "FILE.jsonl|csv",
             .help = "file for measurements: one JSON object per line, or the table of steps and evaluations",
             .value = text(config.metrics)});
  if (training) {
    table.add({.name = "trace",
               .placeholder = "FILE.json",
               .help = "file for a timeline of all ranks: open it in ui.perfetto.dev or chrome://tracing",
               .value = text(config.trace),
               .agree = Agree::kPresence});  // it compares the ranks' clocks
    add_follower_options(table, config);
    table.add({.name = "log-every",
               .placeholder = "STEPS",
               .help = "steps between lines if stdout is no terminal",
               .default_text = fmt::to_string(config.log_every),
               .value = integer(config.log_every, 1, kMost)});
  }
  table.add(session::log_level_option(
      config.log_level, "least level of messages on stderr; debug: also start and end of each bucket in each step"));
  if (training) {
    table.add({.name = "quiet",
               .kind = OptionKind::kFlag,
               .help = "nothing on stdout; warnings and errors stay",
               .value = boolean(config.quiet)});
    table.exclusive({"log-every", "quiet"});
  }
  options::add_config_option(table, config.config_file);
}

}  // namespace

namespace {

// Of scripts that PyTorch's launchers start.
void add_scripts_flags(OptionTable& table) {
  table.add(options::OtherProgramsFlag{.names = {"local-rank"},
                                       .why = "the launcher's variables say another one",
                                       .remedy = "leave it out: lockstep takes its ranks from LOCAL_RANK and the like",
                                       .is_done_anyway = [](const std::string& value) {
                                         return value == fmt::to_string(comm::discover_world(env).local_rank);
                                       }});
  table.add(options::OtherProgramsFlag{
      .names = {"rank", "world-size", "dist-url", "multiprocessing-distributed", "distributed"},
      .why = "ranks are started by a launcher, and find each other through it",
      .remedy = "lockstep launch -n 2 -- lockstep train …, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"});
  table.add(options::OtherProgramsFlag{.names = {"dist-backend"},
                                       .why = "the ranks take the fastest backend that they can use",
                                       .remedy = "leave it out, or choose another one: --backend"});
  table.add(options::OtherProgramsFlag{.names = {"gpu", "gpus"},
                                       .why = "each rank has a device of its own",
                                       .remedy = "name others: --device cuda:0,3"});
  table.add(options::OtherProgramsFlag{.names = {"cuda", "use-cuda"},
                                       .why = "GPUs are used where there are any",
                                       .remedy = "--device cuda demands them",
                                       .takes_value = false});
  table.add(options::OtherProgramsFlag{.names = {"no-cuda", "cpu"},
                                       .why = "the device has a flag of its own",
                                       .remedy = "--device cpu",
                                       .takes_value = false});
  table.add(options::OtherProgramsFlag{.names = {"fp16", "amp", "bf16", "mixed-precision"},
                                       .why = "the precision has a flag of its own",
                                       .remedy = "--precision bf16, or on GPUs fp16",
                                       .takes_value = false});
  table.add(options::OtherProgramsFlag{.names = {"pretrained"},
                                       .why = "weights come from a file",
                                       .remedy = "--weights FILE (.pt, .pth or .safetensors)",
                                       .takes_value = false});
  table.add(options::OtherProgramsFlag{.names = {"restore-best", "load-best-model-at-end"},
                                       .why = "the weights that a run saves may be those of its best evaluation",
                                       .remedy = "--save FILE --save-best accuracy",
                                       .takes_value = false});
  table.add(options::OtherProgramsFlag{.names = {"evaluate", "e"},
                                       .why = "that is a command of its own",
                                       .remedy = "lockstep eval MODEL --data DATA --weights FILE",
                                       .takes_value = false});
}

}  // namespace

OptionTable train_options(TrainConfig& config) {
  OptionTable table(
      "train", "Trains MODEL on DATA, alone or as one of the ranks that mpirun, srun or lockstep launch has started.");
  add_model_options(table, config);
  add_training_options(table, config);
  checkpoint::add_weight_file(table, config, "file to start from");
  add_tuning_options(table, config);
  add_batch_options(table, config);
  add_accumulate_option(table, config);
  add_recompute_option(table, config);
  add_shards_option(table, config);
  add_balance_option(table, config);
  add_audit_option(table, config);
  add_bad_batch_option(table, config);
  add_divergence_option(table, config);
  add_length_options(table, config);
  add_update_options(table, config);
  add_average_option(table, config);
  add_schedule_options(table, config);
  session::add_device_options(table, config);
  add_deterministic_option(table, config);
  add_autotune_option(table, config);
  add_graphs_option(table, config);
  table.add({.name = "parallel",
             .placeholder = "ddp|dp",
             .help = "ddp: one process per device; dp: this process divides each batch among all devices in --device",
             .default_text = name_of(config.parallel),
             .value = choice(config.parallel, {{"ddp", Parallel::kDdp}, {"dp", Parallel::kDp}}),
             .agree = Agree::kValue,
             .may_change = true});
  add_bucket_options(table, config);
  add_comm_hook_option(table, config);
  add_zero_option(table, config);
  add_ddp_options(table, config);
  add_checkpoint_options(table, config);
  add_report_options(table, config, /*training=*/true);
  add_scripts_flags(table);
  return table;
}

namespace {

/// What a program's own model and data have no use for.
std::set<std::string> settings_of_others(const TrainConfig& config) {
  std::set<std::string> without = {"data", "classes"};
  std::set<std::string> own;
  const auto add = [&](const std::string& name, const std::string& chosen, const std::vector<SettingSpec>& settings) {
    for (const auto& setting : settings) (name == chosen ? own : without).insert(setting.name);
  };
  for (const auto* family : nn::model_families())
    for (const auto& variant : family->variants) add(variant.name, config.model.name, family->settings);
  for (const auto* family : data::dataset_families()) add(family->name, config.data, family->settings);
  for (const auto& name : own) without.erase(name);
  if (!nn::model_family(config.model.name).word_pieces) without.insert({"vocab", "merges", "vocab-size", "cased"});
  return without;
}

}  // namespace

OptionTable own_training_options(TrainConfig& config, const std::string& program) {
  OptionTable table = train_options(config);
  table.become_program(
      program,
      "Trains alone or as one of the ranks that mpirun, srun or lockstep launch has started; with eval "
      "as the first word it evaluates weights.",
      settings_of_others(config));
  return table;
}

OptionTable own_evaluation_options(TrainConfig& config, const std::string& program) {
  OptionTable table = eval_options(config);
  table.become_program(program, "Evaluates the weights of a file.", settings_of_others(config));
  return table;
}

OptionTable eval_options(TrainConfig& config) {
  OptionTable table("eval",
                    "Evaluates MODEL with the weights of a file on the validation part of DATA, or on all of DATA "
                    "without parts. Ranks that mpirun, srun or lockstep launch has started share the samples.");
  add_model_options(table, config);
  add_split_option(table, config);
  add_loss_options(table, config, /*training=*/false);
  checkpoint::add_weight_file(table, config, "file to start from");
  table.group("Batches");
  table.add(batch_option(config, "samples per rank in a batch"));
  add_workers_option(table, config);
  session::add_device_options(table, config);
  add_autotune_option(table, config);
  add_report_options(table, config, /*training=*/false);
  table.add(
      {.name = "report",
       .kind = OptionKind::kFlag,
       .help = "precision, recall, F1 and samples of each class, and what they are taken for; of numbers the errors",
       .value = boolean(config.report),
       .agree = Agree::kValue});
  table.add({.name = "predictions",
             .placeholder = "FILE.csv|FILE.jsonl",
             .help = "file for name, truth and prediction of each sample, with the probabilities of classes",
             .value = text(config.predictions),
             .agree = Agree::kPresence});
  table.add({.name = "json",
             .kind = OptionKind::kFlag,
             .help = "print JSON, an object per line",
             .value = boolean(config.json)});
  return table;
}

}  // namespace lockstep::trainer
