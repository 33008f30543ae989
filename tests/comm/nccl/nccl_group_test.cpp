// The NCCL group's states, and what it does about errors and stalls.
#include "comm/nccl/nccl_group.h"

#include <gmock/gmock.h>

#include <future>

#include "comm/nccl/agreement.h"
#include "tests/comm/nccl/nccl_fixture.h"

namespace lockstep::comm {
namespace {

using fake_nccl::counts;
using fake_nccl::script;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::StartsWith;
using namespace std::chrono_literals;

// ---- States ----

TEST_F(NcclGroupTest, EndsInOrder) {
  make();
  EXPECT_EQ(group_->name(), "nccl");
  EXPECT_EQ(group_->device(), (Device{DeviceKind::kCuda, 0}));
  all_reduce().wait_host();
  group_->shutdown();
  EXPECT_EQ(counts().finalizes, 1);
  EXPECT_EQ(counts().destroys, 1);
  EXPECT_THROW(all_reduce(), InternalError);
  EXPECT_THROW(group_->allocate(1), InternalError);
  arena_.reset();
  group_.reset();
  EXPECT_EQ(counts().aborts, 0);
  EXPECT_EQ(counts().allocations, 0);
}

TEST_F(NcclGroupTest, AbortsWithoutShutdown) {
  make();
  all_reduce().wait_host();
  group_.reset();
  EXPECT_EQ(counts().aborts, 1);
  EXPECT_EQ(counts().finalizes + counts().destroys, 0);
}

TEST_F(NcclGroupTest, WaitsForBackgroundCalls) {
  script().looks_in_progress = 500;
  make();
  for (int i = 0; i < 3; ++i) all_reduce();
  group_->barrier().wait_host();
  group_->shutdown();
}

TEST_F(NcclGroupTest, SlowAbortIsAwaited) {
  make();
  script().abort_hangs = true;
  auto end = std::async(std::launch::async, [&] { group_.reset(); });
  EXPECT_EQ(end.wait_for(200ms), std::future_status::timeout);
  script().abort_hangs = false;
  end.get();
  EXPECT_EQ(counts().aborts, 1);
}

// ---- Making it ----

TEST_F(NcclGroupTest, CannotBeMadeWithAnOldNccl) {
  script().version = NCCL_VERSION(2, 18, 5);
  try {
    make();
    FAIL() << "made";
  } catch (const NcclError& error) {
    EXPECT_STREQ(error.what(), "NCCL 2.18.5 is too old");
    EXPECT_EQ(error.remedy(), "install NCCL 2.19.1 or newer");
    EXPECT_EQ(error.code(), 4);
  }
}

TEST_F(NcclGroupTest, CannotBeMadeOnAGpuThatIsNotThere) {
  try {
    make_nccl_group(control_, {.device = 2, .producer = producer_.view()}, &fake_nccl::api());
    FAIL() << "made";
  } catch (const DeviceError& error) {
    EXPECT_STREQ(error.what(), "there is no GPU 2: this process may see 2");
  }
}

TEST_F(NcclGroupTest, ReportsTheCommunicatorsError) {
  script().last_error = "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000\n";
  script().init_ends = ncclInvalidUsage;
  try {
    make();
    FAIL() << "made";
  } catch (const NcclError& error) {
    EXPECT_STREQ(error.what(),
                 "joining the ranks by NCCL failed: invalid usage: Duplicate GPU detected : rank 0 and rank 1 both on "
                 "CUDA device 1b000");
    EXPECT_THAT(error.remedy(), StartsWith("start every rank alike"));
  }
  EXPECT_EQ(counts().aborts, 1);
}

TEST_F(NcclGroupTest, AbortsNothingWithoutACommunicator) {
  script().init = ncclSystemError;
  EXPECT_THROW(make(), NcclError);
  script() = {};
  script().unique_id = ncclSystemError;
  EXPECT_THROW(make(), NcclError);
  EXPECT_EQ(counts().aborts, 0);
}

TEST_F(NcclGroupTest, JoinTimesOut) {
  script().init_hangs = true;
  try {
    make(1s);
    FAIL() << "made";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), MatchesRegex("joining 1 ranks by NCCL timed out after [0-9.]+ s.*"));
  }
  EXPECT_EQ(counts().aborts, 1);
}

// ---- Errors ----

TEST_F(NcclGroupTest, ACallThatFails) {
  make();
  all_reduce().wait_host();
  script().call = ncclInvalidArgument;
  group_->set_step(7);
  const std::string what = broken_by<NcclError>([&] { all_reduce(); });
  EXPECT_EQ(what, "allreduce #2 (sum of 16 f32 at byte 0, step 7) failed: some error");
  EXPECT_THAT(remedy_, HasSubstr("NCCL_DEBUG=WARN"));
}

TEST_F(NcclGroupTest, BackgroundCallFails) {
  make();
  script().looks_in_progress = 300;
  script().call_ends = ncclSystemError;
  const std::string what = broken_by<NcclError>([&] { group_->broadcast(region(), 0); });
  EXPECT_THAT(what, StartsWith("broadcast #1 (16 f32 at byte 0, from rank 0) failed: unhandled system error"));
}

TEST_F(NcclGroupTest, WaitFindsAnAsynchronousError) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make();
  script().stalls = true;
  const Work work = all_reduce();
  script().async = ncclRemoteError;
  const std::string what = broken_by<NcclError>([&] { work.wait_host(); });
  EXPECT_EQ(what, "allreduce #1 (sum of 16 f32 at byte 0) failed: remote process exited or there was a network error");
  EXPECT_THAT(remedy_, HasSubstr("logs of the other ranks"));
}

TEST_F(NcclGroupTest, PollFindsAnAsynchronousError) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make();
  script().stalls = true;
  all_reduce();
  group_->poll();
  script().async = ncclRemoteError;
  broken_by<NcclError>([&] {
    for (;;) group_->poll();
  });
}

// It is asked after each operator of backward: from one millisecond to the next it reads the word alone.
TEST_F(NcclGroupTest, PollsQueryNcclOnlyNowAndThen) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make();
  script().stalls = true;
  const Work work = all_reduce();
  const int before = counts().looks_for_errors;
  const auto begin = Clock::now();
  for (int i = 0; i < 10'000; ++i) EXPECT_FALSE(work.done());
  const auto most = 2 + (Clock::now() - begin) / 1ms;
  EXPECT_GT(counts().looks_for_errors, before);
  EXPECT_LE(counts().looks_for_errors - before, most);
  script().async = ncclRemoteError;
  broken_by<NcclError>([&] {
    for (;;) work.done();
  });
}

TEST_F(NcclGroupTest, CompletionIsSeenWithoutNccl) {
  make();
  const Work work = all_reduce();
  const int before = counts().looks_for_errors;
  EXPECT_TRUE(work.done());
  EXPECT_EQ(counts().looks_for_errors, before);
}

TEST_F(NcclGroupTest, AbortReleasesPendingOperations) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make(1s);
  script().stalls = true;
  for (int i = 0; i < 5; ++i) all_reduce();
  CudaStream consumer;
  group_->barrier().wait(consumer.view());
  broken_by<TimeoutError>([&] { group_->barrier().wait_host(Deadline::after(100ms)); });
  consumer.synchronize();
}

// ---- Stalls ----

TEST_F(NcclGroupTest, AWaitEndsAtItsDeadline) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make(2s);
  all_reduce().wait_host();
  script().stalls = true;
  group_->set_step(3);
  all_reduce();
  const Work last = all_reduce();
  const std::string what = broken_by<TimeoutError>([&] { last.wait_host(Deadline::after(300ms)); });
  EXPECT_THAT(what, AllOf(StartsWith("allreduce #2 (sum of 16 f32 at byte 0, step 3) timed out after "),
                          HasSubstr("although every rank has issued it")));
  EXPECT_THAT(remedy_, HasSubstr("--timeout-seconds"));
}

TEST_F(NcclGroupTest, PollsEndAfterTheTimeout) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make(500ms);
  script().stalls = true;
  all_reduce();
  const auto begin = Clock::now();
  const std::string what = broken_by<TimeoutError>([&] {
    for (;;) group_->poll();
  });
  EXPECT_GE(Clock::now() - begin, 500ms);
  EXPECT_THAT(what, StartsWith("allreduce #1 "));
}

TEST_F(NcclGroupTest, AnArenaThatIsDestroyedUnderWork) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make();
  script().stalls = true;
  const Work work = all_reduce();
  arena_.reset();
  const std::string what = broken_by<UsageError>([&] { work.wait_host(); });
  EXPECT_EQ(what,
            "arena 1 of 4096 bytes was destroyed while allreduce #1 (sum of 16 f32 at byte 0) on it was under way");
}

// Its memory is freed when the GPU has come to that.
TEST_F(NcclGroupTest, ArenaMayBeFreedOnceTheProducerIsOrderedAfterItsWork) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make();
  all_reduce().wait(producer_.view());
  arena_.reset();
  group_->barrier().wait_host();
}

TEST_F(NcclGroupTest, BackgroundCallTimesOut) {
  make(500ms);
  script().call_hangs = true;
  const std::string what = broken_by<TimeoutError>([&] { all_reduce(); });
  EXPECT_THAT(what, StartsWith("allreduce #1 (sum of 16 f32 at byte 0) timed out after "));
}

TEST_F(NcclGroupTest, FinalizeTimesOut) {
  make(500ms);
  script().finalize_hangs = true;
  broken_by<TimeoutError>([&] { group_->shutdown(); });
  EXPECT_THAT(remedy_, HasSubstr("CUDA graphs"));
}

TEST(ProgressExchange, NamesLaggingRanks) {
  ProgressExchange::Answers answers;
  answers.all = {{8, 7, 0, 0}, {5, 5, 0, 0}, {8, 7, 0, 0}, {7, 5, 0, 0}};
  EXPECT_EQ(waiting_text(answers, 8),
            " waiting for rank 1, which has issued 5 and completed 5 operations; rank 3, which has issued 7 and "
            "completed 5 operations");
  EXPECT_EQ(first_late(answers, 8), 1);
  EXPECT_EQ(first_late(answers, 5), -1);
  EXPECT_THAT(waiting_text(answers, 5), HasSubstr("every rank has issued it"));
  answers = {{}, std::make_exception_ptr(TimeoutError("waiting for rank 2 (host b)"))};
  EXPECT_EQ(waiting_text(answers, 5), "; asked where they are: waiting for rank 2 (host b)");
  EXPECT_EQ(first_late(answers, 5), -1);
}

}  // namespace
}  // namespace lockstep::comm
