// Groups over a program's communicators. What a process does with MPI stays, so each test has processes of its own: see
// CMakeLists.txt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "lockstep/comm/mpi.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using ::testing::HasSubstr;
using testing::refusal_of;

GroupOptions with(const std::string& backend, GroupOptions::Progress progress = GroupOptions::Progress::kInline) {
  return {.timeout_seconds = 30, .backend = backend, .progress = progress};
}

/// `ranks` of the job are in it, in this order.
void expect_that_it_works(ProcessGroup& group, const std::vector<int>& ranks) {
  ASSERT_EQ(group.size(), static_cast<int>(ranks.size()));
  std::int32_t sum = 0;
  for (int r = 0; r < group.size(); ++r) {
    EXPECT_EQ(group.job_rank(r), ranks[static_cast<std::size_t>(r)]);
    sum += ranks[static_cast<std::size_t>(r)];
  }
  EXPECT_EQ(group.job_rank(group.rank()), testing::world().rank);
  std::vector<std::int32_t> values(1000, testing::world().rank);
  group.all_reduce(std::span(values));
  EXPECT_EQ(values[999], sum);
}

void use_mpi() {
  int one = 1, sum = 0;
  ASSERT_EQ(MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD), MPI_SUCCESS);
  EXPECT_EQ(sum, testing::world().size);
}

std::vector<int> ranks_like(int parity) {
  std::vector<int> ranks;
  for (int r = parity; r < testing::world().size; r += 2) ranks.push_back(r);
  return ranks;
}

std::vector<int> all_from_the_last() {
  std::vector<int> ranks;
  for (int r = testing::world().size - 1; r >= 0; --r) ranks.push_back(r);
  return ranks;
}

class MpiComm : public ::testing::Test {
 protected:
  void start(int wanted = MPI_THREAD_FUNNELED) {
    ASSERT_EQ(MPI_Init_thread(nullptr, nullptr, wanted, &provided_), MPI_SUCCESS);
  }
  void TearDown() override {
    int initialized = 0, finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    EXPECT_FALSE(finalized) << "MPI is the program's to end";
    if (initialized && !finalized) MPI_Finalize();
  }
  static MPI_Comm split(int color, int key) {
    MPI_Comm comm = MPI_COMM_NULL;
    EXPECT_EQ(MPI_Comm_split(MPI_COMM_WORLD, color, key, &comm), MPI_SUCCESS);
    return comm;
  }
  int rank() const { return testing::world().rank; }

  int provided_ = MPI_THREAD_SINGLE;
};

TEST_F(MpiComm, TwoGroupsAtOnce) {
  start();
  for (const char* backend : {"auto", "shm", "mpi"}) {
    MPI_Comm half = split(rank() % 2, rank()), reversed = split(0, -rank());
    auto of_half = make_group(half, with(backend)), of_all = make_group(reversed, with(backend));
    MPI_Comm_free(&half);
    expect_that_it_works(*of_half, ranks_like(rank() % 2));
    use_mpi();
    MPI_Comm_free(&reversed);
    expect_that_it_works(*of_all, all_from_the_last());
    of_half->shutdown();
    of_half.reset();
    use_mpi();
    expect_that_it_works(*of_all, all_from_the_last());
    of_all->shutdown();
    use_mpi();
  }
}

TEST_F(MpiComm, ItsSubgroups) {
  start();
  for (const char* backend : {"auto", "mpi"}) {
    MPI_Comm reversed = split(0, -rank());
    const auto group = make_group(reversed, with(backend));
    MPI_Comm_free(&reversed);
    const auto part = group->split(rank() % 2, rank());
    expect_that_it_works(*part, ranks_like(rank() % 2));
    use_mpi();
    group->shutdown();
    expect_that_it_works(*part, ranks_like(rank() % 2));
    part->shutdown();
  }
}

// Beside a group of the whole job, for which lockstep finds MPI running.
TEST_F(MpiComm, BesideTheJobsGroup) {
  start();
  const auto job = make_group(testing::world(), with("mpi"));
  const auto group = make_group(MPI_COMM_WORLD, with("mpi"));
  const auto own = make_group(MPI_COMM_SELF, with("mpi"));
  EXPECT_EQ(own->name(), "self");
  use_mpi();
  EXPECT_EQ(job->all_gather_numbers(rank()), group->all_gather_numbers(rank()));
  job->shutdown();
  group->shutdown();
  own->shutdown();
}

TEST_F(MpiComm, AThreadOfTheGroup) {
  start(MPI_THREAD_MULTIPLE);
  if (provided_ != MPI_THREAD_MULTIPLE) GTEST_SKIP() << "this MPI does not allow it";
  MPI_Comm reversed = split(0, -rank());
  const auto group = make_group(reversed, with("mpi", GroupOptions::Progress::kThread));
  MPI_Comm_free(&reversed);
  expect_that_it_works(*group, all_from_the_last());
  use_mpi();
  group->shutdown();
}

TEST_F(MpiComm, AThreadThatMpiDoesNotAllow) {
  start(MPI_THREAD_FUNNELED);
  EXPECT_REFUSED("MPI_THREAD_MULTIPLE", make_group(MPI_COMM_WORLD, with("mpi", GroupOptions::Progress::kThread)));
  std::string refused;
  std::thread([&] { refused = refusal_of([] { make_group(MPI_COMM_WORLD, with("auto")); }); }).join();
  EXPECT_THAT(refused, HasSubstr("MPI_THREAD_MULTIPLE"));
}

TEST_F(MpiComm, NoCommunicator) {
  EXPECT_REFUSED("call MPI_Init before", make_group(MPI_COMM_WORLD));
  start();
  EXPECT_REFUSED("MPI_COMM_NULL", make_group(MPI_COMM_NULL));
  MPI_Comm half = split(rank() % 2, rank()), between = MPI_COMM_NULL;
  ASSERT_EQ(MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank() % 2, 1, &between), MPI_SUCCESS);
  EXPECT_REFUSED("intercommunicator", make_group(between));
  MPI_Comm_free(&between);
  MPI_Comm_free(&half);
  EXPECT_REFUSED("timeout", make_group(MPI_COMM_WORLD, {.timeout_seconds = -1}));
  EXPECT_REFUSED("trumpets", make_group(MPI_COMM_WORLD, {.backend = "trumpets"}));
}

TEST(MpiCommEnd, AfterTheEndOfMpi) {
  ASSERT_EQ(MPI_Init(nullptr, nullptr), MPI_SUCCESS);
  MPI_Finalize();
  EXPECT_REFUSED("before MPI_Finalize", make_group(MPI_COMM_WORLD));
}

}  // namespace
}  // namespace lockstep::comm
