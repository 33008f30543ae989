// The registry of communication hooks. A hook is one file in ddp/hooks/, which declares a `CommHookFamily`, and a line
// in ddp/comm_hooks.cpp. Nobody else knows one by its name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/ddp/comm_hook.h"

namespace lockstep::ddp {

struct CommHookFamily {
  std::string name;      // "powersgd"
  std::string argument;  // ":R" for help texts; "[:exact]" where it may be left out; empty: there is none
  std::string help;
  bool on_gpus = false;  // it works with a group of GPUs, too
  /// `argument` is what follows the colon; empty where there is none. Throws UsageError for one that cannot be.
  std::shared_ptr<CommHook> (*make)(const std::string& argument) = nullptr;
};

/// They stay until the process ends.
const std::vector<const CommHookFamily*>& comm_hook_families();
/// Throws UsageError for another name than one of theirs, with the nearest right one. `spec` may have an argument.
const CommHookFamily& comm_hook_family(const std::string& spec);
/// "none|bf16[:exact]|…".
std::string comm_hook_placeholder();
/// The hook that `spec` names: "bf16", "powersgd:4". nullptr for "none", which is the allreduce itself. Throws
/// UsageError for another name, with the nearest right one, and for an argument that the hook does not take.
std::shared_ptr<CommHook> make_comm_hook(const std::string& spec);

}  // namespace lockstep::ddp
