// The NCCL group in a world of one: its states, what it does about errors and stalls, streams and captures.
#include "comm/nccl/nccl_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <mutex>
#include <thread>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "comm/nccl/roll_call.h"
#include "comm/self_group.h"
#include "tests/comm/nccl/fake_nccl.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::comm {
namespace {

using fake_nccl::counts;
using fake_nccl::script;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;
using namespace std::chrono_literals;

/// What happened, on whatever thread.
class Log {
 public:
  void add(const std::string& what) {
    const std::lock_guard lock(mutex_);
    all_.push_back(what);
  }
  std::vector<std::string> all() const {
    const std::lock_guard lock(mutex_);
    return all_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> all_;
};

class NcclGroupTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_nccl::reset();
    soft_cuda::set_streams(soft_cuda::Streams::kEager);
  }
  void TearDown() override {
    arena_.reset();
    group_.reset();
    soft_cuda::set_streams(soft_cuda::Streams::kEager);
    EXPECT_EQ(counts().calls_in_progress, 0);
    EXPECT_LE(counts().aborts + counts().destroys, 1);
    EXPECT_EQ(counts().aborts + counts().destroys, counts().inits);
  }

  void make(Clock::duration timeout = 60s) {
    group_ = make_nccl_group(control_, {.producer = producer_.view(), .timeout = timeout, .api = &fake_nccl::api()});
    arena_ = group_->allocate(4096);
  }

  Region region(std::size_t count = 16) const { return {arena_.get(), 0, count, DType::kF32}; }
  Work all_reduce(std::size_t count = 16) { return group_->all_reduce(region(count), ReduceOp::kSum); }

  /// The error that `action` throws, and every call after it.
  template <class E, class Action>
  std::string broken_by(Action&& action) {
    std::string what;
    try {
      action();
      ADD_FAILURE() << "nothing was thrown";
      return what;
    } catch (const E& error) {
      what = error.what();
      remedy_ = error.remedy();
    }
    const auto same = [&](auto&& call) {
      try {
        call();
        ADD_FAILURE() << "a broken group took a call";
      } catch (const E& error) {
        EXPECT_EQ(error.what(), what);
      }
    };
    same([&] { all_reduce(); });
    same([&] { group_->barrier(); });
    same([&] { group_->poll(); });
    same([&] { group_->copy(&what, &what, 1); });
    same([&] { group_->all_gather_text("x"); });
    same([&] { group_->allocate(1); });
    same([&] { group_->shutdown(); });
    return what;
  }

  SelfGroup control_{60s};
  CudaStream producer_;
  std::unique_ptr<DeviceGroup> group_;
  std::unique_ptr<Arena> arena_;
  std::string remedy_;
};

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

TEST_F(NcclGroupTest, IsAbortedWhereItWasNotShutDown) {
  make();
  all_reduce().wait_host();
  group_.reset();
  EXPECT_EQ(counts().aborts, 1);
  EXPECT_EQ(counts().finalizes + counts().destroys, 0);
}

TEST_F(NcclGroupTest, WaitsForWhatGoesOnInTheBackground) {
  script().looks_in_progress = 500;
  make();
  for (int i = 0; i < 3; ++i) all_reduce();
  group_->barrier().wait_host();
  group_->shutdown();
}

TEST_F(NcclGroupTest, AnAbortThatTakesItsTimeIsWaitedFor) {
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
    make_nccl_group(control_, {.device = 2, .producer = producer_.view(), .api = &fake_nccl::api()});
    FAIL() << "made";
  } catch (const DeviceError& error) {
    EXPECT_STREQ(error.what(), "there is no GPU 2: this process may see 2");
  }
}

TEST_F(NcclGroupTest, SaysWhatTheCommunicatorFailedWith) {
  script().last_error = "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000\n";
  script().init_ends = ncclInvalidUsage;
  try {
    make();
    FAIL() << "made";
  } catch (const NcclError& error) {
    EXPECT_STREQ(error.what(),
                 "joining the ranks by NCCL failed: invalid usage: Duplicate GPU detected : rank 0 and rank 1 both on "
                 "CUDA device 1b000");
    EXPECT_THAT(error.remedy(), StartsWith("give every rank a GPU of its own"));
  }
  EXPECT_EQ(counts().aborts, 1);
}

TEST_F(NcclGroupTest, AbortsNothingWhereThereIsNoCommunicator) {
  script().init = ncclSystemError;
  EXPECT_THROW(make(), NcclError);
  script() = {};
  script().unique_id = ncclSystemError;
  EXPECT_THROW(make(), NcclError);
  EXPECT_EQ(counts().aborts, 0);
}

TEST_F(NcclGroupTest, DoesNotWaitForeverForTheOthersToJoin) {
  script().init_hangs = true;
  try {
    make(1s);
    FAIL() << "made";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), StartsWith("joining 1 ranks by NCCL timed out after 1 s"));
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

TEST_F(NcclGroupTest, ACallThatFailsInTheBackground) {
  make();
  script().looks_in_progress = 300;
  script().call_ends = ncclSystemError;
  const std::string what = broken_by<NcclError>([&] { group_->broadcast(region(), 0); });
  EXPECT_THAT(what, StartsWith("broadcast #1 (16 f32 at byte 0, from rank 0) failed: unhandled system error"));
}

TEST_F(NcclGroupTest, AWaitFindsAnErrorThatComesByItself) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make();
  script().stalls = true;
  const Work work = all_reduce();
  script().async = ncclRemoteError;
  const std::string what = broken_by<NcclError>([&] { work.wait_host(); });
  EXPECT_EQ(what, "allreduce #1 (sum of 16 f32 at byte 0) failed: remote process exited or there was a network error");
  EXPECT_THAT(remedy_, HasSubstr("logs of the other ranks"));
}

TEST_F(NcclGroupTest, APollFindsIt) {
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

TEST_F(NcclGroupTest, AnAbortLetsGoOfWhatIsUnderWay) {
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
  EXPECT_THAT(what, AllOf(StartsWith("allreduce #2 (sum of 16 f32 at byte 0, step 3) timed out after 0.3"),
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

TEST_F(NcclGroupTest, ACallThatStaysInTheBackgroundTimesOut) {
  make(500ms);
  script().call_hangs = true;
  const std::string what = broken_by<TimeoutError>([&] { all_reduce(); });
  EXPECT_THAT(what, StartsWith("allreduce #1 (sum of 16 f32 at byte 0) timed out after 0.5"));
}

TEST_F(NcclGroupTest, AnEndThatDoesNotComeTimesOut) {
  make(500ms);
  script().finalize_hangs = true;
  broken_by<TimeoutError>([&] { group_->shutdown(); });
  EXPECT_THAT(remedy_, HasSubstr("CUDA graphs"));
}

TEST(RollCall, NamesThoseWhoAreBehind) {
  RollCall::Answers answers;
  answers.all = {{8, 7, 0}, {5, 5, 0}, {8, 7, 0}, {7, 5, 0}};
  EXPECT_EQ(waiting_text(answers, 8),
            " waiting for rank 1, which has issued 5 and completed 5 operations; rank 3, which has issued 7 and "
            "completed 5 operations");
  EXPECT_EQ(first_behind(answers, 8), 1);
  EXPECT_EQ(first_behind(answers, 5), -1);
  EXPECT_THAT(waiting_text(answers, 5), HasSubstr("every rank has issued it"));
  answers = {{}, std::make_exception_ptr(TimeoutError("waiting for rank 2 (host b)"))};
  EXPECT_EQ(waiting_text(answers, 5), "; asked where they are: waiting for rank 2 (host b)");
  EXPECT_EQ(first_behind(answers, 5), -1);
}

// ---- Streams ----

TEST_F(NcclGroupTest, OperationsStandBetweenTheProducerAndWhoeverWaits) {
  soft_cuda::set_streams(soft_cuda::Streams::kLazy);
  Log log;
  make();
  script().on_run = [&] { log.add("operation"); };
  CudaStream consumer;
  soft_cuda::submit(producer_.get(), [&] { log.add("produce"); });
  const Work work = all_reduce();
  work.wait(consumer.view());
  soft_cuda::submit(consumer.get(), [&] { log.add("consume"); });
  soft_cuda::submit(producer_.get(), [&] { log.add("produce more"); });
  EXPECT_THAT(log.all(), IsEmpty());
  consumer.synchronize();
  EXPECT_THAT(log.all(), ElementsAre("produce", "operation", "consume"));
  work.wait_host();
  EXPECT_TRUE(work.done());
}

TEST_F(NcclGroupTest, AnEarlyOperationIsWaitedForByALaterMark) {
  soft_cuda::set_streams(soft_cuda::Streams::kLazy);
  make();
  int ran = 0;
  script().on_run = [&] { ++ran; };
  const Work first = all_reduce();
  for (int i = 0; i < 200; ++i) all_reduce();
  CudaStream consumer;
  first.wait(consumer.view());
  consumer.synchronize();
  EXPECT_GE(ran, 1);
  const Work last = all_reduce();
  last.wait(consumer.view());
  consumer.synchronize();
  EXPECT_EQ(ran, 202);
}

TEST_F(NcclGroupTest, TheHostWaitsBeforeTooManyAreUnderWay) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make();
  Work last;
  for (int i = 0; i < 3000; ++i) last = all_reduce();
  last.wait_host();
  EXPECT_EQ(last.sequence(), 3000u);
}

TEST_F(NcclGroupTest, CopiesComeAfterEverything) {
  soft_cuda::set_streams(soft_cuda::Streams::kLazy);
  make();
  auto* const values = reinterpret_cast<float*>(arena_->data());
  script().on_run = [&] { values[1] = 5; };
  soft_cuda::submit(producer_.get(), [&] { values[0] = 3; });
  all_reduce();
  soft_cuda::submit(producer_.get(), [&] { values[2] = 7; });
  std::vector<float> got(3);
  group_->copy(got.data(), values, 3 * sizeof(float));
  EXPECT_THAT(got, ElementsAre(3, 5, 7));

  script().on_run = nullptr;
  group_->copy(values, std::vector<float>{1, 2, 3, 4}.data(), 4 * sizeof(float));
  group_->zero({arena_.get(), 4, 2, DType::kF32});
  all_reduce();
  got.resize(4);
  group_->copy(got.data(), values, 4 * sizeof(float));
  EXPECT_THAT(got, ElementsAre(1, 0, 0, 4));
}

TEST_F(NcclGroupTest, TimesOperations) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make();
  CudaEvent origin(CudaEvent::Timing::kOn);
  origin.record(producer_.get());
  all_reduce();
  group_->time_operations(true);
  all_reduce(100);
  group_->broadcast(region(4), 0);
  group_->time_operations(false);
  all_reduce();
  const auto times = group_->device_times(origin);
  ASSERT_THAT(times, SizeIs(2));
  EXPECT_EQ(times[0].sequence, 2u);
  EXPECT_EQ(times[0].kind, OpKind::kAllReduce);
  EXPECT_EQ(times[0].bytes, 400u);
  EXPECT_EQ(times[1].kind, OpKind::kBroadcast);
  double last = 0;
  for (const OpTime& time : times)
    for (const double ms : {time.begin_ms, time.end_ms}) {
      EXPECT_GE(ms, last);
      last = ms;
    }
  group_->time_operations(true);
  EXPECT_THAT(group_->device_times(origin), IsEmpty());
}

// ---- Memory ----

TEST_F(NcclGroupTest, ArenasAreRegisteredAndFreed) {
  make();
  EXPECT_EQ(counts().allocations, 1);
  EXPECT_EQ(counts().registrations, 1);
  {
    const auto more = group_->allocate(100);
    const auto none = group_->allocate(0);
    EXPECT_EQ(counts().allocations, 2);
    EXPECT_EQ(counts().registrations, 2);
    EXPECT_EQ(none->bytes(), 0u);
    EXPECT_THAT(more->view<std::uint8_t>(0, 100), Each(0));
    group_->all_reduce({none.get(), 0, 0, DType::kF32}, ReduceOp::kSum).wait_host();
  }
  EXPECT_EQ(counts().allocations, 1);
  EXPECT_EQ(counts().registrations, 1);
}

TEST_F(NcclGroupTest, ArenasDoWithoutRegistration) {
  make();
  script().comm_register = ncclInvalidUsage;
  const auto refused = group_->allocate(100);
  script().comm_register = ncclSuccess;
  script().registers_nothing = true;
  const auto switched_off = group_->allocate(100);
  EXPECT_EQ(counts().registrations, 1);
  EXPECT_EQ(counts().allocations, 3);
  script().mem_alloc = ncclUnhandledCudaError;
  const auto from_cuda = group_->allocate(100);
  EXPECT_EQ(counts().allocations, 3);
  for (const auto* arena : {&refused, &switched_off, &from_cuda}) {
    EXPECT_THAT((*arena)->view<std::uint8_t>(0, 100), Each(0));
    group_->all_reduce({arena->get(), 0, 25, DType::kF32}, ReduceOp::kSum).wait_host();
  }
}

TEST_F(NcclGroupTest, TooLittleMemoryIsSaid) {
  make();
  EXPECT_THROW(group_->allocate(~std::size_t{0}), std::bad_alloc);
  try {
    group_->allocate(std::size_t{1} << 40);
    FAIL() << "allocated";
  } catch (const CudaError& error) {
    EXPECT_THAT(error.what(), AllOf(StartsWith("GPU 0 ("), HasSubstr("has no 1.1 TB for a collective's data"),
                                    HasSubstr("are free")));
  }
  all_reduce().wait_host();
}

TEST_F(NcclGroupTest, WhatABrokenGroupMayStillBeAtIsNotFreed) {
  make();
  script().call = ncclInternalError;
  EXPECT_THROW(all_reduce(), NcclError);
  arena_.reset();
  EXPECT_EQ(counts().allocations, 1);
}

TEST_F(NcclGroupTest, NotAnothersArena) {
  make();
  const auto host = control_.allocate(64);
  const std::string what = broken_by<InternalError>(
      [&] { group_->all_reduce({host.get(), 0, 1, DType::kF32}, ReduceOp::kSum); });
  EXPECT_THAT(what, HasSubstr("allreduce #1 (sum of 1 f32 at byte 0) on an arena of another group"));
}

TEST_F(NcclGroupTest, ObjectsGoThroughTheControlGroup) {
  make();
  EXPECT_THAT(group_->all_gather_text("hello"), ElementsAre("hello"));
  EXPECT_EQ(all_reduce().sequence(), 1u);
}

// ---- Captures ----

class Graph {
 public:
  explicit Graph(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream, &graph), "ending a capture");
    check_cuda(cudaGraphInstantiate(&graph_, graph, 0), "making a graph");
    check_cuda(cudaGraphDestroy(graph), "letting go of a graph");
  }
  ~Graph() { cudaGraphExecDestroy(graph_); }
  void launch(cudaStream_t stream) { check_cuda(cudaGraphLaunch(graph_, stream), "launching a graph"); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

class NcclCapture : public NcclGroupTest {
 protected:
  /// `operations` of them, each one after some work of the producer, and all waited for by it.
  std::unique_ptr<Graph> capture(int operations) {
    group_->begin_capture();
    check_cuda(cudaStreamBeginCapture(producer_.get(), cudaStreamCaptureModeThreadLocal), "beginning a capture");
    works_.clear();
    for (int i = 0; i < operations; ++i) {
      soft_cuda::submit(producer_.get(), [this] { log_.add("produce"); });
      works_.push_back(all_reduce());
    }
    for (const Work& work : works_) work.wait(producer_.view());
    soft_cuda::submit(producer_.get(), [this] { log_.add("consume"); });
    auto graph = std::make_unique<Graph>(producer_.get());
    EXPECT_EQ(group_->end_capture(), static_cast<std::uint64_t>(operations));
    return graph;
  }

  Log log_;
  std::vector<Work> works_;
};

TEST_F(NcclCapture, EachLaunchIsAsIfTheOperationsWereIssued) {
  make();
  script().on_run = [&] { log_.add("operation"); };
  EXPECT_EQ(all_reduce().sequence(), 1u);
  const auto graph = capture(2);
  EXPECT_THAT(log_.all(), ElementsAre("operation"));  // the one before

  // What was captured has not happened, and does not count.
  EXPECT_FALSE(works_[0].done());
  EXPECT_THROW(works_[0].wait_host(), InternalError);
  const Work between = all_reduce();
  EXPECT_EQ(between.sequence(), 2u);
  between.wait(producer_.view());

  for (int launch = 0; launch < 2; ++launch) {
    graph->launch(producer_.get());
    group_->replayed(2);
  }
  EXPECT_EQ(log_.all(),
            (std::vector<std::string>{"operation", "operation", "produce", "operation", "produce", "operation",
                                      "consume", "produce", "operation", "produce", "operation", "consume"}));
  const Work after = all_reduce();
  EXPECT_EQ(after.sequence(), 7u);
  after.wait_host();
  group_->shutdown();
}

TEST_F(NcclCapture, WorksOfACaptureAreThoseOfItsLaunch) {
  soft_cuda::set_streams(soft_cuda::Streams::kLazy);
  make();
  script().on_run = [&] { log_.add("operation"); };
  const auto graph = capture(1);
  const Work captured = works_[0];
  graph->launch(producer_.get());
  group_->replayed(1);
  CudaStream consumer;
  captured.wait(consumer.view());
  soft_cuda::submit(consumer.get(), [this] { log_.add("afterwards"); });
  consumer.synchronize();
  EXPECT_THAT(log_.all(), ElementsAre("produce", "operation", "consume", "afterwards"));
  captured.wait_host();
  EXPECT_TRUE(captured.done());
}

TEST_F(NcclCapture, AStallInALaunchIsNamed) {
  soft_cuda::set_streams(soft_cuda::Streams::kThreads);
  make(1s);
  script().stalls = true;
  const auto graph = capture(3);
  group_->set_step(12);
  graph->launch(producer_.get());
  group_->replayed(3);
  const std::string what = broken_by<TimeoutError>([&] {
    for (;;) group_->poll();
  });
  EXPECT_THAT(what, StartsWith("allreduce #1 (sum of 16 f32 at byte 0, step 12) timed out after 1"));
}

TEST_F(NcclCapture, ManyOperations) {
  make();
  const auto graph = capture(1500);
  for (int launch = 0; launch < 4; ++launch) {
    graph->launch(producer_.get());
    group_->replayed(1500);
  }
  const Work last = all_reduce();
  EXPECT_EQ(last.sequence(), 6001u);
  last.wait_host();
}

TEST_F(NcclCapture, MisuseIsFound) {
  make();
  EXPECT_THROW(group_->replayed(3), InternalError);
  EXPECT_THROW(group_->end_capture(), InternalError);
  group_->begin_capture();
  EXPECT_THROW(group_->begin_capture(), InternalError);
  EXPECT_THROW(group_->allocate(1), InternalError);
  EXPECT_THROW(group_->copy(nullptr, nullptr, 0), InternalError);
  EXPECT_EQ(group_->end_capture(), 0u);
  group_->replayed(0);
  all_reduce().wait_host();

  soft_cuda::set_streams(soft_cuda::Streams::kLazy);
  const auto graph = capture(1);
  all_reduce();
  graph->launch(producer_.get());
  EXPECT_THROW(group_->replayed(1), InternalError) << "nothing orders the launch after the operation before it";
}

// ---- A world of one ----

TEST(DeviceSelfGroup, IsInTheProducersOrder) {
  soft_cuda::set_streams(soft_cuda::Streams::kLazy);
  {
    const CudaStream producer, consumer;
    const auto group = make_device_self_group({.producer = producer.view()});
    EXPECT_EQ(group->size(), 1);
    EXPECT_EQ(group->device().kind, DeviceKind::kCuda);
    const auto arena = group->allocate(64);
    const Region region{arena.get(), 0, 16, DType::kF32};
    EXPECT_THAT(arena->view<float>(0, 16), Each(0.0f));
    float* const values = arena->view<float>(0, 16).data();

    soft_cuda::submit(producer.get(), [=] { values[0] = 3; });
    const Work work = group->all_reduce(region, ReduceOp::kSum);
    work.wait(consumer.view());
    float seen = 0;
    soft_cuda::submit(consumer.get(), [&] { seen = values[0]; });
    consumer.synchronize();
    EXPECT_EQ(seen, 3);

    soft_cuda::submit(producer.get(), [=] { values[0] = 4; });
    float copied = 0;
    group->copy(&copied, values, sizeof copied);
    EXPECT_EQ(copied, 4);
    soft_cuda::submit(producer.get(), [=] { values[0] = 5; });
    group->all_reduce(region, ReduceOp::kSum).wait_host();
    EXPECT_EQ(values[0], 5);
    group->zero(region);
    group->copy(&copied, values, sizeof copied);
    EXPECT_EQ(copied, 0);
    EXPECT_THROW(group->zero({arena.get(), 4, 16, DType::kF32}), UsageError);
    EXPECT_THAT(group->all_gather_text("one"), ElementsAre("one"));
    EXPECT_THROW(group->allocate(~std::size_t{0}), std::bad_alloc);
    EXPECT_EQ(group->allocate(0)->bytes(), 0u);
  }
  soft_cuda::set_streams(soft_cuda::Streams::kEager);
}

TEST(DeviceSelfGroup, CountsWhatIsCaptured) {
  const CudaStream producer;
  const auto group = make_device_self_group({.producer = producer.view()});
  const auto arena = group->allocate(64);
  const Region region{arena.get(), 0, 16, DType::kF32};
  EXPECT_EQ(group->all_reduce(region, ReduceOp::kSum).sequence(), 1u);
  group->begin_capture();
  group->all_reduce(region, ReduceOp::kSum);
  group->barrier();
  EXPECT_EQ(group->end_capture(), 2u);
  group->replayed(2);
  group->replayed(2);
  EXPECT_EQ(group->barrier().sequence(), 6u);
}

TEST(DeviceSelfGroup, NeedsAGpu) {
  EXPECT_THROW(make_device_self_group({.device = 7, .producer = {}}), DeviceError);
  EXPECT_THROW(make_device_self_group({.device = -1, .producer = {}}), DeviceError);
}

}  // namespace
}  // namespace lockstep::comm
