// The soft GPU's kernels: what they may rely on, and what they are caught at.
#include "tests/soft_cuda/soft_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/cuda/device.cuh"

namespace lockstep::soft_cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Device memory of a test, by its element.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    void* data = nullptr;
    check_cuda(cudaMalloc(&data, count * sizeof(T)), "cudaMalloc");
    data_ = static_cast<T*>(data);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  T* get() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    check_cuda(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

template <class Run>
std::string fault_of(const Run& run) {
  try {
    run();
  } catch (const KernelFault& fault) {
    return fault.what();
  }
  return "no fault";
}

__global__ void number_all(unsigned* out) {
  const unsigned in_block = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned at = block * blockDim.x * blockDim.y * blockDim.z + in_block;
  out[at] = at + 1000000 * threadIdx.y;
}

TEST(SoftKernels, EachThreadRunsOnceWithItsOwnIndices) {
  const dim3 grid(3, 2, 2), block(4, 3, 2);
  const DeviceArray<unsigned> out(288);
  launch("number_all", number_all, grid, block, {}, out.get());
  const auto got = out.read();
  for (unsigned i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], i + 1000000 * (i % 24 / 4 % 3)) << i;
}

TEST(SoftKernels, GridWithoutBlocksStartsNothing) {
  const std::uint64_t before = counts().launches;
  launch("number_all", number_all, dim3(0), dim3(32), {}, static_cast<unsigned*>(nullptr));
  EXPECT_EQ(counts().launches, before);
}

// Sums of a block by halves, over shared memory.
__global__ void block_sums(const float* x, float* sums) {
  __shared__ float part[256];
  part[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
  __syncthreads();
  for (unsigned half = 128; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}

TEST(SoftKernels, BarriersWaitForAllThreadsOfABlock) {
  const DeviceArray<float> x(768), sums(3);
  std::vector<float> values(768);
  std::iota(values.begin(), values.end(), 1.0f);
  ASSERT_EQ(cudaMemcpy(x.get(), values.data(), values.size() * 4, cudaMemcpyHostToDevice), cudaSuccess);
  launch("block_sums", block_sums, dim3(3), dim3(256), {}, x.get(), sums.get());
  for (unsigned b = 0; b < 3; ++b)
    EXPECT_EQ(sums.read()[b], std::reduce(values.begin() + 256L * b, values.begin() + 256L * (b + 1)));
}

__device__ inline float warp_sum(float x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

__global__ void shuffles(float* xor_sums, int* down, int* up, double* third, std::int64_t* wide, unsigned* votes) {
  const unsigned t = threadIdx.x;
  xor_sums[t] = warp_sum(static_cast<float>(t));
  down[t] = __shfl_down_sync(0xffffffffu, static_cast<int>(t), 3);
  up[t] = __shfl_up_sync(0xffffffffu, static_cast<int>(t), 1, 8);
  third[t] = __shfl_sync(0xffffffffu, t + 0.5, 2);
  wide[t] = __shfl_xor_sync(0xffffffffu, (std::int64_t{1} << 40) + t, 1);
  votes[t] = __ballot_sync(0xffffffffu, t % 2 == 1);
}

TEST(SoftKernels, ShufflesMoveValuesWithinWarps) {
  const DeviceArray<float> xor_sums(64);
  const DeviceArray<int> down(64), up(64);
  const DeviceArray<double> third(64);
  const DeviceArray<std::int64_t> wide(64);
  const DeviceArray<unsigned> votes(64);
  launch("shuffles", shuffles, dim3(1), dim3(64), {}, xor_sums.get(), down.get(), up.get(), third.get(), wide.get(),
         votes.get());
  for (int t = 0; t < 64; ++t) {
    const auto i = static_cast<std::size_t>(t);
    EXPECT_EQ(xor_sums.read()[i], t < 32 ? 496.0f : 496.0f + 32 * 32);
    EXPECT_EQ(down.read()[i], t % 32 < 29 ? t + 3 : t);
    EXPECT_EQ(up.read()[i], t % 8 > 0 ? t - 1 : t);
    EXPECT_EQ(third.read()[i], t < 32 ? 2.5 : 34.5);
    EXPECT_EQ(wide.read()[i], (std::int64_t{1} << 40) + (t ^ 1));
    EXPECT_EQ(votes.read()[i], 0xaaaaaaaau);
  }
}

__global__ void count_up(int* counter, float* sum) {
  atomicAdd(counter, 1);
  atomicAdd(sum, 0.5f);
}

TEST(SoftKernels, AtomicsCountAll) {
  const DeviceArray<int> counter(1);
  const DeviceArray<float> sum(1);
  cudaMemset(counter.get(), 0, 4);
  cudaMemset(sum.get(), 0, 4);
  launch("count_up", count_up, dim3(10), dim3(96), {}, counter.get(), sum.get());
  EXPECT_EQ(counter.read()[0], 960);
  EXPECT_EQ(sum.read()[0], 480.0f);
}

__global__ void half_at_barrier(int* out) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    out[threadIdx.x] = 1;
    __syncthreads();
  }
}

TEST(SoftKernels, DivergentBarrierIsCaught) {
  const DeviceArray<int> out(32);
  EXPECT_THAT(fault_of([&] { launch("halves", half_at_barrier, dim3(2), dim3(32), {}, out.get()); }),
              AllOf(HasSubstr("kernel \"halves\", block ("), HasSubstr("barriers diverge: thread (0, 0, 0)"),
                    HasSubstr("thread (16, 0, 0) is in __syncthreads")));
}

__global__ void barrier_against_shuffle(int* out) {
  if (threadIdx.x == 5) __syncthreads();
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, static_cast<int>(threadIdx.x), 1);
}

TEST(SoftKernels, ShuffleThatALaneDoesNotReachIsCaught) {
  const DeviceArray<int> out(32);
  EXPECT_THAT(
      fault_of([&] { launch("mixed", barrier_against_shuffle, dim3(1), dim3(32), {}, out.get()); }),
      AllOf(HasSubstr("waits in __shfl_xor_sync"), HasSubstr("for thread (5, 0, 0), which is in __syncthreads")));
}

__global__ void shuffle_after_return(int* out) {
  if (threadIdx.x == 31) return;
  out[threadIdx.x] = __shfl_down_sync(0xffffffffu, 1, 1);
}

TEST(SoftKernels, ShuffleWithALaneThatHasReturnedIsCaught) {
  const DeviceArray<int> out(32);
  EXPECT_THAT(fault_of([&] { launch("left", shuffle_after_return, dim3(1), dim3(32), {}, out.get()); }),
              HasSubstr("for thread (31, 0, 0), which has returned"));
}

__global__ void full_mask_in_a_part(int* out) { out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1); }

TEST(SoftKernels, MaskOfLanesThatAreNotThereIsCaught) {
  const DeviceArray<int> out(16);
  EXPECT_THAT(fault_of([&] { launch("part", full_mask_in_a_part, dim3(1), dim3(16), {}, out.get()); }),
              HasSubstr("names lanes that the block does not have"));
}

__global__ void return_before_barrier(int* out) {
  if (threadIdx.x >= 20) return;
  __syncthreads();
  out[threadIdx.x] = 7;
}

TEST(SoftKernels, ThreadsThatHaveReturnedCountAsArrivedAndAreCounted) {
  const DeviceArray<int> out(32);
  const std::uint64_t before = counts().early_returns;
  launch("early", return_before_barrier, dim3(1), dim3(32), {}, out.get());
  EXPECT_EQ(out.read()[19], 7);
  EXPECT_EQ(counts().early_returns, before + 12);
}

TEST(SoftKernels, DeviceWorksOnAfterAFault) {
  const DeviceArray<int> out(1024);
  fault_of([&] { launch("halves", half_at_barrier, dim3(1), dim3(1024), {}, out.get()); });
  launch("early", return_before_barrier, dim3(1), dim3(32), {}, out.get());
  EXPECT_EQ(out.read()[3], 7);
}

TEST(SoftKernels, GridsAndBlocksThatAreTooLargeAreRefused) {
  unsigned* const nowhere = nullptr;
  EXPECT_THROW(launch("wide", number_all, dim3(1), dim3(1025), {}, nowhere), KernelFault);
  EXPECT_THROW(launch("deep", number_all, dim3(1), dim3(1, 1, 65), {}, nowhere), KernelFault);
  EXPECT_THROW(launch("tall", number_all, dim3(1, 65536), dim3(32), {}, nowhere), KernelFault);
}

__global__ void vectors(const float* x, float4* y) { y[threadIdx.x] = reinterpret_cast<const float4*>(x)[threadIdx.x]; }

TEST(SoftKernels, VectorsAtOddAddressesAreFatal) {
  const DeviceArray<float> x(9);
  const DeviceArray<float4> y(2);
  launch("vectors", vectors, dim3(1), dim3(2), {}, x.get(), y.get());
  EXPECT_DEATH(launch("vectors", vectors, dim3(1), dim3(2), {}, x.get() + 1, y.get()), "misaligned");
}

TEST(SoftKernels, TheFirstLaunchOfAKernelWaitsWhereCodeIsLoadedLate) {
  for (const bool lazy_loading : {false, true}) {
    set_machine({.streams = Streams::kLazy, .lazy_loading = lazy_loading});
    const std::uint64_t before = counts().loading_waits;
    {
      const DeviceArray<float4> y(2);
      const DeviceArray<float> x(8);
      const CudaStream stream, other;
      bool done = false;
      submit(other.get(), [&] { done = true; });
      launch("vectors", vectors, dim3(1), dim3(2), stream.view(), x.get(), y.get());
      EXPECT_EQ(done, lazy_loading);
      bool again = false;
      submit(other.get(), [&] { again = true; });
      launch("vectors", vectors, dim3(1), dim3(2), stream.view(), x.get(), y.get());
      EXPECT_FALSE(again);
      EXPECT_EQ(counts().loading_waits, before + (lazy_loading ? 1 : 0));
    }
    set_machine({});
  }
}

__global__ void beyond_shared(int* out, int at) {
  __shared__ int part[32];
  part[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = part[at];
}

TEST(SoftKernels, IndicesOutsideOfSharedArraysAreFatal) {
  const DeviceArray<int> out(32);
  launch("shared", beyond_shared, dim3(1), dim3(32), {}, out.get(), 31);
  EXPECT_DEATH(launch("shared", beyond_shared, dim3(1), dim3(32), {}, out.get(), 32), "out of bounds");
}

__global__ void round_all(const float* x, BFloat16* y, unsigned count) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    y[i] = from_float<BFloat16>(x[i]);
}

TEST(SoftKernels, RoundsToBf16AsTheHostDoes) {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000; high += 7)
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      values.push_back(std::bit_cast<float>(high << 16 | low));
  const DeviceArray<float> x(values.size());
  const DeviceArray<BFloat16> y(values.size());
  cudaMemcpy(x.get(), values.data(), values.size() * 4, cudaMemcpyHostToDevice);
  launch("round_all", round_all, dim3(16), dim3(256), {}, x.get(), y.get(), static_cast<unsigned>(values.size()));
  const auto got = y.read();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) {
      EXPECT_TRUE(std::isnan(got[i].to_float())) << i;
    } else {
      EXPECT_EQ(got[i].bits, BFloat16::from_float(values[i]).bits) << values[i];
    }
  }
}

}  // namespace
}  // namespace lockstep::soft_cuda
