// What a model carries from each batch to the next (--stateful): of this rank's places of the global batch, and of all.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/nn/io/safetensors.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/sampler/slice.h"

namespace lockstep::trainer {

/// With samples in the order of columns (sampler: Note [Columns]), of which this rank has the same in all steps. Module
/// and group must outlive it.
class CarriedState {
 public:
  /// From now on the module carries its state, which begins with zeros. Throws UsageError for one that carries none.
  CarriedState(nn::Module& module, comm::ProcessGroup& group, std::uint64_t global_batch, DType activations);

  /// Zeros again, in the order of the device's work: where an epoch begins.
  void reset();
  /// Collective: of all ranks' columns, (global batch, …) in f32; on rank `root`, nothing elsewhere.
  std::vector<nn::HostTensor> gather(int root = 0) const;
  /// Collective: continues with what gather() has returned, on any number of ranks; `all` is rank
  /// `reader`'s, and is of `source`. Throws IoError there, and PeerError elsewhere, where it is of another model or
  /// batch.
  void restore(const std::vector<nn::HostTensor>& all, const std::string& source, int reader = 0);

 private:
  comm::ProcessGroup& group_;
  std::uint64_t global_batch_;
  sampler::Slice columns_;
  std::vector<nn::NamedBuffer> parts_;  // (columns, …); of one row where this rank has none
};

}  // namespace lockstep::trainer
