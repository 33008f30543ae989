// What a run wants of its checkpoints, and of a file of weights.
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
  std::int64_t keep_best = 0;                         // besides these: those of so many evaluations, the best
  std::string checkpoint_mirror = {};                 // a second copy on another host: HOST:DIR or DIR; empty: none
  std::string resume = {};                            // auto, or the path of a checkpoint; empty: start anew
  bool resume_data_changed = false;                   // though the data are others than the checkpoint's
};

/// The evaluation for which a run keeps the weights.
struct BestEvaluation {
  std::string metric;  // "accuracy"
  double value = 0;
  std::int64_t step = 0;

  friend bool operator==(const BestEvaluation&, const BestEvaluation&) = default;
};

/// A file of weights, and how its names are read.
struct WeightsOptions {
  std::string weights = {};      // safetensors, or what torch.save() has written; empty: none
  std::string weights_key = {};  // of its dictionaries the one that is meant (nn::ReadOptions)
  bool non_strict = false;       // weights that are missing or unexpected are left alone
  bool keep_prefix = false;      // names are taken as they are (nn::LoadOptions)
};

}  // namespace lockstep::checkpoint
