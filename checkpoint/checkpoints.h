// The checkpoints of one run: when they are taken, and what becomes of them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/writer.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/optim/optimizer.h"

namespace lockstep::checkpoint {

inline constexpr std::int64_t kDefaultKeep = 3;

/// Every rank has one and asks it when; rank 0's alone writes. What goes wrong on the disk is said once and once more
/// at the end, and training continues.
class Checkpoints {
 public:
  struct Options {
    std::string directory;              // empty: none are written
    std::optional<std::int64_t> every;  // steps; 0: only at the end; default: at the end of each epoch
    std::int64_t keep = kDefaultKeep;   // the newest ones; 0: all
    bool writes = false;                // this rank does
  };
  /// None are taken before open().
  explicit Checkpoints(Options options);

  /// Module and optimizer must outlive it. `plan`: what all manifests of this run have in common; `metadata`: of the
  /// weights; `resumed`: what the run resumes from, if anything. Throws CheckpointError where the directory has
  /// checkpoints that this run does not resume from.
  void open(const nn::Module& module, const nn::Optimizer& optimizer, CheckpointManifest plan,
            std::map<std::string, std::string> metadata, const std::optional<Resumed>& resumed);

  /// Whether the configuration asks for any; the same on all ranks, as is what follows.
  bool wanted() const { return !options_.directory.empty(); }
  bool due(std::int64_t step, bool last_of_epoch, bool last) const;

  /// Copies the state after `step`, which is done and was finite, and has it written. Waits for the one before, if that
  /// is still being written. Nothing if this step's has been taken. `carried`, of the rank that writes: what the model
  /// carries from batch to batch.
  void take(std::int64_t step, const sampler::SamplerState& position, std::int64_t optimizer_steps,
            const std::vector<std::string>& bucket_order, std::vector<nn::HostTensor> carried = {});
  /// Whether take() would take one.
  bool is_new(std::int64_t step) const { return step != taken_; }
  /// Waits for the last one. Whether it was written.
  bool finish();
  /// Says at the end what went wrong.
  void tell_failures();

  /// "and the newest checkpoint is of step 120", or that there is none.
  std::string newest() const;

 private:
  void refuse_others(const std::optional<Resumed>& resumed) const;
  void tell_first_failure();

  Options options_;
  CheckpointManifest plan_;
  std::int64_t older_ = 0, taken_ = 0;  // steps
  std::string opening_failure_;
  bool told_ = false;
  double waited_seconds_ = 0;
  std::unique_ptr<StateCopy> copy_;
  std::unique_ptr<CheckpointWriter> writer_;
};

}  // namespace lockstep::checkpoint
