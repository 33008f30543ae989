#include "trainer/run_record.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>
#include <utility>

#include "base/cpu.h"
#include "base/hash.h"
#include "base/text.h"
#include "base/version.h"
#include "comm/agree.h"
#include "lockstep/base/env.h"
#include "trainer/options.h"
#include "trainer/reports.h"
#include "trainer/resume.h"

namespace lockstep::trainer {
namespace {

namespace fs = std::filesystem;

constexpr char kSeparator = '\n';  // neither a host's name nor a device's description has one

std::string first_line_of(const fs::path& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

/// Of the repository that the working directory is in, as git's own files say it; both empty where there is none, or
/// where they say it in another way.
std::pair<std::string, std::string> commit_and_branch() {
  std::error_code none;
  for (fs::path at = fs::current_path(none); !at.empty(); at = at.parent_path()) {
    fs::path git = at / ".git";
    constexpr std::string_view kElsewhere = "gitdir: ";
    if (const std::string line = first_line_of(git); line.starts_with(kElsewhere))
      git = at / line.substr(kElsewhere.size());
    if (!fs::is_directory(git, none)) {
      if (at == at.root_path()) break;
      continue;
    }
    const std::string head = first_line_of(git / "HEAD");
    constexpr std::string_view kRef = "ref: ";
    if (!head.starts_with(kRef)) return {head, ""};
    const std::string ref = head.substr(kRef.size());
    const std::string common = first_line_of(git / "commondir");  // of a further working tree
    const fs::path shared = common.empty() ? git : git / common;
    std::string commit = first_line_of(shared / ref);
    std::ifstream packed(shared / "packed-refs");
    for (std::string line; commit.empty() && std::getline(packed, line);)
      if (line.ends_with(" " + ref)) commit = line.substr(0, line.find(' '));
    constexpr std::string_view kHeads = "refs/heads/";
    return {commit, ref.starts_with(kHeads) ? ref.substr(kHeads.size()) : ref};
  }
  return {};
}

std::string sha256_of(const checkpoint::Facts& facts) {
  Sha256 hash;
  for (const auto& [name, text] : facts) hash.update(fmt::format("{} {}\n", name, text));
  return hash.finish();
}

std::vector<RunReport::Setting> settings_of(const TrainConfig& config) {
  TrainConfig same = config;  // options are bound to what they can change
  const OptionTable table = train_options(same);
  std::vector<RunReport::Setting> settings;
  for (const auto& option : table.options()) {
    if (!option.value.text || (option.applies.unless && option.applies.unless())) continue;
    const auto place = config.places.find(option.name);
    settings.push_back({.name = option.name,
                        .value = option.value.text(),
                        .from = place != config.places.end() ? place->second : "default"});
  }
  return settings;
}

}  // namespace

RunReport describe_run(const TrainConfig& config, const session::Session& session, const nn::Module& model,
                       const data::Dataset& dataset, const checkpoint::Facts& facts, std::int64_t total_steps) {
  RunReport report{.command = config.command,
                   .model = config.model.name,
                   .data = dataset.name(),
                   .steps = total_steps,
                   .version = fmt::format("{} {} {}", version(), git_revision(), build_type()),
                   .instruction_set = cpu_instruction_set()};
  for (const std::string& rank :
       session.group->all_gather_text(host_name() + kSeparator + session.backend->describe())) {
    const std::size_t at = rank.find(kSeparator);
    report.ranks.push_back({.host = rank.substr(0, at), .device = rank.substr(at + 1)});
  }
  comm::run_collectively(*session.group, [&] {
    if (session.group->rank() != 0 || !follows_run(config)) return;
    report.settings = settings_of(config);
    for (const auto& [name, parameter] : model.named_parameters()) {
      report.parameters += parameter->value().count();
      if (parameter->requires_grad()) report.trained_parameters += parameter->value().count();
    }
    report.data_sha256 = sha256_of(facts.empty() ? data_facts_of(dataset) : facts);
    std::tie(report.git_commit, report.git_branch) = commit_and_branch();
  });
  return report;
}

}  // namespace lockstep::trainer
