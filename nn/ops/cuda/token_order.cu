#include "nn/ops/cuda/token_order.h"

#include <bit>
#include <limits>
#include <utility>

#include "base/error.h"
#include "nn/ops/cuda/grid.h"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

// Note [Sorting tokens]
// Digit by digit from the lowest (radix sort), each pass keeping what the passes before it have ordered. A block has a
// chunk of the places and a thread for each digit, which goes over the chunk and counts, then places, its own: that is
// stable without any agreement among threads. A vocabulary of fewer than 512 tokens takes one pass, of fewer than
// 262,144 two.
constexpr int kDigitBits = 9, kDigits = 1 << kDigitBits;
constexpr int kChunk = 1024;
constexpr int kScanBlock = 1024;

__device__ int digit_of(std::int32_t token, int shift) { return token >> shift & (kDigits - 1); }

// Numbers and places; what is no row of the table comes last.
__global__ void __launch_bounds__(kBlock)
    list_places(std::int64_t count, std::int64_t rows, const std::int32_t* numbers, TokenPlace* places) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= count) return;
  const std::int32_t number = numbers[i];
  places[i] = {number >= 0 && number < rows ? number : static_cast<std::int32_t>(rows), static_cast<std::int32_t>(i)};
}

// As many digits as one access takes.
using Digits = Pack<std::uint16_t, 8>;
constexpr int kPacks = kChunk / 8;

// The digits of the block's chunk; kDigits, which is none, after the end.
__device__ void hold_digits(std::int64_t count, int shift, const TokenPlace* places, Digits* digits) {
  const std::int64_t begin = std::int64_t{blockIdx.x} * kChunk;
  const int held = static_cast<int>(at_most(count - begin, kChunk));
  for (int i = static_cast<int>(threadIdx.x); i < kChunk; i += kDigits)
    digits[i / 8].of[i % 8] = static_cast<std::uint16_t>(i < held ? digit_of(places[begin + i].token, shift) : kDigits);
  __syncthreads();
}

// counts (kDigits, chunks)
__global__ void __launch_bounds__(kDigits)
    count_digits(std::int64_t count, int shift, const TokenPlace* places, std::int32_t* counts) {
  __shared__ Digits digits[kPacks];
  hold_digits(count, shift, places, digits);
  const int own = static_cast<int>(threadIdx.x);
  int found = 0;
  for (int i = 0; i < kPacks; ++i) {
    const Digits some = digits[i];
    for (const std::uint16_t digit : some.of) found += digit == own ? 1 : 0;
  }
  counts[std::int64_t{own} * gridDim.x + blockIdx.x] = found;
}

// Each number becomes the sum of those before it. One block.
__global__ void __launch_bounds__(kScanBlock) sum_before(std::int64_t count, std::int32_t* numbers) {
  __shared__ std::int32_t sums[kScanBlock];
  const int t = static_cast<int>(threadIdx.x);
  const std::int64_t share = ceil_div(count, kScanBlock);
  const std::int64_t begin = at_most(t * share, count), end = at_most(begin + share, count);
  std::int32_t own = 0;
  for (std::int64_t i = begin; i < end; ++i) own += numbers[i];
  std::int32_t sum = own;
  sums[t] = sum;
  for (int step = 1; step < kScanBlock; step *= 2) {
    __syncthreads();
    const std::int32_t other = t >= step ? sums[t - step] : 0;
    __syncthreads();
    sum += other;
    sums[t] = sum;
  }
  std::int32_t before = sum - own;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int32_t number = numbers[i];
    numbers[i] = before;
    before += number;
  }
}

__global__ void __launch_bounds__(kDigits) place_digits(std::int64_t count, int shift, const TokenPlace* places,
                                                        const std::int32_t* before, TokenPlace* sorted) {
  __shared__ Digits digits[kPacks];
  hold_digits(count, shift, places, digits);
  const int own = static_cast<int>(threadIdx.x);
  const TokenPlace* const from = places + std::int64_t{blockIdx.x} * kChunk;
  std::int64_t to = before[std::int64_t{own} * gridDim.x + blockIdx.x];
  for (int i = 0; i < kPacks; ++i) {
    const Digits some = digits[i];
    for (int k = 0; k < 8; ++k)
      if (some.of[k] == own) sorted[to++] = from[i * 8 + k];
  }
}

}  // namespace

Tensor sort_tokens(Context& context, const Tensor& numbers, std::int64_t rows) {
  const std::int64_t n = numbers.count();
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  LOCKSTEP_ASSERT(n > 0 && n < kMost && rows < kMost, "sorting {} tokens of {}", n, rows);
  Tensor order = Tensor::empty(context.allocator, {n, 2}, DType::kI32);
  Tensor other = Tensor::empty(context.allocator, {n, 2}, DType::kI32);
  const auto places_of = [](const Tensor& tensor) {
    return reinterpret_cast<TokenPlace*>(tensor.data<std::int32_t>());
  };
  launch("listing tokens", list_places, dim3(static_cast<unsigned>(ceil_div(n, kBlock))), dim3(kBlock), context.stream,
         n, rows, numbers.data<std::int32_t>(), places_of(order));
  const std::int64_t chunks = ceil_div(n, kChunk);
  const Tensor counts = Tensor::empty(context.allocator, {kDigits, chunks}, DType::kI32);
  const dim3 grid(static_cast<unsigned>(chunks));
  const int bits = std::bit_width(static_cast<std::uint64_t>(rows));  // the largest number is `rows`
  for (int shift = 0; shift < bits; shift += kDigitBits) {
    launch("counting tokens", count_digits, grid, dim3(kDigits), context.stream, n, shift, places_of(order),
           counts.data<std::int32_t>());
    launch("counting tokens", sum_before, dim3(1), dim3(kScanBlock), context.stream, kDigits * chunks,
           counts.data<std::int32_t>());
    launch("sorting tokens", place_digits, grid, dim3(kDigits), context.stream, n, shift, places_of(order),
           counts.data<std::int32_t>(), places_of(other));
    std::swap(order, other);
  }
  return order;
}

}  // namespace lockstep::nn::cuda
