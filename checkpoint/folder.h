// Checkpoints on the disk: a directory of directories, each whole or not there.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/scope.h"
#include "checkpoint/manifest.h"
#include "lockstep/base/function_ref.h"

namespace lockstep::checkpoint {

/// Note [Checkpoints on the disk]
/// DIR/step-0000000120/ has weights.safetensors (a weights file like any other), optimizer.safetensors, where there
/// is a moving average ema.safetensors (a weights file with the averages for parameters), where a model carries a state
/// from batch to batch carried.safetensors, and card.json, the manifest, which has the size and the SHA-256 of all of
/// them, and its own. It is written under another name, each file and the directory flushed to the disk, and then
/// renamed, which is flushed too: under this name there is never a part of one. Older ones are removed after that.
/// Names that begin with ".step-" are leftovers of a killed process; the next run with this directory removes them. A
/// directory is one run's at a time (DirectoryLock, .lock).
///
/// Note [Checkpoints in parts]
/// If each rank holds a share of the optimizer's state (ZeRO), each writes its share. Instead of optimizer.safetensors
/// a checkpoint then has optimizer-00000-of-00004.safetensors and so on, one file per rank. Its manifest lists the
/// elements of each parameter in each file. A tensor in these files has one dimension and the name of the whole one;
/// elements lie in the order that they have in memory.
///
///   all ranks   write their file into ".step-….new-ATTEMPT", whose name all know, and flush it. Then a receipt, a
///               small file beside it with its size and SHA-256
///   rank 0      writes the rest too, waits for the receipts, removes them, writes the manifest, and renames
///
/// So a checkpoint appears when all parts are on the disk, while training continues, and no rank's thread
/// needs another rank's. A rank that cannot write has no receipt. When the next checkpoint is due, or the run ends,
/// ranks wait for their own file and exchange their receipts: then it is known, and what is incomplete is
/// removed. So a network file system that shows new files late delays a checkpoint and loses none.
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

/// Of the checkpoint at `path`. Throws IoError for one that is missing, cut or changed.
CheckpointManifest read_manifest(const std::string& path);
/// Reads a checkpoint's files whole. Throws IoError naming the file that is missing, cut or changed.
CheckpointManifest verify_checkpoint(const std::string& path);
/// The same in pieces: which files that are, by their names, of the checkpoint at `path` with this manifest, and one of
/// them. Throw IoError if the manifest lacks a required file, and for an incomplete file.
std::vector<std::string> files_of(const std::string& path, const CheckpointManifest& manifest);
void verify_file(const std::string& path, const CheckpointManifest& manifest, const std::string& name);
/// What verifies a checkpoint, as verify_checkpoint() does.
using Verify = FunctionRef<CheckpointManifest(const std::string& path)>;

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
Search newest_whole(const std::string& directory, Verify verify);

/// What a run resumes from.
struct Resumed {
  std::string path;  // on the rank that reads it; elsewhere for people
  CheckpointManifest manifest;
  std::vector<CorruptCheckpoint> corrupt;  // newer than that, in the directories that this rank has looked into
  int reader = 0;                          // the rank that reads it
  bool from_own_directories = false;       // it lies where this run's own checkpoints go
  bool in_memory = false;                  // the reader has its state already: there are no files
  bool all_have_it = false;                // as have all others
};

/// Makes DIR/step-…: `write_files` puts the files but the manifest into the directory that it is given and returns the
/// manifest. One of this step that is there is replaced. Throws IoError; then nothing has changed and no file remains.
/// `attempt`: of a checkpoint in parts; others write into the same directory, and do not when `write_files` ends.
void write_checkpoint(const std::string& directory, std::int64_t step,
                      const std::function<CheckpointManifest(const std::string& path)>& write_files,
                      const std::string& attempt = {});

/// Which file of a checkpoint in parts is this rank's.
struct OwnPart {
  std::size_t index = 0, count = 1;
  std::string attempt = {};  // the same on all ranks, and no other run's
};
/// Its file alone, which `write_file` puts into the directory that it is given, and the receipt. Throws IoError.
CheckpointManifest::File write_part(const std::string& directory, std::int64_t step, const OwnPart& part,
                                    const std::function<CheckpointManifest::File(const std::string& path)>& write_file);
/// The receipt of part `part` of `count` in a directory that a checkpoint is written into; nothing where there is none.
std::optional<CheckpointManifest::File> find_receipt(const std::string& path, std::size_t part, std::size_t count);
void remove_receipts(const std::string& path, std::size_t count);
/// What a receipt says. Nothing for what is none.
std::string encode_receipt(const CheckpointManifest::File& file);
std::optional<CheckpointManifest::File> decode_receipt(std::string_view text);

/// Removes, of those up to `step`, the ones that are `corrupt`, and all but the newest `keep` (0: keeps all) and the
/// `best`. Throws IoError.
void prune_checkpoints(const std::string& directory, std::int64_t step, std::int64_t keep,
                       const std::vector<CorruptCheckpoint>& corrupt, const std::vector<BestEvaluation>& best = {});

/// Makes the directory, and those that it is in, if it is not there. Throws IoError.
void make_checkpoint_directory(const std::string& directory);
/// Makes the directory if it is not there and sees whether files can be made in it; removes what others have left
/// half done. Throws IoError.
void prepare_checkpoints(const std::string& directory);

/// A directory of checkpoints is one run's at a time. Holds DIR/.lock, which says who does. The lock is the kernel's,
/// of an open file: it ends with the process, in whatever way, and on network file systems, as long as they have locks,
/// with the host's lease. Where they have none, or the directory cannot be written, nothing is held; the first is said
/// once.
class DirectoryLock {
 public:
  DirectoryLock() = default;
  /// Waits for a run that may be ending: `here` for one of this host, `elsewhere` for one of another, which may be a
  /// rank of this job that the network has cut off, and whose end takes as long as it needs to notice. Throws
  /// UsageError naming the run that holds it, and InterruptedError for a stop that is asked for meanwhile.
  explicit DirectoryLock(const std::string& directory, std::chrono::milliseconds here = std::chrono::seconds(3),
                         std::chrono::milliseconds elsewhere = std::chrono::seconds(120));
  ~DirectoryLock() { release(); }
  DirectoryLock(DirectoryLock&& other) noexcept = default;
  DirectoryLock& operator=(DirectoryLock&& other) noexcept;

  bool held() const { return static_cast<bool>(fd_); }

 private:
  void release() noexcept;

  std::string path_;
  UniqueFd fd_;
};

}  // namespace lockstep::checkpoint
