// The kernels of hooks on a GPU against those of the CPU.
#include "ddp/hooks/compression.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/cuda/runtime.h"

namespace lockstep::ddp {
namespace {

/// Numbers on the device, and what they are there.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : count_(values.size()) {
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(T)), "allocating");
    check_cuda(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "copying");
  }
  ~OnDevice() { static_cast<void>(cudaFree(data_)); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* data() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> result(count_);
    check_cuda(cudaMemcpy(result.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "copying");
    return result;
  }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

/// Of all magnitudes, odd ones too; the largest is `largest`.
std::vector<float> numbers(std::size_t count, float largest) {
  std::mt19937 random(static_cast<unsigned>(count));
  std::uniform_real_distribution<float> mantissa(-1, 1);
  std::uniform_int_distribution<int> exponent(-45, 0);
  std::vector<float> values(count);
  for (float& value : values) value = std::ldexp(mantissa(random), exponent(random)) * largest;
  values.back() = -largest;
  return values;
}

template <class T>
std::vector<std::uint16_t> bits_of(const std::vector<T>& values) {
  std::vector<std::uint16_t> bits;
  for (const T value : values) bits.push_back(value.bits);
  return bits;
}

TEST(DeviceHalves, Bf16IsThatOfTheCpu) {
  for (const std::size_t count : {1u, 255u, 257u, 70'001u}) {
    const auto values = numbers(count, 3e5f);
    std::vector<BFloat16> wanted(count);
    narrow(values.data(), 1.0f, wanted.data(), count);
    const OnDevice<float> from(values), back{std::vector<float>(count)};
    const OnDevice<BFloat16> halves{std::vector<BFloat16>(count)};
    narrow_on_device(from.data(), halves.data(), count, {});
    widen_on_device(halves.data(), back.data(), count, {});
    EXPECT_EQ(bits_of(halves.values()), bits_of(wanted));
    std::vector<float> widened(count);
    widen(wanted.data(), 1.0f, widened.data(), count);
    EXPECT_EQ(back.values(), widened);
  }
}

TEST(DeviceHalves, F16IsThatOfTheCpuWithTheScaleOfTheLargest) {
  constexpr int kLog2Ranks = 2;
  for (const float largest : {1e-30f, 7e-6f, 1.0f, 1.5f, 65504.0f, 1e30f})
    for (const std::size_t count : {1u, 255u, 257u, 70'001u}) {
      const auto values = numbers(count, largest);
      const OnDevice<float> from(values), back{std::vector<float>(count)};
      const OnDevice<std::int32_t> found{std::vector<std::int32_t>(1)};
      const OnDevice<Float16> halves{std::vector<Float16>(count)};
      largest_on_device(from.data(), found.data(), count, {});
      EXPECT_EQ(found.values()[0], std::bit_cast<std::int32_t>(largest));
      narrow_on_device(from.data(), found.data(), kLog2Ranks, halves.data(), count, {});
      widen_on_device(halves.data(), found.data(), kLog2Ranks, back.data(), count, {});
      int exponent = 0;
      std::frexp(largest, &exponent);
      const float scale = std::ldexp(1.0f, std::clamp(15 - kLog2Ranks - exponent, -120, 120));
      std::vector<Float16> wanted(count);
      narrow(values.data(), scale, wanted.data(), count);
      ASSERT_EQ(bits_of(halves.values()), bits_of(wanted)) << largest << " " << count;
      std::vector<float> widened(count);
      widen(wanted.data(), 1.0f / scale, widened.data(), count);
      ASSERT_EQ(back.values(), widened);
      EXPECT_LT(std::abs(wanted.back().to_float()) * (1 << kLog2Ranks), 32769.0f) << "all ranks' sum fits";
    }
}

TEST(DeviceHalves, EveryHalfIsWidened) {
  std::vector<Float16> all;
  std::vector<float> wanted;
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<std::uint16_t>(bits)};
    all.push_back(half);
    wanted.push_back(half.to_float());
  }
  const OnDevice<Float16> from(all);
  // A scale of 1: the largest is below 2^15.
  const OnDevice<std::int32_t> largest({std::bit_cast<std::int32_t>(16384.0f)});
  const OnDevice<float> to{std::vector<float>(all.size())};
  widen_on_device(from.data(), largest.data(), 0, to.data(), all.size(), {});
  const auto got = to.values();
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(got[i] == wanted[i] || (std::isnan(got[i]) && std::isnan(wanted[i]))) << i;
  }
}

TEST(DeviceHalves, NonFiniteValuesAreDetected) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    std::vector<float> values(300, 1.0f);
    values[299] = bad;
    const OnDevice<float> from(values), back{std::vector<float>(300)};
    const OnDevice<std::int32_t> largest{std::vector<std::int32_t>(1)};
    const OnDevice<Float16> halves{std::vector<Float16>(300)};
    largest_on_device(from.data(), largest.data(), 300, {});
    narrow_on_device(from.data(), largest.data(), 1, halves.data(), 300, {});
    widen_on_device(halves.data(), largest.data(), 1, back.data(), 300, {});
    EXPECT_FALSE(std::isfinite(back.values()[299]));
  }
}

}  // namespace
}  // namespace lockstep::ddp
