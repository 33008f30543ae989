#include "comm/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
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

std::vector<std::byte*> places(std::vector<Bytes>& parts) {
  std::vector<std::byte*> result;
  for (Bytes& part : parts) result.push_back(part.data());
  return result;
}

// Around one line and a few lines.
constexpr std::size_t kCounts[] = {0, 1, 2, 3, 7, 15, 16, 17, 31, 63, 65, 1023, 1024, 1025, 2047, 2049, 5000};
// Around what is walked in strips: more than 256 KiB in all sources, at least 32 KiB in each; and odd rests of them.
constexpr std::size_t kManyBytes[] = {32'768 - 8,  32'768,      43'696,       65'536,  87'384,
                                      131'072 - 8, 131'072 + 8, 131'072 + 64, 200'000, 300'008};

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

TEST(Reduce, IntoAllGivesEveryCopyTheSame) {
  for (const DType dtype : reference::kDTypes)
    for (const ReduceOp op : reference::kReduceOps)
      for (int copies = 1; copies <= 6; ++copies)
        for (const std::size_t count : kCounts) {
          auto parts = reference::contributions(dtype, count, 10, copies);
          const Bytes expected = reference::reduce(dtype, op, parts);
          reduce_into_all(dtype, op, places(parts), count);
          for (const Bytes& part : parts)
            ASSERT_EQ(part, expected) << name_of(op) << " of " << count << " " << lockstep::name_of(dtype) << " in "
                                      << copies;
        }
}

// One element more than is reduced, and nothing aligned to more than an element.
TEST(Reduce, ManyBytes) {
  for (const DType dtype : reference::kDTypes)
    for (const int sources : {2, 3, 5, 9})
      for (const std::size_t bytes : kManyBytes) {
        const std::size_t element = size_of(dtype), count = bytes / element;
        const auto parts = reference::contributions(dtype, count + 2, 11, sources);
        const Bytes all = reference::reduce(dtype, ReduceOp::kSum, parts);
        const Bytes expected(all.begin() + static_cast<std::ptrdiff_t>(element),
                             all.end() - static_cast<std::ptrdiff_t>(element));
        const auto holds = [&](const Bytes& result, const Bytes& before) {
          // The reduction in the middle, and the first and the last element as they were.
          return std::equal(expected.begin(), expected.end(), result.begin() + static_cast<std::ptrdiff_t>(element)) &&
                 std::equal(before.begin(), before.begin() + static_cast<std::ptrdiff_t>(element), result.begin()) &&
                 std::equal(before.end() - static_cast<std::ptrdiff_t>(element), before.end(),
                            result.end() - static_cast<std::ptrdiff_t>(element));
        };
        const auto where = ::testing::Message()
                           << bytes << " bytes of " << lockstep::name_of(dtype) << " in " << sources;

        auto copies = parts;
        auto targets = places(copies);
        for (std::byte*& target : targets) target += element;
        reduce_into_all(dtype, ReduceOp::kSum, targets, count);
        for (std::size_t r = 0; r < copies.size(); ++r) ASSERT_TRUE(holds(copies[r], parts[r])) << where;

        copies = parts;
        auto from = pointers(copies);
        for (const std::byte*& source : from) source += element;
        reduce_in_order(dtype, ReduceOp::kSum, copies.back().data() + element, from, count);
        ASSERT_TRUE(holds(copies.back(), parts.back())) << where;
        copies.pop_back();
        ASSERT_TRUE(std::equal(copies.begin(), copies.end(), parts.begin())) << "a source was written, " << where;
      }
}

TEST(Reduce, NothingIsWrittenPastTheEnd) {
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

// Ties, overflow to infinity, subnormal numbers and NaN: as BFloat16 rounds, in both halves of a pair.
TEST(Reduce, Bf16RoundsAsTheTypeDoes) {
  std::vector<BFloat16> a, b;
  for (std::uint32_t high = 0; high < 0x10000; ++high)
    for (const std::uint16_t other : {0x0000, 0x8000, 0x3f80, 0x3b80, 0x7f7f, 0xff80, 0x0001, 0x7fc1}) {
      a.push_back({static_cast<std::uint16_t>(high)});
      b.push_back({other});
    }
  // The same shifted by one element, so that each value has been in each half.
  for (const std::size_t skip : {0u, 1u}) {
    const std::size_t count = a.size() - skip;
    std::vector<BFloat16> result(count);
    const std::byte* sources[] = {reinterpret_cast<const std::byte*>(a.data() + skip),
                                  reinterpret_cast<const std::byte*>(b.data() + skip)};
    reduce_in_order(DType::kBF16, ReduceOp::kSum, reinterpret_cast<std::byte*>(result.data()), sources, count);
    for (std::size_t i = 0; i < count; ++i) {
      const float x = a[i + skip].to_float(), y = b[i + skip].to_float();
      const BFloat16 expected = BFloat16::from_float(x + y);
      if (std::isnan(x + y))
        ASSERT_TRUE(std::isnan(result[i].to_float())) << x << " + " << y;
      else
        ASSERT_EQ(result[i].bits, expected.bits) << x << " + " << y;
    }
  }
}

TEST(Reduce, F16RoundsOnce) {
  // 1 + 2^-11 + 2^-11 is 1.0009765625 in f16, and 300 · 300 / 1000 is 90: rounding in between gives 1 and infinity.
  const auto reduced = [](ReduceOp op, float a, float b, float c) {
    const Float16 values[] = {Float16::from_float(a), Float16::from_float(b), Float16::from_float(c)};
    Float16 result;
    std::vector<const std::byte*> sources;
    for (const Float16& value : values) sources.push_back(reinterpret_cast<const std::byte*>(&value));
    reduce_in_order(DType::kF16, op, reinterpret_cast<std::byte*>(&result), sources, 1);
    return result.to_float();
  };
  EXPECT_EQ(reduced(ReduceOp::kSum, 1.0f, 0x1p-11f, 0x1p-11f), 1.0009765625f);
  EXPECT_EQ(reduced(ReduceOp::kProd, 300.0f, 300.0f, 0.0009765625f), 87.875f);
}

// All values on both sides, among others, in both halves of a pair: as the type rounds them.
TEST(Reduce, F16RoundsAsTheTypeDoes) {
  std::vector<Float16> a, b;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits)
    for (const std::uint16_t other : {0x0000, 0x8000, 0x3c00, 0x3bff, 0x0001, 0x83ff, 0x7bff, 0x7c00, 0xfc00, 0x7e01}) {
      a.push_back({static_cast<std::uint16_t>(bits)});
      b.push_back({other});
    }
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd})
    for (const std::size_t skip : {0u, 1u}) {
      const std::size_t count = a.size() - skip;
      std::vector<Float16> result(count);
      const std::byte* sources[] = {reinterpret_cast<const std::byte*>(a.data() + skip),
                                    reinterpret_cast<const std::byte*>(b.data() + skip)};
      reduce_in_order(DType::kF16, op, reinterpret_cast<std::byte*>(result.data()), sources, count);
      for (std::size_t i = 0; i < count; ++i) {
        const float x = a[i + skip].to_float(), y = b[i + skip].to_float();
        const float exact = op == ReduceOp::kSum ? x + y : x * y;
        if (std::isnan(exact))
          ASSERT_TRUE(std::isnan(result[i].to_float())) << x << " and " << y;
        else
          ASSERT_EQ(result[i].bits, Float16::from_float(exact).bits) << x << " and " << y;
      }
    }
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
