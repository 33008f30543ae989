// What only a GPU in software can show of the backend: who waits for whom, and machines that lack something.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/cuda/runtime.h"
#include "lockstep/nn/ops/backend.h"
#include "nn/ops/cuda/memory.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::nn {
namespace {

using soft_cuda::Streams;
using ::testing::HasSubstr;

class SoftBackend : public ::testing::Test {
 protected:
  SoftBackend() { soft_cuda::set_machine({.streams = Streams::kLazy}); }
  ~SoftBackend() override { soft_cuda::set_machine({}); }
};

TEST_F(SoftBackend, CopiesABatchBesideTheStepBefore) {
  const auto backend = make_cuda_backend({});
  std::vector<int> done(6, 0);
  std::vector<float> x(100, 0.0f);
  for (std::size_t step = 0; step < done.size(); ++step) {
    backend->stage(x.data(), {100}, DType::kF32, 0);
    backend->finish_inputs();
    if (step >= 3) {  // the first three get new buffers
      EXPECT_EQ(done[step - 1], 0) << "copying for step " << step << " waited for the step before";
      EXPECT_EQ(done[step - 3], 1) << "the buffer of step " << step - 3 << " was overwritten too early";
    }
    soft_cuda::submit(native(backend->stream()), [&done, step] { done[step] = 1; });
  }
}

TEST_F(SoftBackend, KernelsWaitForTheirBatch) {
  const auto backend = make_cuda_backend({});
  const PinnedMemory pinned(sizeof(float));
  auto* const value = reinterpret_cast<float*>(pinned.data());
  *value = 5;
  const Tensor x = backend->stage(value, {1}, DType::kF32, 0);
  float got = 0;
  soft_cuda::submit(native(backend->stream()), [&] { got = *x.f32(); });
  check_cuda(cudaStreamSynchronize(native(backend->stream())), "waiting");
  EXPECT_EQ(got, 5.0f);
}

TEST_F(SoftBackend, NewBuffersWaitForEarlierUsersOfTheirMemory) {
  const auto backend = make_cuda_backend({});
  float seen = 0;
  {
    const Tensor before = backend->empty({100});
    const float one = 1;
    backend->write(std::as_bytes(std::span(&one, 1)), before);
    soft_cuda::submit(native(backend->stream()), [&, data = before.f32()] { seen = *data; });
  }
  const PinnedMemory pinned(400);
  backend->stage(pinned.data(), {100}, DType::kF32, 0);  // takes the same memory
  backend->finish_inputs();
  EXPECT_EQ(seen, 1.0f);
}

TEST_F(SoftBackend, NothingButFinishInputsWaits) {
  const auto backend = make_cuda_backend({});
  const auto download = backend->make_async_download(4);
  const Tensor x = backend->empty({1});
  std::vector<float> batch(10, 1.0f);
  backend->stage(batch.data(), {10}, DType::kF32, 0);
  const std::uint64_t before = soft_cuda::counts().host_waits;
  for (int step = 0; step < 5; ++step) {
    backend->stage(batch.data(), {10}, DType::kF32, 0);
    const float one = 1;
    backend->write(std::as_bytes(std::span(&one, 1)), x);
    download->begin(x);
    download->ready();
  }
  EXPECT_EQ(soft_cuda::counts().host_waits, before);
  backend->finish_inputs();
  EXPECT_EQ(soft_cuda::counts().host_waits, before + 1);
  backend->finish_inputs();
  EXPECT_EQ(soft_cuda::counts().host_waits, before + 1) << "there was nothing to wait for";
}

// It is an answer, not an error that the next call would be blamed for.
TEST_F(SoftBackend, NotReadyLeavesNoError) {
  const auto backend = make_cuda_backend({});
  const auto download = backend->make_async_download(4);
  const Tensor x = backend->zeros({1});
  download->begin(x);
  EXPECT_FALSE(download->ready());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// Collectives are in a stream of high priority, and stay so.
TEST_F(SoftBackend, GraphsKeepThePrioritiesOfStreams) {
  const auto backend = make_cuda_backend({});
  const Tensor x = backend->empty({1});
  const auto before = soft_cuda::counts().prioritised_graphs;
  std::string why_not;
  const auto graph = backend->capture([&] { backend->pointwise().fill(x, 1.0f); }, why_not);
  ASSERT_NE(graph, nullptr) << why_not;
  EXPECT_EQ(soft_cuda::counts().prioritised_graphs, before + 1);
}

TEST_F(SoftBackend, OneContextOnItsOwnGpu) {
  {
    const auto backend = make_cuda_backend({.device = 1});
    const auto staging = backend->staging_memory();
    std::byte* memory = nullptr;
    std::thread([&] { memory = staging->allocate(100); }).join();
    std::thread([&] { staging->free(memory, 100); }).join();
    std::thread([&] { backend->empty({1000}); }).join();
    std::vector<float> batch(10, 1.0f);
    backend->stage(batch.data(), {10}, DType::kF32, 0);
    const auto download = backend->make_async_download(4);
    EXPECT_EQ(soft_cuda::counts().contexts, 1u);
  }
  EXPECT_EQ(soft_cuda::counts().contexts, 1u);
}

TEST_F(SoftBackend, GivesEverythingBack) {
  {
    const auto backend = make_cuda_backend({});
    std::vector<float> batch(10, 1.0f);
    backend->stage(batch.data(), {10}, DType::kF32, 0);
    const Tensor x = backend->empty({5});
    const auto download = backend->make_async_download(20);
    download->begin(x);
  }
  const soft_cuda::Counts left = soft_cuda::counts();
  EXPECT_EQ(left.allocations, 0u);
  EXPECT_EQ(left.pinned, 0u);
  EXPECT_EQ(left.live_streams, 0u);
  EXPECT_EQ(left.live_events, 0u);
}

TEST_F(SoftBackend, SmallGpuFillsUp) {
  soft_cuda::set_memory_bytes(1'000'000);
  const auto backend = make_cuda_backend({});
  const Tensor held = backend->empty({100'000});
  try {
    const Tensor wanted = backend->empty({200'000});
    FAIL() << "more than there is";
  } catch (const OutOfMemoryError& error) {
    EXPECT_STREQ(error.what(),
                 "GPU 0 (Soft GPU, 0000:1b:00.0) is out of memory: 917.5 kB more were asked for; this process holds "
                 "458.8 kB, 541.2 kB of 1.0 MB are free");
  }
}

// What was freed, but is of another size, goes back to the GPU, though kernels that use it may still be under way.
TEST_F(SoftBackend, IdleMemoryIsFreedWhenNeeded) {
  soft_cuda::set_memory_bytes(1'000'000);
  const auto backend = make_cuda_backend({});
  const Tensor held = backend->empty({50'000});
  bool done = false;
  {
    const Tensor used = backend->empty({100'000});
    soft_cuda::submit(native(backend->stream()), [&, data = used.f32()] {
      *data = 1;  // the machine would stop here, had it been freed before
      done = true;
    });
  }
  const Tensor wanted = backend->empty({150'000});
  EXPECT_TRUE(done);
  const CachingAllocator::Stats stats = backend->allocator().stats();
  EXPECT_EQ(stats.bytes_held, stats.bytes_in_use);
  EXPECT_EQ(soft_cuda::counts().allocations, 2u);
  EXPECT_THROW(backend->empty({100'000}), OutOfMemoryError);
}

// The GPU does what never ends by itself, as a collective whose other ranks are gone: an error must get out all the
// same.
void leave_and_exit(bool while_unwinding) {
  soft_cuda::set_machine({.streams = Streams::kThreads});
  const auto backend = make_cuda_backend({});
  const Tensor x = backend->empty({1});
  soft_cuda::submit(native(backend->stream()), [] { std::this_thread::sleep_for(std::chrono::hours(1)); });
  const auto leave = [&] {
    const auto download = backend->make_async_download(4);
    const auto staging = backend->staging_memory();
    const std::unique_ptr<std::byte, std::function<void(std::byte*)>> batch(
        staging->allocate(100), [&](std::byte* data) { staging->free(data, 100); });
    backend->stage(batch.get(), {25}, DType::kF32, 0);  // comes after the kernels before
    download->begin(x);
    if (while_unwinding) throw std::runtime_error("something");
  };
  try {
    leave();
  } catch (const std::runtime_error&) {
  }
  std::_Exit(soft_cuda::counts().pinned == 2 ? 0 : 1);
}

TEST_F(SoftBackend, MemoryInUseOutlivesAnError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(leave_and_exit(true), ::testing::ExitedWithCode(0), "") << "waits for nothing";
  EXPECT_EXIT(leave_and_exit(false), ::testing::ExitedWithCode(0), "") << "waits for a while";
}

TEST_F(SoftBackend, BatchesAreFreedWhenTheyHaveBeenRead) {
  soft_cuda::set_machine({.streams = Streams::kThreads});
  const auto backend = make_cuda_backend({});
  std::atomic<bool> goes_on = false;
  soft_cuda::submit(native(backend->stream()), [&] { goes_on.wait(false); });
  const auto staging = backend->staging_memory();
  std::byte* const batch = staging->allocate(100);
  backend->stage(batch, {25}, DType::kF32, 0);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    goes_on = true;
    goes_on.notify_all();
  });
  staging->free(batch, 100);  // the copy would find its memory gone
  EXPECT_TRUE(goes_on);
  EXPECT_EQ(soft_cuda::counts().pinned, 0u);
  other.join();
}

// probe_cuda() probes once in a process: each machine gets a process of its own.
void make_on(const soft_cuda::Machine& machine) {
  soft_cuda::set_machine(machine);
  try {
    make_cuda_backend({.device = 0});
  } catch (const DeviceError& error) {
    std::fprintf(stderr, "%s\n", error.line().c_str());
    std::exit(error.code());
  }
  std::exit(0);
}

TEST_F(SoftBackend, MachinesThatCannot) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto exits_4 = ::testing::ExitedWithCode(4);
  EXPECT_EXIT(make_on({.driver_version = 0}), exits_4, "no NVIDIA driver is loaded → install");
  EXPECT_EXIT(make_on({.driver_version = 12080}), exits_4, "runs CUDA up to 12.8, this program needs 13");
  EXPECT_EXIT(make_on({.sees_devices = false}), exits_4, "no GPU is visible to this process");
  EXPECT_EXIT(
      make_on({.compute_major = 7}), exits_4,
      "GPU 0 \\(Soft GPU, 0000:1b:00.0\\) has compute capability 7.0, Volta or Turing, too old for this program → use "
      "a GPU of compute capability 8.0");
  EXPECT_EXIT(make_on({.runs_kernels = false}), exits_4,
              "has compute capability 9.0, and this program was built for [0-9., a-z]+ → build it with "
              "-DCMAKE_CUDA_ARCHITECTURES=90-real");
  EXPECT_EXIT(make_on({}), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace lockstep::nn
