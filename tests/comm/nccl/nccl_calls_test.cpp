// What NCCL is asked for, by ranks that are only said to be there.
#include "comm/nccl/nccl_api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "comm/nccl/communicator.h"
#include "tests/comm/nccl/fake_nccl.h"

namespace lockstep::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class NcclCalls : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_nccl::reset();
    ncclUniqueId id;
    ASSERT_EQ(fake_nccl::api().get_unique_id(&id), ncclSuccess);
    communicator_.join(id, [] {});
  }

  std::vector<std::string> calls_of(OpKind kind, std::size_t count, DType dtype, int rank, int size,
                                    ReduceOp reduce = ReduceOp::kSum, int root = 0) {
    const auto before = static_cast<std::ptrdiff_t>(fake_nccl::calls().size());
    std::vector<std::byte> data(count * size_of(dtype));
    Op op;
    op.kind = kind;
    op.reduce = reduce;
    op.root = root;
    op.data = data.data();
    op.count = count;
    op.dtype = dtype;
    EXPECT_EQ(give_to_nccl(fake_nccl::api(), communicator_.get(), rank, size, op, &scratch_, stream_.get()),
              ncclSuccess);
    const auto calls = fake_nccl::calls();
    return {calls.begin() + before, calls.end()};
  }

  Communicator communicator_{fake_nccl::api(), 0, 0, 1};
  CudaStream stream_;
  std::int32_t scratch_ = 0;
};

TEST_F(NcclCalls, WholeRegions) {
  EXPECT_THAT(calls_of(OpKind::kAllReduce, 100, DType::kF32, 1, 3), ElementsAre("allreduce 100 f32 sum"));
  EXPECT_THAT(calls_of(OpKind::kAllReduce, 7, DType::kBF16, 1, 3, ReduceOp::kMin), ElementsAre("allreduce 7 bf16 min"));
  EXPECT_THAT(calls_of(OpKind::kAllReduce, 7, DType::kF16, 1, 3, ReduceOp::kProd), ElementsAre("allreduce 7 f16 prod"));
  EXPECT_THAT(calls_of(OpKind::kBroadcast, 5, DType::kI64, 0, 3, ReduceOp::kSum, 2),
              ElementsAre("broadcast 5 i64 from 2"));
  EXPECT_THAT(calls_of(OpKind::kReduce, 5, DType::kF32, 0, 3, ReduceOp::kMax, 2), ElementsAre("reduce 5 f32 max to 2"));
  EXPECT_THAT(calls_of(OpKind::kBarrier, 0, DType::kF32, 0, 3), ElementsAre("allreduce 1 i32 sum"));
}

TEST_F(NcclCalls, EqualSlicesAreOneCall) {
  // 16 f32 are what slices are cut in.
  EXPECT_THAT(calls_of(OpKind::kReduceScatter, 4 * 32, DType::kF32, 1, 4), ElementsAre("reduce_scatter 32 f32 sum"));
  EXPECT_THAT(calls_of(OpKind::kAllGather, 3 * 64, DType::kU8, 2, 3), ElementsAre("allgather 64 u8"));
  EXPECT_THAT(calls_of(OpKind::kAllGather, 17, DType::kF64, 0, 1), ElementsAre("allgather 17 f64"));
}

TEST_F(NcclCalls, UnequalSlicesAreGrouped) {
  EXPECT_THAT(calls_of(OpKind::kReduceScatter, 40, DType::kF32, 1, 3, ReduceOp::kMax),
              ElementsAre("group(", "reduce 16 f32 max to 0", "reduce 16 f32 max to 1", "reduce 8 f32 max to 2", ")"));
  // A multiple of the ranks, and yet not of what slices are cut in.
  EXPECT_THAT(
      calls_of(OpKind::kAllGather, 60, DType::kF32, 0, 3),
      ElementsAre("group(", "broadcast 32 f32 from 0", "broadcast 16 f32 from 1", "broadcast 12 f32 from 2", ")"));
  // Nobody is asked for nothing.
  EXPECT_THAT(calls_of(OpKind::kAllGather, 1, DType::kI32, 3, 4), ElementsAre("group(", "broadcast 1 i32 from 0", ")"));
}

TEST_F(NcclCalls, NothingForNoElements) {
  for (const OpKind kind :
       {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast, OpKind::kReduce})
    EXPECT_THAT(calls_of(kind, 0, DType::kF32, 1, 3), IsEmpty());
}

TEST_F(NcclCalls, StartedGroupIsEnded) {
  fake_nccl::script().call = ncclInvalidArgument;
  std::vector<std::byte> data(160);
  Op op;
  op.kind = OpKind::kAllGather;
  op.data = data.data();
  op.count = 40;
  EXPECT_EQ(give_to_nccl(fake_nccl::api(), communicator_.get(), 0, 3, op, &scratch_, stream_.get()),
            ncclInvalidArgument);
  EXPECT_EQ(fake_nccl::calls().back(), ")");
}

TEST(NcclApi, InstalledLibraryHasAllFunctions) {
  try {
    const NcclApi& api = load_nccl();
    EXPECT_THAT(nccl_version_text(api), ::testing::MatchesRegex("2\\.[0-9]+\\.[0-9]+"));
    EXPECT_NE(api.group_end, nullptr);
  } catch (const CudaError& error) {
    // It needs no GPU to be loaded, but to be there.
    EXPECT_THAT(error.what(), ::testing::StartsWith("cannot load NCCL: libnccl.so.2: "));
    EXPECT_THAT(error.remedy(), ::testing::HasSubstr("libnccl2"));
  }
}

}  // namespace
}  // namespace lockstep::comm
