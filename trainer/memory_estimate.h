// What a run will take of memory, known before it takes any.
#pragma once

#include <cstdint>
#include <string>

#include "comm/process_group.h"
#include "data/dataset.h"
#include "nn/models/models.h"
#include "trainer/config.h"

namespace lockstep::trainer {

/// Bytes of one rank, all of which are there at one time. Parameters, gradients and moments are what they will be;
/// activations are what the allocator will be asked for in the largest step. What kernels keep for themselves (packed
/// weights: with convolutions up to four times the parameters) and what blocks are rounded up by is not in it: a run
/// takes at least this much. docs/models.md has both numbers for all models.
struct MemoryNeed {
  std::uint64_t parameters = 0;  // and buffers, and their bf16 copies
  std::uint64_t gradients = 0;
  std::uint64_t moments = 0;      // what the optimizer remembers
  std::uint64_t activations = 0;  // of forward, and of backward's own
  std::uint64_t batches = 0;      // that are read ahead
  std::uint64_t checkpoint = 0;   // the copy of the state that is written

  std::uint64_t total() const { return parameters + gradients + moments + activations + batches + checkpoint; }
  MemoryNeed& operator+=(const MemoryNeed& other);
};

/// "parameters 14.4 GB, gradients 14.4 GB, moments 28.8 GB": what there is of each.
std::string text_of(const MemoryNeed& need);

/// Of one rank: on its host, and on its GPU if it computes on one.
struct MemoryNeeds {
  MemoryNeed host, device;
};

/// What is to be done on a rank.
struct MemoryPlan {
  bool train = true;         // or only run forward
  std::int64_t samples = 1;  // of the largest pass; several devices of one process share them out
  std::size_t devices = 1;   // of this process
  int workers = 0;           // that read batches of `batch` samples
  std::int64_t batch = 0;
  bool checkpoints = false;  // this rank writes them
};

/// Builds the model of `config` for `dataset` and its optimizer, and walks one pass, on a backend of shapes in place of
/// `backend` (nn::make_meta_backend): milliseconds, whatever the sizes. Throws what building the model throws.
MemoryNeeds estimate_memory(const TrainConfig& config, nn::Backend& backend, const data::Dataset& dataset,
                            const MemoryPlan& plan);

/// The same of a model of `spec` that runs forward alone, on `batch` samples at a time on each of `streams` streams.
MemoryNeeds estimate_inference(const nn::ModelSpec& spec, nn::Backend& backend, std::int64_t batch, DType activations,
                               int streams);

/// Collective. Throws OutOfMemoryError (PeerError on the other ranks) where ranks that share memory, of a machine, of a
/// control group or of a GPU, need more of it together than is free: what for, how much there is, and whose limit it
/// is. What the system does not say is not checked.
void check_memory(comm::ProcessGroup& group, nn::Backend& backend, const MemoryNeeds& mine);

}  // namespace lockstep::trainer
