// This process among its ranks: its group, its peers and its device.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/device.h"
#include "lockstep/base/dtype.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/world.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::session {

/// What a process computes on, and its log.
struct DeviceOptions {
  std::string device = "auto";     // auto, cpu, cpu:0,1, cuda, cuda:0,3, cuda:free (session/device_choice.h)
  bool tf32 = false;               // f32 products of GPUs on matrix units, with 10 bits of mantissa
  std::string log_level = "info";  // debug: also when each bucket of each step was ready, started and ended
  bool quiet = false;
};

/// A rank's device and its communication: `backend` may also name what moves the gradients of GPUs.
struct SessionOptions : comm::GroupOptions, DeviceOptions {
  bool share_devices = false;  // several ranks may compute on one GPU
  bool all_devices = false;    // this process computes on all devices that are named: it is alone
  Precision precision = Precision::kF32;
  bool deterministic = true;     // false: attention's gradient on GPUs may have other bits each time
  std::optional<bool> autotune;  // GPUs time the libraries' kernels and keep the fastest; default: no
  int threads = 0;               // compute threads per device, on the CPU; 0: default_threads
  int default_threads = 0;       // 0: its share of the cores
};

/// Members are destroyed in reverse: first the gradients' group, which is on the backend's stream, then the backend's
/// memory, the group last. For an orderly end call shutdown(). Whatever is made of its groups and its backend ends
/// before it.
///
/// It moves, and references to its groups and its backend stay valid. What was moved from may only be destroyed or
/// assigned to; one that is open must not be assigned to, for its groups would end in another order. One thread uses
/// it.
struct Session {
  comm::World world;
  std::unique_ptr<comm::ProcessGroup> group;  // joins the processes; its arenas are the host's memory
  Device device;                              // of this rank; all ranks' are of one kind
  std::vector<int> devices = {0};             // numbers of all that it computes on (SessionOptions::all_devices)
  int cores = 1;                              // this process's share
  std::string binding;                        // "2 cores (processors 0-1), bound", for logs
  int threads = 1;                            // that compute on each device
  std::unique_ptr<nn::Backend> backend;
  std::unique_ptr<comm::ProcessGroup> gradient_group;  // on GPUs: NCCL's; nullptr: `group`

  /// What joins the memory of the ranks' devices: on the CPU `group` itself.
  comm::ProcessGroup& gradients() const { return gradient_group != nullptr ? *gradient_group : *group; }

  /// Collective, blocking: the mean of all ranks' values, for reports; added up in f64, in the order of the ranks.
  double mean(double value);

  /// Collective: the orderly end of both groups, once. Nothing may be issued afterwards.
  void shutdown();
  /// Collective: the same for ranks that end early under `lockstep launch`, without MPI_Finalize. MPI_Finalize would
  /// wait for mpirun. The launcher has stopped mpirun, so that it does not kill the ranks when it is asked to end too.
  void leave();
};

/// Collective: connects the ranks, chooses each one's device (choose_device), binds this process to cores close to it,
/// and opens it. The GPU is the only one on which this process ever has a context. Sets CUDA_DEVICE_ORDER to PCI_BUS_ID
/// unless it is set. Changes the process's log level, and the affinity of the calling thread, which its later threads
/// inherit: so it comes before the program has other threads. Throws UsageError for options that cannot be, DeviceError
/// for devices that are not there and ranks out of reach, TimeoutError for missing ranks; PeerError on ranks without a
/// fault of their own.
Session open_session(const SessionOptions& options);

/// The same for a custom training loop: what init_process_group and set_device do. `device` is as --device has
/// it.
Session open_session(const std::string& device = "auto");

}  // namespace lockstep::session
