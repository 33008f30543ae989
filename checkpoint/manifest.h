// A checkpoint's description of itself: its step, the settings of its run, and the content of its files.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/options.h"
#include "lockstep/sampler/sampler.h"

namespace lockstep::checkpoint {

/// Names and values of what a run is, for people and for comparing, in a fixed order.
using Facts = std::vector<std::pair<std::string, std::string>>;

/// The value of `name`, of `facts`; null: they do not say.
const std::string* find_fact(const Facts& facts, std::string_view name);

/// What DistributedDataParallel has come to.
struct BucketLayout {
  std::vector<std::string> order;  // parameters, as their gradients became ready; may be empty
  std::uint64_t bucket_bytes = 0;  // that were chosen for so many ranks; 0: none were

  friend bool operator==(const BucketLayout&, const BucketLayout&) = default;
};

/// The file of part `part` of `parts`: "optimizer-00001-of-00004.safetensors", with the first one 0.
std::string part_file(std::size_t part, std::size_t parts);

/// What the evaluations so far have decided.
struct EvaluationHistory {
  std::optional<BestEvaluation> best = {};
  std::int64_t since_best = 0;  // those that were not better
  // The best ones, the best first, whose steps' checkpoints stay (CheckpointOptions::keep_best).
  std::vector<BestEvaluation> kept = {};
  // Of a learning rate that follows them: the least loss, those since that were no lower, and how often it was lowered.
  std::optional<double> least_loss = {};
  std::int64_t since_least = 0, reductions = 0;
  friend bool operator==(const EvaluationHistory&, const EvaluationHistory&) = default;
};

struct CheckpointManifest {
  std::int64_t step = 0;           // the last one done, from 1
  sampler::SamplerState position;  // of the sampler after it
  std::int64_t optimizer_steps = 0;
  std::int64_t total_steps = 0;  // of the run, as it was planned then; 0: nobody has planned
  int world_size = 1;
  Facts identity;  // must be the same in a run that resumes
  Facts settings;  // may be others
  Facts data;      // what the run was trained on; empty in checkpoints of earlier versions
  BucketLayout buckets;
  EvaluationHistory evaluations = {};  // before it

  struct File {
    std::uint64_t bytes = 0;
    std::string sha256;
    friend bool operator==(const File&, const File&) = default;
  };
  std::map<std::string, File> files;  // by name, beside the manifest

  /// Elements [begin, begin + count) of a parameter, in the layout that it has in memory.
  struct Slice {
    std::int64_t begin = 0, count = 0;
    friend bool operator==(const Slice&, const Slice&) = default;
  };
  /// Of the moments, by part and by parameter's name: what part_file() has (Note [Checkpoints in parts]). Empty: one
  /// file has all of them.
  std::vector<std::map<std::string, Slice>> parts;

  friend bool operator==(const CheckpointManifest&, const CheckpointManifest&) = default;
};

/// JSON, which ends with the SHA-256 of all the rest. Bytes that are not UTF-8 are replaced. Versions that know of no
/// parts refuse a manifest that has any by its format.
std::string encode(const CheckpointManifest& manifest);

/// Throws IoError naming `source` for anything that encode() has not written. Nothing in `text` is trusted.
CheckpointManifest decode_checkpoint_manifest(const std::string& text, const std::string& source);

}  // namespace lockstep::checkpoint
