// Groups in a program that uses MPI itself. What a process does with MPI stays, so each test has processes of its own:
// see CMakeLists.txt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <memory>
#include <string>
#include <thread>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

std::unique_ptr<ProcessGroup> make(const std::string& backend,
                                   GroupOptions::Progress progress = GroupOptions::Progress::kInline) {
  return make_group(testing::world(), {.timeout_seconds = 30, .backend = backend, .progress = progress});
}

void expect_a_sum(ProcessGroup& group) {
  const auto arena = group.allocate(64);
  arena->view<std::int64_t>(0, 1)[0] = group.rank() + 1;
  group.all_reduce({arena.get(), 0, 1, DType::kI64}, ReduceOp::kSum).wait_host();
  EXPECT_EQ(arena->view<std::int64_t>(0, 1)[0], group.size() * (group.size() + 1) / 2);
}

bool is_finalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

void allreduce_of_mpi() {
  int one = 1, sum = 0;
  ASSERT_EQ(MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD), MPI_SUCCESS);
  EXPECT_EQ(sum, testing::world().size);
}

// One group after the other, with every backend whose ranks MPI joins.
TEST(MpiProgram, GroupsLeaveMpiInitialised) {
  ASSERT_EQ(MPI_Init(nullptr, nullptr), MPI_SUCCESS);
  MPI_Errhandler before = MPI_ERRHANDLER_NULL, after = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before);
  for (const char* backend : {"mpi", "shm", "auto", "mpi"}) {
    const auto group = make(backend);
    expect_a_sum(*group);
    allreduce_of_mpi();
    group->shutdown();
    allreduce_of_mpi();
  }
  EXPECT_FALSE(is_finalized());
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &after);
  EXPECT_EQ(before, after);
  EXPECT_EQ(MPI_Finalize(), MPI_SUCCESS);
  EXPECT_REFUSED("make groups before MPI_Finalize", make("mpi"));
}

TEST(MpiProgram, AThreadThatMpiDoesNotAllow) {
  ASSERT_EQ(MPI_Init(nullptr, nullptr), MPI_SUCCESS);
  EXPECT_REFUSED("MPI_THREAD_MULTIPLE", make("mpi", GroupOptions::Progress::kThread));
  // Left the choice, a group does without.
  const auto group = make_group(testing::world(), {.timeout_seconds = 30, .backend = "mpi", .spare_core = true});
  expect_a_sum(*group);
  group->shutdown();
  EXPECT_EQ(MPI_Finalize(), MPI_SUCCESS);
}

TEST(MpiProgram, ThreadsWhereMpiAllowsThem) {
  int provided = 0;
  ASSERT_EQ(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), MPI_SUCCESS);
  if (provided == MPI_THREAD_MULTIPLE) {
    const auto group = make("mpi", GroupOptions::Progress::kThread);
    expect_a_sum(*group);
    allreduce_of_mpi();
    group->shutdown();
  }
  allreduce_of_mpi();
  EXPECT_EQ(MPI_Finalize(), MPI_SUCCESS);
}

// The last one to go ends what the first has started.
TEST(MpiProgram, TwoGroupsAtATime) {
  const auto first = make("mpi"), second = make("shm");
  expect_a_sum(*first);
  expect_a_sum(*second);
  first->shutdown();
  EXPECT_FALSE(is_finalized());
  expect_a_sum(*second);
  second->shutdown();
  EXPECT_TRUE(is_finalized());
}

TEST(MpiProgram, NoGroupAfterTheEndOfMpi) {
  make("shm")->shutdown();
  ASSERT_TRUE(is_finalized());
  EXPECT_REFUSED("call MPI_Init in the program", make("shm"));
}

}  // namespace
}  // namespace lockstep::comm
