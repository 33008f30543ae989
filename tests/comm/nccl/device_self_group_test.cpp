#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "comm/nccl/nccl_group.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::comm {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

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
