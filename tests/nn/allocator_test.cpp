#include "lockstep/nn/tensor/allocator.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn {
namespace {

class AllocatorTest : public ::testing::Test {
 protected:
  std::size_t capacity_for(std::size_t bytes) {
    Block* const block = allocator.acquire(bytes);
    const std::size_t capacity = block->bytes;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block->data) % 64, 0u);
    block->references = 0;
    recycle(block);
    return capacity;
  }

  CachingAllocator allocator{make_host_memory()};
};

TEST_F(AllocatorTest, BlocksAreLargeEnoughAndWasteLittle) {
  EXPECT_EQ(capacity_for(0), 256u);
  EXPECT_EQ(capacity_for(1), 256u);
  EXPECT_EQ(capacity_for(256), 256u);
  EXPECT_EQ(capacity_for(257), 320u);
  for (std::size_t bytes = 256; bytes < 70000; bytes += 61) {
    const std::size_t capacity = capacity_for(bytes), lines = (bytes + 63) / 64 * 64;
    ASSERT_GE(capacity, bytes);
    ASSERT_LE(capacity * 4, lines * 5) << bytes;  // at most a quarter more than asked, a fifth of the block
  }
  for (const std::size_t bytes : {std::size_t{1} << 20, (std::size_t{1} << 21) + 1, std::size_t{10'000'019}}) {
    ASSERT_GE(capacity_for(bytes), bytes);
    ASSERT_LE(capacity_for(bytes) * 4, (bytes + 64) * 5);
  }
}

TEST_F(AllocatorTest, ReusesWhatWasGivenBack) {
  float* place = nullptr;
  {
    const Tensor t = Tensor::empty(allocator, {100});
    place = t.f32();
  }
  EXPECT_EQ(Tensor::empty(allocator, {101}).f32(), place);  // the same class
  const Tensor a = Tensor::empty(allocator, {100}), b = Tensor::empty(allocator, {100});
  EXPECT_NE(a.f32(), b.f32());
  EXPECT_EQ(allocator.stats().system_allocations, 2u);
}

TEST_F(AllocatorTest, TrimReleasesIdleMemory) {
  const Tensor kept = Tensor::empty(allocator, {100});
  kept.f32()[99] = 3.0f;
  { const Tensor idle = Tensor::empty(allocator, {100000}); }
  EXPECT_GT(allocator.stats().bytes_held, 400000u);
  allocator.trim();
  EXPECT_EQ(allocator.stats().bytes_held, allocator.stats().bytes_in_use);
  EXPECT_EQ(kept.f32()[99], 3.0f);
  EXPECT_NE(Tensor::empty(allocator, {100000}).f32(), nullptr);
}

TEST_F(AllocatorTest, CountsBytes) {
  {
    const Tensor a = Tensor::empty(allocator, {64}), b = Tensor::empty(allocator, {128});
    EXPECT_EQ(allocator.stats().bytes_in_use, 768u);
    EXPECT_EQ(allocator.stats().bytes_held, 768u);
  }
  const Tensor c = Tensor::empty(allocator, {32}, DType::kF64);
  EXPECT_EQ(allocator.stats().bytes_in_use, 256u);
  EXPECT_EQ(allocator.stats().bytes_held, 768u);
  EXPECT_EQ(allocator.stats().peak_bytes_in_use, 768u);
  EXPECT_EQ(allocator.stats().system_allocations, 2u);
}

TEST_F(AllocatorTest, TensorsShareAndRelease) {
  Tensor a = Tensor::empty(allocator, {2, 3});
  EXPECT_TRUE(a.is_sole_owner());
  Tensor b = a;
  EXPECT_FALSE(a.is_sole_owner());
  EXPECT_EQ(a.f32(), b.f32());
  Tensor c = std::move(b);
  EXPECT_FALSE(b.defined());  // NOLINT: what is left of a moved tensor is part of the contract
  b = c;
  c = Tensor();
  a = a.reshaped({6});
  EXPECT_EQ(a.shape(), Shape{6});
  b = Tensor();
  EXPECT_TRUE(a.is_sole_owner());
  EXPECT_EQ(allocator.stats().bytes_in_use, 256u);
  Tensor& self = a;
  a = self;
  EXPECT_TRUE(a.is_sole_owner());
  a = Tensor();
  EXPECT_EQ(allocator.stats().bytes_in_use, 0u);
  EXPECT_THROW(Tensor::empty(allocator, {2, 3}).reshaped({5}), UsageError);
  EXPECT_THROW(Tensor::empty(allocator, {2}).data<double>(), UsageError);
}

TEST_F(AllocatorTest, ViewsOwnNothing) {
  float memory[6] = {};
  {
    const Tensor view = Tensor::view_of(memory, {2, 3});
    const Tensor copy = view;  // NOLINT(performance-unnecessary-copy-initialization): that is what is tried
    const Tensor flat = view.reshaped({6});
    copy.f32()[1] = 1.0f;
    flat.f32()[5] = 5.0f;
    EXPECT_FALSE(view.is_sole_owner());
    EXPECT_EQ(view.bytes(), sizeof(memory));
  }
  EXPECT_EQ(memory[1], 1.0f);
  EXPECT_EQ(memory[5], 5.0f);
  EXPECT_EQ(allocator.stats().system_allocations, 0u);
}

TEST_F(AllocatorTest, SizesThatNoMemoryHas) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  EXPECT_THROW(Tensor::empty(allocator, {kHuge, kHuge}), UsageError);
  EXPECT_THROW(Tensor::empty(allocator, {-1, 4}), UsageError);
  EXPECT_THROW(Tensor::empty(allocator, {-1, -4}), UsageError);
  EXPECT_THROW(allocator.acquire(~std::size_t{0}), DeviceError);
#if !defined(LOCKSTEP_SANITIZED)                                       // sanitizers end the program instead
  EXPECT_THROW(allocator.acquire(std::size_t{1} << 59), DeviceError);  // more than addresses
#endif
  EXPECT_EQ(allocator.stats().bytes_in_use, 0u);
  EXPECT_EQ(Tensor::empty(allocator, {0, kHuge}).count(), 0);
  const Tensor works = Tensor::empty(allocator, {4});
  EXPECT_TRUE(works.defined());
}

TEST_F(AllocatorTest, FourThreadsGetDistinctMemory) {
  const Tensor shared = Tensor::empty(allocator, {16});
  std::atomic<bool> wrong{false};
  const auto work = [&](float mark) {
    for (std::int64_t i = 0; i < 5000; ++i) {
      const Tensor mine = Tensor::empty(allocator, {16 + i % 5 * 64});
      const Tensor view = shared;  // NOLINT(performance-unnecessary-copy-initialization): the count is shared, too
      std::fill_n(mine.f32(), mine.count(), mark);
      const Tensor other = Tensor::empty(allocator, {16});
      for (const float v : mine.span<float>())
        if (v != mark) wrong = true;
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) threads.emplace_back(work, static_cast<float>(t));
  for (auto& thread : threads) thread.join();
  EXPECT_FALSE(wrong);
  EXPECT_TRUE(shared.is_sole_owner());
  EXPECT_EQ(allocator.stats().bytes_in_use, 256u);
  EXPECT_LE(allocator.stats().system_allocations, 1u + 4u * 6u);
}

TEST_F(AllocatorTest, GraphsHaveAPoolOfTheirOwn) {
  const void* captured = nullptr;
  {
    const GraphMemory memory(allocator);
    captured = Tensor::empty(allocator, {1000}).raw();
  }
  const Tensor ordinary = Tensor::empty(allocator, {1000});
  EXPECT_NE(ordinary.raw(), captured);
  Tensor kept;
  {
    const GraphMemory memory(allocator);
    kept = Tensor::empty(allocator, {1000});
    EXPECT_EQ(kept.raw(), captured);  // and it is used again there
  }
  kept = Tensor();  // given back outside of the scope: still not for others
  EXPECT_NE(Tensor::empty(allocator, {1000}).raw(), captured);
  EXPECT_EQ(allocator.stats().system_allocations, 3u);
}

std::int64_t resident_bytes() {
  std::int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

// A model's parameters and their moments are many blocks of a few huge pages each.
TEST(HostMemory, HasHardlyMorePagesThanIsAskedFor) {
  constexpr std::int64_t kBytes = 2359296, kBlocks = 64;  // a GPT-2 block's c_proj.weight
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);                   // pages that earlier tests have written are resident already
  CachingAllocator allocator(make_host_memory());
  std::vector<Tensor> blocks;
  const std::int64_t before = resident_bytes();
  for (int i = 0; i < kBlocks; ++i) {
    blocks.push_back(Tensor::empty(allocator, {kBytes / 4}));
    std::memset(blocks.back().f32(), 1, kBytes);
  }
  const std::int64_t taken = resident_bytes() - before;
  EXPECT_GE(taken, kBlocks * kBytes);
  EXPECT_LE(taken, kBlocks * kBytes * 5 / 4);
}

/// Has so many bytes, and counts how often it was asked.
class SmallMemory final : public MemorySource {
 public:
  explicit SmallMemory(std::size_t bytes, int& asked) : left_(bytes), asked_(asked) {}
  std::byte* allocate(std::size_t bytes) override {
    ++asked_;
    if (bytes > left_) throw OutOfMemoryError(fmt::format("{} bytes", bytes));
    left_ -= bytes;
    return host_->allocate(bytes);
  }
  void free(std::byte* data, std::size_t bytes) noexcept override {
    left_ += bytes;
    host_->free(data, bytes);
  }

 private:
  std::unique_ptr<MemorySource> host_ = make_host_memory();
  std::size_t left_;
  int& asked_;
};

TEST(FullMemory, IdleBlocksAreGivenBackFirst) {
  int asked = 0;
  CachingAllocator allocator(std::make_unique<SmallMemory>(2048, asked));
  const Tensor held = Tensor::empty(allocator, {64});
  held.f32()[0] = 5;
  for (const std::int64_t count : {64, 128, 192}) {
    const Tensor a = Tensor::empty(allocator, {count}), b = Tensor::empty(allocator, {count});
    EXPECT_NE(a.raw(), b.raw());
  }
  EXPECT_EQ(allocator.stats().bytes_held, 256u + 2 * 768u);
  EXPECT_EQ(asked, 1 + 2 + 2 + 2 + 1) << "all but one request found memory at once";
  {
    const Tensor all = Tensor::empty(allocator, {448});
    EXPECT_EQ(allocator.stats().bytes_held, 2048u);
    asked = 0;
    EXPECT_THROW(Tensor::empty(allocator, {1}), OutOfMemoryError);
    EXPECT_EQ(asked, 1) << "nothing was idle";
  }
  EXPECT_THROW(Tensor::empty(allocator, {449}), OutOfMemoryError);
  EXPECT_EQ(allocator.stats().bytes_held, 256u);
  EXPECT_EQ(allocator.stats().bytes_in_use, 256u);
  EXPECT_EQ(held.f32()[0], 5.0f);
}

TEST(FullMemory, MemoryOfGraphsIsKept) {
  int asked = 0;
  CachingAllocator allocator(std::make_unique<SmallMemory>(1024, asked));
  { const Tensor ordinary = Tensor::empty(allocator, {128}); }
  const void* captured = nullptr;
  {
    const GraphMemory memory(allocator);
    captured = Tensor::empty(allocator, {192}).raw();
  }
  EXPECT_EQ(allocator.stats().bytes_held, 768u) << "ordinary blocks were freed for it";
  EXPECT_THROW(Tensor::empty(allocator, {128}), OutOfMemoryError);
  const GraphMemory memory(allocator);
  EXPECT_EQ(Tensor::empty(allocator, {192}).raw(), captured);
}

TEST(ShapeTest, CountsAndCompares) {
  EXPECT_EQ(Shape().count(), 1);
  EXPECT_EQ((Shape{2, 0, 3}).count(), 0);
  EXPECT_EQ((Shape{2, 3, 4}).count(), 24);
  EXPECT_NE((Shape{2}), (Shape{2, 0}));
  EXPECT_NE((Shape{2, 1}), (Shape{2}));
  EXPECT_EQ(to_string(Shape{64, 8, 8, 1}), "[64, 8, 8, 1]");
  EXPECT_EQ(to_string(Shape{}), "[]");
  EXPECT_THROW((Shape{1, 1, 1, 1, 1, 1, 1}), UsageError);
}

}  // namespace
}  // namespace lockstep::nn
