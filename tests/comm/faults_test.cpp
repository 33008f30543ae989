// Ranks that do not do their part. Every test leaves its group broken, so each one is run in processes of its own:
// see CMakeLists.txt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <csignal>

#include <chrono>
#include <thread>

#include "base/error.h"
#include "base/signals.h"
#include "lockstep/comm/make_group.h"
#include "tests/support/ranks.h"

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
    else if (rank() == last())
      std::this_thread::sleep_for(500ms);
  }

  int rank() const { return group_->rank(); }
  int last() const { return group_->size() - 1; }
  Region region(std::size_t count, DType dtype = DType::kF32) const { return {arena_.get(), 0, count, dtype}; }

  /// The error that `action` throws, which must be an E; then the group must be broken with the same one.
  template <class E, class Action>
  std::string expect_broken_by(Action&& action) {
    std::string what;
    try {
      action();
      ADD_FAILURE() << "nothing was thrown";
      return what;
    } catch (const E& error) {
      EXPECT_FALSE(std::string(error.what()).find('\n') != std::string::npos);
      what = error.what();
    }
    const auto same = [&](auto&& call) {
      try {
        call();
        ADD_FAILURE() << "a broken group took a call";
      } catch (const E& error) {
        EXPECT_EQ(error.what(), what);
      }
    };
    same([&] { group_->all_reduce(region(1), ReduceOp::kSum).wait_host(); });
    same([&] { group_->allocate(1); });
    same([&] { group_->barrier().wait_host(); });
    same([&] { group_->poll(); });
    same([&] { group_->shutdown(); });
    return what;
  }

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
  start(20);
  const std::string what = expect_broken_by<OutOfStepError>([&] {
    if (rank() == last())
      group_->barrier().wait_host();
    else
      group_->all_reduce(region(1000), ReduceOp::kSum).wait_host();
  });
  const std::string named = fmt::format("rank {} (host ", last());
  if (rank() == last()) {
    EXPECT_THAT(what, HasSubstr("this rank is in barrier #2"));
  } else {
    EXPECT_THAT(what, AllOf(HasSubstr(named), HasSubstr("is in barrier #2"),
                            HasSubstr("this rank is in allreduce #2 (sum of 1000 f32 at byte 0)")));
  }
}

TEST_F(Faults, AnotherSize) {
  start(20);
  const std::size_t count = rank() == last() ? 500'000 : 500'001;
  const std::string what =
      expect_broken_by<OutOfStepError>([&] { group_->all_reduce(region(count), ReduceOp::kSum).wait_host(); });
  EXPECT_THAT(what, HasSubstr(fmt::format("this rank is in allreduce #2 (sum of {} f32", count)));
  if (rank() == last()) return;
  EXPECT_THAT(what, HasSubstr(fmt::format("rank {} (host ", last())));
}

TEST_F(Faults, AnotherType) {
  start(20);
  const std::string what = expect_broken_by<OutOfStepError>([&] {
    group_->all_reduce(region(100, rank() == last() ? DType::kI32 : DType::kF32), ReduceOp::kSum).wait_host();
  });
  if (rank() == last()) return;
  EXPECT_THAT(what, AllOf(HasSubstr(fmt::format("rank {} (host ", last())), HasSubstr("i32")));
}

// Roots need nothing from the others: it only shows in what they do next.
TEST_F(Faults, AnotherRoot) {
  start(20);
  const std::string what = expect_broken_by<OutOfStepError>([&] {
    group_->broadcast(region(10), rank() == last() ? last() : 0).wait_host();
    for (int i = 0; i < 10; ++i) group_->barrier().wait_host();
  });
  EXPECT_THAT(what, HasSubstr("out of step: rank "));
}

// Sizes are asked for first: what ranks have allocated differently, no operation could find safely.
TEST_F(Faults, AnotherArenaSize) {
  start(20);
  const std::size_t bytes = rank() == last() ? 65'536 : 4096;
  const std::string what =
      fmt::format("out of step: rank {} allocates an arena of 65536 bytes where rank 0 allocates 4096", last());
  if (rank() == last()) {
    try {
      group_->allocate(bytes);
      FAIL() << "allocated";
    } catch (const OutOfStepError& error) {
      EXPECT_EQ(error.what(), what);
    }
  } else {
    try {
      group_->allocate(bytes);
      FAIL() << "allocated";
    } catch (const PeerError& error) {
      EXPECT_EQ(error.what(), what);
      EXPECT_EQ(error.code(), 5);
    }
  }
  // Nothing is broken, and the ranks' arenas have the same numbers still.
  const auto arena = group_->allocate(4096);
  group_->all_reduce({arena.get(), 0, 1024, DType::kF32}, ReduceOp::kSum).wait_host();
}

TEST_F(Faults, AnAllocationWhereOthersReduce) {
  start(20);
  const std::string what = expect_broken_by<OutOfStepError>([&] {
    if (rank() == last())
      group_->allocate(4096);
    else
      group_->all_reduce(region(100), ReduceOp::kSum).wait_host();
  });
  EXPECT_THAT(what, HasSubstr(rank() == last() ? "this rank is in an allocation" : "is in an allocation"));
}

TEST_F(Faults, AnotherArena) {
  start(20);
  const auto second = group_->allocate(4 << 20), third = group_->allocate(4 << 20);
  const Region there{rank() == last() ? third.get() : second.get(), 0, 1000, DType::kF32};
  const std::string what =
      expect_broken_by<OutOfStepError>([&] { group_->all_reduce(there, ReduceOp::kSum).wait_host(); });
  if (rank() == last()) return;
  EXPECT_THAT(what, AllOf(HasSubstr(fmt::format("rank {} (host ", last())), HasSubstr("arena 3 of 4194304 bytes"),
                          HasSubstr("arena 2 of 4194304 bytes")));
}

// As of a rank that has left out a step, whose buckets look like those of any other.
TEST_F(Faults, AnotherStep) {
  start(20);
  const std::string what = expect_broken_by<OutOfStepError>([&] {
    for (std::int64_t step = 0; step < 10; ++step) {
      if (step == 5 && rank() == last()) continue;
      group_->set_step(step);
      group_->all_reduce(region(1000), ReduceOp::kSum, 0).wait_host();
    }
  });
  EXPECT_THAT(what, AllOf(HasSubstr("#7 (sum of 1000 f32 at byte 0, step 5, bucket 0)"),
                          HasSubstr("#7 (sum of 1000 f32 at byte 0, step 6, bucket 0)")));
  if (rank() != last()) {
    EXPECT_THAT(what, HasSubstr(fmt::format("rank {} (host ", last())));
  }
}

TEST_F(Faults, AnotherBucket) {
  start(20);
  const std::string what = expect_broken_by<OutOfStepError>(
      [&] { group_->all_reduce(region(200'000), ReduceOp::kSum, rank() == last() ? 1 : 0).wait_host(); });
  EXPECT_THAT(what, AllOf(HasSubstr("bucket 0"), HasSubstr("bucket 1")));
}

TEST_F(Faults, AnArenaThatIsDestroyedUnderWork) {
  start(20);
  if (rank() != last()) {
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

TEST_F(Faults, OneOperationTooMany) {
  start(20);
  const std::string what = expect_broken_by<OutOfStepError>([&] {
    if (rank() == last()) group_->all_reduce(region(8), ReduceOp::kMax).wait_host();
    for (int i = 0; i < 3; ++i) group_->all_reduce(region(70'000), ReduceOp::kSum).wait_host();
  });
  EXPECT_THAT(what, HasSubstr("#2"));
}

TEST_F(Faults, ARankThatNeverComes) {
  start(1.5);
  if (rank() == last()) {
    std::this_thread::sleep_for(3s);
    return;
  }
  group_->set_step(41);
  const auto begin = Clock::now();
  const std::string what =
      expect_broken_by<TimeoutError>([&] { group_->all_reduce(region(300'000), ReduceOp::kSum).wait_host(); });
  // Where one rank's patience ends, so does that of those which began to wait later: 1.5 s at most.
  EXPECT_GE(Clock::now() - begin, 500ms);
  EXPECT_THAT(what, AllOf(HasSubstr("allreduce #2 (sum of 300000 f32 at byte 0, step 41) timed out after "),
                          HasSubstr(fmt::format("waiting for rank {} (host ", last()))));
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
  if (rank() == last()) {
    std::this_thread::sleep_for(2s);
    return;
  }
  std::thread stopper([] {
    std::this_thread::sleep_for(300ms);
    ::kill(::getpid(), SIGTERM);
  });
  const std::string what =
      expect_broken_by<InterruptedError>([&] { group_->all_reduce(region(10), ReduceOp::kSum).wait_host(); });
  stopper.join();
  EXPECT_THAT(what, HasSubstr("SIGTERM"));
}

}  // namespace
}  // namespace lockstep::comm
