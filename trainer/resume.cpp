#include "trainer/resume.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "base/version.h"
#include "comm/agree.h"
#include "lockstep/base/env.h"
#include "lockstep/data/families.h"
#include "lockstep/ddp/replicate.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/optim/optimizers.h"
#include "lockstep/trainer/forward.h"
#include "trainer/build.h"
#include "trainer/options.h"

namespace lockstep::trainer {

using checkpoint::CheckpointManifest;
using checkpoint::Facts;
using checkpoint::kManifestFile;
using checkpoint::kOptimizerFile;
using checkpoint::kWeightsFile;
using checkpoint::Resumed;

namespace {

namespace fs = std::filesystem;

constexpr const char* kGlobalBatch = "global batch";

/// "layers 4, heads 4, width 256, context 256".
std::string sizes_of(const nn::ModelSpec& spec) {
  std::vector<std::string> sizes;
  for (const auto& setting : nn::model_family(spec.name).settings) {
    if (setting.role != SettingSpec::Role::kStructure) continue;
    const SettingValue& value = *spec.settings.find(setting.name);
    if (!std::holds_alternative<bool>(value.any()))
      sizes.push_back(fmt::format("{} {}", setting.name, to_string(value)));
    else if (value != setting.fallback)
      sizes.push_back(setting.help);
  }
  return sizes.empty() ? "its own" : join(sizes, ", ");
}

std::string optimizer_text(const TrainConfig& config) {
  const std::string name = optimizer_of(config);
  const auto state = nn::optimizer_family(name).state;
  return state != nullptr ? state(optimizer_settings_of(config)) : name;
}

bool augments(const TrainConfig& config) {
  const SettingValue* const given = config.data_settings.find(data::kAugment);
  return given == nullptr || std::get<bool>(given->any());
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

void check_same_run(const CheckpointManifest& there, const CheckpointManifest& here, const std::string& path) {
  const auto differing = differences(there.identity, here.identity);
  if (!differing.empty()) {
    std::string remedy = "give what it was made with, or start anew without --resume and with another --checkpoint-dir";
    const auto batch = std::ranges::find(there.identity, kGlobalBatch, &Facts::value_type::first);
    if (differing.size() == 1 && differing.front().starts_with(kGlobalBatch) && batch != there.identity.end())
      remedy = fmt::format("add --global-batch {}: it is the same at any number of ranks", batch->second);
    throw CheckpointError(fmt::format("checkpoint {} is of another run: {}", path, join(differing, "; ")), remedy);
  }
  if (here.total_steps > 0 && there.step > here.total_steps)
    throw CheckpointError(
        fmt::format("checkpoint {} is of step {}, and this run ends at step {}", path, there.step, here.total_steps),
        "give more --steps or --epochs, or resume from an older one");
}

[[noreturn]] void rethrow_unusable(const std::string& path, const Error& error) {
  throw CheckpointError(fmt::format("checkpoint {} cannot be used: {}", path, error.what()),
                        "resume from another one with --resume PATH, or start anew without --resume");
}

Resumed chosen(checkpoint::Search search, const std::string& directory) {
  if (!search.found) {
    std::vector<std::string> why;
    for (const auto& corrupt : search.corrupt) why.push_back(corrupt.why);
    throw CheckpointError(
        fmt::format("none of the {} checkpoints in {} is whole: {}", search.corrupt.size(), directory, join(why, "; ")),
        "remove them to start anew, or choose another --checkpoint-dir");
  }
  for (const auto& corrupt : search.corrupt) log_warn("{}; the one before it is taken", corrupt.why);
  return {.path = std::move(search.found->path),
          .manifest = std::move(search.found->manifest),
          .corrupt = std::move(search.corrupt)};
}

/// A job that was started again must not start anew where it has checkpoints: rank 0 may be on another host by then.
void check_reported(const checkpoint::Search& search, const std::string& directory) {
  const auto reported = parse_int(env("LOCKSTEP_CHECKPOINT_STEP").value_or(""));
  if (!reported || *reported == 0 || !search.corrupt.empty()) return;
  if (search.found && search.found->manifest.step >= *reported) return;
  throw CheckpointError(
      fmt::format("this job has taken a checkpoint of step {}, and {} on host {} has {}", *reported, directory,
                  host_name(),
                  search.found ? fmt::format("none after step {}", search.found->manifest.step) : std::string("none")),
      "put --checkpoint-dir on a file system that all hosts share: rank 0 may be on another host after a restart");
}

// Rank 0's.
std::optional<Resumed> find(const ResumeFrom& from) {
  const bool automatic = from.resume == "auto";
  const std::string& path = automatic ? from.directory : from.resume;
  if (!automatic && fs::exists(fmt::format("{}/{}", path, kManifestFile)))
    return Resumed{.path = path, .manifest = checkpoint::verify_checkpoint(path), .corrupt = {}};
  checkpoint::Search search = checkpoint::newest_whole(path);
  if (automatic) check_reported(search, path);
  if (search.found || !search.corrupt.empty()) return chosen(std::move(search), path);
  if (automatic) return std::nullopt;
  throw CheckpointError(fmt::format("{} is no checkpoint, and there is none in it", path),
                        fmt::format("give a directory with {}, or one with such directories", kManifestFile));
}

void load_module(const Resumed& resumed, const CheckpointManifest& plan, nn::Module& module) {
  check_same_run(resumed.manifest, plan, resumed.path);
  const std::string file = fmt::format("{}/{}", resumed.path, kWeightsFile);
  nn::load_entries(nn::entries_of(module), nn::read_safetensors(file), file);
  for (const auto& [name, parameter] : module.named_parameters()) parameter->changed();
  // One that another version does not have is no difference.
  const auto known_to = [](const Facts& others) {
    return [&others](const auto& fact) {
      return std::ranges::find(others, fact.first, &Facts::value_type::first) != others.end();
    };
  };
  Facts there, here;
  std::ranges::copy_if(resumed.manifest.settings, std::back_inserter(there), known_to(plan.settings));
  std::ranges::copy_if(plan.settings, std::back_inserter(here), known_to(there));
  if (const auto differing = differences(there, here); !differing.empty())
    log_info("checkpoint {} is of a run with other settings: {}", resumed.path, join(differing, "; "));
}

std::vector<ddp::NamedBytes> moments_of(const nn::Optimizer& optimizer) {
  std::vector<ddp::NamedBytes> pieces;
  for (const auto& moment : optimizer.moments())
    pieces.push_back({moment.name, {static_cast<std::byte*>(moment.value.raw()), moment.value.bytes()}});
  return pieces;
}

}  // namespace

CheckpointManifest plan_of(const TrainConfig& config, const data::Dataset& dataset, int world_size,
                           std::int64_t total_steps) {
  CheckpointManifest manifest;
  manifest.total_steps = total_steps;
  manifest.world_size = world_size;
  manifest.identity = {
      {"model", config.model.name},
      {"sizes", sizes_of(model_spec(config.model, dataset))},
      {"samples", fmt::to_string(dataset.size())},
      {"sample", fmt::format("[{}]", fmt::join(dataset.sample_dims(), ", "))},
      {"classes", fmt::to_string(dataset.classes())},
      {"augment", augments(config) ? "yes" : "no"},
      {kGlobalBatch, fmt::to_string(global_batch_of(config, world_size))},
      {"optimizer", optimizer_text(config)},
  };
  // Checkpoints of earlier versions, which had none, can be resumed.
  if (const SampleFormat format = format_of(dataset); !format.further.empty())
    manifest.identity.emplace_back("further inputs", format.describe_further());
  if (dataset.word_pieces() != nullptr) manifest.identity.emplace_back("word pieces", dataset.word_pieces()->sha256());
  if (config.shards > 0)
    manifest.identity.emplace_back("threads of a shard", fmt::to_string(threads_of_a_shard(config)));
  manifest.settings = {
      {"ranks", fmt::to_string(world_size)},
      {"steps", fmt::to_string(total_steps)},
      {"lr", fmt::to_string(learning_rate_of(config, world_size))},
      {"weight-decay", fmt::to_string(weight_decay_of(config))},
      {"lockstep", fmt::format("{} {}", version(), git_revision())},
  };
  TrainConfig same = config;
  const OptionTable table = train_options(same);
  for (const auto& option : table.options()) {
    const std::string text = option.value.text ? option.value.text() : std::string();
    if (!option.identity.empty() && (option.not_in_identity.empty() || text != option.not_in_identity))
      manifest.identity.emplace_back(option.identity, text.empty() ? "nothing" : text);
    // One that this run has no use for is no difference.
    const bool has_effect = !option.applies.unless || !option.applies.unless();
    if (option.may_change && has_effect) manifest.settings.emplace_back(option.name, text);
  }
  return manifest;
}

std::optional<Resumed> resume_module(const ResumeFrom& from, comm::ProcessGroup& group, const CheckpointManifest& plan,
                                     nn::Module& module) {
  if (from.resume.empty()) return std::nullopt;
  std::optional<Resumed> resumed;
  comm::run_collectively(group, [&] {
    if (group.rank() != 0) return;
    try {
      resumed = find(from);
      if (resumed) load_module(*resumed, plan, module);
    } catch (const CheckpointError&) {
      throw;
    } catch (const Error& error) {
      rethrow_unusable(resumed ? resumed->path : from.resume, error);
    }
  });
  const std::string text = group.all_gather_text(resumed ? encode(resumed->manifest) : std::string()).front();
  if (text.empty()) return std::nullopt;
  if (!resumed)
    resumed = Resumed{
        .path = {}, .manifest = checkpoint::decode_checkpoint_manifest(text, "rank 0's manifest"), .corrupt = {}};
  return resumed;
}

void resume_optimizer(const Resumed& resumed, comm::ProcessGroup& group, comm::ProcessGroup& gradients,
                      nn::Optimizer& optimizer, parallel::DistributedDataParallel& ddp) {
  comm::run_collectively(group, [&] {
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
  optimizer.set_steps(resumed.manifest.optimizer_steps);
  ddp.set_bucket_order(resumed.manifest.bucket_order);
  ddp.check();
  ddp::check_replicas(gradients, moments);
}

void resume_carried(const Resumed& resumed, comm::ProcessGroup& group, CarriedState& carried) {
  if (resumed.manifest.position.cursor == 0) return;
  std::vector<nn::HostTensor> all;
  const std::string file = fmt::format("{}/{}", resumed.path, checkpoint::kCarriedFile);
  comm::run_collectively(group, [&] {
    if (group.rank() != 0) return;
    try {
      // Those files alone are whole that the manifest lists.
      if (!resumed.manifest.files.contains(checkpoint::kCarriedFile))
        throw IoError(fmt::format("its manifest does not list {}", checkpoint::kCarriedFile), "");
      all = nn::read_safetensors(file);
    } catch (const Error& error) {
      rethrow_unusable(resumed.path, error);
    }
  });
  carried.restore(all, file);
}

}  // namespace lockstep::trainer
