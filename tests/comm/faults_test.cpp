// Ranks that do not do their part. Every test leaves its group broken, so each one is run in processes of its own:
// see CMakeLists.txt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <csignal>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/signals.h"
#include "lockstep/comm/make_group.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

class Faults : public ::testing::Test {
 protected:
  void start(double timeout_seconds) {
    GroupOptions options = testing::group_options();
    options.timeout_seconds = timeout_seconds;
    // Who is still on its way out of the barrier would hear there of what another rank does wrong next: hence another
    // barrier, of another group. A thread that moves MPI has all of MPI, which leaves nothing but to wait.
    const bool mpi_is_taken = options.backend == "mpi" && options.progress == GroupOptions::Progress::kThread;
    if (!mpi_is_taken) apart_ = make_group(testing::world(), options);
    group_ = make_group(testing::world(), options);
    arena_ = group_->allocate(4 << 20);
    group_->barrier().wait_host();
    if (apart_)
      apart_->barrier().wait_host();
    else if (is_last())
      std::this_thread::sleep_for(500ms);
  }

  int rank() const { return group_->rank(); }
  int last() const { return group_->size() - 1; }
  bool is_last() const { return rank() == last(); }
  Region region(std::size_t count, DType dtype = DType::kF32) const { return {arena_.get(), 0, count, dtype}; }
  void all_reduce(const Region& region, int bucket = -1) {
    group_->all_reduce(region, ReduceOp::kSum, bucket).wait_host();
  }

  /// The error that `action` throws, which must be an E; then the group must be broken with the same one.
  template <class E, class Action>
  std::string expect_broken_by(Action&& action) {
    const std::string what = testing::thrown<E>(action).what();
    EXPECT_THAT(what, Not(HasSubstr("\n")));
    const auto same = [&](const auto& call) { EXPECT_EQ(testing::thrown<E>(call).what(), what); };
    same([&] { all_reduce(region(1)); });
    same([&] { group_->allocate(1); });
    same([&] { group_->barrier().wait_host(); });
    same([&] { group_->poll(); });
    same([&] { group_->shutdown(); });
    return what;
  }

  /// `action`, in which the last rank does something else. Its error has `there` in it, the others' have `others`.
  void expect_out_of_step(const std::function<void()>& action, const std::vector<std::string>& there,
                          const std::vector<std::string>& others) {
    start(20);
    const std::string what = expect_broken_by<OutOfStepError>(action);
    for (const std::string& text : is_last() ? there : others) EXPECT_THAT(what, HasSubstr(text));
  }
  /// As errors name the last rank.
  static std::string named_last() { return fmt::format("rank {} (host ", testing::world().size - 1); }

  /// The group is of no use any more, but mpirun wants a word of farewell from every rank that it has started.
  void TearDown() override {
    apart_.reset();
    group_.reset();
    int started = 0;
    MPI_Initialized(&started);
    EXPECT_EQ(started != 0, testing::world().mpi_joins);
    if (started != 0) MPI_Finalize();
  }

  std::unique_ptr<ProcessGroup> group_, apart_;
  std::unique_ptr<Arena> arena_;
};

TEST_F(Faults, AnotherOperation) {
  expect_out_of_step(
      [&] {
        if (is_last())
          group_->barrier().wait_host();
        else
          all_reduce(region(1000));
      },
      {"this rank is in barrier #2"},
      {named_last(), "is in barrier #2", "this rank is in allreduce #2 (sum of 1000 f32 at byte 0)"});
}

TEST_F(Faults, AnotherSize) {
  expect_out_of_step([&] { all_reduce(region(is_last() ? 500'000 : 500'001)); },
                     {"this rank is in allreduce #2 (sum of 500000 f32"},
                     {"this rank is in allreduce #2 (sum of 500001 f32", named_last()});
}

TEST_F(Faults, AnotherType) {
  expect_out_of_step([&] { all_reduce(region(100, is_last() ? DType::kI32 : DType::kF32)); }, {},
                     {named_last(), "i32"});
}

// Roots need nothing from the others: it only shows in what they do next.
TEST_F(Faults, AnotherRoot) {
  const auto broadcasts = [&] {
    group_->broadcast(region(10), is_last() ? last() : 0).wait_host();
    for (int i = 0; i < 10; ++i) group_->barrier().wait_host();
  };
  expect_out_of_step(broadcasts, {"out of step: rank "}, {"out of step: rank "});
}

// Sizes are asked for first: what ranks have allocated differently, no operation could find safely.
TEST_F(Faults, AnotherArenaSize) {
  start(20);
  const auto allocate = [&] { group_->allocate(is_last() ? 65'536 : 4096); };
  const std::string what =
      fmt::format("out of step: rank {} allocates an arena of 65536 bytes where rank 0 allocates 4096", last());
  if (is_last()) {
    EXPECT_EQ(testing::thrown<OutOfStepError>(allocate).what(), what);
  } else {
    const auto error = testing::thrown<PeerError>(allocate);
    EXPECT_EQ(error.what(), what);
    EXPECT_EQ(error.code(), 5);
  }
  // Nothing is broken, and the ranks' arenas have the same numbers still.
  const auto arena = group_->allocate(4096);
  all_reduce({arena.get(), 0, 1024, DType::kF32});
}

TEST_F(Faults, AnAllocationWhereOthersReduce) {
  expect_out_of_step(
      [&] {
        if (is_last())
          group_->allocate(4096);
        else
          all_reduce(region(100));
      },
      {"this rank is in an allocation"}, {"is in an allocation"});
}

TEST_F(Faults, AnotherArena) {
  expect_out_of_step(
      [&] {
        const auto second = group_->allocate(4 << 20), third = group_->allocate(4 << 20);
        all_reduce({is_last() ? third.get() : second.get(), 0, 1000, DType::kF32});
      },
      {}, {named_last(), "arena 3 of 4194304 bytes", "arena 2 of 4194304 bytes"});
}

// As of a rank that has left out a step, whose buckets look like those of any other.
TEST_F(Faults, AnotherStep) {
  const std::string sixth = "#7 (sum of 1000 f32 at byte 0, step 5, bucket 0)",
                    seventh = "#7 (sum of 1000 f32 at byte 0, step 6, bucket 0)";
  expect_out_of_step(
      [&] {
        for (std::int64_t step = 0; step < 10; ++step) {
          if (step == 5 && is_last()) continue;
          group_->set_step(step);
          all_reduce(region(1000), 0);
        }
      },
      {sixth, seventh}, {sixth, seventh, named_last()});
}

TEST_F(Faults, AnotherBucket) {
  const std::vector<std::string> both = {"bucket 0", "bucket 1"};
  expect_out_of_step([&] { all_reduce(region(200'000), is_last() ? 1 : 0); }, both, both);
}

TEST_F(Faults, OneOperationTooMany) {
  const auto operations = [&] {
    if (is_last()) group_->all_reduce(region(8), ReduceOp::kMax).wait_host();
    for (int i = 0; i < 3; ++i) all_reduce(region(70'000));
  };
  expect_out_of_step(operations, {"#2"}, {"#2"});
}

TEST_F(Faults, AnArenaThatIsDestroyedUnderWork) {
  start(20);
  if (!is_last()) {
    const Work work = group_->all_reduce(region(300'000), ReduceOp::kSum);
    std::byte* const memory = arena_->data();
    arena_.reset();
    const std::string what = expect_broken_by<UsageError>([&] { work.wait_host(); });
    EXPECT_EQ(what,
              "arena 1 of 4194304 bytes was destroyed while allreduce #2 (sum of 300000 f32 at byte 0) on it was under "
              "way");
    memory[0] = std::byte{1};  // it stays: others may be at it
  }
  std::this_thread::sleep_for(1s);
}

TEST_F(Faults, ARankThatNeverComes) {
  start(1.5);
  if (is_last()) {
    std::this_thread::sleep_for(3s);
    return;
  }
  group_->set_step(41);
  const auto begin = Clock::now();
  const std::string what = expect_broken_by<TimeoutError>([&] { all_reduce(region(300'000)); });
  // Where one rank's patience ends, so does that of those which began to wait later: 1.5 s at most.
  EXPECT_GE(Clock::now() - begin, 500ms);
  EXPECT_THAT(what, AllOf(HasSubstr("allreduce #2 (sum of 300000 f32 at byte 0, step 41) timed out after "),
                          HasSubstr("waiting for " + named_last())));
  // Ranks that wait as well are not to blame.
  for (int other = 0; other < last(); ++other) EXPECT_THAT(what, Not(HasSubstr(fmt::format("rank {} ", other))));
}

TEST_F(Faults, ARankThatNeverComesToABarrier) {
  start(1.5);
  if (rank() == 0) {
    std::this_thread::sleep_for(3s);
    return;
  }
  const std::string what = expect_broken_by<TimeoutError>([&] { group_->barrier().wait_host(); });
  EXPECT_THAT(what, HasSubstr("waiting for rank 0 (host "));
  for (int other = 1; other <= last(); ++other) EXPECT_THAT(what, Not(HasSubstr(fmt::format("rank {} ", other))));
}

TEST_F(Faults, AStopWhileWaiting) {
  start(30);
  watch_for_stops();
  if (is_last()) {
    std::this_thread::sleep_for(2s);
    return;
  }
  const std::jthread stopper([] {
    std::this_thread::sleep_for(300ms);
    ::kill(::getpid(), SIGTERM);
  });
  EXPECT_THAT(expect_broken_by<InterruptedError>([&] { all_reduce(region(10)); }), HasSubstr("SIGTERM"));
}

}  // namespace
}  // namespace lockstep::comm
