// Collectives on memory of a GPU that no group has allocated, over NCCL itself or in software.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "lockstep/comm/device_group.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

using testing::group;

DeviceGroup& gpus() { return dynamic_cast<DeviceGroup&>(group()); }
std::size_t ranks() { return static_cast<std::size_t>(group().size()); }
std::size_t own() { return static_cast<std::size_t>(group().rank()); }

/// cudaMalloc'd, at `first` elements after an aligned address.
class Memory {
 public:
  explicit Memory(const std::vector<std::int32_t>& values, std::size_t first = 0) : count_(values.size()) {
    check_cuda(cudaMalloc(&whole_, (first + count_ + 1) * sizeof(std::int32_t)), "allocating");
    data_ = static_cast<std::int32_t*>(whole_) + first;
    group().copy(data_, values.data(), count_ * sizeof(std::int32_t));
  }
  ~Memory() { static_cast<void>(cudaFree(whole_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::int32_t* data() const { return data_; }
  /// What a stream sees that is ordered after `work`.
  std::vector<std::int32_t> after(const Work& work) const {
    work.wait(gpus().producer_stream());
    std::vector<std::int32_t> values(count_);
    group().copy(values.data(), data_, count_ * sizeof(std::int32_t));
    return values;
  }

 private:
  void* whole_ = nullptr;
  std::int32_t* data_ = nullptr;
  std::size_t count_;
};

/// `count` numbers of a rank, another for each element.
std::vector<std::int32_t> numbers(std::size_t rank, std::size_t count) {
  std::vector<std::int32_t> all(count);
  std::iota(all.begin(), all.end(), static_cast<std::int32_t>(1000 * rank));
  return all;
}

std::vector<std::int32_t> sums(std::size_t count) {
  std::vector<std::int32_t> all(count);
  for (std::size_t r = 0; r < ranks(); ++r)
    for (std::size_t i = 0; i < count; ++i) all[i] += numbers(r, count)[i];
  return all;
}

// Counts that are no multiple of what slices of arenas are cut in, at addresses that are multiples of 4 alone.
class CallersMemory : public ::testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Counts, CallersMemory, ::testing::Values(0, 1, 7, 64, 3001));

TEST_P(CallersMemory, Reductions) {
  const std::size_t count = GetParam();
  const Memory values(numbers(own(), count), 1);
  EXPECT_EQ(values.after(gpus().all_reduce(values.data(), count, DType::kI32, ReduceOp::kSum)), sums(count));
  const Memory at_last(numbers(own(), count), 3);
  const int root = group().size() - 1;
  const auto reduced = at_last.after(gpus().reduce(at_last.data(), count, DType::kI32, ReduceOp::kMax, root));
  if (group().rank() == root) EXPECT_EQ(reduced, numbers(own(), count));
}

TEST_P(CallersMemory, ReduceScatterKeepsWhatItReads) {
  const std::size_t count = GetParam(), all_count = count * ranks();
  const Memory all(numbers(own(), all_count), 1), mine(std::vector<std::int32_t>(count, -1), 2);
  const Work work = gpus().reduce_scatter(all.data(), mine.data(), count, DType::kI32, ReduceOp::kSum);
  const auto wanted = sums(all_count);
  const auto begin = wanted.begin() + static_cast<std::ptrdiff_t>(own() * count);
  EXPECT_EQ(mine.after(work), std::vector(begin, begin + static_cast<std::ptrdiff_t>(count)));
  EXPECT_EQ(all.after(work), numbers(own(), all_count));
}

TEST_P(CallersMemory, Moves) {
  const std::size_t count = GetParam();
  std::vector<std::int32_t> wanted;
  for (std::size_t r = 0; r < ranks(); ++r) {
    const auto part = numbers(r, count);
    wanted.insert(wanted.end(), part.begin(), part.end());
  }
  const Memory mine(numbers(own(), count), 1), all(std::vector<std::int32_t>(wanted.size(), -1), 1);
  EXPECT_EQ(all.after(gpus().all_gather(mine.data(), count, DType::kI32, all.data())), wanted);
  // In place: this rank's part is where it belongs.
  std::vector<std::int32_t> before(wanted.size(), -1);
  if (count > 0) std::memcpy(before.data() + own() * count, numbers(own(), count).data(), count * sizeof(std::int32_t));
  const Memory inside(before);
  EXPECT_EQ(inside.after(gpus().all_gather(inside.data() + own() * count, count, DType::kI32, inside.data())), wanted);
  const int root = group().size() - 1;
  EXPECT_EQ(mine.after(gpus().broadcast(mine.data(), count, DType::kI32, root)), numbers(ranks() - 1, count));
}

// The producer's stream is ordered after each operation, so any thread may issue the next.
TEST(CallersMemory, IsIssuedByOneThreadAfterTheOther) {
  const Memory values(std::vector<std::int32_t>(100, 1));
  Work last;
  for (int round = 0; round < 3; ++round)
    std::thread([&] {
      last = gpus().all_reduce(values.data(), 100, DType::kI32, ReduceOp::kMax);
      last.wait(gpus().producer_stream());
    }).join();
  EXPECT_EQ(gpus().last().sequence(), last.sequence());
  EXPECT_EQ(values.after(last), std::vector<std::int32_t>(100, 1));
}

TEST(CallersMemory, RefusesARootThatThereIsNot) {
  const Memory values(std::vector<std::int32_t>(4, 1));
  EXPECT_THROW(gpus().broadcast(values.data(), 4, DType::kI32, group().size()), UsageError);
  EXPECT_EQ(values.after(gpus().broadcast(values.data(), 4, DType::kI32, 0)), std::vector<std::int32_t>(4, 1));
}

}  // namespace
}  // namespace lockstep::comm
