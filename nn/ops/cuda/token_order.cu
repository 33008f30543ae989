#include "nn/ops/cuda/own_kernels.h"

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
// chunk of the places, a thread one of them: its place among those of its digit is the number of them in earlier
// chunks, and of those before it in its own. A vocabulary of fewer than 512 tokens takes one pass, of fewer than
// 262,144 two.
constexpr int kDigitBits = 9, kDigits = 1 << kDigitBits;
constexpr int kChunk = kBlock;
constexpr int kScanBlock = 1024;

__device__ int digit_of(std::int32_t token, int shift) { return token >> shift & (kDigits - 1); }

// Numbers and places; what is no row of the table comes last.
__global__ void __launch_bounds__(kBlock)
    list_places(std::int64_t count, std::int64_t rows, const std::int32_t* indices, TokenPlace* places) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= count) return;
  const std::int32_t index = indices[i];
  places[i] = {index >= 0 && index < rows ? index : static_cast<std::int32_t>(rows), static_cast<std::int32_t>(i)};
}

// counts (kDigits, chunks)
__global__ void __launch_bounds__(kChunk)
    count_digits(std::int64_t count, int shift, const TokenPlace* places, std::int32_t* counts) {
  __shared__ std::int32_t found[kDigits];
  const int t = static_cast<int>(threadIdx.x);
  for (int digit = t; digit < kDigits; digit += kChunk) found[digit] = 0;
  __syncthreads();
  const std::int64_t own = std::int64_t{blockIdx.x} * kChunk + t;
  if (own < count) atomicAdd(&found[digit_of(places[own].token, shift)], 1);
  __syncthreads();
  for (int digit = t; digit < kDigits; digit += kChunk)
    counts[std::int64_t{digit} * gridDim.x + blockIdx.x] = found[digit];
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

// As many digits as one access takes.
using Digits = Pack<std::uint16_t, 8>;

__global__ void __launch_bounds__(kChunk) place_digits(std::int64_t count, int shift, const TokenPlace* places,
                                                       const std::int32_t* before, TokenPlace* sorted) {
  __shared__ Digits digits[kChunk / 8];
  const int t = static_cast<int>(threadIdx.x);
  const std::int64_t own = std::int64_t{blockIdx.x} * kChunk + t;
  const TokenPlace place = own < count ? places[own] : TokenPlace{};
  const int digit = own < count ? digit_of(place.token, shift) : kDigits;
  digits[t / 8].of[t % 8] = static_cast<std::uint16_t>(digit);
  __syncthreads();
  if (own >= count) return;
  std::int64_t to = before[std::int64_t{digit} * gridDim.x + blockIdx.x];
  for (int i = 0; i <= t / 8; ++i) {
    const Digits some = digits[i];
    for (int k = 0; k < 8; ++k) to += some.of[k] == digit && i * 8 + k < t ? 1 : 0;
  }
  sorted[to] = place;
}

}  // namespace

Tensor sort_tokens(Context& context, const Tensor& indices, std::int64_t rows) {
  const std::int64_t n = indices.count();
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  LOCKSTEP_ASSERT(n > 0 && n < kMost && rows < kMost, "sorting {} tokens of {}", n, rows);
  Tensor order = Tensor::empty(context.allocator, {n, 2}, DType::kI32);
  Tensor other = Tensor::empty(context.allocator, {n, 2}, DType::kI32);
  const auto places_of = [](const Tensor& tensor) {
    return reinterpret_cast<TokenPlace*>(tensor.data<std::int32_t>());
  };
  launch("listing tokens", list_places, dim3(static_cast<unsigned>(ceil_div(n, kBlock))), dim3(kBlock), context.stream,
         n, rows, indices.data<std::int32_t>(), places_of(order));
  const std::int64_t chunks = ceil_div(n, kChunk);
  const Tensor counts = Tensor::empty(context.allocator, {kDigits, chunks}, DType::kI32);
  const dim3 grid(static_cast<unsigned>(chunks));
  const int bits = std::bit_width(static_cast<std::uint64_t>(rows));  // the largest index is `rows`
  for (int shift = 0; shift < bits; shift += kDigitBits) {
    launch("counting tokens", count_digits, grid, dim3(kChunk), context.stream, n, shift, places_of(order),
           counts.data<std::int32_t>());
    launch("counting tokens", sum_before, dim3(1), dim3(kScanBlock), context.stream, kDigits * chunks,
           counts.data<std::int32_t>());
    launch("sorting tokens", place_digits, grid, dim3(kChunk), context.stream, n, shift, places_of(order),
           counts.data<std::int32_t>(), places_of(other));
    std::swap(order, other);
  }
  return order;
}

}  // namespace lockstep::nn::cuda
