// A GPU as a Backend: its memory, and what goes there and comes back.
#include "lockstep/nn/ops/backend.h"

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "base/cuda/runtime.h"

namespace lockstep::nn {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

class CudaBackendTest : public ::testing::Test {
 protected:
  template <class T>
  Tensor upload(const std::vector<T>& values) {
    Tensor made = backend_->empty({static_cast<std::int64_t>(values.size())}, dtype_of<T>());
    backend_->upload(std::as_bytes(std::span(values)), made);
    return made;
  }
  template <class T>
  std::vector<T> download(const Tensor& tensor) {
    std::vector<T> values(static_cast<std::size_t>(tensor.count()));
    backend_->download(tensor, std::as_writable_bytes(std::span(values)));
    return values;
  }

  std::unique_ptr<Backend> backend_ = make_cuda_backend({});
};

std::vector<float> counted(std::size_t count, float first) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

TEST_F(CudaBackendTest, TensorsOutliveIt) {
  const std::vector<float> values = counted(1000, 1.0f);
  Tensor kept = upload(values);
  const Tensor idle = upload(values);
  backend_.reset();
  std::vector<float> there(values.size());
  ASSERT_EQ(cudaMemcpy(there.data(), kept.raw(), kept.bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(there, values);
  kept = Tensor();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(CudaBackendTest, SaysWhatItIs) {
  EXPECT_EQ(backend_->device(), (Device{DeviceKind::kCuda, 0}));
  EXPECT_THAT(backend_->describe(), MatchesRegex("cuda:0, .+, CUDA 1[0-9]\\.[0-9], driver for CUDA 1[0-9]\\.[0-9]"));
  EXPECT_EQ(backend_->steps_ahead(), 1);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) EXPECT_TRUE(backend_->computes_in(dtype));
  EXPECT_FALSE(backend_->computes_in(DType::kF64));
  EXPECT_NE(backend_->stream().native, nullptr);
  EXPECT_NE(backend_->cache_block_bytes() / 4, 0u);
}

TEST_F(CudaBackendTest, UploadsAndDownloadsWhatItWasGiven) {
  const auto values = counted(1000, 3.0f);
  const Tensor x = upload(values);
  EXPECT_EQ(download<float>(x), values);
  const std::vector<std::int64_t> longs = {1, -2, std::int64_t{1} << 50};
  EXPECT_EQ(download<std::int64_t>(upload(longs)), longs);
}

TEST_F(CudaBackendTest, UploadsAndDownloadsFirstBytesOnly) {
  const Tensor x = upload(counted(8, 0.0f));
  const std::array<float, 2> two = {-1.0f, -2.0f};
  backend_->upload(std::as_bytes(std::span(two)), x);
  std::array<float, 3> got{};
  backend_->download(x, std::as_writable_bytes(std::span(got)));
  EXPECT_THAT(got, ::testing::ElementsAre(-1.0f, -2.0f, 2.0f));
}

TEST_F(CudaBackendTest, EmptyTensorsAreNoTrouble) {
  const Tensor none = backend_->empty({0, 7});
  EXPECT_TRUE(none.defined());
  backend_->upload({}, none);
  EXPECT_TRUE(download<float>(none).empty());
  const Tensor fed = backend_->stage(nullptr, {0, 3}, DType::kF32, 0);
  EXPECT_TRUE(fed.defined());
  backend_->finish_inputs();
  const auto download = backend_->make_async_download(0);
  download->begin(none);
  while (!download->ready()) std::this_thread::yield();
  EXPECT_TRUE(download->bytes().empty());
}

TEST_F(CudaBackendTest, MemoryThatIsGivenBackIsUsedAgain) {
  const void* first = nullptr;
  { first = backend_->empty({1000}).raw(); }
  const std::uint64_t before = backend_->allocator().stats().system_allocations;
  const Tensor second = backend_->empty({990});
  EXPECT_EQ(second.raw(), first);
  EXPECT_EQ(backend_->allocator().stats().system_allocations, before);
}

TEST_F(CudaBackendTest, OutOfMemorySaysWhereHowMuchAndWhatThereIs) {
  const Tensor held = backend_->empty({1 << 20});
  try {
    const Tensor wanted = backend_->empty({std::int64_t{1} << 38});
    FAIL() << "got a terabyte";
  } catch (const OutOfMemoryError& error) {
    EXPECT_THAT(
        error.what(),
        MatchesRegex("GPU 0 \\(.+, [0-9a-fA-F:]+\\.[0-9]\\) is out of memory: 1.1 TB more were asked for; this process "
                     "holds .+ MB, .+ of .+ are free"));
    EXPECT_THAT(error.remedy(), HasSubstr("smaller batch"));
    EXPECT_EQ(error.code(), static_cast<int>(ExitCode::kDevice));
  }
  EXPECT_EQ(download<float>(upload(counted(10, 1.0f))), counted(10, 1.0f)) << "and it works on";
}

TEST_F(CudaBackendTest, WritesInTheOrderOfTheWorkAndTakesBytesAtOnce) {
  const Tensor to = upload(std::vector<float>(17, 9.0f));
  const Tensor seen = backend_->empty({5, 16});
  std::array<float, 16> values{};
  for (std::size_t i = 0; i < 5; ++i) {
    values.fill(static_cast<float>(i));
    backend_->write(std::as_bytes(std::span(values)), to);
    check_cuda(cudaMemcpyAsync(seen.slice(static_cast<std::int64_t>(i), static_cast<std::int64_t>(i) + 1).raw(),
                               to.raw(), 64, cudaMemcpyDeviceToDevice, native(backend_->stream())),
               "copying");
    values.fill(-1.0f);
  }
  const auto got = download<float>(seen);
  for (std::size_t i = 0; i < 80; ++i) EXPECT_EQ(got[i], std::floor(static_cast<float>(i) / 16)) << i;
  EXPECT_EQ(download<float>(to)[16], 9.0f) << "what follows stays";

  const std::array<std::uint8_t, 3> bytes = {1, 2, 3};
  const Tensor small = upload(std::vector<std::uint8_t>{7, 7, 7, 7});
  backend_->write(std::as_bytes(std::span(bytes)), small);
  backend_->write({}, small);
  EXPECT_THAT(download<std::uint8_t>(small), ::testing::ElementsAre(1, 2, 3, 7));
}

TEST_F(CudaBackendTest, AsyncDownloadsReadValuesInStreamOrder) {
  const Tensor x = upload(std::vector<float>{1.0f, 2.0f});
  const auto first = backend_->make_async_download(8), second = backend_->make_async_download(64);
  for (float round = 0; round < 3; ++round) {
    const std::array<float, 2> now = {round, round + 0.5f};
    backend_->write(std::as_bytes(std::span(now)), x);
    first->begin(x);
    const std::array<float, 2> later = {-round, -1.0f};
    backend_->write(std::as_bytes(std::span(later)), x);
    second->begin(x);
    while (!second->ready()) std::this_thread::yield();
    EXPECT_TRUE(first->ready()) << "it came before";
    std::array<float, 2> got{};
    ASSERT_EQ(first->bytes().size(), 8u);
    std::memcpy(got.data(), first->bytes().data(), 8);
    EXPECT_EQ(got, now);
    std::memcpy(got.data(), second->bytes().data(), 8);
    EXPECT_EQ(got, later);
  }
}

// Each batch is kept by the device, as a step would read it, and compared in the end.
TEST_F(CudaBackendTest, BatchesArriveWhole) {
  constexpr int kBatches = 40;
  const std::shared_ptr<MemorySource> staging = backend_->staging_memory();
  const std::size_t bytes = 600 * sizeof(float);
  std::byte* const memory = staging->allocate(bytes);
  auto* const values = reinterpret_cast<float*>(memory);
  std::vector<Tensor> kept;
  for (int i = 0; i < kBatches; ++i) {
    const std::int64_t rows = i % 5 == 4 ? 7 : (i % 3 == 2 ? 59 : 60);
    backend_->finish_inputs();
    for (std::int64_t j = 0; j < rows * 10; ++j) values[j] = 1000.0f * static_cast<float>(i) + static_cast<float>(j);
    const Tensor x = backend_->stage(values, {rows, 10}, DType::kF32, 0);
    EXPECT_EQ(x.shape(), (Shape{rows, 10}));
    kept.push_back(backend_->empty(x.shape()));
    check_cuda(
        cudaMemcpyAsync(kept.back().raw(), x.raw(), x.bytes(), cudaMemcpyDeviceToDevice, native(backend_->stream())),
        "copying");
  }
  for (int i = 0; i < kBatches; ++i) {
    const auto got = download<float>(kept[static_cast<std::size_t>(i)]);
    for (std::size_t j = 0; j < got.size(); ++j)
      ASSERT_EQ(got[j], 1000.0f * static_cast<float>(i) + static_cast<float>(j)) << "batch " << i;
  }
  staging->free(memory, bytes);
}

// Arrays of one shape and type that a step takes together, each by its number, in three steps: none lies where another
// one does.
TEST_F(CudaBackendTest, AsManyInputsOfOneShapeAsAStepHas) {
  constexpr int kInputs = 5, kSteps = 6;
  const std::shared_ptr<MemorySource> staging = backend_->staging_memory();
  constexpr std::size_t kBytes = kInputs * 4 * sizeof(float);
  std::byte* const memory = staging->allocate(kBytes);
  auto* const values = reinterpret_cast<float*>(memory);
  const Tensor kept = backend_->empty({kSteps * kInputs, 4});
  for (int step = 0; step < kSteps; ++step) {
    backend_->finish_inputs();
    for (int j = 0; j < kInputs * 4; ++j) values[j] = static_cast<float>(step * kInputs * 4 + j);
    std::vector<Tensor> inputs;
    for (int i = 0; i < kInputs; ++i) inputs.push_back(backend_->stage(values + 4 * i, {4}, DType::kF32, i));
    for (int i = 0; i < kInputs; ++i)
      check_cuda(cudaMemcpyAsync(kept.slice(step * kInputs + i, step * kInputs + i + 1).raw(),
                                 inputs[static_cast<std::size_t>(i)].raw(), 16, cudaMemcpyDeviceToDevice,
                                 native(backend_->stream())),
                 "copying");
  }
  EXPECT_EQ(download<float>(kept), counted(kSteps * kInputs * 4, 0.0f));
  staging->free(memory, kBytes);
}

// The contract: a tensor is good until the second following call of its kind, also for work that is given that late.
TEST_F(CudaBackendTest, TwoBatchesOfOneShapeMayBeUsedTogether) {
  const std::shared_ptr<MemorySource> staging = backend_->staging_memory();
  std::byte* const memory = staging->allocate(128);
  const auto values = std::span(reinterpret_cast<float*>(memory), 32);
  const Tensor kept = backend_->empty({10, 2, 16});
  for (std::int64_t step = 0; step < 10; ++step) {
    backend_->finish_inputs();
    for (std::size_t j = 0; j < 32; ++j) values[j] = static_cast<float>(step) * 32 + static_cast<float>(j);
    const Tensor x = backend_->stage(values.data(), {16}, DType::kF32, 0);
    const Tensor target = backend_->stage(values.data() + 16, {16}, DType::kF32, 0);
    float* const to = kept.slice(step, step + 1).f32();
    const cudaStream_t stream = native(backend_->stream());
    check_cuda(cudaMemcpyAsync(to, x.raw(), 64, cudaMemcpyDeviceToDevice, stream), "copying");
    check_cuda(cudaMemcpyAsync(to + 16, target.raw(), 64, cudaMemcpyDeviceToDevice, stream), "copying");
  }
  EXPECT_EQ(download<float>(kept), counted(320, 0.0f));
  staging->free(memory, 128);
}

TEST_F(CudaBackendTest, StagingMemoryIsPinnedAndServesOtherThreads) {
  std::shared_ptr<MemorySource> staging = backend_->staging_memory();
  std::byte* memory = nullptr;
  std::thread([&] { memory = staging->allocate(1 << 16); }).join();
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, memory), "asking about memory");
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  backend_ = nullptr;
  memory[5] = std::byte{1};  // it may outlive the backend
  staging->free(memory, 1 << 16);
}

TEST(MakeCudaBackend, DeviceThatDoesNotExistIsNamed) {
  try {
    make_cuda_backend({.device = 1000});
    FAIL() << "a thousand GPUs";
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), MatchesRegex("there is no cuda:1000: this process sees [0-9]+ GPUs?"));
    EXPECT_THAT(error.remedy(), HasSubstr("CUDA_VISIBLE_DEVICES"));
  }
}

}  // namespace
}  // namespace lockstep::nn
