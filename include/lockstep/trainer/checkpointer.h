// Checkpoints of a custom training loop.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/checkpoint/options.h"
#include "lockstep/data/dataset.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/sampler/sampler.h"
#include "lockstep/session/session.h"

namespace lockstep::trainer {

/// The state of a loop on disk, to resume from: parameters, buffers, the state of the optimizer, its GradScaler and the
/// communication hook, the position in the data and the order of buckets. A hook is registered, and a scaler set,
/// before load_latest(). A loop over it:
///
///   Checkpointer checkpoints(session, ddp, *optimizer, {.checkpoint_dir = "kept"});
///   std::int64_t step = checkpoints.load_latest(sampler).value_or(0);
///   data::Loader loader(dataset, sampler, {});  // from where the sampler is now
///   while (step < kSteps) {
///     const data::Batch& batch = loader.next();
///     …
///     if (++step % 100 == 0) checkpoints.save(step, batch.state_after);
///   }
///   checkpoints.finish();
///
/// A checkpoint is a directory below `checkpoint_dir` that is whole or not there (docs/checkpoints.md): an end at any
/// time leaves the one before. Any number of ranks may resume. Rank 0 writes, on a thread of its own while training
/// continues; with sharded updates each rank writes what it remembers, if all can write there. A directory is
/// one run's at a time. Session, ddp (and its module) and optimizer (and its scaler) must outlive it; all calls are
/// collective, by the thread that uses ddp. The destructor is not: it waits for what this rank still writes, and only
/// finish() says whether that is on the disk.
class Checkpointer {
 public:
  /// What is trained, and on what.
  struct Subject {
    std::string name = "model";  // checkpoints of another name are refused
    /// load_latest() reads some of it, and refuses checkpoints of other data unless `resume_data_changed`. nullptr:
    /// they are not compared. Rank 0's is what counts.
    std::shared_ptr<const data::Dataset> data = nullptr;
  };
  /// Reads and writes nothing. Throws UsageError without a directory, for a negative `keep`, and for what the loop does
  /// itself or not at all: `checkpoint_every`, `resume`, `checkpoint_mirror`.
  Checkpointer(session::Session& session, parallel::DistributedDataParallel& ddp, nn::Optimizer& optimizer,
               checkpoint::CheckpointOptions options, Subject subject);
  Checkpointer(session::Session& session, parallel::DistributedDataParallel& ddp, nn::Optimizer& optimizer,
               checkpoint::CheckpointOptions options)
      : Checkpointer(session, ddp, optimizer, std::move(options), Subject()) {}
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Before the first step, once (else UsageError). If there is a checkpoint, all ranks have its state afterwards, and
  /// its last step is returned; nothing if there is none. `sampler` continues from there, and is copied by Loaders:
  /// make them afterwards. Checkpoints that are cut or changed are passed over with a warning. Throws CheckpointError
  /// where none is whole, and for one of another model or of other data; UsageError where another run writes to the
  /// directory.
  std::optional<std::int64_t> load_latest(sampler::DistributedSampler& sampler);

  /// After step `step` (from 1, larger each time), when the loader's `position` (Batch::state_after) has been trained
  /// on. Waits for the checkpoint before, and returns when the state has been copied. Throws OutOfStepError unless all
  /// ranks have the same parameters, UsageError before load_latest() and for a step that is not larger. What goes wrong
  /// on the disk is a warning, and finish() says so.
  void save(std::int64_t step, const sampler::SamplerState& position);

  /// Waits for the last one. Throws IoError where that is not on the disk.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::trainer
