#include "cli/commands.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/folder.h"
#include "options/values.h"

namespace lockstep::cli {
namespace {

using checkpoint::Facts;

// One, or all those in a directory of them, the newest first.
std::vector<std::string> checkpoints_at(const std::string& path) {
  std::error_code none;
  if (std::filesystem::exists(fmt::format("{}/{}", path, checkpoint::kManifestFile), none)) return {path};
  std::vector<std::string> paths;
  for (const auto& stored : checkpoint::list_checkpoints(path)) paths.push_back(stored.path);
  if (paths.empty())
    throw CheckpointError(fmt::format("{} is no checkpoint, and there is none in it", path),
                          "give the directory that lockstep train --checkpoint-dir named, or one in it");
  return paths;
}

std::size_t longest_name(const Facts& facts) {
  std::size_t longest = 0;
  for (const auto& fact : facts) longest = std::max(longest, fact.first.size());
  return longest;
}

std::string text_of(const Facts& facts, std::size_t width) {
  std::string text;
  for (const auto& [name, value] : facts) text += fmt::format("  {:<{}}  {}\n", name, width, value);
  return text;
}

// Names of many classes, digests.
Facts shortened(Facts facts) {
  constexpr std::size_t kColumns = 90;
  for (auto& [name, value] : facts) value = cut_columns(value, kColumns);
  return facts;
}

void show(const std::string& path, const checkpoint::CheckpointManifest& manifest) {
  const std::string of = manifest.total_steps > 0 ? fmt::format(" of {}", manifest.total_steps) : "";
  std::string text = fmt::format("{}\nstep {}{}, in epoch {} after {} samples of it\n", path, manifest.step, of,
                                 manifest.position.epoch + 1, manifest.position.cursor);
  const std::size_t width =
      std::max({longest_name(manifest.identity), longest_name(manifest.settings), longest_name(manifest.data)});
  text += "a run that resumes must have the same\n" + text_of(manifest.identity, width);
  text += "and may change\n" + text_of(manifest.settings, width);
  if (!manifest.data.empty())
    text += "data; lockstep train --resume-data-changed resumes on others\n" + text_of(shortened(manifest.data), width);
  const auto& best = manifest.evaluations.kept;
  if (!best.empty()) text += "checkpoints of the best evaluations before it, which are kept\n";
  for (const auto& evaluation : best)
    text += fmt::format("  step {}  {} {:.6g}\n", evaluation.step, evaluation.metric, evaluation.value);
  for (const auto& [name, file] : manifest.files)
    text += fmt::format("{}  {} bytes  {}\n", file.sha256, file.bytes, name);
  std::fputs(text.c_str(), stdout);
}

int verify(const std::vector<std::string>& paths) {
  std::int64_t corrupt = 0;
  std::string first;
  for (const auto& path : paths) {
    try {
      const auto manifest = checkpoint::verify_checkpoint(path);
      std::fputs(fmt::format("{}: whole, step {}\n", path, manifest.step).c_str(), stdout);
    } catch (const IoError& error) {
      std::fputs(fmt::format("{}: corrupt\n", path).c_str(), stdout);
      if (corrupt++ == 0) first = error.what();
    }
  }
  if (corrupt == 0) return 0;
  throw CheckpointError(fmt::format("{} of {} checkpoint{} cannot be used: {}", corrupt, paths.size(),
                                    paths.size() == 1 ? "" : "s", first),
                        "lockstep train --resume auto takes the newest one that is whole");
}

}  // namespace

OptionTable checkpoint_options(std::string& action, std::string& path) {
  OptionTable table(
      "checkpoint",
      "Shows the run of a checkpoint, or reads all of it and checks its bytes against their SHA-256. PATH is a "
      "checkpoint, or a --checkpoint-dir: show takes its newest complete one, verify all of them.");
  table.positional({"show|verify", "what to do", options::text(action)});
  table.positional({"PATH", "a checkpoint, or a directory of them", options::text(path)});
  table.group("Flags");
  options::add_config_option(table);
  return table;
}

int checkpoint_command(const Sources& sources, const ForeignFlags& foreign) {
  std::string action, path;
  const OptionTable table = checkpoint_options(action, path);
  if (parse_options(table, sources, foreign).help) {
    std::fputs(table.help().c_str(), stdout);
    return 0;
  }
  if (action != "show" && action != "verify")
    throw UsageError(fmt::format("checkpoint: unknown action '{}'", action), "use show or verify");
  try {
    const auto paths = checkpoints_at(path);
    if (action == "verify") return verify(paths);
    if (paths.size() == 1 && paths.front() == path) {
      show(path, checkpoint::verify_checkpoint(path));
      return 0;
    }
    const auto search = checkpoint::newest_whole(path);
    if (!search.found) return verify(paths);
    show(search.found->path, search.found->manifest);
    return 0;
  } catch (const IoError& error) {
    throw CheckpointError(error.what(), error.remedy());
  }
}

}  // namespace lockstep::cli
