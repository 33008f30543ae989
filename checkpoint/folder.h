// Checkpoints on the disk: a directory of directories, each whole or not there.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/manifest.h"

namespace lockstep::checkpoint {

/// Note [Checkpoints on the disk]
/// DIR/step-0000000120/ has weights.safetensors (a weights file like any other), optimizer.safetensors, where there
/// is a moving average ema.safetensors (a weights file with the averages for parameters), where a model carries a state
/// from batch to batch carried.safetensors, and card.json, the manifest, which has the size and the SHA-256 of all of
/// them, and its own. It is written under another name, each file and the directory flushed to the disk, and then
/// renamed, which is flushed too: under this name there is never a part of one. Older ones are removed after that.
/// Names that begin with ".step-" are what a process that was killed has left; the next run with this directory removes
/// them. A directory is one run's at a time.
inline constexpr const char* kWeightsFile = "weights.safetensors";
inline constexpr const char* kOptimizerFile = "optimizer.safetensors";
inline constexpr const char* kAverageFile = "ema.safetensors";
inline constexpr const char* kCarriedFile = "carried.safetensors";
inline constexpr const char* kHookFile = "hook.safetensors";
inline constexpr const char* kScalerFile = "scaler.safetensors";
inline constexpr const char* kManifestFile = "card.json";

struct StoredCheckpoint {
  std::int64_t step = 0;
  std::string path;
};

/// Those in `directory` by their names, the newest first. None where there is no such directory. Throws IoError where
/// it cannot be read.
std::vector<StoredCheckpoint> list_checkpoints(const std::string& directory);

/// Reads a checkpoint's files whole. Throws IoError naming the file that is missing, cut or changed.
CheckpointManifest verify_checkpoint(const std::string& path);

struct FoundCheckpoint {
  std::string path;
  CheckpointManifest manifest;
};
struct CorruptCheckpoint {
  std::string path;
  std::string why;  // names the file
  std::int64_t step = 0;
};
struct Search {
  std::optional<FoundCheckpoint> found;    // the newest whole one
  std::vector<CorruptCheckpoint> corrupt;  // newer than that
};
Search newest_whole(const std::string& directory);

/// What a run resumes from.
struct Resumed {
  std::string path;  // on the rank that reads it; elsewhere for people
  CheckpointManifest manifest;
  std::vector<CorruptCheckpoint> corrupt;  // newer than that, in the directories that this rank has looked into
  int reader = 0;                          // the rank that reads it
  bool from_own_directories = false;       // it lies where this run's own checkpoints go
};

/// Makes DIR/step-…: `write_files` puts the files but the manifest into the directory that it is given and returns the
/// manifest. One of this step that is there is replaced. Throws IoError; then nothing has changed and no file remains.
void write_checkpoint(const std::string& directory, std::int64_t step,
                      const std::function<CheckpointManifest(const std::string& path)>& write_files);

/// Removes, of those up to `step`, all but the newest `keep` (0: keeps all) and those that are `corrupt`. Throws
/// IoError.
void prune_checkpoints(const std::string& directory, std::int64_t step, std::int64_t keep,
                       const std::vector<CorruptCheckpoint>& corrupt);

/// Makes the directory if it is not there and sees whether files can be made in it; removes what others have left
/// half done. Throws IoError.
void prepare_checkpoints(const std::string& directory);

}  // namespace lockstep::checkpoint
