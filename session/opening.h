// How lockstep's own programs open a session: its options, the steps and the checks.
#pragma once

#include <functional>
#include <string>

#include "lockstep/base/env.h"
#include "lockstep/session/session.h"
#include "options/table.h"

namespace lockstep::session {

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

/// Collective: connects the ranks, continues only if `check` passes on all of them (comm::run_collectively), and binds
/// this process to its share of the cores. There is no backend yet.
Session join_session(const comm::GroupOptions& options, const std::function<void()>& check);

/// Checks that are made on all ranks; if one throws, all end with it.
struct SessionChecks {
  std::function<void()> before = [] {};  // once the ranks are connected
  /// Once it is known what the ranks compute on; `why`: see check_kind().
  std::function<void(DeviceKind kind, const std::string& why)> device = [](DeviceKind, const std::string&) {};
};

/// open_session(), with checks of the caller's; throws what they throw.
Session open_session(const SessionOptions& options, const SessionChecks& checks);

/// A call of what it returns lets the calling thread run on the processors that it may run on now: sessions narrow
/// that, and the next one is to divide all of them again.
std::function<void()> keep_processors();

/// "node1, processors 0-3": where this process computes.
std::string place_of_process();

/// Warns of options that have no effect because of the machine and the number of ranks. On one rank.
void warn_of_unused(const SessionOptions& options, const Session& session);

// What a session takes, as options.

/// Device, backend, threads, timeouts, encryption; opens a group.
void add_device_options(options::OptionTable& table, SessionOptions& session);

/// The same, of ranks that move memory of their devices and compute nothing.
void add_rank_options(options::OptionTable& table, SessionOptions& session, const char* what);

// One by one, for commands that take some.
options::Option encrypt_option(bool& encrypt);
options::Option precision_option(Precision& precision, const char* help);
options::Option tf32_option(bool& tf32, const std::string& device);
options::Option log_level_option(std::string& level, const char* help);

/// Whether `device` names the CPU; and for messages, "this run has --device cpu".
bool is_on_cpu(const std::string& device);
std::string device_text(const std::string& device);
/// What options are for that GPUs alone have; `device` is read when a run is checked, and must live on.
options::Applies to_gpus(const std::string& device);

}  // namespace lockstep::session
