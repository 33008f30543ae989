// The checkpoints of one run: when they are taken, and what becomes of them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/writer.h"
#include "lockstep/base/deadline.h"
#include "lockstep/checkpoint/options.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/optim/optimizer.h"

namespace lockstep::checkpoint {

/// Every rank has one and asks it when; rank 0's writes, and that of the rank that has the mirror, if there is one. In
/// parts each rank's does.
/// What goes wrong on a disk is said once and once more at the end, and training continues.
class Checkpoints {
 public:
  /// None are taken before open(). `writes`: directories that this rank writes to, the run's first, if it does.
  /// `record`: a file that this rank keeps of the run's steps, which is on the disk before their checkpoint is; empty:
  /// none.
  Checkpoints(CheckpointOptions options, std::vector<std::string> writes, std::string record = {})
      : options_(std::move(options)), writes_(std::move(writes)), record_(std::move(record)) {}

  /// Module, optimizer and `average`, nullptr where there is none, must outlive it. `plan`: the common part of this
  /// run's manifests; `metadata`: of the weights; `resumed`: the checkpoint to resume from, if any; `part`: each rank
  /// writes its own moments (Note [Checkpoints in parts]); `plan` has their layout. Throws CheckpointError where the
  /// directory has checkpoints that this run does not resume from, UsageError where another run writes to it.
  void open(const nn::Module& module, const nn::Optimizer& optimizer, const nn::MovingAverage* average,
            CheckpointManifest plan, const std::map<std::string, std::string>& metadata,
            const std::optional<Resumed>& resumed, const std::optional<OwnPart>& part = std::nullopt);
  /// After open(): whether it was given a part; the same on all ranks.
  bool in_parts() const { return part_.has_value(); }
  /// Before take() and finish() of checkpoints in parts: waits for what this rank writes; its receipt, or nothing where
  /// there is none. All ranks' receipts are to be given to settle() then.
  std::optional<CheckpointManifest::File> wait_for_own();
  void settle(const std::vector<std::optional<CheckpointManifest::File>>& receipts);
  /// After open(): whether a directory that this rank writes to lacks the checkpoint that the run resumes from, as
  /// where a disk was lost.
  bool lacks_copy() const;
  /// Writes it there, from the state that has been restored, with what else it had.
  void write_missing_copies(const CheckpointManifest& resumed, ExtraState extra);

  const CheckpointOptions& options() const { return options_; }
  /// Whether they ask for any; the same on all ranks, as is what follows.
  bool wanted() const { return !options_.checkpoint_dir.empty(); }
  bool due(std::int64_t step, bool last_of_epoch, bool last) const;

  /// Before moments are gathered for take(): waits for the last one, and frees what was copied of its moments, so that
  /// they are not there twice.
  void free_moments();
  /// Copies the state after `step`, which is done and was finite, and has it written. Waits for the one before, if that
  /// is still being written. Nothing if this step's has been taken. `extra`, of the rank that writes: what it does not
  /// have by itself. `since`: when training stopped for it.
  void take(std::int64_t step, Clock::time_point since, const sampler::SamplerState& position,
            std::int64_t optimizer_steps, const BucketLayout& buckets, ExtraState extra = {});
  /// Whether take() would take one.
  bool is_new(std::int64_t step) const { return step != taken_; }
  /// Waits for the last one. Whether it was written to the run's directory, as far as this rank does that.
  bool finish();

  struct Written {
    std::int64_t step = 0;
    std::uint64_t bytes = 0;
    double write_seconds = 0;  // by the writer's thread
    double held_seconds = 0;   // for which training stood still
  };
  /// The next one that has come to the run's directory since the last call. Nothing on other ranks.
  std::optional<Written> written();
  struct Summary {
    std::int64_t count = 0;
    std::uint64_t bytes = 0;   // of the newest one
    double write_seconds = 0;  // of one, in the mean
    double held_seconds = 0;   // of all together
  };
  /// Of those in the run's directory; count 0 on other ranks, too.
  Summary summary();
  /// Says at the end what went wrong.
  void tell_failures();

 private:
  /// A directory that this rank writes to.
  struct Place {
    std::string directory;
    DirectoryLock lock = {};
    std::string opening_failure = {};
    bool told = false;       // what went wrong
    std::int64_t older = 0;  // the newest step that was there before
    std::unique_ptr<CheckpointWriter> writer = {};
  };
  /// The newest step that is there.
  std::int64_t refuse_others(const std::string& directory, const std::optional<Resumed>& resumed) const;
  void tell_first_failure(Place& place) const;
  std::string newest_in(const Place& place) const;
  void collect_written();
  bool writes_part_alone() const { return part_ && part_->index > 0; }
  bool writes_the_runs() const {
    return !places_.empty() && places_.front().directory == options_.checkpoint_dir && !writes_part_alone();
  }

  CheckpointOptions options_;
  std::vector<std::string> writes_;
  std::string record_;
  CheckpointManifest plan_;
  std::optional<OwnPart> part_;
  std::int64_t older_ = 0, taken_ = 0, collected_ = 0;  // steps
  double held_seconds_ = 0, all_held_seconds_ = 0;
  std::deque<Written> written_;  // that nobody has asked for yet
  std::unique_ptr<StateCopy> copy_;
  std::vector<Place> places_;
};

}  // namespace lockstep::checkpoint
