// This process among its ranks: who it is, who it talks to, what it computes on.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/device.h"
#include "base/error.h"
#include "comm/make_group.h"
#include "comm/process_group.h"
#include "comm/world.h"
#include "devices/binding.h"
#include "nn/ops/backend.h"
#include "trainer/config.h"

namespace lockstep::trainer {

/// Destroyed in reverse: the gradients' group first, which is on the backend's stream, then the backend's memory, the
/// group last. Ending in order takes shutdown().
struct Session {
  comm::World world;
  std::unique_ptr<comm::ProcessGroup> group;  // joins the processes; its arenas are the host's memory
  Device device;                              // of this rank; all ranks' are of one kind
  devices::Binding binding;
  int threads = 1;  // that compute on each device
  std::unique_ptr<nn::Backend> backend;
  std::unique_ptr<comm::ProcessGroup> gradient_group;  // on GPUs: NCCL's; nullptr: `group`

  /// What joins the memory of the ranks' devices.
  comm::ProcessGroup& gradients() const { return gradient_group != nullptr ? *gradient_group : *group; }

  /// Collective: the orderly end of both groups.
  void shutdown();
  /// Collective: the same for ranks that end early under `lockstep launch`, without MPI_Finalize. That waits for
  /// mpirun, which may have been asked to end too, and which the launcher has stopped so that it does not kill the
  /// ranks.
  void leave();
};

/// Collective: meets the other ranks, goes on only if `check` passes on all of them (comm::run_collectively), and binds
/// this process to its share of the cores. There is no backend yet.
Session join_session(const comm::GroupOptions& options, const std::function<void()>& check);

/// Collective: meets the other ranks, where `refusal` and `config` are what is checked, chooses each one's device
/// (choose_device), binds this process to cores close to it, and opens it. The GPU is the only one on which this
/// process ever has a context. Sets CUDA_DEVICE_ORDER to PCI_BUS_ID unless it is set. Throws what cannot be.
Session open_session(const TrainConfig& config, const std::optional<UsageError>& refusal);
/// The same with another `check` than that of a training configuration, of which only what concerns devices, threads
/// and logs is looked at.
Session open_session(const TrainConfig& config, const std::function<void()>& check);

/// The same for a training loop of one's own: what init_process_group and set_device do. `device` is as --device has
/// it.
Session open_session(const std::string& device = "auto");

}  // namespace lockstep::trainer
