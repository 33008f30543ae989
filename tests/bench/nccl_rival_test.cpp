// What `--compare nccl` calls: that it does what lockstep's collectives do, on a GPU and an NCCL in software.
#include <gtest/gtest.h>

#include "base/error.h"
#include "bench/collective_case.h"
#include "bench/rivals/rivals.h"
#include "tests/comm/nccl/fake_nccl.h"
#include "tests/soft_cuda/soft_cuda.h"
#include "tests/support/ranks.h"

namespace lockstep::bench {
namespace {

using testing::group;

class NcclRivalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // Of threads: a GPU that ran a send at once would wait in it for the receiver.
    soft_cuda::set_streams(soft_cuda::Streams::kThreads);
    comm::fake_nccl::script().may_block = true;
    rival_ = make_rival("nccl", testing::world(), group(), DeviceKind::kCuda);
  }
  void TearDown() override {
    if (rival_ != nullptr) rival_->shutdown();
    comm::fake_nccl::script().may_block = false;
  }

  void check(CollectiveOptions options) {
    options.compare = {"nccl"};
    CollectiveCase one(group(), group(), options);
    for (const std::int64_t bytes : sizes_of(options, group().size())) {
      one.resize(bytes);
      one.put(*rival_);
      const std::int64_t expected = options.collective == Collective::kBarrier ? -1 : 0;
      EXPECT_EQ(one.count_wrong(*rival_), expected) << family_of(options.collective).name << " of " << bytes;
      one.run(*rival_);
    }
  }

  std::unique_ptr<Rival> rival_;
};

TEST_F(NcclRivalTest, DoesEachCollective) {
  for (const CollectiveFamily& family : collective_families()) {
    CollectiveOptions options;
    options.collective = family.collective;
    options.min_bytes = 4;
    options.max_bytes = 100'000;
    options.factor = 25;
    options.root = family.has_root ? group().size() - 1 : 0;
    check(options);
  }
}

TEST_F(NcclRivalTest, TakesTypesAndOperations) {
  CollectiveOptions options;
  options.min_bytes = options.max_bytes = 1000;
  for (const DType dtype : {DType::kF64, DType::kBF16, DType::kF16, DType::kI32, DType::kI64, DType::kU8})
    for (const auto op : {comm::ReduceOp::kMin, comm::ReduceOp::kMax, comm::ReduceOp::kProd}) {
      options.dtype = dtype;
      options.op = op;
      check(options);
    }
}

TEST_F(NcclRivalTest, SendsInEachPattern) {
  if (group().size() == 1) GTEST_SKIP() << "a pair takes two";
  for (const Pattern pattern : {Pattern::kLatency, Pattern::kBandwidth, Pattern::kBidirectional}) {
    CollectiveOptions options;
    options.collective = Collective::kSendRecv;
    options.pattern = pattern;
    options.min_bytes = 4;
    options.max_bytes = 40'000;
    options.factor = 100;
    check(options);
  }
}

TEST_F(NcclRivalTest, IsRefusedWhereMemoryIsOfAnotherKind) {
  EXPECT_THROW(make_rival("nccl", testing::world(), group(), DeviceKind::kCpu), Error) << "UsageError on rank 0";
  EXPECT_THROW(make_rival("mpi", testing::world(), group(), DeviceKind::kCuda), Error);
}

}  // namespace
}  // namespace lockstep::bench
