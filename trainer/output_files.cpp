#include "lockstep/trainer/config.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "checkpoint/folder.h"
#include "lockstep/data/families.h"
#include "trainer/predictions.h"

namespace lockstep::trainer {
namespace {

namespace fs = std::filesystem;

struct NamedFile {
  const char* flag;
  std::string path;
};

constexpr const char* kOutputRemedy = "give each a file of its own";

std::vector<NamedFile> given(std::vector<NamedFile> files) {
  std::erase_if(files, [](const NamedFile& file) { return file.path.empty(); });
  return files;
}

std::vector<NamedFile> outputs_of(const TrainConfig& config) {
  return given({{"--save", config.save},
                {"--metrics", config.metrics},
                {"--trace", config.trace},
                {"--predictions", config.predictions},
                {"--tensorboard", config.tensorboard},
                {"--checkpoint-dir", config.checkpoint_dir}});
}

/// Of data that are files; the parts of directories have names that nobody takes by accident.
std::vector<NamedFile> inputs_of(const TrainConfig& config) {
  std::vector<NamedFile> files = {{"--weights", config.weights},
                                  {"--config", config.config_file},
                                  {"--status-token-file", config.status_token_file}};
  if (config.resume != "auto") files.push_back({"--resume", config.resume});
  if (const auto* family = data::find_dataset_family(config.data); family != nullptr && family->files != nullptr)
    for (const auto& path : family->files(data::dataset_argument(config.data))) files.push_back({"--data", path});
  return given(std::move(files));
}

bool is_regular_output_of(int fd, const std::string& path) {
  struct stat of_fd = {}, of_path = {};
  return ::fstat(fd, &of_fd) == 0 && ::stat(path.c_str(), &of_path) == 0 && S_ISREG(of_fd.st_mode) &&
         of_fd.st_dev == of_path.st_dev && of_fd.st_ino == of_path.st_ino;
}

/// --resume continues in the directory that it came from.
bool may_be_one(const NamedFile& output, const NamedFile& input) {
  const std::string flag = output.flag, other = input.flag;
  return (flag == "--save" && other == "--weights") || (flag == "--checkpoint-dir" && other == "--resume");
}

void check_alone(const NamedFile& output) {
  if (output.path == "-")
    throw UsageError(fmt::format("{} -: it is written to a file, not to standard output", output.flag),
                     "name a file; one that is called '-' is ./-");
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO})
    if (is_regular_output_of(fd, output.path))
      throw UsageError(fmt::format("{} {} is the file that standard {} goes to", output.flag, output.path,
                                   fd == STDOUT_FILENO ? "output" : "error"),
                       kOutputRemedy);
  const fs::path directory = fs::path(output.path).parent_path();
  const auto is_there = [&](const char* name) {
    std::error_code ignored;
    return fs::exists((directory.empty() ? fs::path(".") : directory) / name, ignored);
  };
  if (is_there(checkpoint::kManifestFile) && is_there(checkpoint::kWeightsFile))
    throw UsageError(fmt::format("{} {} lies in a checkpoint", output.flag, output.path),
                     "give another place: further files in a checkpoint make it corrupt");
}

/// What it holds is what its name says. A device has no such name.
void check_metrics_name(const std::string& path) {
  std::error_code none;
  if (path.empty() || path.ends_with(".jsonl") || path.ends_with(".csv") || fs::is_character_file(path, none) ||
      fs::is_fifo(path, none))
    return;
  throw UsageError(fmt::format("--metrics {}: metrics are lines of JSON (.jsonl) or a table (.csv)", path),
                   fmt::format("call it {}", fs::path(path).replace_extension(".jsonl").string()));
}

}  // namespace

void check_output_files(const TrainConfig& config) {
  check_predictions_path(config.predictions);
  const auto outputs = outputs_of(config), inputs = inputs_of(config);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    check_alone(outputs[i]);
    for (std::size_t j = 0; j < i; ++j)
      if (is_same_file(outputs[i].path, outputs[j].path))
        throw UsageError(fmt::format("{} and {} are one file: {}", outputs[j].flag, outputs[i].flag, outputs[i].path),
                         kOutputRemedy);
    for (const auto& input : inputs)
      if (!may_be_one(outputs[i], input) && is_same_file(outputs[i].path, input.path))
        throw UsageError(fmt::format("{} would overwrite the file of {}: {}", outputs[i].flag, input.flag, input.path),
                         kOutputRemedy);
  }
  check_metrics_name(config.metrics);
}

}  // namespace lockstep::trainer
