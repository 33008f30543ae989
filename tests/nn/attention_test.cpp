// Attention on the CPU: against plain loops in f64, with one and with two threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

void expect_within(const std::vector<double>& expected, const Tensor& actual) {
  ASSERT_EQ(static_cast<std::int64_t>(expected.size()), actual.count());
  for (std::size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(expected[i], at(actual, static_cast<std::int64_t>(i)), 2e-5) << "element " << i;
}

class AttentionTest : public CpuKernelTest {};

Tensor dropout_state(Backend& backend, std::array<std::int64_t, 3> numbers) {
  Tensor state = backend.empty({3}, DType::kI64);
  backend.upload(std::as_bytes(std::span(numbers)), state);
  return state;
}

// Over blocks of queries and whole fours of keys. Samples that are whole, cut and empty.
TEST_P(AttentionTest, MatchesPlainLoops) {
  constexpr std::int64_t kBatch = 3, kHeads = 2, kWidth = 3, kModel = kHeads * kWidth, kLayer = 7;
  for (const std::int64_t tokens : {1, 6, 67, 130})
    for (const bool causal : {true, false})
      for (const bool padded : {false, true})
        for (const double drop : {0.0, 0.3}) {
          SCOPED_TRACE(fmt::format("{} tokens, causal {}, padded {}, dropout {}", tokens, causal, padded, drop));
          const std::array<std::int32_t, kBatch> lengths = {static_cast<std::int32_t>(padded ? tokens / 2 + 1 : tokens),
                                                            static_cast<std::int32_t>(tokens),
                                                            static_cast<std::int32_t>(padded ? 0 : tokens)};
          AttentionOptions options{.causal = causal, .dropout = drop, .layer = kLayer};
          if (drop > 0) options.dropout_state = dropout_state(*backend, {5, 9, 100});
          if (padded) {
            options.lengths = backend->empty({kBatch}, DType::kI32);
            backend->upload(std::as_bytes(std::span(lengths)), options.lengths);
          }
          const Tensor qkv = random({kBatch, tokens, 3 * kModel}, 1), dy = random({kBatch, tokens, kModel}, 2);
          std::vector<double> y(static_cast<std::size_t>(kBatch * tokens * kModel)), dqkv(3 * y.size());
          std::int64_t dropped = 0, all = 0;
          const auto of = [&](std::int64_t b, std::int64_t t, std::int64_t part, std::int64_t h, std::int64_t c) {
            return ((b * tokens + t) * 3 + part) * kModel + h * kWidth + c;
          };
          for (std::int64_t b = 0; b < kBatch; ++b)
            for (std::int64_t h = 0; h < kHeads; ++h)
              for (std::int64_t t = 0; t < lengths[static_cast<std::size_t>(b)]; ++t) {
                std::vector<double> p, kept, dp;
                double sum = 0, mean = 0;
                const std::int64_t seen = causal ? t + 1 : lengths[static_cast<std::size_t>(b)];
                for (std::int64_t key = 0; key < seen; ++key) {
                  double score = 0;
                  for (std::int64_t c = 0; c < kWidth; ++c)
                    score += at(qkv, of(b, t, 0, h, c)) * at(qkv, of(b, key, 1, h, c));
                  p.push_back(std::exp(score / std::sqrt(static_cast<double>(kWidth))));
                  sum += p.back();
                  const RandomBits bits =
                      attention_bits({.seed = 5, .step = 9, .first_sample = 100}, kLayer, 100 + b, h, tokens, t, key);
                  kept.push_back(drop == 0 ? 1 : bits.word[key % 4] >= dropout_threshold(drop) ? 1 / (1 - drop) : 0);
                  dropped += kept.back() == 0 ? 1 : 0;
                  ++all;
                }
                for (std::size_t key = 0; key < p.size(); ++key) {
                  p[key] /= sum;
                  dp.push_back(0);
                  for (std::int64_t c = 0; c < kWidth; ++c) {
                    const std::int64_t value = of(b, static_cast<std::int64_t>(key), 2, h, c);
                    const std::int64_t out = (b * tokens + t) * kModel + h * kWidth + c;
                    y[static_cast<std::size_t>(out)] += kept[key] * p[key] * at(qkv, value);
                    dqkv[static_cast<std::size_t>(value)] += kept[key] * p[key] * at(dy, out);
                    dp[key] += kept[key] * at(dy, out) * at(qkv, value);
                  }
                  mean += p[key] * dp[key];
                }
                for (std::size_t key = 0; key < p.size(); ++key)
                  for (std::int64_t c = 0; c < kWidth; ++c) {
                    const double ds = p[key] * (dp[key] - mean) / std::sqrt(static_cast<double>(kWidth));
                    const std::int64_t k = of(b, static_cast<std::int64_t>(key), 1, h, c), q = of(b, t, 0, h, c);
                    dqkv[static_cast<std::size_t>(q)] += ds * at(qkv, k);
                    dqkv[static_cast<std::size_t>(k)] += ds * at(qkv, q);
                  }
              }
          if (all > 1000) {
            EXPECT_NEAR(static_cast<double>(dropped) / static_cast<double>(all), drop, 0.03);
          }
          const Tensor got = unset(dy.shape()), log_sums = unset({kBatch, kHeads, tokens}),
                       gradients = unset(qkv.shape());
          backend->attention().forward(qkv, kHeads, options, got, log_sums);
          expect_within(y, got);
          backend->attention().backward(qkv, kHeads, options, got, log_sums, dy, gradients);
          expect_within(dqkv, gradients);
        }
}

// A sample's weights are dropped alike whichever rank has it.
TEST_P(AttentionTest, DropoutDependsOnTheSample) {
  constexpr std::int64_t kTokens = 70, kHeads = 3, kModel = 12;
  const Tensor qkv = random({3, kTokens, 3 * kModel}, 1);
  const auto result = [&](const Tensor& x, std::int64_t first, std::int64_t step) {
    const AttentionOptions drop{.dropout = 0.5, .dropout_state = dropout_state(*backend, {1, step, first}), .layer = 2};
    const Tensor y = unset({x.size(0), kTokens, kModel}), log_sums = unset({x.size(0), kHeads, kTokens});
    backend->attention().forward(x, kHeads, drop, y, log_sums);
    return std::vector<float>(y.f32(), y.f32() + y.count());
  };
  const Tensor last = backend->empty({1, kTokens, 3 * kModel});
  std::copy_n(qkv.f32() + 2 * last.count(), last.count(), last.f32());
  const auto all = result(qkv, 40, 6), one = result(last, 42, 6);
  EXPECT_TRUE(std::equal(one.begin(), one.end(), all.end() - static_cast<std::ptrdiff_t>(one.size())));
  EXPECT_NE(one, result(last, 41, 6));
  EXPECT_NE(one, result(last, 42, 7));
}

INSTANTIATE_TEST_SUITE_P(Threads, AttentionTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace lockstep::nn
