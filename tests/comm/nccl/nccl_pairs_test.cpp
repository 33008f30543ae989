// Sends and receives between GPUs in software, and all-to-all, between processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "lockstep/comm/process_group.h"
#include "tests/comm/nccl/fake_nccl.h"
#include "tests/soft_cuda/soft_cuda.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

using testing::group;

/// Streams of threads: a GPU that ran a send at once would wait in it for the receiver.
class NcclPairs : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (group().size() == 1) GTEST_SKIP() << "a transfer takes two";
    soft_cuda::set_streams(soft_cuda::Streams::kThreads);
    fake_nccl::script().looks_in_progress = GetParam();
    arena_ = group().allocate(8 << 20);
    floats_ = arena_->view<float>(0, (8 << 20) / sizeof(float));
  }
  void TearDown() override {
    if (arena_ == nullptr) return;
    arena_.reset();
    fake_nccl::script().looks_in_progress = 0;
    EXPECT_EQ(fake_nccl::counts().calls_in_progress, 0);
  }
  Region region(std::size_t first, std::size_t count) const {
    return {arena_.get(), first * sizeof(float), count, DType::kF32};
  }
  int next() const { return (group().rank() + 1) % group().size(); }
  int before() const { return (group().rank() + group().size() - 1) % group().size(); }

  std::unique_ptr<Arena> arena_;
  std::span<float> floats_;
};

// With calls that end at once, and with such as NCCL continues in the background.
INSTANTIATE_TEST_SUITE_P(Background, NcclPairs, ::testing::Values(0, 3));

TEST_P(NcclPairs, ARing) {
  for (const std::size_t count : {1u, 0u, 1000u, 500'001u}) {
    for (std::size_t i = 0; i < count; ++i)
      floats_[i] = static_cast<float>(i % 1000) + static_cast<float>(group().rank());
    const Transfer out = group().isend(region(0, count), next());
    const Transfer in = group().irecv(region(1 << 20, count), before());
    out.wait();
    in.wait();
    for (std::size_t i = 0; i < count; ++i)
      ASSERT_EQ(floats_[(1 << 20) + i], static_cast<float>(i % 1000) + static_cast<float>(before())) << i;
  }
}

// What the producer's stream has been given comes before a send, and what a stream that waits is given comes after a
// receive: the host waits for neither.
TEST_P(NcclPairs, AmongStreams) {
  CudaStream consumer;
  std::vector<float> seen(3);
  std::vector<Transfer> sends;
  for (int round = 0; round < 3; ++round) {
    // In the order of the producer's stream.
    group().zero(region(0, 4096));
    sends.push_back(group().isend(region(0, 4096), next()));
    const auto place = static_cast<std::size_t>((1 << 20) + round * 4096);
    std::ranges::fill(floats_.subspan(place, 4096), 1.0f);
    group().irecv(region(place, 4096), before()).wait(consumer.view());
    soft_cuda::submit(consumer.get(),
                      [&, place, round] { seen[static_cast<std::size_t>(round)] = floats_[place + 4095] + 5; });
  }
  consumer.synchronize();
  EXPECT_EQ(seen, std::vector<float>(3, 5.0f));
  for (const Transfer& send : sends) send.wait();
}

TEST_P(NcclPairs, BesideCollectives) {
  for (int round = 0; round < 4; ++round) {
    std::ranges::fill(floats_.first(100), 1.0f);
    floats_[200] = static_cast<float>(10 * round + group().rank());
    Transfer transfer;
    if (group().rank() == 1) transfer = group().isend(region(200, 1), 0);
    const Work work = group().all_reduce(region(0, 100), ReduceOp::kSum);
    if (group().rank() == 0) transfer = group().irecv(region(300, 1), 1);
    work.wait_host();
    transfer.wait();
    EXPECT_EQ(floats_[99], static_cast<float>(group().size()));
    if (group().rank() == 0) {
      EXPECT_EQ(floats_[300], static_cast<float>(10 * round + 1));
    }
  }
}

// One rank is refused, and in step with the other one afterwards.
TEST_P(NcclPairs, ATransferInACapture) {
  const bool sends = group().rank() == 0;
  if (sends) {
    group().begin_capture();
    EXPECT_THROW(group().isend(region(0, 10), 1), UsageError);
    EXPECT_THROW(group().irecv(region(0, 10), 1), UsageError);
    EXPECT_THROW(group().all_to_all(region(0, 12), region(12, 12)), UsageError);
    EXPECT_EQ(group().end_capture(), 0u);
  }
  floats_[0] = 3;
  if (sends) group().isend(region(0, 1), 1).wait();
  if (group().rank() == 1) {
    floats_[0] = 0;
    group().irecv(region(0, 1), 0).wait();
    EXPECT_EQ(floats_[0], 3);
  }
  group().all_to_all(region(0, 12), region(12, 12));
}

TEST_P(NcclPairs, AllToAllOfRegions) {
  const auto ranks = static_cast<std::size_t>(group().size());
  constexpr std::size_t kCount = 3001;
  for (std::size_t to = 0; to < ranks; ++to)
    std::ranges::fill(floats_.subspan(to * kCount, kCount),
                      static_cast<float>(10 * group().rank()) + static_cast<float>(to));
  group().all_to_all(region(0, ranks * kCount), region(1 << 20, ranks * kCount));
  for (std::size_t from = 0; from < ranks; ++from)
    EXPECT_EQ(std::ranges::count(floats_.subspan((1 << 20) + from * kCount, kCount),
                                 static_cast<float>(10 * from) + static_cast<float>(group().rank())),
              static_cast<std::ptrdiff_t>(kCount));
}

}  // namespace
}  // namespace lockstep::comm
