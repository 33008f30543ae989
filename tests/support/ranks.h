// What a test on several ranks sees of its world.
#pragma once

#include <memory>

#include "lockstep/comm/make_group.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/world.h"

namespace lockstep::testing {

/// The group that main() made of all processes of this test. Tests run in the same order on every rank, and each one
/// must issue the same collectives on all of them.
comm::ProcessGroup& group();

/// What the environment said before the group was made.
const comm::World& world();

/// Which groups this run is to use: LOCKSTEP_TEST_GROUP in the environment, "inline" or "thread" (MPI, moved on by the
/// caller or by a thread), "shm", "tcp" (shm without MPI: run_ranks then starts no mpirun), or one of several hosts
/// that are one machine: "hosts2" (every two ranks are on one; moved on by the caller), "hosts2-thread", "hosts2-mpi"
/// (MPI introduces them); see run_ranks. Several ranks must set it.
comm::GroupOptions group_options();

/// For tests on a group that needs another: main() makes the latter, and group() is what `make` builds on it. Both are
/// shut down at the end. Define it at namespace scope, in a file that is linked with the tests:
///   const lockstep::testing::GroupLayer layer(make_over_nccl);
struct GroupLayer {
  explicit GroupLayer(std::unique_ptr<comm::ProcessGroup> (*make)(comm::ProcessGroup& below));
};

/// For tests that leave the group broken, or never join it (lockstep_test(… OWN_GROUPS), whose programs link
/// own_groups.cpp): main() then makes no group, group() may not be called, and the ranks agree on nothing at the end
/// (each one's exit code stands for itself).
struct OwnGroups {
  OwnGroups();
};

/// For tests on a GPU, `lockstep_test(… RANKS … GPU)`: where this process sees none, main() says so and ends as what
/// ctest takes for skipped. Define it at namespace scope:
///   const lockstep::testing::NeedsGpu needs_gpu;
struct NeedsGpu {
  NeedsGpu();
};

}  // namespace lockstep::testing
