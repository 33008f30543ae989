#include "comm/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/comm/reference.h"

namespace lockstep::comm {
namespace {

using reference::Bytes;

std::vector<const std::byte*> pointers(const std::vector<Bytes>& parts) {
  std::vector<const std::byte*> result;
  for (const Bytes& part : parts) result.push_back(part.data());
  return result;
}

// Around the loops' block of 1024 elements, and vector widths.
constexpr std::size_t kCounts[] = {0, 1, 2, 3, 7, 15, 16, 17, 31, 63, 65, 1023, 1024, 1025, 2047, 2049, 5000};

TEST(Reduce, MatchesAPlainLoop) {
  for (const DType dtype : reference::kDTypes)
    for (const ReduceOp op : reference::kReduceOps)
      for (int sources = 1; sources <= 6; ++sources)
        for (const std::size_t count : kCounts) {
          const auto parts = reference::contributions(dtype, count, 7, sources);
          Bytes result(count * size_of(dtype), std::byte{0xee});
          reduce_in_order(dtype, op, result.data(), pointers(parts), count);
          ASSERT_EQ(result, reference::reduce(dtype, op, parts))
              << name_of(op) << " of " << count << " " << lockstep::name_of(dtype) << " from " << sources;
        }
}

TEST(Reduce, TheDestinationMayBeAnySource) {
  for (const DType dtype : reference::kDTypes)
    for (const std::size_t count : kCounts)
      for (int sources = 1; sources <= 5; ++sources)
        for (std::size_t own = 0; own < static_cast<std::size_t>(sources); ++own) {
          auto parts = reference::contributions(dtype, count, 8, sources);
          const Bytes expected = reference::reduce(dtype, ReduceOp::kSum, parts);
          reduce_in_order(dtype, ReduceOp::kSum, parts[own].data(), pointers(parts), count);
          ASSERT_EQ(parts[own], expected)
              << count << " " << lockstep::name_of(dtype) << ", source " << own << " of " << sources;
        }
}

TEST(Reduce, NothingIsWrittenBehindTheEnd) {
  const std::size_t count = 1025;
  const auto parts = reference::contributions(DType::kF32, count, 9, 3);
  Bytes result((count + 16) * 4, std::byte{0x5a});
  reduce_in_order(DType::kF32, ReduceOp::kSum, result.data(), pointers(parts), count);
  for (std::size_t i = count * 4; i < result.size(); ++i) ASSERT_EQ(result[i], std::byte{0x5a}) << i;
}

TEST(Reduce, SumsInOrder) {
  // Any other order gives another result: 1e8 + -1e8 + 1 = 1, 1 + 1e8 - 1e8 = 0 in f32.
  const float a = 1e8f, b = -1e8f, c = 1.0f;
  float result = 0;
  const auto bytes = [](const float& x) { return reinterpret_cast<const std::byte*>(&x); };
  const std::byte* forward[] = {bytes(a), bytes(b), bytes(c)};
  reduce_in_order(DType::kF32, ReduceOp::kSum, reinterpret_cast<std::byte*>(&result), forward, 1);
  EXPECT_EQ(result, 1.0f);
  const std::byte* other[] = {bytes(c), bytes(a), bytes(b)};
  reduce_in_order(DType::kF32, ReduceOp::kSum, reinterpret_cast<std::byte*>(&result), other, 1);
  EXPECT_EQ(result, 0.0f);
}

TEST(Reduce, Bf16RoundsOnce) {
  // 1 + 2^-8 + 2^-8 is 1.0078125 in bf16; rounding after each addition would lose both.
  const BFloat16 one = BFloat16::from_float(1.0f), small = BFloat16::from_float(0.00390625f);
  BFloat16 result;
  const auto bytes = [](const BFloat16& x) { return reinterpret_cast<const std::byte*>(&x); };
  const std::byte* sources[] = {bytes(one), bytes(small), bytes(small)};
  reduce_in_order(DType::kBF16, ReduceOp::kSum, reinterpret_cast<std::byte*>(&result), sources, 1);
  EXPECT_EQ(result.to_float(), 1.0078125f);
}

template <class T>
void expect_nan_wins(DType dtype) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  for (const ReduceOp op : reference::kReduceOps)
    for (std::size_t place = 0; place < 3; ++place) {
      // Long enough for the vector loop and its rest.
      std::vector<std::vector<T>> values(3, std::vector<T>(37, T{1}));
      values[place].assign(37, nan);
      std::vector<const std::byte*> sources;
      for (const auto& v : values) sources.push_back(reinterpret_cast<const std::byte*>(v.data()));
      std::vector<T> result(37);
      reduce_in_order(dtype, op, reinterpret_cast<std::byte*>(result.data()), sources, 37);
      for (const T value : result) ASSERT_TRUE(std::isnan(value)) << name_of(op) << ", NaN from source " << place;
    }
}

TEST(Reduce, NaNWins) {
  expect_nan_wins<float>(DType::kF32);
  expect_nan_wins<double>(DType::kF64);
}

}  // namespace
}  // namespace lockstep::comm
