// A communicator of NCCL, from its making to its end.
#pragma once

#include <nccl.h>

#include <memory>

#include "comm/nccl/nccl_api.h"
#include "lockstep/base/function_ref.h"

namespace lockstep::comm {

/// Note [Communicator]
/// Its calls do not block (ncclConfig_t::blocking = 0): NCCL continues in the background while other ranks have to
/// answer, and the call returns ncclInProgress. No other call may follow before that has come to an end: settle() waits
/// for it.
///
/// It is initialising until join() has returned, then ready, and ends in one of two ways. leave() needs every rank, all
/// operations to be complete, and no CUDA graph to exist that has captured any of them. abort() needs nobody: kernels
/// that are under way quit. ncclCommAbort returns when everything is gone, and waits without limit for graphs that hold
/// operations; so it runs on a thread of its own, and end() waits for it for a while, by when whoever fails has let go
/// of its graphs. After abort() nothing but end() may be called.
///
/// One thread uses it. `api` must outlive it.
class Communicator {
 public:
  enum class State { kInitialising, kReady, kAborted, kLeft };

  Communicator(const NcclApi& api, int device, int rank, int size);
  ~Communicator() { end(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Blocks until all ranks have come with the same id. `look` is called between two looks at NCCL's state, a few times
  /// a millisecond, and ends the wait by throwing. Throws NcclError.
  void join(const ncclUniqueId& id, FunctionRef<void()> look);
  /// The same without blocking: begins it, and whether it is over. Throws NcclError.
  void begin_join(const ncclUniqueId& id);
  bool has_joined();
  /// What a call with this result comes to in the end: success or an error, never ncclInProgress.
  ncclResult_t settle(ncclResult_t result, FunctionRef<void()> look);
  /// The same without blocking: what it has come to so far.
  ncclResult_t state_of_call() const;
  /// What has gone wrong in the background, if anything.
  ncclResult_t async_error() const;
  void leave(FunctionRef<void()> look);
  void abort() noexcept;
  /// abort() unless leave() has succeeded, and waits until it is over, though not for more than some seconds.
  void end() noexcept;

  State state() const { return state_; }
  ncclComm_t get() const { return comm_; }
  const NcclApi& api() const { return api_; }

 private:
  struct AbortDone;

  ncclResult_t start_joining(const ncclUniqueId& id);
  void end_joining(ncclResult_t result);

  const NcclApi& api_;
  const int device_;
  const int rank_;
  const int size_;
  State state_ = State::kInitialising;
  ncclComm_t comm_ = nullptr;
  std::shared_ptr<AbortDone> abort_done_;  // of abort()'s thread
};

}  // namespace lockstep::comm
