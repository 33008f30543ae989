// This process among its ranks: who it is, who it talks to, what it computes on.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "devices/binding.h"
#include "lockstep/base/device.h"
#include "lockstep/base/dtype.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/world.h"
#include "nn/ops/backend.h"

namespace lockstep::session {

/// What a rank computes on, how it talks to the others and how much it says.
struct SessionOptions {
  std::string device = "auto";               // auto, cpu, cpu:0,1, cuda, cuda:0,3, cuda:free (session/device_request.h)
  bool share_devices = false;                // several ranks may compute on one GPU
  bool all_devices = false;                  // this process computes on all devices that are named: it is alone
  std::string backend = comm::kAutoBackend;  // what moves the gradients (comm/backends.h)
  Precision precision = Precision::kF32;
  bool tf32 = false;                  // f32 products of GPUs on matrix units, with 10 bits of mantissa
  bool deterministic = true;          // false: attention's gradient on GPUs may have other bits each time
  std::optional<bool> autotune;       // GPUs time the libraries' kernels and keep the fastest; default: no
  int threads = 0;                    // compute threads per device; 0: its share of the cores
  double timeout_seconds = 300;       // longest wait for another rank
  double stall_warning_seconds = 10;  // after which a wait is reported; 0: never
  bool encrypt = false;               // what ranks of different hosts send to each other
  std::string log_level = "info";     // debug: also when each bucket of each step was ready, started and ended
  bool quiet = false;
};

/// Where GPUs' fastest kernels are noted: in the user's cache directory, by `lookup` of its environment. Empty, with a
/// warning, where it has none.
std::string file_of_kernels(const EnvLookup& lookup);
/// How GPU `index` is opened.
nn::CudaOptions cuda_options(const SessionOptions& options, int index);

/// Throws UsageError for what a device of this kind does not do. `why`: why it is one of this kind; empty where the
/// options say so.
void check_kind(const SessionOptions& options, DeviceKind kind, const std::string& why = {});
/// What only the ranks together know: throws UsageError where encryption cannot hold for GPUs that `several_hosts`
/// have.
void check_encryption(const SessionOptions& options, DeviceKind kind, bool several_hosts);
/// Throws UsageError for another level than debug, info, warn and error.
void check_log_level(const std::string& level);

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

/// Collective: connects the ranks, continues only if `check` passes on all of them (comm::run_collectively), and binds
/// this process to its share of the cores. There is no backend yet.
Session join_session(const comm::GroupOptions& options, const std::function<void()>& check);

/// Checks that are made on all ranks; if one throws, all end with it.
struct SessionChecks {
  std::function<void()> before = [] {};  // once the ranks are connected
  /// Once it is known what the ranks compute on; `why`: see check_kind().
  std::function<void(DeviceKind kind, const std::string& why)> device = [](DeviceKind, const std::string&) {};
};

/// Collective: connects the ranks, chooses each one's device (choose_device), binds this process to cores close to it,
/// and opens it. The GPU is the only one on which this process ever has a context. Sets CUDA_DEVICE_ORDER to PCI_BUS_ID
/// unless it is set. Throws what cannot be, and what `checks` throw.
Session open_session(const SessionOptions& options, const SessionChecks& checks);

/// The same for a training loop of one's own: what init_process_group and set_device do. `device` is as --device has
/// it.
Session open_session(const std::string& device = "auto");

/// Warns of options that have no effect because of the machine and the number of ranks. On one rank.
void warn_of_unused(const SessionOptions& options, const Session& session);

}  // namespace lockstep::session
