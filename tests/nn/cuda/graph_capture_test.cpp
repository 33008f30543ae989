
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

class GraphCaptureTest : public ::testing::Test {
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

TEST_F(GraphCaptureTest, ReplaysReadCurrentMemory) {
  ASSERT_TRUE(backend_->can_capture());
  const Tensor x = backend_->empty({2}), y = backend_->empty({2});
  set(x, 1.0f);
  set(y, 0.0f);
  const auto graph = backend_->capture([&] { copy(x, y, stream()); }, why_not_);
  ASSERT_NE(graph, nullptr) << why_not_;
  EXPECT_THAT(get(y), ElementsAre(0.0f, 0.0f)) << "nothing is done while it is captured";
  for (const float value : {2.0f, 3.0f}) {
    set(x, value);
    graph->run();
    EXPECT_THAT(get(y), ElementsAre(value, value));
  }
}

TEST_F(GraphCaptureTest, KeepsKernelArguments) {
  const Tensor x = backend_->empty({2});
  std::array<float, 2> values = {4.0f, 5.0f};
  const auto graph = backend_->capture([&] { backend_->write(std::as_bytes(std::span(values)), x); }, why_not_);
  ASSERT_NE(graph, nullptr) << why_not_;
  values = {};
  set(x, 0.0f);
  graph->run();
  EXPECT_THAT(get(x), ElementsAre(4.0f, 5.0f));
}

TEST_F(GraphCaptureTest, CapturesJoinedStreams) {
  const Tensor x = backend_->empty({2}), y = backend_->empty({2}), z = backend_->empty({2});
  const CudaStream side;
  CudaEvent fork, join;
  const auto graph = backend_->capture(
      [&] {
        fork.record(stream());
        fork.make_wait(side.get());
        copy(x, y, side.get());
        join.record(side.get());
        join.make_wait(stream());
        copy(y, z, stream());
      },
      why_not_);
  ASSERT_NE(graph, nullptr) << why_not_;
  set(x, 6.0f);
  graph->run();
  EXPECT_THAT(get(z), ElementsAre(6.0f, 6.0f));
}

// Each reason leaves a device that works on and captures again.
TEST_F(GraphCaptureTest, ReportsWhyCaptureFailed) {
  const Tensor x = backend_->empty({2});
  EXPECT_EQ(backend_->capture([&] { get(x); }, why_not_), nullptr);
  EXPECT_THAT(why_not_, HasSubstr("cudaErrorStreamCaptureUnsupported"));

  EXPECT_EQ(backend_->capture([&] { backend_->empty({54321}); }, why_not_), nullptr);
  EXPECT_THAT(why_not_, HasSubstr("of new memory were asked for while work is being captured"));

  EXPECT_THROW(backend_->capture([] { throw UsageError("something else"); }, why_not_), UsageError);

  set(x, 7.0f);
  EXPECT_THAT(get(x), ElementsAre(7.0f, 7.0f));
  const Tensor y = backend_->empty({2});
  const auto graph = backend_->capture([&] { copy(x, y, stream()); }, why_not_);
  ASSERT_NE(graph, nullptr) << why_not_;
  graph->run();
  EXPECT_THAT(get(y), ElementsAre(7.0f, 7.0f));
}

TEST_F(GraphCaptureTest, CachedMemoryMayBeUsedInACapture) {
  { const Tensor warm = backend_->empty({54321}); }
  const Tensor x = backend_->empty({2}), y = backend_->empty({2});
  const auto graph = backend_->capture(
      [&] {
        const Tensor between = backend_->empty({54321});
        copy(x, y, stream());
      },
      why_not_);
  EXPECT_NE(graph, nullptr) << why_not_;
}

}  // namespace
}  // namespace lockstep::nn
