// Collectives over NCCL itself, on whatever GPUs there are: against plain loops, with numbers whose sums are exact in
// any order.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "base/error.h"
#include "tests/comm/nccl/on_gpu.h"
#include "tests/comm/reference.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

using reference::Bytes;
using testing::group;
using namespace std::chrono_literals;

const testing::NeedsGpu needs_gpu;
const testing::GroupLayer layer([](ProcessGroup& control) -> std::unique_ptr<ProcessGroup> {
  return make_group_on_gpu(control, 50s);
});

DeviceGroup& device_group() { return dynamic_cast<DeviceGroup&>(group()); }
cudaStream_t producer() { return producer_on_gpu().get(); }

/// Small whole numbers, another on every rank.
Bytes contribution(DType dtype, std::size_t count, std::size_t seed, int rank) {
  Bytes bytes(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const auto number = static_cast<int>(reference::mix(seed, rank, i) % 13);
    const auto put = [&](auto value) { std::memcpy(bytes.data() + i * sizeof(value), &value, sizeof(value)); };
    switch (dtype) {
      case DType::kF32: put(static_cast<float>(number - 6)); break;
      case DType::kF64: put(static_cast<double>(number - 6)); break;
      case DType::kBF16: put(BFloat16::from_float(static_cast<float>(number - 6))); break;
      case DType::kF16: put(Float16::from_float(static_cast<float>(number - 6))); break;
      case DType::kI32: put(static_cast<std::int32_t>(number - 6)); break;
      case DType::kI64: put(static_cast<std::int64_t>(number - 6)); break;
      case DType::kU8: put(static_cast<std::uint8_t>(number)); break;
    }
  }
  return bytes;
}

std::vector<Bytes> contributions(DType dtype, std::size_t count, std::size_t seed) {
  std::vector<Bytes> all;
  for (int rank = 0; rank < group().size(); ++rank) all.push_back(contribution(dtype, count, seed, rank));
  return all;
}

void write(const Region& region, const Bytes& bytes) { group().copy(region.data(), bytes.data(), bytes.size()); }
Bytes read(const Region& region, std::size_t begin_bytes, std::size_t bytes) {
  Bytes got(bytes);
  group().copy(got.data(), region.data() + begin_bytes, bytes);
  return got;
}

/// Runs one operation and compares what is specified afterwards.
::testing::AssertionResult check(const Arena& arena, OpKind kind, DType dtype, ReduceOp op, std::size_t count, int root,
                                 std::size_t seed) {
  const Region region{&arena, kArenaAlignment, count, dtype};
  const std::size_t element = size_of(dtype);
  const auto parts = contributions(dtype, count, seed);
  write(region, parts[static_cast<std::size_t>(group().rank())]);
  Work work;
  std::size_t begin = 0;
  Bytes wanted;
  const auto cut = [&](const Bytes& bytes, int rank) {
    const Slice slice = slice_of(count, element, rank, group().size());
    const auto from = bytes.begin() + static_cast<std::ptrdiff_t>(slice.begin * element);
    return Bytes(from, from + static_cast<std::ptrdiff_t>(slice.count * element));
  };
  switch (kind) {
    case OpKind::kAllReduce:
      work = group().all_reduce(region, op);
      wanted = reference::reduce(dtype, op, parts);
      break;
    case OpKind::kReduceScatter:
      work = group().reduce_scatter(region, op);
      begin = slice_of(count, element, group().rank(), group().size()).begin * element;
      wanted = cut(reference::reduce(dtype, op, parts), group().rank());
      break;
    case OpKind::kAllGather:
      work = group().all_gather(region);
      for (int rank = 0; rank < group().size(); ++rank) {
        const Bytes slice = cut(parts[static_cast<std::size_t>(rank)], rank);
        wanted.insert(wanted.end(), slice.begin(), slice.end());
      }
      break;
    case OpKind::kBroadcast:
      work = group().broadcast(region, root);
      wanted = parts[static_cast<std::size_t>(root)];
      break;
    case OpKind::kReduce:
      work = group().reduce(region, op, root);
      if (group().rank() == root) wanted = reference::reduce(dtype, op, parts);
      break;
    case OpKind::kBarrier: work = group().barrier(); break;
  }
  work.wait_host();
  if (read(region, begin, wanted.size()) == wanted) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << fmt::format("wrong after {} ({}) of {} {} from root {}", name_of(kind),
                                                      name_of(op), count, lockstep::name_of(dtype), root);
}

TEST(NcclOnGpu, MatchesPlainLoops) {
  const auto arena = group().allocate(4 << 20);
  std::size_t seed = 0;
  for (const DType dtype : reference::kDTypes)
    for (const std::size_t count :
         {1ul, 63ul, 64ul, 1000ul, static_cast<std::size_t>(group().size()) * 4096, 300'001ul}) {
      for (const ReduceOp op : reference::kReduceOps)
        ASSERT_TRUE(check(*arena, OpKind::kAllReduce, dtype, op, count, 0, ++seed));
      ASSERT_TRUE(check(*arena, OpKind::kReduceScatter, dtype, ReduceOp::kSum, count, 0, ++seed));
      ASSERT_TRUE(check(*arena, OpKind::kReduce, dtype, ReduceOp::kSum, count, group().size() - 1, ++seed));
      ASSERT_TRUE(check(*arena, OpKind::kAllGather, dtype, ReduceOp::kSum, count, 0, ++seed));
      ASSERT_TRUE(check(*arena, OpKind::kBroadcast, dtype, ReduceOp::kSum, count, group().size() - 1, ++seed));
    }
}

TEST(NcclOnGpu, NothingAndBarriers) {
  const auto none = group().allocate(0);
  group().all_reduce({none.get(), 0, 0, DType::kF32}, ReduceOp::kSum);
  const Work work = group().barrier();
  work.wait_host();
  EXPECT_TRUE(work.done());
  EXPECT_EQ(group().all_gather_numbers(group().rank()).back(), group().size() - 1);
}

TEST(NcclOnGpu, ALateRankIsWaitedFor) {
  const auto arena = group().allocate(4096);
  if (group().rank() == group().size() - 1) std::this_thread::sleep_for(1s);
  EXPECT_TRUE(check(*arena, OpKind::kAllReduce, DType::kF32, ReduceOp::kSum, 100, 0, 1));
}

// What a step does: the stream writes, the operation follows, the stream reads; and the host waits for none of it.
TEST(NcclOnGpu, StreamsAreOrderedWithoutTheHost) {
  constexpr std::size_t kCount = 1 << 18, kRounds = 40;
  const auto arena = group().allocate(kCount * sizeof(std::int32_t));
  const Region region{arena.get(), 0, kCount, DType::kI32};
  const PinnedMemory results(kRounds * sizeof(std::int32_t));
  auto* const seen = reinterpret_cast<std::int32_t*>(results.data());
  std::mt19937 random(7);
  std::vector<std::size_t> places;
  for (std::size_t round = 0; round < kRounds; ++round) {
    const int byte = static_cast<int>(round) + 1;
    check_cuda(cudaMemsetAsync(arena->data(), byte, region.bytes(), producer()), "writing");
    group().all_reduce(region, ReduceOp::kSum).wait(producer_on_gpu().view());
    places.push_back(random() % kCount);
    check_cuda(cudaMemcpyAsync(seen + round, arena->data() + places.back() * sizeof(std::int32_t), sizeof(std::int32_t),
                               cudaMemcpyDeviceToHost, producer()),
               "reading");
    group().poll();
  }
  producer_on_gpu().synchronize();
  for (std::size_t round = 0; round < kRounds; ++round)
    EXPECT_EQ(seen[round], (static_cast<int>(round) + 1) * 0x01010101 * group().size())
        << round << " at " << places[round];
}

TEST(NcclOnGpu, GraphsRepeatOperations) {
  constexpr std::size_t kCount = 1 << 16, kOps = 4, kLaunches = 5;
  const auto arena = group().allocate(kOps * kCount * sizeof(std::int32_t));
  const auto region = [&](std::size_t op) {
    return Region{arena.get(), op * kCount * sizeof(std::int32_t), kCount, DType::kI32};
  };
  // NCCL connects the ranks in the first operations, which a capture would not stand.
  for (std::size_t op = 0; op < kOps; ++op) group().all_reduce(region(op), ReduceOp::kSum).wait_host();

  device_group().begin_capture();
  check_cuda(cudaStreamBeginCapture(producer(), cudaStreamCaptureModeThreadLocal), "beginning a capture");
  std::vector<Work> works;
  for (std::size_t op = 0; op < kOps; ++op) {
    check_cuda(cudaMemsetAsync(region(op).data(), static_cast<int>(op) + 1, region(op).bytes(), producer()), "writing");
    works.push_back(group().all_reduce(region(op), ReduceOp::kSum));
  }
  for (const Work& work : works) work.wait(producer_on_gpu().view());
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(producer(), &graph), "ending a capture");
  ASSERT_EQ(device_group().end_capture(), kOps);
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "making a graph");
  check_cuda(cudaGraphDestroy(graph), "letting go of a graph");

  for (std::size_t launch = 0; launch < kLaunches; ++launch) {
    group().set_step(static_cast<std::int64_t>(launch));
    check_cuda(cudaGraphLaunch(executable, producer()), "launching a graph");
    device_group().replayed(kOps);
    // Others in between.
    if (launch == 2) group().barrier().wait(producer_on_gpu().view());
  }
  const Work last = group().barrier();
  last.wait_host();
  EXPECT_EQ(last.sequence(), works.back().sequence() + (kLaunches - 1) * kOps + 2);
  for (std::size_t op = 0; op < kOps; ++op) {
    std::vector<std::int32_t> got(kCount);
    group().copy(got.data(), region(op).data(), region(op).bytes());
    const auto wanted = static_cast<std::int32_t>(op + 1) * 0x01010101 * group().size();
    EXPECT_EQ(got, std::vector<std::int32_t>(kCount, wanted)) << op;
  }
  check_cuda(cudaGraphExecDestroy(executable), "letting go of a graph");
}

TEST(NcclOnGpu, OperationsAreTimed) {
  const auto arena = group().allocate(8 << 20);
  CudaEvent origin(CudaEvent::Timing::kOn);
  device_group().time_operations(true);
  origin.record(producer());
  group().all_reduce({arena.get(), 0, 2 << 20, DType::kF32}, ReduceOp::kSum);
  group().all_reduce({arena.get(), 0, 1 << 10, DType::kF32}, ReduceOp::kSum);
  device_group().time_operations(false);
  const auto times = device_group().device_times(origin);
  ASSERT_EQ(times.size(), 2u);
  EXPECT_EQ(times[0].bytes, 8u << 20);
  EXPECT_GE(times[0].end_ms, times[0].begin_ms);
  EXPECT_GE(times[1].begin_ms, times[0].end_ms);
  EXPECT_GE(times[1].end_ms, times[1].begin_ms);
}

TEST(NcclOnGpu, AWorldOfOneNeedsNoNccl) {
  const auto alone = make_device_self_group({.device = group().device().index, .producer = producer_on_gpu().view()});
  const auto arena = alone->allocate(64);
  check_cuda(cudaMemsetAsync(arena->data(), 1, 64, producer()), "writing");
  alone->all_reduce({arena.get(), 0, 16, DType::kI32}, ReduceOp::kSum).wait_host();
  std::int32_t got = 0;
  alone->copy(&got, arena->data(), sizeof got);
  EXPECT_EQ(got, 0x01010101);
}

// A ring and an all-to-all, which begin with communicators of two ranks each.
TEST(NcclGpu, SendsAndReceives) {
  const int size = group().size();
  if (size == 1) GTEST_SKIP() << "a transfer takes two";
  const int next = (group().rank() + 1) % size, before = (group().rank() + size - 1) % size;
  const auto arena = group().allocate(16 << 20);
  for (const std::size_t count : {1u, 4097u, 1'000'001u}) {
    const Region mine{arena.get(), 0, count, DType::kF32}, theirs{arena.get(), 8 << 20, count, DType::kF32};
    write(mine, contribution(DType::kF32, count, count, group().rank()));
    const Transfer out = group().isend(mine, next);
    const Transfer in = group().irecv(theirs, before);
    in.wait();
    out.wait();
    EXPECT_EQ(read(theirs, 0, theirs.bytes()), contribution(DType::kF32, count, count, before)) << count;
  }
  const auto ranks = static_cast<std::size_t>(size);
  const Region from{arena.get(), 0, 1000 * ranks, DType::kI32}, to{arena.get(), 8 << 20, 1000 * ranks, DType::kI32};
  const auto parts = contributions(DType::kI32, 1000 * ranks, 5);
  write(from, parts[static_cast<std::size_t>(group().rank())]);
  group().all_to_all(from, to);
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto begin = parts[r].begin() + static_cast<std::ptrdiff_t>(4000 * group().rank());
    EXPECT_EQ(read(to, 4000 * r, 4000), Bytes(begin, begin + 4000)) << r;
  }
}

}  // namespace
}  // namespace lockstep::comm
