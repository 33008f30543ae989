// What a run wants of its checkpoints.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::checkpoint {

inline constexpr std::int64_t kDefaultKeep = 3;

/// Where checkpoints are written, and which one is resumed from. A directory is one run's at a time.
struct CheckpointOptions {
  std::string checkpoint_dir = {};                    // empty: none are written
  std::optional<std::int64_t> checkpoint_every = {};  // steps; 0: only at the end; default: at the end of each epoch
  std::optional<std::int64_t> keep = {};              // the newest ones; 0: all; default: kDefaultKeep
  std::string checkpoint_mirror = {};                 // a second copy on another host: HOST:DIR or DIR; empty: none
  std::string resume = {};                            // auto, or the path of a checkpoint; empty: start anew
  bool resume_data_changed = false;                   // though the data are others than the checkpoint's
};

}  // namespace lockstep::checkpoint
