#include "base/cuda/runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

TEST(CheckCuda, ErrorNamesCallGpuAndCudaMessage) {
  try {
    check_cuda(cudaErrorInvalidValue, "copying a batch");
    FAIL() << "an error that was not one";
  } catch (const CudaError& error) {
    EXPECT_THAT(error.what(), MatchesRegex("copying a batch failed on GPU 0 \\(.+, [0-9a-fA-F:]+\\.[0-9]\\): "
                                           "invalid argument \\(cudaErrorInvalidValue\\)"));
    EXPECT_THAT(error.remedy(), HasSubstr("nvidia-smi"));
    EXPECT_THAT(error.where().file_name(), HasSubstr("cuda_runtime_test"));
  }
}

TEST(CheckCuda, LeavesNoErrorForTheNextCall) {
  EXPECT_THROW(check_cuda(cudaSetDevice(1000), "choosing a GPU"), CudaError);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

TEST(CudaStream, MovesAndKeepsItsOrder) {
  CudaStream stream(CudaStream::Priority::kHigh);
  const CudaStream moved(std::move(stream));
  EXPECT_EQ(stream.get(), nullptr);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(moved.view().native, moved.get());
  moved.synchronize();
}

TEST(CudaEvent, IsDoneWhenItsStreamIs) {
  const CudaStream stream;
  CudaEvent event;
  EXPECT_TRUE(event.done()) << "never recorded";
  event.record(stream.get());
  event.synchronize();
  EXPECT_TRUE(event.done());
}

TEST(CudaEvent, MeasuresTimeWhereAskedTo) {
  const CudaStream stream;
  CudaEvent from(CudaEvent::Timing::kOn), to(CudaEvent::Timing::kOn), without;
  from.record(stream.get());
  to.record(stream.get());
  without.record(stream.get());
  stream.synchronize();
  EXPECT_GE(CudaEvent::ms_between(from, to), 0.0);
  EXPECT_THROW(CudaEvent::ms_between(from, without), CudaError);
}

TEST(PinnedMemory, IsAlignedAndMoves) {
  PinnedMemory memory(100);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % 4096, 0u);
  const PinnedMemory moved(std::move(memory));
  EXPECT_EQ(memory.data(), nullptr);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(moved.bytes(), 100u);
  EXPECT_EQ(PinnedMemory(0).data(), nullptr);
}

TEST(PinnedMemory, SaysHowMuchWasAsked) {
  try {
    const PinnedMemory memory(std::size_t{1} << 60);
    FAIL() << "an exbibyte was pinned";
  } catch (const CudaError& error) {
    EXPECT_THAT(error.what(), HasSubstr("of host memory could be pinned"));
  }
}

}  // namespace
}  // namespace lockstep
