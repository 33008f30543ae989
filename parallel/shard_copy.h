// What DistributedDataParallel computes further shards of a turn with.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/parallel/device_thread.h"
#include "lockstep/parallel/distributed_data_parallel.h"

namespace lockstep::parallel {

/// What a shard is computed with beside the module itself, on a thread of its own.
struct DistributedDataParallel::ShardCopy {
  std::unique_ptr<nn::Backend> backend;
  std::unique_ptr<nn::Module> module;
  std::vector<nn::NamedParameter> parameters;
  std::vector<std::uint64_t> versions;  // of the module's parameters, whose values are known here
  std::vector<nn::NamedBuffer> buffers;
  std::unique_ptr<nn::Tape> tape;
  std::unique_ptr<DeviceThread> thread;  // ends first
};

}  // namespace lockstep::parallel
