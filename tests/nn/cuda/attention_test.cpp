// CUDA's attention against the CPU's.
#include <array>
#include <ranges>

#include "base/error.h"
#include "nn/ops/cuda/fused_attention.h"
#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

struct AttentionSizes {
  std::int64_t batch, tokens, heads, width;

  Shape qkv() const { return {batch, tokens, 3 * heads * width}; }
  Shape y() const { return {batch, tokens, heads * width}; }
  Shape log_sums() const { return {batch, heads, tokens}; }
  std::string text() const { return fmt::format("{} x {} tokens, {} heads of {}", batch, tokens, heads, width); }
};
// Around a tile of 64 tokens, slabs of 32 columns, and the 64 and 128 columns that a block has of a result.
const AttentionSizes kAttentionSizes[] = {{1, 1, 1, 1},  {2, 5, 3, 4},   {1, 64, 1, 32}, {1, 65, 2, 7},
                                          {0, 3, 2, 4},  {1, 70, 1, 64}, {1, 9, 1, 132}, {1, 130, 1, 20},
                                          {2, 3, 1, 72}, {1, 66, 1, 129}};
// What is masked or dropped is a weight, of two tokens: columns have nothing to do with it.
bool is_narrow(const AttentionSizes& s) { return s.width <= 64; }

class CudaAttention : public DeviceTest {
 protected:
  // Sums of `tokens` weights, or of `tokens` gradients; in 16 bits what is kept in between is rounded: results, and
  // inside of cuDNN weights and gradients of scores.
  Tolerance tolerance(std::int64_t tokens, double scale = 1.0) const {
    if (is_half(type())) return {type(), 0x1p16 * finer_than_bf16(type()), scale};  // in bf16 2⁻⁷ of it
    return {type(), 32.0 + static_cast<double>(tokens), scale};
  }

  // Forward and backward, against the CPU's.
  void compare(const AttentionSizes& s, const AttentionOptions& how, bool padded, double scale = 2.0) {
    SCOPED_TRACE(fmt::format("{}, causal {}, padded {}", s.text(), how.causal, padded));
    Both<AttentionOptions> options = {how, how};
    const auto to_both = [&](auto numbers, DType dtype, Tensor AttentionOptions::*place) {
      options.host.*place = cpu->empty({static_cast<std::int64_t>(numbers.size())}, dtype);
      cpu->upload(std::as_bytes(std::span(numbers)), options.host.*place);
      options.device.*place = plain(options.host.*place);
    };
    if (how.dropout > 0) to_both(std::vector<std::int64_t>{9, 4, 17}, DType::kI64, &AttentionOptions::dropout_state);
    if (padded && s.batch > 0) {
      std::vector<std::int32_t> lengths;
      for (std::int64_t b = 0; b < s.batch; ++b)
        lengths.push_back(static_cast<std::int32_t>(b % 2 == 0 ? s.tokens * 2 / 3 : s.tokens));
      to_both(lengths, DType::kI32, &AttentionOptions::lengths);
    }
    const Operand qkv = activations(random(s.qkv(), 1)), dy = activations(random(s.y(), 2));
    // Of weights that are masked or dropped the two keep other sums.
    std::vector<Tolerance> tolerances = {tolerance(s.tokens, scale)};
    if (!padded && how.dropout == 0) tolerances.push_back({DType::kF32, 32.0, 8.0});
    const Output log_sums = {s.log_sums(), DType::kF32, padded ? cpu->zeros(s.log_sums()) : Tensor()};
    const auto made = DeviceTest::compare(
        cpu->attention(), *attention, {activation_like(s.y()), log_sums}, tolerances,
        [&](auto& on, Side at, const auto& out) { on.forward(at(qkv), s.heads, at(options), out[0], out[1]); });
    const Operand y = activations(rounded(made.expected[0])), sums = plains(made.expected[1]);
    DeviceTest::compare(cpu->attention(), *attention, {activation_like(s.qkv())}, {tolerance(s.tokens, 4.0 * scale)},
                        [&](auto& on, Side at, const auto& out) {
                          on.backward(at(qkv), s.heads, at(options), at(y), at(sums), at(dy), out[0]);
                        });
  }

  std::unique_ptr<AttentionKernels> attention = cuda::make_attention_kernels(context);
};

TEST_P(CudaAttention, ForwardAndBackward) {
  for (const AttentionSizes& s : kAttentionSizes) compare(s, {}, false, 1.0);
}

// The same weights are dropped as on the CPU, in both directions.
TEST_P(CudaAttention, Dropout) {
  for (const AttentionSizes& s : kAttentionSizes | std::views::filter(is_narrow))
    compare(s, {.dropout = 0.3, .layer = 5}, false);
}

// Samples of several lengths, the first of them whole; keys that come after their query.
TEST_P(CudaAttention, PaddingAndKeysThatFollow) {
  for (const AttentionSizes& s : kAttentionSizes | std::views::filter(is_narrow)) {
    compare(s, {.causal = false}, false);
    compare(s, {.causal = false}, true);
    compare(s, {.causal = true}, true);
    compare(s, {.causal = false, .dropout = 0.3, .layer = 5}, true);
  }
}

// Token by token, some at a time, and more than a block for each of them does: each time what forward() makes of all.
TEST_P(CudaAttention, Extend) {
  for (const AttentionSizes& s : {AttentionSizes{2, 7, 3, 4}, AttentionSizes{1, 70, 2, 40},
                                  AttentionSizes{1, 5, 1, 264}, AttentionSizes{1, 19, 1, 256}}) {
    SCOPED_TRACE(s.text());
    const std::int64_t most = s.tokens + 3;
    const Tensor qkv_host = random(s.qkv(), 1), expected = cpu->empty(s.y()), log_sums = cpu->empty(s.log_sums());
    cpu->attention().forward(qkv_host, s.heads, {}, expected, log_sums);
    const Tensor zeros = cpu->zeros({s.batch, most, 2 * s.heads * s.width});
    for (const std::vector<std::int64_t>& steps :
         {std::vector<std::int64_t>{s.tokens}, {s.tokens - 2, 1, 1}, {1, 2, s.tokens - 3}}) {
      const Tensor cache = activation(zeros);
      std::int64_t past = 0;
      for (const std::int64_t count : steps) {
        const Tensor part = cpu->empty({s.batch, count, 3 * s.heads * s.width});
        const Tensor wanted = cpu->empty({s.batch, count, s.heads * s.width});
        for (std::int64_t b = 0; b < s.batch; ++b) {
          std::copy_n(qkv_host.f32() + (b * s.tokens + past) * qkv_host.size(2), count * qkv_host.size(2),
                      part.f32() + b * count * qkv_host.size(2));
          std::copy_n(expected.f32() + (b * s.tokens + past) * expected.size(2), count * expected.size(2),
                      wanted.f32() + b * count * expected.size(2));
        }
        const Tensor x = activation(part);
        const auto got = results({activation_like(wanted.shape())},
                                 [&](const auto& out) { attention->extend(x, s.heads, past, cache, out[0]); });
        expect_close(wanted, got[0], tolerance(s.tokens));
        past += count;
      }
      // The cache holds keys and values as they came, and nothing after them.
      const auto bytes = download(cache);
      const Tensor held = cpu->empty(zeros.shape());
      for (std::int64_t i = 0; i < held.count(); ++i)
        held.f32()[i] = is_half(type()) ? float_of_half(reinterpret_cast<const std::uint16_t*>(bytes.data())[i], type())
                                        : reinterpret_cast<const float*>(bytes.data())[i];
      const std::int64_t row = 2 * s.heads * s.width;
      for (std::int64_t i = 0; i < held.count(); ++i) {
        const std::int64_t b = i / (most * row), t = i / row % most;
        const float kept = t < s.tokens ? qkv_host.f32()[(b * s.tokens + t) * row / 2 * 3 + row / 2 + i % row] : 0.0f;
        ASSERT_EQ(held.f32()[i], kept) << i;
      }
    }
  }
}

// Large scores, of which exp() alone would be infinite, and a token that sees nothing but NaN.
TEST_P(CudaAttention, LargeScoresStayFiniteAndNaNReachesLaterQueries) {
  const AttentionSizes s = {1, 70, 1, 8};
  const Tensor host = random(s.qkv(), 1), expected = cpu->empty(s.y()), log_sums = cpu->empty(s.log_sums());
  for (float& v : host.span<float>()) v *= 16.0f;  // an exact factor
  const auto forward = [&] {
    const Tensor qkv = activation(host);
    return results({activation_like(s.y()), {s.log_sums()}},
                   [&](const auto& out) { attention->forward(qkv, s.heads, {}, out[0], out[1]); });
  };
  cpu->attention().forward(host, s.heads, {}, expected, log_sums);
  const auto large = forward();
  expect_close(log_sums, large[1], {DType::kF32, 32.0, 512.0});
  expect_close(expected, large[0], tolerance(s.tokens, is_half(type()) ? 16.0 : 512.0));
  host.f32()[68 * 24 + 8] = kNaN;  // a key
  const auto got = forward();
  for (std::int64_t i = 0; i < got[0].count(); ++i) ASSERT_EQ(std::isnan(got[0].f32()[i]), i / 8 >= 68) << i;
}

TEST(FusedAttention, SamplesAtOnceKeepScoresWithinBounds) {
  EXPECT_EQ(cuda::samples_at_once(8, 12, 1024), 8);
  EXPECT_EQ(cuda::samples_at_once(64, 12, 1024), 10);
  EXPECT_EQ(cuda::samples_at_once(64, 12, 8192), 1);
  EXPECT_EQ(cuda::samples_at_once(1, 1, 1), 1);
}

INSTANTIATE_TEST_SUITE_P(, CudaAttention, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
