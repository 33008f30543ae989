// What ranks do with gradients, statistics and what the optimizer remembers.
#include "lockstep/comm/reduction_tree.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "options/values.h"
#include "trainer/bad_batches.h"
#include "trainer/balance.h"
#include "trainer/divergence.h"
#include "trainer/options.h"

namespace lockstep::trainer {

using options::Applies;
using options::Binding;
using options::boolean;
using options::Complaint;
using options::integer;
using options::kMost;
using options::number;
using options::OptionKind;
using options::Range;
using options::when;

namespace {

const std::string kAuto = "auto";
constexpr Range kBucketMib = {.low = 0, .high = parallel::kMostBucketMib, .open_low = true};

/// A number, or "auto".
Binding bucket_bytes(TrainConfig& config) {
  Binding mib = number(config.bucket_mb, kBucketMib);
  return {[&config, mib](const std::string& text) -> std::optional<Complaint> {
            config.tune_bucket_mb = text == kAuto;
            if (config.tune_bucket_mb) config.bucket_mb.reset();
            if (config.tune_bucket_mb) return std::nullopt;
            auto complaint = mib.set(text);
            if (complaint) complaint->remedy += ", or auto";
            return complaint;
          },
          [&config, mib] { return config.tune_bucket_mb ? kAuto : mib.text(); },
          [&config, mib] { return config.tune_bucket_mb ? std::nullopt : mib.check(); },
          [&config, mib] { return config.tune_bucket_mb || mib.asked(); }};
}

/// A flag that turns off what is on.
Binding negated(bool& on) {
  return {[&on, as_is = boolean(on)](const std::string& text) {
            auto complaint = as_is.set(text);
            if (!complaint) on = !on;
            return complaint;
          },
          [&on] { return fmt::to_string(!on); },
          {},
          [&on] { return !on; }};
}

}  // namespace

Applies to_models_that(const ModelConfig& model, bool (*does)(const nn::ModelFamily& family), const char* kind) {
  return {.to = fmt::format("{}: {}", kind, nn::models_that(does)), .unless = [&model, does] {
            return when(nn::find_model_family(model.name) != nullptr && !does(nn::model_family(model.name)),
                        "the model is " + model.name);
          }};
}

void add_shards_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "shards",
             .placeholder = "V",
             .help = "parts of a step, summed along a tree: same bits at any number of ranks from 1 to V; --batch is "
                     "then the samples of one shard, and --threads (1) the threads that compute it",
             .value = integer(config.shards, 1, static_cast<std::int64_t>(comm::ReductionTree::kMostLeaves),
                              /*unset=*/0),
             .applies = {.to = "training without --accumulate, --stateful, --sync-batchnorm, "
                               "--no-broadcast-buffers, --graphs yes and --parallel dp",
                         .unless = [&config]() -> std::optional<std::string> {
                           if (config.accumulate > 1) return "--accumulate splits a rank's share too";
                           if (config.stateful) return "--stateful carries the state of each rank's rows";
                           if (config.sync_batchnorm) return "--sync-batchnorm sums over ranks";
                           if (!config.broadcast_buffers) return "--no-broadcast-buffers keeps statistics apart";
                           if (config.graphs == true) return "--graphs yes runs a step as one graph";
                           return when(config.parallel == Parallel::kDp, "--parallel dp has one rank");
                         }},
             .agree = Agree::kValue,
             .identity = "shards",
             .not_in_identity = "0"});
}

void add_balance_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "balance",
             .placeholder = "auto|speeds:S,S,…",
             .help =
                 "give ranks that are not equally fast different numbers of --shards, or, without those, of samples: "
                 "as measured, or for speeds by rank; with --shards the bits stay",
             .default_text = config.balance,
             .value = options::parsed_text(config.balance, parse_balance, "none"),
             .applies = {.to = "training without --stateful, --local-sgd and --parallel dp, and without --shards not "
                               "with --tail pad or of models with batch normalisation",
                         .unless = [&config]() -> std::optional<std::string> {
                           if (config.stateful) return "--stateful carries the state of each rank's rows";
                           if (config.local_sgd > 0) return "--local-sgd lets ranks take steps alone";
                           if (config.parallel == Parallel::kDp) return "--parallel dp has one rank";
                           if (config.shards == 0 && config.tail == sampler::Tail::kPad)
                             return "--tail pad makes ranks' parts equal";
                           return when(config.shards == 0 && nn::model_family(config.model.name).batch_norm,
                                       "batch normalisation has the statistics of a rank's samples: give --shards");
                         }},
             .agree = Agree::kValue,
             .may_change = true});
}

void add_bad_batch_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "on-bad-batch",
             .placeholder = "stop|skip[:N]",
             .help =
                 "what happens if a rank cannot read its part of a batch, or, on CPUs, the loss is not finite: skip "
                 "leaves the batch out on all ranks, at most N (10) times",
             .default_text = config.on_bad_batch,
             .value = options::parsed_text(config.on_bad_batch, parse_bad_batch, "stop"),
             .applies = {.to = "training without --stateful, --local-sgd and --parallel dp",
                         .unless = [&config]() -> std::optional<std::string> {
                           if (config.stateful) return "--stateful carries the state of each row to the next one";
                           if (config.local_sgd > 0) return "--local-sgd lets ranks take steps alone";
                           return when(config.parallel == Parallel::kDp, "--parallel dp has a copy for each device");
                         }},
             .agree = Agree::kValue,
             .may_change = true});
}

void add_divergence_option(OptionTable& table, TrainConfig& config) {
  table.add(
      {.name = "on-divergence",
       .placeholder = "stop|rewind[:K]",
       .help = "what happens if the loss is not finite: rewind goes back to the newest checkpoint and continues with "
               "the data that follow, at most K (3) times",
       .default_text = config.on_divergence,
       .value = options::parsed_text(config.on_divergence, parse_divergence, "stop"),
       .applies = {.to = "training with --checkpoint-dir and without --stateful and --trace",
                   .unless = [&config]() -> std::optional<std::string> {
                     if (config.stateful) return "--stateful carries the state of each row to the next one";
                     if (!config.trace.empty()) return "--trace writes one file of one run";
                     return when(config.checkpoint_dir.empty(), "there are no checkpoints: give --checkpoint-dir");
                   }},
       .agree = Agree::kValue,
       .may_change = true});
}

void add_audit_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "audit",
             .placeholder = "P",
             .help = "in this share of the steps, and in those that end with a checkpoint, two ranks compute each of "
                     "--shards and compare the bits: a rank that computes wrongly is named",
             .default_text = "0",
             .value = number(config.audit, {.low = 0, .high = 1}),
             .applies = {.to = "training with --shards in f32 or bf16",
                         .unless = [&config]() -> std::optional<std::string> {
                           if (config.precision == Precision::kFp16) return "--precision fp16 moves the losses' scale";
                           return when(config.shards == 0, "without --shards no rank has another one's bits");
                         }},
             .agree = Agree::kValue,
             .may_change = true});
}

void add_bucket_options(OptionTable& table, TrainConfig& config) {
  table.add({.name = "bucket-mb",
             .placeholder = "X|auto",
             .help = "size of a gradient bucket in MiB; auto: try sizes in the first steps and keep the fastest",
             .default_text = "25; 4 between hosts on the CPU",
             .value = bucket_bytes(config),
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "first-bucket-mb",
             .placeholder = "X",
             .help = "size of the first bucket to be ready, in MiB",
             .default_text = fmt::to_string(config.first_bucket_mb),
             .value = number(config.first_bucket_mb, kBucketMib),
             .agree = Agree::kValue,
             .may_change = true});
}

void add_comm_hook_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "comm-hook",
             .placeholder = ddp::comm_hook_placeholder(),
             .help = "how gradients are sent: as f32, bf16 or fp16, as products of R columns of each matrix, or only "
                     "the largest P percent of each bucket",
             .default_text = config.comm_hook,
             .value = options::parsed_text(config.comm_hook, ddp::make_comm_hook, "none"),
             .applies = {.to = "training without --shards, --zero and --parallel dp",
                         .unless = [&config]() -> std::optional<std::string> {
                           if (config.zero > 0) return "--zero reduce-scatters gradients";
                           if (config.shards > 0)
                             return "--shards promises the same bits at any number of ranks, which a hook cannot";
                           if (config.parallel == Parallel::kDp) return "--parallel dp has one rank";
                           return std::nullopt;
                         }},
             .agree = Agree::kValue,
             .may_change = true});
}

void add_zero_option(OptionTable& table, TrainConfig& config) {
  table.add({.name = "zero",
             .placeholder = "0|1",
             .help = "1: each rank updates its share of the parameters and stores only that share of the optimizer's "
                     "state (ZeRO, stage 1)",
             .default_text = fmt::to_string(config.zero),
             .value = integer(config.zero, 0, 3),
             .applies = {.to = "training without --parallel dp",
                         .unless = [&config]() -> std::optional<std::string> {
                           return when(config.parallel == Parallel::kDp, "--parallel dp has one rank");
                         }},
             .agree = Agree::kValue,
             .may_change = true});
}

void add_ddp_options(OptionTable& table, TrainConfig& config) {
  const auto normalises = [](const nn::ModelFamily& family) { return family.batch_norm; };
  const Applies to_batch_norm = to_models_that(config.model, normalises, "models with batch normalisation");
  table.add({.name = "find-unused",
             .synonyms = {"find-unused-parameters"},
             .kind = OptionKind::kFlag,
             .help = "allow parameters without a gradient in a step; those that no rank used stay unchanged",
             .value = boolean(config.find_unused_parameters),
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "static-graph",
             .kind = OptionKind::kFlag,
             .help = "the same parameters lack a gradient in every step; they are found in the first, and a step that "
                     "differs is an error",
             .value = boolean(config.static_graph),
             .applies = {.to = "steps over ranks, without --find-unused and --shards",
                         .unless = [&config]() -> std::optional<std::string> {
                           if (config.find_unused_parameters) return "this run has --find-unused";
                           return when(config.shards > 0, "this run has --shards");
                         }},
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "no-broadcast-buffers",
             .kind = OptionKind::kFlag,
             .help = "each rank keeps its own running statistics instead of rank 0's",
             .value = negated(config.broadcast_buffers),
             .applies = to_batch_norm,
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "local-sgd",
             .placeholder = "K",
             .help = "each rank takes K steps by its own gradients; then, and at the end of an epoch, parameters and "
                     "moments are averaged over the ranks",
             .default_text = "gradients are summed in each step",
             .value = integer(config.local_sgd, 1, kMost, /*unset=*/0),
             .applies = {.to = "training without --shards, --comm-hook, --zero, --ema, --sync-batchnorm, "
                               "--no-broadcast-buffers and --parallel dp, whose "
                               "--checkpoint-every and --check-replicas are multiples of K",
                         .unless = [&config]() -> std::optional<std::string> {
                           const auto apart = [&](std::int64_t steps) {
                             return steps % std::max<std::int64_t>(config.local_sgd, 1) != 0;
                           };
                           if (config.shards > 0) return "--shards sums each step along a tree";
                           if (config.comm_hook != "none") return "--comm-hook carries the gradients of each step";
                           if (config.zero > 0) return "--zero sums the gradients of each step";
                           if (config.ema) return "--ema follows parameters that all ranks have";
                           if (config.sync_batchnorm) return "--sync-batchnorm sums over ranks in each step";
                           if (!config.broadcast_buffers) return "--no-broadcast-buffers keeps statistics apart";
                           if (config.parallel == Parallel::kDp) return "--parallel dp has one rank";
                           if (apart(config.checkpoint_every.value_or(0)))
                             return fmt::format("--checkpoint-every {} falls between two averagings",
                                                *config.checkpoint_every);
                           return when(
                               apart(config.check_replicas),
                               fmt::format("--check-replicas {} falls between two averagings", config.check_replicas));
                         }},
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "sync-batchnorm",
             .kind = OptionKind::kFlag,
             .help = "batch normalisation over the samples of all ranks",
             .value = boolean(config.sync_batchnorm),
             .applies = to_batch_norm,
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "check-replicas",
             .placeholder = "STEPS",
             .help = "steps between checks that all ranks' parameters are bitwise equal, else the run stops; 0: only "
                     "at checkpoints and the end",
             .default_text = fmt::to_string(config.check_replicas),
             .value = integer(config.check_replicas, 0, kMost),
             .agree = Agree::kValue});
}

}  // namespace lockstep::trainer
