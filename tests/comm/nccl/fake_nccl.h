// An NCCL in software, for tests: the faults to inject, and the calls that it got.
#pragma once

#include <nccl.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/nccl/nccl_api.h"

namespace lockstep::comm::fake_nccl {

/// Works: the ranks of a communicator, in processes of one host, share memory and combine their contributions in rank
/// order. Its operations are work of the soft device's streams.
const NcclApi& api();

/// What goes otherwise, in this process. reset() undoes all.
struct Script {
  int version = NCCL_VERSION_CODE;

  /// Every call that continues in the background returns ncclInProgress that often before its end.
  int looks_in_progress = 0;
  bool may_block = false;  // calls of a communicator whose configuration says so; otherwise that is refused
  bool init_hangs = false;
  bool finalize_hangs = false;
  bool abort_hangs = false;  // for as long as it is true
  bool call_hangs = false;   // collectives: they stay in progress
  ncclResult_t unique_id = ncclSuccess;
  ncclResult_t init = ncclSuccess;       // what the call says, which then makes no communicator
  ncclResult_t init_ends = ncclSuccess;  // what it comes to
  ncclResult_t call = ncclSuccess;       // of a collective, at once
  int calls_before = 0;                  // that succeed before `call` holds
  ncclResult_t call_ends = ncclSuccess;
  ncclResult_t async = ncclSuccess;  // an error that comes by itself
  ncclResult_t mem_alloc = ncclSuccess;
  ncclResult_t comm_register = ncclSuccess;
  bool registers_nothing = false;  // succeeds, without a handle
  std::string last_error;

  /// Operations wait in their stream until the communicator is aborted, like those whose peers do not come.
  bool stalls = false;
  /// Called when an operation's turn has come.
  std::function<void()> on_run;
};
Script& script();

struct Counts {
  int inits = 0, finalizes = 0, destroys = 0, aborts = 0;
  int allocations = 0, registrations = 0;  // that there are
  int calls_in_progress = 0;               // made while another was, which NCCL forbids
  int looks_for_errors = 0;                // ncclCommGetAsyncError
};
Counts counts();

/// "allreduce 100 f32 sum", "reduce 16 f32 sum to 1", "group(", ")": since reset().
std::vector<std::string> calls();

/// All communicators must be gone.
void reset();

}  // namespace lockstep::comm::fake_nccl
