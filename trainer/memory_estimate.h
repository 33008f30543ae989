// What a run will take of memory, computed before it takes any, and whether all its passes can be run.
#pragma once

#include <cstdint>

#include "lockstep/data/dataset.h"
#include "lockstep/sampler/sampler.h"
#include "lockstep/trainer/config.h"
#include "session/memory.h"

namespace lockstep::trainer {

/// Of the passes with any samples that some rank runs in training, on one device, the smallest one.
struct SmallestPass {
  std::int64_t samples = 0;    // 0: there is none
  bool last_of_epoch = false;  // only the last step of an epoch has one that is so small
};

/// What is to be done on a rank.
struct MemoryPlan {
  bool train = true;           // or only run forward
  std::int64_t samples = 1;    // of the largest pass; several devices of one process share them out
  SmallestPass smallest = {};  // is walked, too
  std::size_t devices = 1;     // of this process
  std::size_t passes = 1;      // of a device at a time, of so many samples each
  std::size_t gradients = 1;   // places for all gradients (ddp: Note [Shards])
  std::size_t updates = 1;     // ranks that share what the optimizer remembers
  int workers = 0;             // that read batches of `batch` samples
  std::int64_t batch = 0;
  int ranks = 1;                 // of the job
  bool checkpoints = false;      // this rank writes them
  bool checkpoint_part = false;  // every rank writes what it remembers; else those that write have all of it
};

/// `devices`: of each rank. With synchronised batch normalisation, which sums over ranks, all ranks' passes are one.
SmallestPass smallest_pass(const TrainConfig& config, const sampler::DistributedSampler& sampler, std::size_t devices);

/// Builds the model of `config` for `dataset` and its optimizer, and walks one pass, on a backend of shapes in place of
/// `backend` (nn::make_meta_backend): milliseconds, whatever the sizes. Throws what building the model throws,
/// and UsageError where a layer cannot train on so few samples.
session::MemoryNeeds estimate_memory(const TrainConfig& config, nn::Backend& backend, const data::Dataset& dataset,
                                     const MemoryPlan& plan);

}  // namespace lockstep::trainer
