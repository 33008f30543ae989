// The NCCL group among streams: order, copies, memory, captures.
#include <gmock/gmock.h>

#include "tests/comm/nccl/nccl_fixture.h"

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

// ---- Streams ----

TEST_F(NcclGroupTest, OperationsRunAfterTheProducerAndBeforeWaiters) {
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
  producer_.synchronize();  // what it still has to do uses the log
}

// NCCL's call returns before its kernel has been given to the stream.
TEST_F(NcclGroupTest, WaitersRunAfterBackgroundLaunches) {
  soft_cuda::set_streams(soft_cuda::Streams::kLazy);
  script().looks_in_progress = 3;
  make();
  Log log;
  script().on_run = [&] { log.add("operation"); };
  CudaStream consumer;
  const Work work = all_reduce();
  work.wait(consumer.view());
  soft_cuda::submit(consumer.get(), [&] { log.add("consume"); });
  consumer.synchronize();
  EXPECT_THAT(log.all(), ElementsAre("operation", "consume"));
  work.wait_host();
  EXPECT_TRUE(work.done());
}

TEST_F(NcclGroupTest, LaterEventCoversEarlierOperations) {
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

TEST_F(NcclGroupTest, HostWaitsWhenTheQueueIsFull) {
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

TEST_F(NcclGroupTest, RefusesACaptureThatItWasNotToldOf) {
  make();
  all_reduce().wait_host();
  check_cuda(cudaStreamBeginCapture(producer_.get(), cudaStreamCaptureModeThreadLocal), "beginning a capture");
  try {
    all_reduce();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("allreduce #2 (sum of 16 f32 at byte 0) in the capture of a CUDA graph"));
  }
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(producer_.get(), &graph), "ending a capture");
  check_cuda(cudaGraphDestroy(graph), "destroying a graph");
  // The group is as it was.
  const Work work = all_reduce();
  work.wait_host();
  EXPECT_EQ(work.sequence(), 2u);
  group_->shutdown();
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

TEST_F(NcclGroupTest, OutOfMemoryIsReported) {
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

TEST_F(NcclGroupTest, BrokenGroupKeepsMemoryInUse) {
  make();
  script().call = ncclInternalError;
  EXPECT_THROW(all_reduce(), NcclError);
  arena_.reset();
  EXPECT_EQ(counts().allocations, 1);
}

TEST_F(NcclGroupTest, ArenaOfAnotherGroupIsRefused) {
  make();
  const auto host = control_.allocate(64);
  EXPECT_THROW(group_->all_reduce({host.get(), 0, 1, DType::kF32}, ReduceOp::kSum), UsageError);
  EXPECT_EQ(all_reduce().sequence(), 1u) << "nothing is broken";
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

TEST_F(NcclCapture, LaunchEqualsIssuingTheOperations) {
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
  // Of a graph, what the producer does for the second operation may run before the first one, too.
  std::string order;
  for (const std::string& entry : log_.all()) order += entry[0];
  EXPECT_THAT(order, ::testing::MatchesRegex("oo(popo|ppoo)c(popo|ppoo)c"));
  const Work after = all_reduce();
  EXPECT_EQ(after.sequence(), 7u);
  after.wait_host();
  group_->shutdown();
}

TEST_F(NcclCapture, WorkHandlesOfACaptureReferToItsLaunch) {
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
  EXPECT_THAT(what, StartsWith("allreduce #1 (sum of 16 f32 at byte 0, step 12) timed out after "));
}

// Something in a step that cannot be captured: the steps run without a graph.
TEST_F(NcclCapture, BrokenCaptureLeavesTheGroupUsable) {
  make();
  group_->begin_capture();
  check_cuda(cudaStreamBeginCapture(producer_.get(), cudaStreamCaptureModeThreadLocal), "beginning a capture");
  all_reduce().wait(producer_.view());
  EXPECT_NE(cudaStreamSynchronize(producer_.get()), cudaSuccess);
  EXPECT_THROW(all_reduce(), CudaError);
  cudaGraph_t graph = nullptr;
  EXPECT_NE(cudaStreamEndCapture(producer_.get(), &graph), cudaSuccess);
  static_cast<void>(cudaGetLastError());
  group_->end_capture();

  const Work work = all_reduce();
  EXPECT_EQ(work.sequence(), 1u);
  work.wait_host();
  group_->shutdown();
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

}  // namespace
}  // namespace lockstep::comm
