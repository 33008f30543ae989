// Carries a bucket of gradients between the ranks: the place for compression, sharding and other sums. A hook of
// lockstep's is one file in ddp/hooks/, which declares a `CommHookFamily`, and a line in ddp/comm_hooks.cpp. Nobody
// else knows one by its name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/bucket_plan.h"

namespace lockstep::ddp {

/// A bucket whose gradients are complete on this rank. May be kept: what it refers to is the reducer's, and stays until
/// the next lay_out() or the reducer's end.
struct GradBucket {
  std::size_t index = 0;  // in the order in which buckets are reduced
  std::int64_t step = 0;
  comm::Region gradients;  // f32 in the reducer's arena: slots at multiples of 64 bytes, zeros between them
  std::span<const std::size_t> slots;
  bool last = false;  // of the step
};

/// Turns one rank's gradients into those of all ranks, in place of the allreduce that a Reducer does without one
/// (PyTorch's register_comm_hook). Counts, losses and unused slots travel beside the buckets, where no hook sees them.
///
/// Buckets come in the same order on every rank: all of a step are started before the first of them is finished. A hook
/// issues the same collectives on all ranks (comm Note [Same order]), in start() or finish(), on the bucket itself or
/// on arenas of its own. One thread calls it; on a device it gives its work to the group's computation stream, and
/// where steps are captured as graphs it is captured too: it must neither wait on the host nor allocate then. What it
/// throws in a step comes out of the reducer's call, and the step cannot be continued.
///
/// A hook is one reducer's, whose group must outlive its use. Before it is registered, and after the reducer's end,
/// only questions may be asked: name(), memory(), state(), bytes_sent() and fallbacks(). make_comm_hook()
/// makes lockstep's own.
class CommHook {
 public:
  virtual ~CommHook() = default;
  /// What ranks compare, settings included: "bf16", "powersgd:4".
  virtual std::string name() const = 0;
  /// When it is registered, before anything else. Throws UsageError for a group that it cannot work with; all ranks
  /// throw where one does.
  virtual void check(const comm::ProcessGroup& group) const;
  /// Called when it is registered, on all ranks: there it may allocate. Again when buckets have changed, between steps:
  /// there it issues nothing. `slots` and `plan` are the reducer's, and stay until the next call or the reducer's end;
  /// a plan has the same number of bytes whatever the order of the slots.
  virtual void lay_out(std::span<const SlotSpec> slots, const BucketPlan& plan, comm::ProcessGroup& group);
  /// Issues the bucket's collective, while backward continues. Returns the last one that it has issued; an empty Work
  /// if it has issued none.
  virtual comm::Work start(const GradBucket& bucket, comm::ProcessGroup& group) = 0;
  /// Work given to `stream` now finds what start() has issued complete. Afterwards the bucket's region holds the
  /// result.
  virtual void finish(const GradBucket& bucket, StreamView stream) = 0;
  /// After finish(), where gradients may be absent: no rank has had one of these slots in this step, and what the
  /// bucket holds for them is not used. `slots` is good during the call.
  virtual void drop(const GradBucket& bucket, std::span<const std::size_t> slots);

  /// Numbers that a run has to save to continue with the same bits, in memory that the hook owns and keeps; whoever
  /// resumes writes them there. Between steps.
  struct State {
    std::string name;
    std::span<float> values;
    bool of_rank = false;  // each rank has its own, whose sum over the ranks counts; else they are the same on all
  };
  virtual std::vector<State> state() { return {}; }

  /// What it takes for these slots, in bytes, before it has taken any. For estimates.
  struct Memory {
    std::uint64_t held = 0;   // on each rank's device
    std::uint64_t saved = 0;  // of all ranks' state() together
  };
  virtual Memory memory(std::span<const SlotSpec> slots, int ranks) const;

  /// Payload that a rank sends for bucket `index`, in bytes, if each of `ranks` has a link of its own (bytes_sent()).
  /// For reports; nothing: unknown.
  virtual std::optional<double> bytes_sent(std::size_t index, int ranks) const;
  /// Buckets, so far, whose result could not be used, and which were sent a second time without compression.
  virtual std::int64_t fallbacks() const { return 0; }

 private:
  friend class Reducer;
  bool registered_ = false;
};

/// What a rank sends in an allreduce of `bytes`, and in an allgather whose result has `bytes`, if each rank has a link
/// of its own (docs/collectives.md).
constexpr double bytes_sent_by_all_reduce(double bytes, int ranks) { return 2 * bytes * (ranks - 1) / ranks; }
constexpr double bytes_sent_by_all_gather(double bytes, int ranks) { return bytes * (ranks - 1) / ranks; }

/// What the registry knows of a hook.
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
