
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "base/cuda/runtime.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RecordingTest : public ::testing::Test {
 protected:
  cudaStream_t stream() { return native(backend_->stream()); }
  void copy(const Tensor& from, const Tensor& to, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to.raw(), from.raw(), from.bytes(), cudaMemcpyDeviceToDevice, stream), "copying");
  }
  void set(const Tensor& tensor, float value) {
    const std::vector<float> all(static_cast<std::size_t>(tensor.count()), value);
    backend_->upload(std::as_bytes(std::span(all)), tensor);
  }
  std::array<float, 2> get(const Tensor& tensor) {
    std::array<float, 2> values{};
    backend_->download(tensor, std::as_writable_bytes(std::span(values)));
    return values;
  }

  std::unique_ptr<Backend> backend_ = make_cuda_backend({});
  std::string why_not_;
};

TEST_F(RecordingTest, RunsAgainWithWhatMemoryHoldsThen) {
  ASSERT_TRUE(backend_->records());
  const Tensor x = backend_->empty({2}), y = backend_->empty({2});
  set(x, 1.0f);
  set(y, 0.0f);
  const auto recording = backend_->record([&] { copy(x, y, stream()); }, why_not_);
  ASSERT_NE(recording, nullptr) << why_not_;
  EXPECT_THAT(get(y), ElementsAre(0.0f, 0.0f)) << "nothing is done while it is recorded";
  for (const float value : {2.0f, 3.0f}) {
    set(x, value);
    recording->run();
    EXPECT_THAT(get(y), ElementsAre(value, value));
  }
}

TEST_F(RecordingTest, KeepsTheValuesThatKernelsWereStartedWith) {
  const Tensor x = backend_->empty({2});
  std::array<float, 2> values = {4.0f, 5.0f};
  const auto recording = backend_->record([&] { backend_->write(std::as_bytes(std::span(values)), x); }, why_not_);
  ASSERT_NE(recording, nullptr) << why_not_;
  values = {};
  set(x, 0.0f);
  recording->run();
  EXPECT_THAT(get(x), ElementsAre(4.0f, 5.0f));
}

TEST_F(RecordingTest, TakesStreamsThatComeBack) {
  const Tensor x = backend_->empty({2}), y = backend_->empty({2}), z = backend_->empty({2});
  const CudaStream side;
  CudaEvent fork, join;
  const auto recording = backend_->record(
      [&] {
        fork.record(stream());
        fork.make_wait(side.get());
        copy(x, y, side.get());
        join.record(side.get());
        join.make_wait(stream());
        copy(y, z, stream());
      },
      why_not_);
  ASSERT_NE(recording, nullptr) << why_not_;
  set(x, 6.0f);
  recording->run();
  EXPECT_THAT(get(z), ElementsAre(6.0f, 6.0f));
}

// Each reason leaves a device that works on and records again.
TEST_F(RecordingTest, SaysWhyNot) {
  const Tensor x = backend_->empty({2});
  EXPECT_EQ(backend_->record([&] { get(x); }, why_not_), nullptr);
  EXPECT_THAT(why_not_, HasSubstr("cudaErrorStreamCaptureUnsupported"));

  EXPECT_EQ(backend_->record([&] { backend_->empty({54321}); }, why_not_), nullptr);
  EXPECT_THAT(why_not_, HasSubstr("of new memory were asked for while work is being recorded"));

  EXPECT_THROW(backend_->record([] { throw UsageError("something else"); }, why_not_), UsageError);

  set(x, 7.0f);
  EXPECT_THAT(get(x), ElementsAre(7.0f, 7.0f));
  const Tensor y = backend_->empty({2});
  const auto recording = backend_->record([&] { copy(x, y, stream()); }, why_not_);
  ASSERT_NE(recording, nullptr) << why_not_;
  recording->run();
  EXPECT_THAT(get(y), ElementsAre(7.0f, 7.0f));
}

TEST_F(RecordingTest, MemoryThatIsThereAlreadyIsNoObstacle) {
  { const Tensor warm = backend_->empty({54321}); }
  const Tensor x = backend_->empty({2}), y = backend_->empty({2});
  const auto recording = backend_->record(
      [&] {
        const Tensor between = backend_->empty({54321});
        copy(x, y, stream());
      },
      why_not_);
  EXPECT_NE(recording, nullptr) << why_not_;
}

}  // namespace
}  // namespace lockstep::nn
