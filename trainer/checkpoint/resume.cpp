#include "trainer/checkpoint/resume.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "base/version.h"
#include "comm/agree.h"
#include "ddp/replicate.h"
#include "nn/io/state.h"
#include "trainer/build.h"

namespace lockstep::trainer {
namespace {

namespace fs = std::filesystem;

constexpr const char* kGlobalBatch = "global batch";

std::string sizes_of(const nn::ModelSpec& spec) {
  if (spec.name == "mlp") return fmt::format("hidden {}", fmt::join(spec.hidden, ","));
  if (spec.name.starts_with("gpt"))
    return fmt::format("layers {}, heads {}, width {}, context {}{}", spec.gpt.layers, spec.gpt.heads, spec.gpt.width,
                       spec.gpt.context, spec.gpt.tied ? "" : ", a head of its own");
  if (spec.name == "lstm") return fmt::format("layers {}, width {}", spec.lstm.layers, spec.lstm.width);
  return "its own";
}

std::string optimizer_text(const TrainConfig& config) {
  if (optimizer_of(config) == Optimizer::kAdamW) return "adamw";
  return momentum_of(config) > 0 ? "sgd with momentum" : "sgd without momentum";
}

// What describe() has that is told of otherwise, or concerns nobody who goes on.
bool is_told_otherwise(const std::string& name) {
  constexpr std::array kNames = {"model",
                                 "hidden",
                                 "gpt",
                                 "freeze",
                                 "classes",
                                 "augment",
                                 "image-size",
                                 "batch",
                                 "global-batch",
                                 "tail",
                                 "epochs",
                                 "steps",
                                 "eval-every",
                                 "optimizer",
                                 "lr",
                                 "weight-decay",
                                 "seed",
                                 "check-replicas",
                                 "trace",
                                 "checkpoints",
                                 "checkpoint-every",
                                 "resume",
                                 "zero-init-residual"};
  return std::ranges::find(kNames, name) != kNames.end();
}

// "global batch 64 there and 96 here; seed 1 there and 2 here"
std::vector<std::string> differences(const Facts& there, const Facts& here) {
  std::vector<std::string> all;
  const auto value_in = [](const Facts& facts, const std::string& name) {
    const auto found = std::ranges::find(facts, name, &Facts::value_type::first);
    return found == facts.end() ? std::string("unknown") : found->second;
  };
  for (const auto& [name, value] : there)
    if (const std::string other = value_in(here, name); other != value)
      all.push_back(fmt::format("{} {} there and {} here", name, value, other));
  for (const auto& [name, value] : here)
    if (std::ranges::find(there, name, &Facts::value_type::first) == there.end())
      all.push_back(fmt::format("{} unknown there and {} here", name, value));
  return all;
}

void check_same_run(const CheckpointCard& there, const CheckpointCard& here, const std::string& path) {
  const auto differing = differences(there.identity, here.identity);
  if (!differing.empty()) {
    std::string remedy = "give what it was made with, or start anew without --resume and with another --checkpoint-dir";
    const auto batch = std::ranges::find(there.identity, kGlobalBatch, &Facts::value_type::first);
    if (differing.size() == 1 && differing.front().starts_with(kGlobalBatch) && batch != there.identity.end())
      remedy = fmt::format("add --global-batch {}: it is the same at any number of ranks", batch->second);
    throw CheckpointError(fmt::format("checkpoint {} is of another run: {}", path, join(differing, "; ")), remedy);
  }
  if (there.step > here.total_steps)
    throw CheckpointError(
        fmt::format("checkpoint {} is of step {}, and this run ends at step {}", path, there.step, here.total_steps),
        "give more --steps or --epochs, or resume from an older one");
}

[[noreturn]] void rethrow_unusable(const std::string& path, const Error& error) {
  throw CheckpointError(fmt::format("checkpoint {} cannot be used: {}", path, error.what()),
                        "resume from another one with --resume PATH, or start anew without --resume");
}

Resumed chosen(Search search, const std::string& directory) {
  if (!search.found) {
    std::vector<std::string> why;
    for (const auto& damaged : search.damaged) why.push_back(damaged.why);
    throw CheckpointError(
        fmt::format("none of the {} checkpoints in {} is whole: {}", search.damaged.size(), directory, join(why, "; ")),
        "remove them to start anew, or choose another --checkpoint-dir");
  }
  for (const auto& damaged : search.damaged) log_warn("{}; the one before it is taken", damaged.why);
  return {.path = std::move(search.found->path),
          .card = std::move(search.found->card),
          .damaged = std::move(search.damaged)};
}

// Rank 0's.
std::optional<Resumed> find(const TrainConfig& config) {
  const bool automatic = config.resume == "auto";
  const std::string& path = automatic ? config.checkpoint_dir : config.resume;
  if (!automatic && fs::exists(fmt::format("{}/{}", path, kCardFile)))
    return Resumed{.path = path, .card = verify_checkpoint(path), .damaged = {}};
  Search search = newest_whole(path);
  if (search.found || !search.damaged.empty()) return chosen(std::move(search), path);
  if (automatic) return std::nullopt;
  throw CheckpointError(fmt::format("{} is no checkpoint, and there is none in it", path),
                        fmt::format("give a directory with {}, or one with such directories", kCardFile));
}

void load_module(const Resumed& resumed, const CheckpointCard& plan, nn::Module& module) {
  check_same_run(resumed.card, plan, resumed.path);
  const std::string file = fmt::format("{}/{}", resumed.path, kWeightsFile);
  nn::load_entries(nn::entries_of(module), nn::read_safetensors(file), file);
  for (const auto& [name, parameter] : module.named_parameters()) parameter->changed();
  if (const auto differing = differences(resumed.card.settings, plan.settings); !differing.empty())
    log_info("checkpoint {} is of a run with other settings: {}", resumed.path, join(differing, "; "));
}

std::vector<ddp::NamedBytes> moments_of(const nn::Optimizer& optimizer) {
  std::vector<ddp::NamedBytes> pieces;
  for (const auto& moment : optimizer.moments())
    pieces.push_back({moment.name, {static_cast<std::byte*>(moment.value.raw()), moment.value.bytes()}});
  return pieces;
}

}  // namespace

CheckpointCard plan_of(const TrainConfig& config, const data::Dataset& dataset, int world_size,
                       std::int64_t total_steps) {
  CheckpointCard card;
  card.total_steps = total_steps;
  card.world_size = world_size;
  card.identity = {
      {"model", config.model.name},
      {"sizes", sizes_of(model_spec(config.model, dataset))},
      {"samples", fmt::to_string(dataset.size())},
      {"sample", fmt::format("[{}]", fmt::join(dataset.sample_dims(), ", "))},
      {"classes", fmt::to_string(dataset.classes())},
      {"augment", config.augment.value_or(true) ? "yes" : "no"},
      {"seed", fmt::to_string(config.seed)},
      {kGlobalBatch, fmt::to_string(global_batch_of(config, world_size))},
      {"tail", name_of(config.tail)},
      {"optimizer", optimizer_text(config)},
      {"frozen", config.freeze.empty() ? "nothing" : config.freeze},
  };
  card.settings = {
      {"ranks", fmt::to_string(world_size)},
      {"steps", fmt::to_string(total_steps)},
      {"lr", fmt::to_string(learning_rate_of(config, world_size))},
      {"weight-decay", fmt::to_string(weight_decay_of(config))},
      {"lockstep", fmt::format("{} {}", version(), git_revision())},
  };
  for (const auto& fact : describe(config))
    if (!is_told_otherwise(fact.first)) card.settings.push_back(fact);
  return card;
}

std::optional<Resumed> resume_module(const TrainConfig& config, comm::ProcessGroup& group, const CheckpointCard& plan,
                                     nn::Module& module) {
  if (config.resume.empty()) return std::nullopt;
  std::optional<Resumed> resumed;
  comm::agree_on(group, [&] {
    if (group.rank() != 0) return;
    try {
      resumed = find(config);
      if (resumed) load_module(*resumed, plan, module);
    } catch (const CheckpointError&) {
      throw;
    } catch (const Error& error) {
      rethrow_unusable(resumed ? resumed->path : config.resume, error);
    }
  });
  const std::string text = group.all_gather_text(resumed ? encode(resumed->card) : std::string()).front();
  if (text.empty()) return std::nullopt;
  if (!resumed) resumed = Resumed{.path = {}, .card = decode_checkpoint_card(text, "rank 0's card"), .damaged = {}};
  return resumed;
}

void resume_optimizer(const Resumed& resumed, comm::ProcessGroup& group, comm::ProcessGroup& gradients,
                      nn::Optimizer& optimizer, Replica& replica) {
  comm::agree_on(group, [&] {
    if (group.rank() != 0) return;
    try {
      const std::string file = fmt::format("{}/{}", resumed.path, kOptimizerFile);
      nn::load_entries(nn::entries_of(optimizer), nn::read_safetensors(file), file);
    } catch (const Error& error) {
      rethrow_unusable(resumed.path, error);
    }
  });
  const auto moments = moments_of(optimizer);
  ddp::broadcast_state(gradients, moments, 0);
  optimizer.set_steps(resumed.card.optimizer_steps);
  replica.adopt_order(resumed.card.bucket_order);
  replica.check();
  ddp::check_replicas(gradients, moments);
}

}  // namespace lockstep::trainer
