#include "trainer/checkpoint_parts.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/scope.h"
#include "base/text.h"
#include "lockstep/nn/io/safetensors.h"

namespace lockstep::trainer {
namespace {

using checkpoint::CheckpointManifest;
using checkpoint::part_file;

/// A file that a rank makes and rank 0 looks for. It has the name of a checkpoint in writing, so that the next run
/// removes it if this one is killed.
std::string probe_of(const std::string& directory, const std::string& nonce, int rank) {
  return fmt::format("{}/.step-part-{}-{}", directory, nonce, rank);
}

/// Collective: ranks whose files rank 0 does not see in `directory`.
std::vector<int> ranks_elsewhere(const std::string& directory, const std::string& nonce, comm::ProcessGroup& group) {
  bool made = group.rank() != 0;
  if (group.rank() == 0) {
    try {
      checkpoint::make_checkpoint_directory(directory);
      made = true;
    } catch (const IoError&) {
      // Opening the checkpoints says so.
    }
  }
  group.all_gather_numbers(made ? 1 : 0);
  const std::string mine = probe_of(directory, nonce, group.rank());
  const UniqueFd fd(::open(mine.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  group.all_gather_numbers(0);
  std::vector<int> elsewhere;
  if (group.rank() == 0)
    for (int rank = 0; rank < group.size(); ++rank)
      if (::access(probe_of(directory, nonce, rank).c_str(), F_OK) != 0) elsewhere.push_back(rank);
  std::string text;
  for (const int rank : elsewhere) text += fmt::format("{} ", rank);
  const std::string said = group.all_gather_text(text).front();
  if (fd) ::unlink(mine.c_str());
  if (group.rank() != 0)
    for (const auto& number : split(said, ' '))
      if (const auto rank = parse_int(number)) elsewhere.push_back(static_cast<int>(*rank));
  return elsewhere;
}

std::vector<std::map<std::string, CheckpointManifest::Slice>> layout_of(const parallel::DistributedDataParallel& ddp,
                                                                        int ranks) {
  std::vector<std::map<std::string, CheckpointManifest::Slice>> parts(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& slices = ddp.slices_of(rank);
    for (std::size_t i = 0; i < slices.size(); ++i)
      if (slices[i].count > 0)
        parts[static_cast<std::size_t>(rank)][ddp.parameters()[i].name] = {slices[i].begin, slices[i].count};
  }
  return parts;
}

[[noreturn]] void refuse(const std::string& file, const std::string& why) {
  throw IoError(fmt::format("{} cannot be used: {}", file, why), "use another checkpoint");
}

/// The parts have each parameter's elements once, and no others.
void check_layout(const std::string& path, const CheckpointManifest& manifest, const nn::Optimizer& optimizer) {
  const std::string card = fmt::format("{}/{}", path, checkpoint::kManifestFile);
  std::map<std::string, std::vector<CheckpointManifest::Slice>> by_parameter;
  for (const auto& part : manifest.parts)
    for (const auto& [name, slice] : part) by_parameter[name].push_back(slice);
  for (const auto& [name, parameter] : optimizer.parameters()) {
    auto& slices = by_parameter[name];
    std::ranges::sort(slices, {}, &CheckpointManifest::Slice::begin);
    const std::int64_t count = parameter->value().count();
    std::int64_t at = 0;
    const bool joined = std::ranges::all_of(slices, [&](const CheckpointManifest::Slice& slice) {
      const bool fits = slice.begin == at && slice.count > 0 && slice.count <= count - at;
      if (fits) at += slice.count;
      return fits;
    });
    if (!joined || at != count)
      refuse(card, fmt::format("its parts do not make up the {} elements of {}", count, name));
    by_parameter.erase(name);
  }
  if (!by_parameter.empty())
    refuse(card,
           fmt::format("it has moments of {}, which is not trained here", nn::shown_name(by_parameter.begin()->first)));
}

}  // namespace

bool in_parts(const TrainConfig& config, int ranks) {
  return config.zero > 0 && ranks > 1 && !config.checkpoint_dir.empty() && config.checkpoint_mirror.empty();
}

SeenDirectory look_at_directory(const std::string& path, comm::ProcessGroup& group) {
  SeenDirectory directory{.path = path, .attempt = {}, .elsewhere = {}};
  directory.attempt = group.all_gather_text(fmt::format("{}-{:x}", host_name(), ::getpid())).front();
  directory.elsewhere = ranks_elsewhere(path, directory.attempt, group);
  return directory;
}

std::optional<checkpoint::OwnPart> place_part(const SeenDirectory& directory, const comm::ProcessGroup& group,
                                              const parallel::DistributedDataParallel& ddp,
                                              const nn::Optimizer& optimizer, CheckpointManifest& plan) {
  if (!optimizer.is_sliced() || group.size() == 1 || optimizer.moments().empty()) return std::nullopt;
  const std::vector<int>& elsewhere = directory.elsewhere;
  if (!elsewhere.empty()) {
    if (group.rank() == 0 && elsewhere.front() != 0) {
      std::vector<std::string> numbers;
      for (const int rank : elsewhere) numbers.push_back(fmt::to_string(rank));
      log_info(
          "rank{} {} cannot write to rank 0's --checkpoint-dir {} (host {}): rank 0 gathers all moments and writes "
          "them "
          "→ give a directory on a file system that all hosts share, and each rank writes its own",
          numbers.size() == 1 ? "" : "s", join(numbers, ", "), directory.path, host_name());
    }
    return std::nullopt;
  }
  plan.parts = layout_of(ddp, group.size());
  return checkpoint::OwnPart{.index = static_cast<std::size_t>(group.rank()),
                             .count = static_cast<std::size_t>(group.size()),
                             .attempt = directory.attempt};
}

void settle_parts(checkpoint::Checkpoints& checkpoints, comm::ProcessGroup& group) {
  if (!checkpoints.in_parts()) return;
  const auto own = checkpoints.wait_for_own();
  std::vector<std::optional<CheckpointManifest::File>> receipts;
  for (const auto& text : group.all_gather_text(own ? checkpoint::encode_receipt(*own) : std::string()))
    receipts.push_back(checkpoint::decode_receipt(text));
  checkpoints.settle(receipts);
}

bool finish_checkpoints(checkpoint::Checkpoints& checkpoints, comm::ProcessGroup& group) {
  settle_parts(checkpoints, group);
  return checkpoints.finish();
}

std::vector<std::vector<std::byte>> gather_moments(checkpoint::Checkpoints& checkpoints,
                                                   const parallel::DistributedDataParallel& ddp,
                                                   const nn::Optimizer& optimizer, int root) {
  if (!optimizer.is_sliced() || checkpoints.in_parts()) return {};
  checkpoints.free_moments();
  return ddp.gather_moments(optimizer, root);
}

std::vector<nn::ParameterSlice> whole_slices(const nn::Optimizer& optimizer) {
  std::vector<nn::ParameterSlice> all;
  for (const auto& [name, parameter] : optimizer.parameters()) all.push_back({.count = parameter->value().count()});
  return all;
}

std::vector<std::vector<std::byte>> read_moments(const std::string& path, const CheckpointManifest& manifest,
                                                 const nn::Optimizer& optimizer,
                                                 std::span<const nn::ParameterSlice> slices) {
  check_layout(path, manifest, optimizer);
  const auto& parameters = optimizer.parameters();
  const auto moments = optimizer.moments();
  std::vector<std::vector<std::byte>> mine;
  for (std::size_t m = 0; m < moments.size(); ++m)
    mine.emplace_back(static_cast<std::size_t>(slices[m % parameters.size()].count) * sizeof(float));
  for (std::size_t p = 0; p < manifest.parts.size(); ++p) {
    // What it has of a parameter, and from where on this rank wants it.
    const auto overlap = [&](std::size_t index) {
      const auto found = manifest.parts[p].find(parameters[index].name);
      const CheckpointManifest::Slice theirs =
          found == manifest.parts[p].end() ? CheckpointManifest::Slice{} : found->second;
      const std::int64_t begin = std::max(theirs.begin, slices[index].begin);
      const std::int64_t end = std::min(theirs.begin + theirs.count, slices[index].begin + slices[index].count);
      return std::pair(theirs, nn::ParameterSlice{.begin = begin, .count = std::max<std::int64_t>(end - begin, 0)});
    };
    bool wanted = false;
    for (std::size_t i = 0; i < parameters.size(); ++i) wanted = wanted || overlap(i).second.count > 0;
    if (!wanted) continue;
    const std::string file = fmt::format("{}/{}", path, part_file(p, manifest.parts.size()));
    std::map<std::string, nn::HostTensor> tensors;
    for (auto& tensor : nn::read_safetensors(file)) tensors.emplace(tensor.name, std::move(tensor));
    const std::size_t kinds = moments.size() / parameters.size();
    if (tensors.size() != kinds * manifest.parts[p].size())
      refuse(file,
             fmt::format("it has {} tensors, and {} were expected", tensors.size(), kinds * manifest.parts[p].size()));
    for (std::size_t m = 0; m < moments.size(); ++m) {
      const std::size_t index = m % parameters.size();
      const auto [theirs, part] = overlap(index);
      if (theirs.count == 0) continue;
      const auto found = tensors.find(moments[m].name);
      if (found == tensors.end() || found->second.dtype != DType::kF32 ||
          found->second.shape != std::vector<std::int64_t>{theirs.count})
        refuse(file, fmt::format("it has no {} of {} elements", moments[m].name, theirs.count));
      if (part.count == 0) continue;
      std::memcpy(mine[m].data() + static_cast<std::size_t>(part.begin - slices[index].begin) * sizeof(float),
                  found->second.bytes.data() + static_cast<std::size_t>(part.begin - theirs.begin) * sizeof(float),
                  static_cast<std::size_t>(part.count) * sizeof(float));
    }
  }
  return mine;
}

std::optional<std::string> path_for_all(const checkpoint::Resumed& resumed, comm::ProcessGroup& group) {
  const bool reads = group.rank() == resumed.reader;
  const std::string path =
      group.all_gather_text(reads ? resumed.path : std::string())[static_cast<std::size_t>(resumed.reader)];
  bool sees = false;
  try {
    sees = checkpoint::read_manifest(path) == resumed.manifest;
  } catch (const IoError&) {
    // It is on another host's disk.
  }
  if (std::ranges::min(group.all_gather_numbers(sees ? 1 : 0)) == 0) return std::nullopt;
  return path;
}

}  // namespace lockstep::trainer
