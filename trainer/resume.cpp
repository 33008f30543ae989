#include "trainer/resume.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iterator>

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
#include "trainer/checkpoint_parts.h"
#include "trainer/options.h"

namespace lockstep::trainer {

using checkpoint::CheckpointManifest;
using checkpoint::Facts;
using checkpoint::find_fact;
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

// Of a run that does not speak of it: the one value for which it does not (Option::not_in_identity), or `otherwise`.
std::string unsaid(const std::string& name, const char* otherwise) {
  TrainConfig any;
  const OptionTable table = train_options(any);
  for (const auto& option : table.options())
    if (option.identity == name && !option.not_in_identity.empty()) return option.not_in_identity;
  return otherwise;
}

// "global batch 64 there and 96 here; seed 1 there and 2 here"
std::vector<std::string> differences(const Facts& there, const Facts& here) {
  std::vector<std::string> all;
  const auto add = [&](const std::string& name, const std::string& is_there, const std::string& is_here) {
    all.push_back(fmt::format("{} {} there and {} here", name, is_there, is_here));
  };
  for (const auto& [name, value] : there) {
    const std::string* const other = find_fact(here, name);
    if (other == nullptr || *other != value) add(name, value, other != nullptr ? *other : unsaid(name, "none"));
  }
  for (const auto& [name, value] : here)
    if (find_fact(there, name) == nullptr) add(name, unsaid(name, "unknown"), value);  // an older version may know none
  return all;
}

void check_same_run(const CheckpointManifest& there, const CheckpointManifest& here, const std::string& path) {
  const auto differing = differences(there.identity, here.identity);
  if (!differing.empty()) {
    std::string remedy =
        "give what it was made with, or start a new run without --resume and with another --checkpoint-dir";
    const std::string* const batch = find_fact(there.identity, kGlobalBatch);
    if (differing.size() == 1 && differing.front().starts_with(kGlobalBatch) && batch != nullptr)
      remedy = fmt::format("add --global-batch {}: it is the same at any number of ranks", *batch);
    throw CheckpointError(fmt::format("checkpoint {} is of another run: {}", path, join(differing, "; ")), remedy);
  }
  if (here.total_steps > 0 && there.step > here.total_steps)
    throw CheckpointError(
        fmt::format("checkpoint {} is of step {}, and this run ends at step {}", path, there.step, here.total_steps),
        "give more --steps or --epochs, or resume from an older one");
}

[[noreturn]] void rethrow_unusable(const std::string& path, const Error& error) {
  throw CheckpointError(fmt::format("checkpoint {} cannot be used: {}", path, error.what()),
                        "resume from another one with --resume PATH, or start a new run without --resume");
}

[[noreturn]] void refuse_all(const std::vector<checkpoint::CorruptCheckpoint>& corrupt, const std::string& directory) {
  std::vector<std::string> why;
  for (const auto& one : corrupt) why.push_back(one.why);
  throw CheckpointError(
      fmt::format("none of the {} checkpoints in {} is whole: {}", corrupt.size(), directory, join(why, "; ")),
      "remove them to start a new run, or choose another --checkpoint-dir");
}

/// A job that was started again must not start anew where it has checkpoints: rank 0 may be on another host by then.
/// `newest`: the step of the one that was found; 0: none.
void check_reported(std::int64_t newest, const std::string& directory) {
  const auto reported = parse_int(env("LOCKSTEP_CHECKPOINT_STEP").value_or(""));
  if (!reported || *reported <= newest) return;
  throw CheckpointError(
      fmt::format("this job has taken a checkpoint of step {}, and {} on host {} has {}", *reported, directory,
                  host_name(), newest > 0 ? fmt::format("none after step {}", newest) : std::string("none")),
      "put --checkpoint-dir on a file system that all hosts share, or give --checkpoint-mirror: rank 0 "
      "may be on another host after a restart");
}

/// What a rank has found where `auto` looks: the newest whole one, and all that are corrupt and newer than those beside
/// them.
struct SearchResult {
  std::optional<checkpoint::FoundCheckpoint> found;
  std::vector<checkpoint::CorruptCheckpoint> corrupt;

  std::int64_t step() const { return found ? found->manifest.step : 0; }
};

/// With several, one that cannot be read is as one whose checkpoints are all corrupt.
SearchResult search_directories(const std::vector<std::string>& directories, checkpoint::Verify verify) {
  SearchResult all;
  for (const std::string& directory : directories) {
    checkpoint::Search search;
    try {
      search = checkpoint::newest_whole(directory, verify);
    } catch (const IoError& error) {
      if (directories.size() == 1) rethrow_unusable(directory, error);
      search.corrupt.push_back({directory, error.what()});
    }
    std::ranges::move(search.corrupt, std::back_inserter(all.corrupt));
    if (search.found && search.found->manifest.step > all.step()) all.found = std::move(search.found);
  }
  return all;
}

// Rank 0's, for a checkpoint that --resume PATH names.
Resumed find_named(const checkpoint::CheckpointOptions& options, checkpoint::Verify verify) {
  const std::string& path = options.resume;
  std::error_code none;
  if (fs::exists(fmt::format("{}/{}", path, kManifestFile), none)) {
    Resumed resumed;
    resumed.path = path;
    try {
      resumed.manifest = verify(path);
    } catch (const IoError& error) {
      rethrow_unusable(path, error);
    }
    std::error_code ignored;
    resumed.from_own_directories =
        fs::equivalent(fs::path(path + "/..").lexically_normal(), options.checkpoint_dir, ignored);
    return resumed;
  }
  SearchResult result = search_directories({path}, verify);
  if (!result.found && !result.corrupt.empty()) refuse_all(result.corrupt, path);
  if (!result.found)
    throw CheckpointError(fmt::format("{} is no checkpoint, and there is none in it", path),
                          fmt::format("give a directory with {}, or one with such directories", kManifestFile));
  for (const auto& corrupt : result.corrupt) log_warn("{}; the one before it is taken", corrupt.why);
  std::error_code ignored;
  return {.path = std::move(result.found->path),
          .manifest = std::move(result.found->manifest),
          .corrupt = std::move(result.corrupt),
          .from_own_directories = fs::equivalent(path, options.checkpoint_dir, ignored)};
}

// Collective: the newest one of all ranks that look; nothing where nobody has found any. On the rank that reads it,
// what it has found; elsewhere the manifest is still to come.
std::optional<Resumed> find_newest(const std::string& checkpoint_dir, const Mirror* mirror, comm::ProcessGroup& group) {
  SearchResult result;
  std::vector<std::string> directories = {checkpoint_dir};
  if (mirror != nullptr) directories.push_back(mirror->directory);
  const bool looks = mirror == nullptr ? group.rank() == 0
                                       : std::ranges::find(mirror->on_a_host, group.rank()) != mirror->on_a_host.end();
  comm::run_collectively(group, [&] {
    if (mirror == nullptr)
      verify_together(group, [&](checkpoint::Verify verify) { result = search_directories(directories, verify); });
    else if (looks)
      result =
          search_directories(directories, [](const std::string& path) { return checkpoint::verify_checkpoint(path); });
  });
  const auto steps = group.all_gather_numbers(result.step());
  const auto newest = std::ranges::max_element(steps);
  comm::run_collectively(group, [&] {
    if (looks && result.corrupt.empty()) check_reported(*newest, checkpoint_dir);
  });
  if (*newest == 0) {
    comm::run_collectively(group, [&] {
      if (!result.corrupt.empty()) refuse_all(result.corrupt, join(directories, " and "));
    });
    return std::nullopt;
  }
  Resumed resumed;
  resumed.corrupt = std::move(result.corrupt);
  resumed.reader = static_cast<int>(newest - steps.begin());
  resumed.from_own_directories = true;
  for (const auto& one : resumed.corrupt)
    log_warn("{}; {}", one.why,
             mirror == nullptr ? "the one before it is taken" : "the newest whole one of all copies is taken");
  if (group.rank() == resumed.reader) {
    resumed.path = std::move(result.found->path);
    resumed.manifest = std::move(result.found->manifest);
  }
  return resumed;
}

void load_module(const Resumed& resumed, const CheckpointManifest& plan, bool data_changed, nn::Module& module) {
  check_same_run(resumed.manifest, plan, resumed.path);
  check_same_data(resumed.manifest.data, plan.data, resumed.path, data_changed);
  const std::string file = fmt::format("{}/{}", resumed.path, kWeightsFile);
  nn::load_entries(nn::entries_of(module), nn::read_safetensors(file), file);
  // One that another version does not have is no difference.
  const auto known_to = [](const Facts& others) {
    return [&others](const auto& fact) { return find_fact(others, fact.first) != nullptr; };
  };
  Facts there, here;
  std::ranges::copy_if(resumed.manifest.settings, std::back_inserter(there), known_to(plan.settings));
  std::ranges::copy_if(plan.settings, std::back_inserter(here), known_to(there));
  if (const auto differing = differences(there, here); !differing.empty())
    log_info("checkpoint {} is of a run with other settings: {}", resumed.path, join(differing, "; "));
}

std::vector<ddp::NamedBytes> pieces_of(const std::vector<nn::NamedMoment>& all) {
  std::vector<ddp::NamedBytes> pieces;
  for (const auto& moment : all)
    pieces.push_back({moment.name, {static_cast<std::byte*>(moment.value.raw()), moment.value.bytes()}});
  return pieces;
}

// All moments are on the rank that reads them.
void resume_from_whole(const Resumed& resumed, comm::ProcessGroup& group, comm::ProcessGroup& gradients,
                       nn::Optimizer& optimizer, parallel::DistributedDataParallel& ddp) {
  std::vector<std::vector<std::byte>> whole;  // of an optimizer of slices
  comm::run_collectively(group, [&] {
    if (group.rank() != resumed.reader || resumed.in_memory) return;
    try {
      const std::string file = fmt::format("{}/{}", resumed.path, kOptimizerFile);
      auto entries = nn::entries_of(optimizer);
      if (optimizer.is_sliced())
        for (nn::StateEntry& entry : entries) entry.value = entry.backend->empty(entry.value.shape());
      nn::load_entries(entries, nn::read_safetensors(file), file);
      if (!optimizer.is_sliced()) return;
      for (nn::StateEntry& entry : entries) {
        entry.backend->download(entry.value, whole.emplace_back(entry.value.bytes()));
        entry.value = {};
      }
    } catch (const Error& error) {
      rethrow_unusable(resumed.path, error);
    }
  });
  const auto moments = pieces_of(optimizer.moments());
  if (optimizer.is_sliced())
    ddp.scatter_moments(optimizer, whole, resumed.reader);
  else if (!resumed.all_have_it)
    ddp::broadcast_state(gradients, moments, resumed.reader);
}

void upload(const nn::Optimizer& optimizer, const std::vector<std::vector<std::byte>>& values) {
  const auto moments = optimizer.moments();
  for (std::size_t m = 0; m < moments.size(); ++m)
    if (!values[m].empty()) moments[m].parameter->backend().upload(values[m], moments[m].value);
}

// Each rank reads what it remembers, where it can; else the rank that has found the checkpoint reads all.
void resume_from_parts(const Resumed& resumed, comm::ProcessGroup& group, comm::ProcessGroup& gradients,
                       nn::Optimizer& optimizer, parallel::DistributedDataParallel& ddp) {
  const auto path = optimizer.is_sliced() ? path_for_all(resumed, group) : std::nullopt;
  const bool reads = path || group.rank() == resumed.reader;
  std::vector<std::vector<std::byte>> values;
  comm::run_collectively(group, [&] {
    if (!reads) return;
    run_on_checkpoint(resumed.path, [&] {
      values = read_moments(path.value_or(resumed.path), resumed.manifest, optimizer,
                            path ? optimizer.slices() : whole_slices(optimizer));
    });
  });
  if (optimizer.is_sliced() && !path) return ddp.scatter_moments(optimizer, values, resumed.reader);
  if (reads) upload(optimizer, values);
  if (!optimizer.is_sliced()) ddp::broadcast_state(gradients, pieces_of(optimizer.moments()), resumed.reader);
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
  if (!dataset.info().vocabulary_sha256.empty())
    manifest.identity.emplace_back("vocabulary", dataset.info().vocabulary_sha256);
  if (const auto ignored = ignored_label_of(config))
    manifest.identity.emplace_back("ignored label", fmt::to_string(*ignored));
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

std::optional<Resumed> resume_module(const checkpoint::CheckpointOptions& options, const Mirror* mirror,
                                     comm::ProcessGroup& group, comm::ProcessGroup& gradients,
                                     const CheckpointManifest& plan, nn::Module& module) {
  if (options.resume.empty()) return std::nullopt;
  std::optional<Resumed> resumed;
  const bool automatic = options.resume == "auto";
  // A file that cannot be read is a checkpoint that cannot be used.
  const auto collectively = [&](const std::function<void()>& work) {
    comm::run_collectively(group, [&] {
      try {
        work();
      } catch (const CheckpointError&) {
        throw;
      } catch (const Error& error) {
        rethrow_unusable(resumed && !resumed->path.empty() ? resumed->path : options.resume, error);
      }
    });
  };
  if (automatic) {
    resumed = find_newest(options.checkpoint_dir, mirror, group);
    if (!resumed) return std::nullopt;
  } else {
    resumed.emplace();
    comm::run_collectively(group, [&] {
      verify_together(group, [&](checkpoint::Verify verify) { resumed = find_named(options, verify); });
    });
    resumed->from_own_directories = group.all_gather_numbers(resumed->from_own_directories ? 1 : 0).front() != 0;
  }
  const bool reads = group.rank() == resumed->reader;
  collectively([&] {
    if (reads) load_module(*resumed, plan, options.resume_data_changed, module);
  });
  const auto reader = static_cast<std::size_t>(resumed->reader);
  const std::string manifest = group.all_gather_text(reads ? encode(resumed->manifest) : std::string())[reader];
  const std::string path =
      group.all_gather_text(reads ? fmt::format("{} (host {})", resumed->path, host_name()) : std::string())[reader];
  if (!reads) {
    resumed->manifest =
        checkpoint::decode_checkpoint_manifest(manifest, fmt::format("rank {}'s manifest", resumed->reader));
    resumed->path = path;
  }
  // DistributedDataParallel begins with rank 0's.
  if (resumed->reader != 0) broadcast_module(gradients, module, resumed->reader);
  return resumed;
}

void broadcast_module(comm::ProcessGroup& gradients, nn::Module& module, int root) {
  std::vector<ddp::NamedBytes> pieces;
  for (const auto& entry : nn::entries_of(module))
    pieces.push_back({entry.name, {static_cast<std::byte*>(entry.value.raw()), entry.value.bytes()}});
  ddp::broadcast_state(gradients, pieces, root);
  for (const auto& [name, parameter] : module.named_parameters()) parameter->changed();
}

checkpoint::BucketLayout bucket_layout_of(const parallel::DistributedDataParallel& ddp) {
  const auto& choice = ddp.bucket_choice();
  return {.order = ddp.bucket_order(), .bucket_bytes = choice ? choice->bucket_bytes : 0};
}

void resume_optimizer(const Resumed& resumed, comm::ProcessGroup& group, comm::ProcessGroup& gradients,
                      nn::Optimizer& optimizer, parallel::DistributedDataParallel& ddp) {
  if (!resumed.manifest.parts.empty()) {
    resume_from_parts(resumed, group, gradients, optimizer, ddp);
  } else {
    resume_from_whole(resumed, group, gradients, optimizer, ddp);
  }
  optimizer.set_steps(resumed.manifest.optimizer_steps);
  ddp.set_bucket_order(resumed.manifest.buckets.order);
  if (ddp.choosing_buckets() && resumed.manifest.buckets.bucket_bytes > 0 &&
      resumed.manifest.world_size == group.size())
    ddp.set_bucket_choice(resumed.manifest.buckets.bucket_bytes);
  ddp.check();
  if (!optimizer.is_sliced()) ddp::check_replicas(gradients, pieces_of(optimizer.moments()));
}

void resume_average(const Resumed& resumed, comm::ProcessGroup& group, comm::ProcessGroup& gradients,
                    nn::MovingAverage& average) {
  comm::run_collectively(group, [&] {
    if (group.rank() != resumed.reader || resumed.in_memory) return;
    try {
      const std::string file = fmt::format("{}/{}", resumed.path, checkpoint::kAverageFile);
      if (!resumed.manifest.files.contains(checkpoint::kAverageFile))
        throw IoError(fmt::format("its manifest does not list {}", checkpoint::kAverageFile), "");
      auto tensors = nn::read_safetensors(file);
      const auto entries = nn::entries_of(average);
      // The file has what is not averaged, too.
      std::erase_if(tensors, [&](const nn::HostTensor& tensor) {
        return std::ranges::find(entries, tensor.name, &nn::StateEntry::name) == entries.end();
      });
      nn::load_entries(entries, tensors, file);
    } catch (const Error& error) {
      rethrow_unusable(resumed.path, error);
    }
  });
  const auto pieces = pieces_of(average.values());
  if (!resumed.all_have_it) ddp::broadcast_state(gradients, pieces, resumed.reader);
  ddp::check_replicas(gradients, pieces);
}

void run_on_checkpoint(const std::string& path, FunctionRef<void()> work) {
  try {
    work();
  } catch (const Error& error) {
    rethrow_unusable(path, error);
  }
}

void resume_carried(const Resumed& resumed, comm::ProcessGroup& group, CarriedState& carried) {
  if (resumed.manifest.position.cursor == 0) return;
  std::vector<nn::HostTensor> all;
  const std::string file = fmt::format("{}/{}", resumed.path, checkpoint::kCarriedFile);
  comm::run_collectively(group, [&] {
    if (group.rank() != resumed.reader) return;
    run_on_checkpoint(resumed.path, [&] {
      // Those files alone are whole that the manifest lists.
      if (!resumed.manifest.files.contains(checkpoint::kCarriedFile))
        throw IoError(fmt::format("its manifest does not list {}", checkpoint::kCarriedFile), "");
      all = nn::read_safetensors(file);
    });
  });
  carried.restore(all, file, resumed.reader);
}

}  // namespace lockstep::trainer
