// Steps that a device has recorded, by what they depend on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "nn/layers/module.h"
#include "nn/ops/backend.h"
#include "trainer/forward.h"
#include "trainer/replica.h"

namespace lockstep::trainer {

/// Note [Step graphs]
/// A step whose kernels and addresses are those of the step before is recorded once (on GPUs as a CUDA graph) and then
/// given to the device with one call: forward, backward, collectives and update. All that changes lies in device
/// memory: the batch is copied to where the recording reads it, learning rate and bias corrections are in the
/// optimizer's control tensor, losses go out through the reducer's tail. A recording holds for one number of samples,
/// which is a constant of its kernels. Other steps run as they are: the last one of an epoch, until it has come often
/// enough to be recorded too, and the first ones, which allocate memory and build plans.
///
/// NCCL wants an operation to be recorded on all ranks or on none. So what decides is the number of samples of all
/// ranks together, which all of them know, and they agree on whether recording has worked. A rank without samples
/// records that it contributes nothing.
///
/// Backend, replica and module must outlive it. One thread uses it.
class StepGraphs {
 public:
  /// `module` is the replica's.
  StepGraphs(nn::Backend& backend, Replica& replica, const nn::Module& module, DType activations);

  /// What a recording is for, beside the memory of model and optimizer.
  struct Key {
    std::uint64_t global_count = 0;  // samples of the step, of all ranks together
    int variant = 0;                 // of a caller that changes what collectives do
    friend bool operator==(const Key&, const Key&) = default;
  };

  /// Collective. Runs step `step` on `inputs` (undefined where this rank has no samples), from a recording, which it
  /// makes with `compute` if it is time to, or in preparation of one: true. False: the caller runs the step itself.
  /// `compute` is the whole step, from Replica::begin_step() to the update.
  bool run(std::int64_t step, const Key& key, const Inputs& inputs, FunctionRef<void(const Inputs&)> compute);

  /// Why a step that came again was not recorded; empty where none was refused.
  const std::string& refusal() const { return refusal_; }
  /// How many steps have been run from recordings.
  std::int64_t replayed() const { return replayed_; }

 private:
  struct Entry {
    Key key;
    Inputs inputs;  // where the recording reads; undefined: there is nothing to read
    bool rehearsed = false;
    int seen = 0;  // steps of this key that have run as they are
    std::unique_ptr<nn::CapturedGraph> recording;
    std::uint64_t operations = 0;         // collectives of it
    std::vector<const BFloat16*> copies;  // of the parameters, that it writes; nullptr: none
  };
  Entry& entry_of(const Key& key);
  void record(Entry& entry, FunctionRef<void(const Inputs&)> compute);
  void refresh_copies();
  void note_update(const Entry& entry);

  nn::Backend& backend_;
  Replica& replica_;
  std::vector<nn::NamedParameter> parameters_;  // those that are not trained, too
  DType activations_;
  std::vector<Entry> entries_;  // few
  std::string refusal_;
  std::int64_t replayed_ = 0;
};

}  // namespace lockstep::trainer
