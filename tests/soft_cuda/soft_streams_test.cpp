// The soft GPU's memory, streams and events.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "base/cuda/runtime.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::soft_cuda {
namespace {

class SoftMachine : public ::testing::Test {
 protected:
  SoftMachine() { set_machine({}); }
  ~SoftMachine() override {
    set_streams(Streams::kEager);
    set_machine({});
  }
  float* allocate(std::size_t count) {
    void* data = nullptr;
    check_cuda(cudaMalloc(&data, count * sizeof(float)), "cudaMalloc");
    return static_cast<float*>(data);
  }
};

TEST_F(SoftMachine, NewMemoryIsNotANumber) {
  float* const data = allocate(4);
  float got = 0;
  ASSERT_EQ(cudaMemcpy(&got, data + 3, sizeof got, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_TRUE(std::isnan(got));
  cudaFree(data);
}

TEST_F(SoftMachine, CopiesWithAWrongKindFail) {
  float* const data = allocate(4);
  float host[8] = {};
  EXPECT_EQ(cudaMemcpy(host, data, 16, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(data, host, 16, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(data, host, 32, cudaMemcpyHostToDevice), cudaErrorInvalidValue) << "16 bytes too far";
  EXPECT_EQ(cudaMemcpy(data + 1, host, 16, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(data, host, 16, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemset(host, 0, 16), cudaErrorInvalidValue);
  cudaFree(data);
}

TEST_F(SoftMachine, MemoryRunsOutAndComesBack) {
  set_memory_bytes(1000);
  void* first = nullptr;
  void* second = nullptr;
  EXPECT_EQ(cudaMalloc(&first, 600), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&second, 600), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  std::size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  EXPECT_EQ(free, 400u);
  EXPECT_EQ(total, 1000u);
  cudaFree(first);
  EXPECT_EQ(cudaMalloc(&second, 600), cudaSuccess);
  cudaFree(second);
}

TEST_F(SoftMachine, WritesBesideAnAllocationAreFatal) {
  float* const data = allocate(4);
  EXPECT_DEATH(
      {
        data[4] = 1;
        cudaFree(data);
      },
      "wrote beside");
  cudaFree(data);
}

TEST_F(SoftMachine, LazyStreamsRunWhenSomebodyWaits) {
  set_streams(Streams::kLazy);
  int done = 0;
  {
    const CudaStream stream;
    submit(stream.get(), [&] { done = 1; });
    EXPECT_EQ(done, 0);
    stream.synchronize();
    EXPECT_EQ(done, 1);
  }
}

TEST_F(SoftMachine, LazyStreamsAreOrderedByEventsAlone) {
  set_streams(Streams::kLazy);
  const CudaStream producer, consumer;
  int made = 0, seen_without = -1, seen_with = -1;
  submit(producer.get(), [&] { made = 1; });
  CudaEvent event;
  event.record(producer.get());
  submit(consumer.get(), [&] { seen_without = made; });
  event.make_wait(consumer.get());
  submit(consumer.get(), [&] { seen_with = made; });
  consumer.synchronize();
  EXPECT_EQ(seen_without, 0);
  EXPECT_EQ(seen_with, 1);
}

TEST_F(SoftMachine, QueriesOfALazyStreamComeToAnEnd) {
  set_streams(Streams::kLazy);
  const CudaStream stream;
  CudaEvent event;
  int done = 0;
  submit(stream.get(), [&] { ++done; });
  submit(stream.get(), [&] { ++done; });
  event.record(stream.get());
  EXPECT_FALSE(event.done());
  int asked = 1;
  while (!event.done()) ++asked;
  EXPECT_EQ(done, 2);
  EXPECT_LE(asked, 4);
}

TEST_F(SoftMachine, PinnedMemoryIsReadWhenTheCopyRuns) {
  set_streams(Streams::kLazy);
  float* const data = allocate(1);
  float got_pinned = 0, got_pageable = 0;
  {
    const CudaStream stream;
    const PinnedMemory pinned(sizeof(float));
    auto* const value = reinterpret_cast<float*>(pinned.data());
    *value = 1;
    cudaMemcpyAsync(data, value, sizeof(float), cudaMemcpyHostToDevice, stream.get());
    *value = 2;  // too early
    cudaMemcpyAsync(&got_pinned, data, sizeof(float), cudaMemcpyDeviceToHost, stream.get());
    float pageable = 3;
    cudaMemcpyAsync(data, &pageable, sizeof(float), cudaMemcpyHostToDevice, stream.get());
    pageable = 4;
    cudaMemcpyAsync(&got_pageable, data, sizeof(float), cudaMemcpyDeviceToHost, stream.get());
  }
  EXPECT_EQ(got_pinned, 2.0f);
  EXPECT_EQ(got_pageable, 3.0f);
  cudaFree(data);
}

TEST_F(SoftMachine, GraphsReplayCapturedWork) {
  const CudaStream stream, side;
  CudaEvent fork, join;
  int runs = 0, side_runs = 0;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  submit(stream.get(), [&] { ++runs; });
  fork.record(stream.get());
  fork.make_wait(side.get());
  submit(side.get(), [&] { ++side_runs; });
  join.record(side.get());
  join.make_wait(stream.get());
  ASSERT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess);
  EXPECT_EQ(runs, 0);
  ASSERT_EQ(cudaGraphInstantiate(&made, graph, 0), cudaSuccess);
  cudaGraphDestroy(graph);
  cudaGraphLaunch(made, stream.get());
  cudaGraphLaunch(made, stream.get());
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(side_runs, 2);
  cudaGraphExecDestroy(made);
}

// What a graph of two branches and a join ran, at each of its replays.
std::vector<std::string> orders_of(bool joins) {
  const CudaStream stream, side;
  CudaEvent fork, join;
  std::string order;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal);
  const auto add = [&](const CudaStream& to, char name) { submit(to.get(), [&order, name] { order += name; }); };
  add(stream, 'a');
  fork.record(stream.get());
  add(stream, 'b');
  fork.make_wait(side.get());
  add(side, 'x');
  add(side, 'y');
  join.record(side.get());
  if (!joins) add(stream, 'c');
  join.make_wait(stream.get());
  if (joins) add(stream, 'c');
  EXPECT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphInstantiate(&made, graph, 0), cudaSuccess);
  cudaGraphDestroy(graph);
  std::vector<std::string> orders;
  for (int i = 0; i < 100; ++i) {
    order.clear();
    cudaGraphLaunch(made, stream.get());
    orders.push_back(order);
  }
  cudaGraphExecDestroy(made);
  return orders;
}

TEST_F(SoftMachine, GraphsRunInEveryOrderThatTheirEdgesAllow) {
  const auto joined = orders_of(true);
  EXPECT_EQ(std::set(joined.begin(), joined.end()), (std::set<std::string>{"abxyc", "axbyc", "axybc"}));
  // Without the wait that was meant, the last one may come before the branch is done.
  const auto apart = orders_of(false);
  EXPECT_EQ(std::set(apart.begin(), apart.end()),
            (std::set<std::string>{"abcxy", "abxcy", "abxyc", "axbcy", "axbyc", "axybc"}));
}

TEST_F(SoftMachine, OrdersOfGraphsFollowFromTheSeed) {
  set_machine({.seed = 5});
  const auto first = orders_of(true);
  set_machine({.seed = 5});
  EXPECT_EQ(orders_of(true), first);
}

TEST_F(SoftMachine, CollectivesOfAGraphStayInTheirOrder) {
  const CudaStream stream, side;
  CudaEvent fork, join;
  std::string order;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal);
  fork.record(stream.get());
  fork.make_wait(side.get());
  submit_collective(stream.get(), [&] { order += 'a'; });
  submit_collective(side.get(), [&] { order += 'b'; });
  submit_collective(stream.get(), [&] { order += 'c'; });
  join.record(side.get());
  join.make_wait(stream.get());
  ASSERT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess);
  cudaGraphInstantiate(&made, graph, 0);
  cudaGraphDestroy(graph);
  for (int i = 0; i < 20; ++i) cudaGraphLaunch(made, stream.get());
  cudaGraphExecDestroy(made);
  for (std::size_t i = 0; i < order.size(); i += 3) EXPECT_EQ(order.substr(i, 3), "abc");
}

TEST_F(SoftMachine, CallsThatCannotBeCapturedBreakTheCapture) {
  const CudaStream stream;
  const CudaEvent event;
  void* memory = nullptr;
  const auto capture_with = [&](cudaStreamCaptureMode mode, auto call) {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(stream.get(), mode), cudaSuccess);
    const cudaError_t refused = call();
    const cudaError_t later = submit(stream.get(), [] {});
    const cudaError_t ended = cudaStreamEndCapture(stream.get(), &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    return std::vector{refused, later, ended};
  };
  const std::vector broken = {cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated,
                              cudaErrorStreamCaptureInvalidated};
  const auto strict = cudaStreamCaptureModeThreadLocal;
  EXPECT_EQ(capture_with(strict, [&] { return cudaStreamSynchronize(stream.get()); }), broken);
  EXPECT_EQ(capture_with(strict, [&] { return cudaEventQuery(event.get()); }), broken);
  EXPECT_EQ(capture_with(strict, [&] { return cudaMalloc(&memory, 8); }), broken);
  EXPECT_EQ(capture_with(cudaStreamCaptureModeRelaxed, [&] { return cudaEventQuery(event.get()); }),
            std::vector(3, cudaSuccess));
}

TEST_F(SoftMachine, CaptureWithAnUnjoinedStreamFails) {
  const CudaStream stream, side;
  CudaEvent fork;
  cudaGraph_t graph = nullptr;
  cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal);
  fork.record(stream.get());
  fork.make_wait(side.get());
  EXPECT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaErrorStreamCaptureUnjoined);

  // Nor may work follow the mark by which it came back.
  cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal);
  fork.record(stream.get());
  fork.make_wait(side.get());
  submit(side.get(), [] {});
  CudaEvent join;
  join.record(side.get());
  submit(side.get(), [] {});
  join.make_wait(stream.get());
  EXPECT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaErrorStreamCaptureUnjoined);
}

TEST_F(SoftMachine, DevicesHaveTheirOwnMemoryAndStreams) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  float* const there = allocate(1);
  const CudaStream stream;
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(there, 0, 4, stream.get()), cudaErrorInvalidResourceHandle) << "a stream of another GPU";
  float* const here = allocate(1);
  EXPECT_EQ(cudaMemcpyPeer(there, 0, here, 1, 4), cudaErrorInvalidValue) << "the wrong way round";
  EXPECT_EQ(cudaMemcpyPeer(there, 1, here, 0, 4), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  const CudaEvent event;
  EXPECT_EQ(cudaEventRecord(event.get(), stream.get()), cudaErrorInvalidResourceHandle) << "an event of another GPU";
  EXPECT_EQ(counts().contexts, 2u);
  cudaFree(here);
  cudaFree(there);
}

}  // namespace
}  // namespace lockstep::soft_cuda
