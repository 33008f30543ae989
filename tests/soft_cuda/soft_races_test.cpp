// What the soft GPU finds in what the threads of a grid read and write; each kernel beside one that does it right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/cuda/device.cuh"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::soft_cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr unsigned kAll = 0xffffffffu;

class SoftRaces : public ::testing::Test {
 protected:
  SoftRaces() {
    set_machine({.watched_launches = 1000000});
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&data_), kCount * sizeof(float)), "cudaMalloc");
    check_cuda(cudaMemset(data_, 0, kCount * sizeof(float)), "cudaMemset");
  }
  ~SoftRaces() override {
    cudaFree(data_);
    set_machine({});
  }

  // "" for none.
  template <class... Arguments>
  std::string fault_of(void (*kernel)(float*, Arguments...), unsigned blocks, unsigned threads,
                       std::type_identity_t<Arguments>... arguments) {
    try {
      launch("k", kernel, dim3(blocks), dim3(threads), {}, data_, arguments...);
    } catch (const KernelFault& fault) {
      return fault.what();
    }
    return "";
  }

  static constexpr std::size_t kCount = 1000;
  float* data_ = nullptr;
};

__global__ void add_in_blocks(float* to, bool atomic) {
  if (threadIdx.x != 3) return;
  if (atomic)
    atomicAdd(to + 7, 1.0f);
  else
    to[7] += 1.0f;
}

TEST_F(SoftRaces, BlocksThatChangeOneElement) {
  EXPECT_THAT(fault_of(add_in_blocks, 2, 32, false),
              AllOf(HasSubstr("kernel \"k\", block ("), HasSubstr("a race: thread (3, 0, 0) reads byte 28 of an"),
                    HasSubstr("which thread (3, 0, 0) of block ("), HasSubstr("has written, and nothing orders blocks"),
                    HasSubstr("LOCKSTEP_SOFT_SEED=")));
  EXPECT_EQ(fault_of(add_in_blocks, 2, 32, true), "");
  EXPECT_EQ(fault_of(add_in_blocks, 1, 32, false), "");
}

__global__ void read_of_next_block(float* to, unsigned ahead) { to[blockIdx.x] = to[blockIdx.x + ahead] + 1.0f; }

TEST_F(SoftRaces, ABlockThatReadsWhatAnotherWrites) {
  EXPECT_THAT(fault_of(read_of_next_block, 3, 1, 1), HasSubstr("nothing orders blocks"));
  EXPECT_EQ(fault_of(read_of_next_block, 3, 1, 0), "");
  EXPECT_EQ(fault_of(read_of_next_block, 3, 1, 3), "");
}

__global__ void read_atomic_sum(float* to) {
  atomicAdd(to, 1.0f);
  if (blockIdx.x == 1) to[1] = to[0];
}

TEST_F(SoftRaces, AtomicsAreOrderedAmongThemselvesAlone) {
  EXPECT_THAT(fault_of(read_atomic_sum, 2, 1), HasSubstr("atomic operation"));
}

__global__ void neighbours_bf16(float* to) {
  reinterpret_cast<BFloat16*>(to)[blockIdx.x * blockDim.x + threadIdx.x] = from_float<BFloat16>(1.0f);
}
__global__ void neighbour_bytes(float* to) {
  reinterpret_cast<unsigned char*>(to)[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}

TEST_F(SoftRaces, NeighboursAreNoRace) {
  EXPECT_EQ(fault_of(neighbours_bf16, 3, 33), "");
  EXPECT_EQ(fault_of(neighbour_bytes, 3, 33), "");
}

__global__ void turn_block(float* to, bool waits) {
  __shared__ float part[96];
  part[threadIdx.x] = to[threadIdx.x];
  if (waits) __syncthreads();
  to[100 + threadIdx.x] = part[95 - threadIdx.x];
}

TEST_F(SoftRaces, AMissingBarrier) {
  EXPECT_NE(fault_of(turn_block, 1, 96, false), "");
  EXPECT_EQ(fault_of(turn_block, 1, 96, true), "");
}

// Which of the two comes first depends on the order.
__global__ void shared_twice(float* to, bool waits) {
  __shared__ float part[64];
  for (int i = 0; i < 2; ++i) {
    part[threadIdx.x] = to[threadIdx.x];
    __syncthreads();
    to[threadIdx.x] = part[63 - threadIdx.x];
    if (waits) __syncthreads();
  }
}

TEST_F(SoftRaces, AMissingBarrierBeforeMemoryIsUsedAgain) {
  EXPECT_THAT(fault_of(shared_twice, 1, 64, false),
              AllOf(HasSubstr("a race: thread ("), HasSubstr("shared memory"), HasSubstr("no barrier is between")));
  EXPECT_EQ(fault_of(shared_twice, 1, 64, true), "");
}

__global__ void turn_warp(float* to, unsigned mask, bool shuffles) {
  __shared__ float part[32];
  part[threadIdx.x] = 1.0f;
  if (shuffles)
    __shfl_xor_sync(kAll, 1, 1);
  else
    __syncwarp(mask);
  if (threadIdx.x < 16) to[threadIdx.x] = part[threadIdx.x ^ 1];
  if (threadIdx.x < 16 && mask == kAll) to[threadIdx.x] = part[threadIdx.x + 16];
}
__global__ void halves_of_a_warp(float* to) {
  const unsigned mask = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
  to[threadIdx.x] = 1.0f;
  __syncwarp(mask);
  to[32 + threadIdx.x] = to[31 - threadIdx.x];
}
__global__ void halves_then_quarters(float* to, bool joins) {
  const unsigned lane = threadIdx.x;
  to[lane] = 1.0f;
  __syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);
  // Lane 0 knows of 16 to 31 by way of lane 31.
  if (joins && lane % 31 == 0) __syncwarp(0x80000001u);
  if (lane == 0) to[40] = to[20];
}

TEST_F(SoftRaces, LanesAreOrderedBySyncwarpAlone) {
  EXPECT_EQ(fault_of(turn_warp, 1, 32, kAll, false), "");
  EXPECT_NE(fault_of(turn_warp, 1, 32, kAll, true), "") << "shuffles do not order memory";
  EXPECT_THAT(fault_of(halves_of_a_warp, 1, 32), HasSubstr("no barrier is between"));
  EXPECT_EQ(fault_of(halves_then_quarters, 1, 32, true), "");
  EXPECT_NE(fault_of(halves_then_quarters, 1, 32, false), "");
}

__global__ void warps_by_syncwarp(float* to) {
  to[threadIdx.x] = 1.0f;
  __syncwarp();
  to[100 + threadIdx.x] = to[63 - threadIdx.x];
}

TEST_F(SoftRaces, SyncwarpOrdersNoOtherWarps) {
  EXPECT_THAT(fault_of(warps_by_syncwarp, 1, 64), HasSubstr("no barrier is between"));
}

// With many readers, of which the writer is one.
__global__ void read_then_written(float* to, bool waits) {
  const float read = to[0];
  if (waits) __syncthreads();
  if (threadIdx.x == 17) to[0] = read + 1.0f;
}

TEST_F(SoftRaces, AReaderBeforeTheWriterIsRemembered) {
  EXPECT_NE(fault_of(read_then_written, 1, 64, false), "");
  EXPECT_EQ(fault_of(read_then_written, 1, 64, true), "");
}

__global__ void part_of_shared(float* to, unsigned written) {
  __shared__ float part[64];
  if (threadIdx.x < written) part[threadIdx.x] = 1.0f;
  __syncthreads();
  to[blockIdx.x * 64 + threadIdx.x] = part[threadIdx.x];
}

TEST_F(SoftRaces, SharedMemoryThatNobodyHasWritten) {
  EXPECT_EQ(fault_of(part_of_shared, 2, 64, 64), "");
  // Of a block before this one there is nothing.
  EXPECT_THAT(fault_of(part_of_shared, 2, 64, 63),
              HasSubstr("thread (63, 0, 0) reads 4 bytes of shared memory that no thread of its block has written"));
}

TEST_F(SoftRaces, SharedMemoryIsNotANumberWhereNothingIsWatched) {
  EXPECT_EQ(fault_of(part_of_shared, 1, 64, 64), "");
  cudaFree(data_);
  set_machine({.watched_launches = 0});
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&data_), kCount * sizeof(float)), "cudaMalloc");
  EXPECT_EQ(fault_of(part_of_shared, 1, 64, 63), "");
  std::vector<float> got(64);
  check_cuda(cudaMemcpy(got.data(), data_, 64 * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
  EXPECT_EQ(got[62], 1.0f);
  EXPECT_TRUE(std::isnan(got[63]));
}

__global__ void read_at(float* to, int at) { to[0] = to[at]; }
__global__ void write_at(float* to, int at) { to[at] = 1.0f; }

TEST_F(SoftRaces, AddressesOutsideOfAllocations) {
  EXPECT_EQ(fault_of(read_at, 1, 1, 999), "");
  EXPECT_THAT(fault_of(read_at, 1, 1, 1000),
              HasSubstr("thread (0, 0, 0) reads 4 bytes at byte 4000 of an allocation of 4000 bytes, outside of it"));
  EXPECT_THAT(fault_of(write_at, 1, 1, -1), HasSubstr("writes 4 bytes at byte -4 of an allocation"));
}

__global__ void write_to(float*, float* other) { *other = 1.0f; }

TEST_F(SoftRaces, MemoryOfTheHostIsNoMemoryOfTheDevice) {
  const auto of_host = std::make_unique<float>(2.0f);
  EXPECT_THAT(fault_of(write_to, 1, 1, of_host.get()), HasSubstr("an address that is no memory of the device"));
  EXPECT_EQ(*of_host, 2.0f);
  const PinnedMemory pinned(sizeof(float));
  EXPECT_EQ(fault_of(write_to, 1, 1, reinterpret_cast<float*>(pinned.data())), "");
}

TEST_F(SoftRaces, MemoryThatWasFreedBeforeTheKernelRan) {
  set_streams(Streams::kLazy);
  {
    const CudaStream stream, other;
    float* freed = nullptr;
    check_cuda(cudaMallocAsync(reinterpret_cast<void**>(&freed), 16, other.get()), "cudaMallocAsync");
    launch("k", write_to, dim3(1), dim3(1), stream.view(), data_, freed);
    cudaFreeAsync(freed, other.get());  // without a wait for the kernel
    other.synchronize();
    EXPECT_THROW(cudaStreamSynchronize(stream.get()), KernelFault);
  }
  set_streams(Streams::kEager);
}

__global__ void write_order(float* to) {
  if (threadIdx.x == 0) to[static_cast<int>(atomicAdd(to + 999, 1.0f))] = static_cast<float>(blockIdx.x);
}

TEST_F(SoftRaces, OrdersOfBlocksFollowFromTheSeed) {
  const auto order_with = [&](std::uint64_t seed) {
    cudaFree(data_);
    set_machine({.seed = seed});
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&data_), kCount * sizeof(float)), "cudaMalloc");
    check_cuda(cudaMemset(data_, 0, kCount * sizeof(float)), "cudaMemset");
    launch("k", write_order, dim3(40), dim3(32), {}, data_);
    std::vector<float> got(40);
    check_cuda(cudaMemcpy(got.data(), data_, 40 * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return got;
  };
  const auto first = order_with(1);
  EXPECT_EQ(order_with(1), first);
  EXPECT_NE(order_with(2), first);
  auto sorted = first;
  std::ranges::sort(sorted);
  for (std::size_t i = 0; i < 40; ++i) EXPECT_EQ(sorted[i], static_cast<float>(i));
}

}  // namespace
}  // namespace lockstep::soft_cuda
