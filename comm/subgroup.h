// What a group has to know to be divided, and how the ranks of a part join.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "comm/store.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {

struct MpiRanks;

/// What a group was made of.
struct GroupOrigin {
  World world;
  GroupOptions options;
  JobRanks job_ranks;

  static void set(ProcessGroup& group, GroupOrigin origin) {
    group.origin_ = std::make_shared<const GroupOrigin>(std::move(origin));
  }
};

/// A part of a group in the making.
struct Subgroup {
  const ProcessGroup& parent;
  Store* parent_store;       // nullptr: it has none
  std::vector<int> members;  // ranks of `parent`, in the order of the part's
  JobRanks job_ranks;
  bool oversubscribed;  // as far as `parent` knows
};

/// The group of the ranks of `store`, by the first backend that they can use: what make_group() and
/// ProcessGroup::split() end in. Collective. `world` and `options` have been checked. If it throws, `store` is left
/// where it was, except after refusals, which all ranks agree on.
std::unique_ptr<ProcessGroup> make_joined_group(const World& world, const GroupOptions& options,
                                                std::unique_ptr<Store>& store, const Subgroup* subgroup = nullptr);

/// make_group(); of ranks that have other numbers in the job than in `world`, and of those of a communicator `over`
/// (comm/mpi/session.h), which is needed until it returns.
std::unique_ptr<ProcessGroup> make_group_over(const World& world, const GroupOptions& options, JobRanks job_ranks,
                                              const MpiRanks* over);

/// make_group() of ranks that `join` introduces to each other: it is called unless there is only one.
std::unique_ptr<ProcessGroup> make_group_through(
    const World& world, const GroupOptions& options, JobRanks job_ranks,
    FunctionRef<std::unique_ptr<Store>(const World&, const JobRanks&)> join);

}  // namespace lockstep::comm
