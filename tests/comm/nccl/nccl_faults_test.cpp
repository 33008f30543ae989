// Ranks that do not do their part, on an NCCL in software. Every test leaves its groups broken, so each one is run in
// processes of its own: see CMakeLists.txt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <csignal>
#include <thread>
#include <type_traits>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "base/signals.h"
#include "comm/nccl/nccl_group.h"
#include "comm/stall.h"
#include "lockstep/comm/make_group.h"
#include "tests/comm/nccl/fake_nccl.h"
#include "tests/soft_cuda/soft_cuda.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

using fake_nccl::counts;
using fake_nccl::script;
using ::testing::_;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Matcher;
using ::testing::Not;
using ::testing::StartsWith;
using namespace std::chrono_literals;

class NcclFaults : public ::testing::Test {
 protected:
  void meet() {
    soft_cuda::set_streams(soft_cuda::Streams::kThreads);
    GroupOptions options = testing::group_options();
    options.timeout_seconds = 30;
    control_ = make_group(testing::world(), options);
    producer_ = CudaStream();
  }
  void make(Clock::duration timeout, int device = 0) {
    group_ = make_nccl_group(*control_, {.device = device, .producer = producer_.view(), .timeout = timeout},
                             &fake_nccl::api());
    arena_ = group_->allocate(1 << 20);
    group_->barrier().wait_host();
  }
  void start(Clock::duration timeout) {
    meet();
    make(timeout);
  }

  int rank() const { return control_->rank(); }
  int last() const { return control_->size() - 1; }
  bool is_last() const { return rank() == last(); }
  Work all_reduce(std::size_t count) {
    return group_->all_reduce({arena_.get(), 0, count, DType::kF32}, ReduceOp::kSum);
  }

  /// The error that `action` throws, which must be an E; then the group, if there is one, must be broken with it.
  template <class E, class Action>
  std::string broken_by(Action&& action) {
    std::string what;
    try {
      action();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const E& error) {
      what = error.what();
      code_ = error.code();
    }
    if (group_ != nullptr) {
      EXPECT_THROW(group_->poll(), E);
    }
    // Ranks that wait for the same time must not find that the first of them has ended.
    if constexpr (std::is_same_v<E, TimeoutError>) std::this_thread::sleep_for(1s);
    return what;
  }

  /// `action` on all ranks: the last one's error is an L, whose text is as `there` says, the others' an O.
  template <class L, class O, class Action>
  void expect_broken(const Action& action, const Matcher<std::string>& there, const Matcher<std::string>& others) {
    if (is_last())
      EXPECT_THAT(broken_by<L>(action), there);
    else
      EXPECT_THAT(broken_by<O>(action), others);
  }

  void TearDown() override {
    arena_.reset();
    group_.reset();
    EXPECT_EQ(counts().aborts, counts().inits);
    EXPECT_EQ(counts().destroys, 0);
    // What moves MPI on must have ended before this thread calls it.
    control_.reset();
    int started = 0;
    MPI_Initialized(&started);
    if (started != 0) MPI_Finalize();
  }

  std::unique_ptr<ProcessGroup> control_;
  CudaStream producer_;
  std::unique_ptr<DeviceGroup> group_;
  std::unique_ptr<Arena> arena_;
  int code_ = 0;
};

TEST_F(NcclFaults, ARankThatNeverComes) {
  start(1500ms);
  if (is_last()) {
    std::this_thread::sleep_for(4s);
    return;
  }
  group_->set_step(41);
  const auto begin = Clock::now();
  const std::string what = broken_by<TimeoutError>([&] { all_reduce(1000).wait_host(); });
  EXPECT_GE(Clock::now() - begin, 1500ms);
  EXPECT_THAT(what, AllOf(StartsWith("allreduce #2 (sum of 1000 f32 at byte 0, step 41) timed out after "),
                          HasSubstr("asked where they are"), HasSubstr(fmt::format("rank {} (host ", last()))));
  // Ranks that wait as well are not to blame.
  for (int other = 0; other < last(); ++other) EXPECT_THAT(what, Not(HasSubstr(fmt::format("rank {} ", other))));
}

// One rank says who is missing, and nobody else is named; the operation then completes.
TEST_F(NcclFaults, LateRankIsReported) {
  start(60s);
  set_stall_warning(500ms);
  ::testing::internal::CaptureStderr();
  if (is_last()) std::this_thread::sleep_for(7s);
  all_reduce(1000).wait_host();
  const auto said = control_->all_gather_text(::testing::internal::GetCapturedStderr());
  EXPECT_THAT(said[0], AllOf(HasSubstr("allreduce #2 (sum of 1000 f32 at byte 0) has waited"),
                             HasSubstr(fmt::format(" s for rank {}, which does not wait in it →", last()))));
  for (int other = 0; other < last(); ++other) EXPECT_THAT(said[0], Not(HasSubstr(fmt::format("rank {},", other))));
  for (std::size_t other = 1; other < said.size(); ++other) EXPECT_THAT(said[other], Not(HasSubstr("has waited")));
}

TEST_F(NcclFaults, StallWithoutMissingRanksIsReported) {
  start(9s);
  set_stall_warning(500ms);
  ::testing::internal::CaptureStderr();
  script().stalls = true;
  broken_by<TimeoutError>([&] {
    all_reduce(10);
    for (;; std::this_thread::sleep_for(1ms)) group_->poll();
  });
  const auto said = control_->all_gather_text(::testing::internal::GetCapturedStderr());
  EXPECT_THAT(said[0], HasSubstr(" s for a GPU or the network between them: every rank waits in it"));
}

// Each of them has come, and the operation does not end.
TEST_F(NcclFaults, NobodyIsMissing) {
  start(1500ms);
  script().stalls = true;
  const std::string what = broken_by<TimeoutError>([&] {
    all_reduce(10);
    for (;;) group_->poll();
  });
  EXPECT_THAT(what, HasSubstr("although every rank has issued it"));
}

TEST_F(NcclFaults, ARankThatDies) {
  if (testing::world().mpi_joins) GTEST_SKIP() << "mpirun would end the others too";
  start(60s);
  control_->barrier().wait_host();  // nobody is at the end of the last operation still
  if (is_last()) ::_exit(0);
  group_->set_step(5);
  const std::string what = broken_by<DeviceError>([&] { all_reduce(1000).wait_host(); });
  EXPECT_THAT(what, AllOf(StartsWith(fmt::format("rank {} (host ", last())),
                          HasSubstr("has ended, and this rank waits for it in"),
                          HasSubstr("allreduce #2 (sum of 1000 f32 at byte 0, step 5)")));
  std::this_thread::sleep_for(1s);  // whoever has not looked yet is to see who was the first
}

TEST_F(NcclFaults, AnErrorOnOneRank) {
  start(1500ms);
  if (is_last()) script().call = ncclSystemError;
  expect_broken<NcclError, TimeoutError>([&] { all_reduce(10).wait_host(); },
                                         "allreduce #2 (sum of 10 f32 at byte 0) failed: unhandled system error",
                                         HasSubstr(fmt::format("rank {} (host ", last())));
  if (is_last()) std::this_thread::sleep_for(4s);
}

TEST_F(NcclFaults, OneRankDoesNotJoin) {
  meet();
  if (is_last()) script().init_hangs = true;
  expect_broken<TimeoutError, PeerError>(
      [&] { make(1500ms); }, StartsWith(fmt::format("joining {} ranks by NCCL timed out after ", last() + 1)),
      fmt::format("rank {} could not join the others by NCCL", last()));
  if (!is_last()) {
    EXPECT_EQ(code_, 5);
  }
}

TEST_F(NcclFaults, OneRankCannotJoin) {
  meet();
  if (is_last()) {
    script().init_ends = ncclInvalidUsage;
    broken_by<NcclError>([&] { make(1500ms); });
    std::this_thread::sleep_for(4s);
  } else {
    // All of them get to the point where they would be joined, if the last one were.
    script().init_hangs = true;
    const auto begin = Clock::now();
    EXPECT_THAT(broken_by<Error>([&] { make(1500ms); }), HasSubstr(fmt::format("rank {} ", last())));
    EXPECT_LT(Clock::now() - begin, 20s) << "the other groups' timeout is longer";
  }
}

TEST_F(NcclFaults, AnotherVersion) {
  meet();
  if (is_last()) script().version = NCCL_VERSION(2, 20, 3);
  expect_broken<OutOfStepError, PeerError>(
      [&] { make(60s); }, AllOf(HasSubstr("has NCCL=2.20.3 where rank 0"), HasSubstr("has NCCL=2.28.")), _);
  EXPECT_EQ(counts().inits, 0);
}

TEST_F(NcclFaults, AGpuThatIsNotThere) {
  meet();
  expect_broken<DeviceError, PeerError>([&] { make(60s, is_last() ? 7 : 0); }, _, HasSubstr("there is no GPU 7"));
}

TEST_F(NcclFaults, ASendOfAnotherSize) {
  start(3s);
  const auto region = [&](std::size_t count) { return Region{arena_.get(), 0, count, DType::kF32}; };
  if (rank() == 1) group_->isend(region(8), 0);
  if (rank() != 0) {
    broken_by<Error>([&] { group_->barrier().wait_host(); });
    return;
  }
  const std::string what = broken_by<OutOfStepError>([&] { group_->irecv(region(4), 1).wait(); });
  EXPECT_THAT(what, AllOf(HasSubstr("rank 1 is in send #1 to this rank (8 f32)"),
                          HasSubstr("this rank is in receive #1 from rank 1 (4 f32)")));
}

TEST_F(NcclFaults, ARankThatDoesNotSend) {
  start(1500ms);
  if (rank() != 0) {
    std::this_thread::sleep_for(4s);
    return;
  }
  const std::string what = broken_by<TimeoutError>([&] {
    group_->irecv({arena_.get(), 0, 100, DType::kF32}, 1).wait();
  });
  EXPECT_THAT(what, StartsWith("receive #1 from rank 1 (100 f32) timed out after "));
}

TEST_F(NcclFaults, AnArenaThatIsDestroyedUnderASend) {
  start(2s);
  if (rank() != 0) {
    broken_by<Error>([&] { group_->barrier().wait_host(); });
    return;
  }
  group_->isend({arena_.get(), 0, 100, DType::kF32}, 1);
  arena_.reset();
  EXPECT_THAT(broken_by<UsageError>([&] { group_->poll(); }),
              HasSubstr("while a send or a receive on it was under way"));
}

TEST_F(NcclFaults, AStopWhileWaiting) {
  start(30s);
  watch_for_stops();
  if (is_last()) {
    std::this_thread::sleep_for(2s);
    return;
  }
  std::thread stopper([] {
    std::this_thread::sleep_for(300ms);
    ::kill(::getpid(), SIGTERM);
  });
  const std::string what = broken_by<InterruptedError>([&] { all_reduce(10).wait_host(); });
  stopper.join();
  EXPECT_THAT(what, HasSubstr("SIGTERM"));
}

TEST_F(NcclFaults, AnotherArenaSize) {
  start(30s);
  if (is_last())
    EXPECT_THROW(group_->allocate(1 << 16), OutOfStepError);
  else
    EXPECT_THROW(group_->allocate(1 << 12), PeerError);
}

// NCCL sums whatever comes. A rank that has left out a step is found within a hundred operations, long before the end.
TEST_F(NcclFaults, AStepLeftOut) {
  start(60s);
  std::int64_t reached = 0;
  const std::string what = broken_by<OutOfStepError>([&] {
    for (std::int64_t step = 0; step < 1000; ++step) {
      if (step == 5 && is_last()) continue;
      group_->set_step(step);
      reached = step;
      for (int bucket = 0; bucket < 2; ++bucket)
        group_->all_reduce({arena_.get(), 0, 100, DType::kF32}, ReduceOp::kSum, bucket).wait_host();
    }
  });
  EXPECT_LE(reached, 60);
  EXPECT_EQ(what, fmt::format("out of step: rank {} came to allreduce #100 (sum of 100 f32 at byte 0, step 50, bucket "
                              "0), ranks {} to allreduce #100 (sum of 100 f32 at byte 0, step 49, bucket 0)",
                              last(), "0, 1"));
}

TEST_F(NcclFaults, AStepLeftOutAtTheEnd) {
  start(60s);
  group_->set_step(is_last() ? 8 : 7);
  all_reduce(100).wait_host();
  group_->set_step(9);
  all_reduce(100).wait_host();
  const std::string what = broken_by<OutOfStepError>([&] { group_->shutdown(); });
  EXPECT_THAT(what, AllOf(StartsWith(fmt::format("out of step: rank {} came to allreduce #3 ", last())),
                          HasSubstr("step 9) after other operations, ranks 0, 1 to allreduce #3")));
}

// The others wait for it on the GPU, while it waits for them at the end.
TEST_F(NcclFaults, OneOperationTooFew) {
  start(1500ms);
  group_->set_step(7);
  all_reduce(100).wait_host();
  if (is_last()) {
    const std::string what = broken_by<OutOfStepError>([&] { group_->shutdown(); });
    EXPECT_THAT(what, HasSubstr(" after allreduce #2 (sum of 100 f32 at byte 0, step 7)"));
    return;
  }
  group_->set_step(8);
  const std::string what = broken_by<TimeoutError>([&] { all_reduce(100).wait_host(); });
  EXPECT_THAT(
      what, AllOf(StartsWith("allreduce #3 (sum of 100 f32 at byte 0, step 8) timed out"), HasSubstr("out of step: ")));
}

// What goes wrong on one rank without breaking anything.
TEST_F(NcclFaults, MemoryOfOneRank) {
  start(30s);
  if (is_last()) soft_cuda::set_memory_bytes(4 << 20);
  if (is_last())
    EXPECT_THROW(group_->allocate(64 << 20), CudaError);
  else
    EXPECT_THROW(group_->allocate(64 << 20), PeerError);
  EXPECT_EQ(counts().registrations, 1);

  // NCCL wants all of a buffer's ranks to have it registered, or none.
  if (is_last()) script().comm_register = ncclInvalidUsage;
  const auto arena = group_->allocate(4096);
  EXPECT_EQ(counts().registrations, 1);
  group_->all_reduce({arena.get(), 0, 1024, DType::kF32}, ReduceOp::kSum).wait_host();
  group_->barrier().wait_host();
  control_->barrier().wait_host();
}

}  // namespace
}  // namespace lockstep::comm
