// --parallel dp: one process that computes on several devices.
#pragma once

#include <string>
#include <vector>

#include "lockstep/parallel/data_parallel.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/config.h"

namespace lockstep::trainer {

/// Throws UsageError where `config` wants one process for all devices and this process is one of several ranks.
void check_alone(const TrainConfig& config);

/// A model that batches are shared out through. The module is on session.backend, which is the first device, where the
/// devices' losses are added up; both must outlive it.
class DataParallelModel {
 public:
  DataParallelModel(const TrainConfig& config, session::Session& session, nn::Module& module);

  parallel::DataParallel& module() { return module_; }
  /// By place among the devices.
  nn::Backend& backend(std::size_t place) { return devices_[module_.device_ids()[place]]; }
  /// For people: "cpu:0, cpu:1: each cpu, 1 thread, …".
  std::string describe() const;

 private:
  nn::Backend& first_;
  parallel::Devices devices_;
  parallel::DataParallel module_;
};

}  // namespace lockstep::trainer
