// CUDA's losses against the CPU's.
#include "base/error.h"
#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class CudaLoss : public DeviceTest {
 protected:
  Tensor labels_of(const std::vector<std::int32_t>& labels) {
    const Tensor made = cpu->empty({static_cast<std::int64_t>(labels.size())}, DType::kI32);
    std::copy(labels.begin(), labels.end(), made.data<std::int32_t>());
    return made;
  }
  Tensor logits(const Shape& shape, std::uint64_t seed) {
    const Tensor made = random_tensor(*cpu, shape, seed);
    for (float& v : made.span<float>()) v *= 8.0f;
    return rounded(made);
  }

  std::unique_ptr<LossKernels> loss = cuda::make_loss_kernels(context);
};

TEST_P(CudaLoss, CrossEntropy) {
  const Shape shapes[] = {{1, 1},    {5, 1},    {1, 3},    {7, 10},   {33, 10},  {64, 10},   {3, 31},    {9, 64},
                          {300, 17}, {5, 1000}, {2, 1024}, {3, 1025}, {2, 5003}, {1, 16384}, {2, 16391}, {3, 50257}};
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(to_string(shape));
    const std::int64_t rows = shape[0], classes = shape[1];
    const Tensor host = logits(shape, 1);
    std::vector<std::int32_t> labels;
    for (std::int64_t i = 0; i < rows; ++i) labels.push_back(static_cast<std::int32_t>(i * 7919 % classes));
    if (rows > 1) labels.back() = static_cast<std::int32_t>(classes - 1);
    for (std::int64_t i = 0; i < rows; i += 3) host.f32()[i * classes + labels[static_cast<std::size_t>(i)]] = 9.0f;
    const Operand x_of_both = activations(host), labels_of_both = plains(labels_of(labels));
    const Tensor &x = x_of_both.device, &to = labels_of_both.device;
    const float scale = 0.3f;
    for (const float smoothing : {0.0f, 0.1f}) {
      // The CPU adds up exp() of a row one after the other in f32, the GPU in many short sums.
      const double ulps = 8.0 + std::sqrt(static_cast<double>(classes));
      const std::vector<Tolerance> tolerances = {{DType::kF32, ulps}, {type(), ulps, static_cast<double>(scale)}};
      const auto [expected, both] = compare(
          cpu->loss(), *loss, {{{2}}, activation_like(shape)}, tolerances, [&](auto& on, Side at, const auto& out) {
            on.cross_entropy(at(x_of_both), at(labels_of_both), scale, smoothing, out[0], out[1]);
          });
      EXPECT_EQ(expected[0].f32()[1], both[0].f32()[1]);
      const auto alone =
          results({{{2}}}, [&](const auto& out) { loss->cross_entropy(x, to, scale, smoothing, out[0], Tensor()); });
      expect_same(both[0], alone[0]);
      // Over the logits themselves.
      const auto over = results({{{2}}, activation_like(shape, host)}, [&](const auto& out) {
        loss->cross_entropy(out[1], to, scale, smoothing, out[0], out[1]);
      });
      expect_same(both[1], over[1]);
      // Logits and gradient at different distances from an aligned address.
      const Tensor shifted = on_device(host, type(), 1 + GetParam().offset);
      const auto apart = results({{{2}}, activation_like(shape)}, [&](const auto& out) {
        loss->cross_entropy(shifted, to, scale, smoothing, out[0], out[1]);
      });
      for (std::size_t i = 0; i < 2; ++i) expect_close(expected[i], apart[i], tolerances[i]);
    }
  }
}

// With a pitch (Note [Pitch]): the same numbers, and nothing between the rows is read or written.
TEST_P(CudaLoss, RowsThatLieApart) {
  for (const Shape& shape : {Shape{5, 1}, {7, 10}, {33, 65}, {300, 17}, {3, 1025}, {2, 5003}, {2, 16391}, {2, 50257}}) {
    SCOPED_TRACE(to_string(shape));
    const std::int64_t rows = shape[0], classes = shape[1];
    const Tensor host = logits(shape, 1);
    std::vector<std::int32_t> labels;
    for (std::int64_t i = 0; i < rows; ++i) labels.push_back(static_cast<std::int32_t>(i * 7919 % classes));
    const Tensor host_labels = labels_of(labels), to = plain(host_labels), x = apart(host), dx = apart_like(shape);
    for (const float smoothing : {0.0f, 0.1f}) {
      const Tensor totals = cpu->empty({2}), dlogits = cpu->empty(shape);
      cpu->loss().cross_entropy(host, host_labels, 0.3f, smoothing, totals, dlogits);
      const auto got =
          results({{{2}}}, [&](const auto& out) { loss->cross_entropy(x, to, 0.3f, smoothing, out[0], dx); });
      const double ulps = 8.0 + std::sqrt(static_cast<double>(classes));
      expect_close(totals, got[0], {DType::kF32, ulps});
      EXPECT_EQ(totals.f32()[1], got[0].f32()[1]);
      expect_close(dlogits, joined(dx, std::byte{0}), {type(), ulps, 0.3});
    }
    const Tensor total = cpu->empty({1});
    cpu->loss().count_in_top(host, host_labels, 5, total);
    const auto top = results({{{1}}}, [&](const auto& out) { loss->count_in_top(x, to, 5, out[0]); });
    EXPECT_EQ(total.f32()[0], top[0].f32()[0]);
  }
}

// Of two classes, of all, of none; where several are as likely the first counts.
TEST_P(CudaLoss, CrossEntropyOfProbabilities) {
  for (const Shape& shape : {Shape{1, 1},
                             {5, 1},
                             {1, 3},
                             {7, 10},
                             {33, 65},
                             {300, 17},
                             {5, 1000},
                             {2, 1024},
                             {3, 1025},
                             {2, 5003},
                             {2, 16391}}) {
    SCOPED_TRACE(to_string(shape));
    const std::int64_t rows = shape[0], classes = shape[1];
    const Tensor host = logits(shape, 1), p = random_tensor(*cpu, shape, 4);
    for (std::int64_t i = 0; i < rows; ++i) {
      float* const row = p.f32() + i * classes;
      float sum = 0;
      for (std::int64_t k = 0; k < classes; ++k) sum += row[k] = std::abs(row[k]);
      for (std::int64_t k = 0; k < classes; ++k) row[k] /= sum;
      if (i % 3 == 2) continue;
      std::fill_n(row, classes, 0.0f);
      const float share = i % 2 == 0 ? 0.5f : 0.7f;
      row[i * 7919 % classes] += share;
      row[i * 104729 % classes] += 1 - share;
      host.f32()[i * classes + i * 7919 % classes] = 9.0f;
    }
    const Operand x = activations(host), to = plains(p);
    const double ulps = 16.0 + std::sqrt(static_cast<double>(classes));
    const std::vector<Tolerance> tolerances = {{DType::kF32, ulps, static_cast<double>(8 * rows)}, {type(), ulps, 0.3}};
    for (const float smoothing : {0.0f, 0.1f}) {
      const auto [expected, got] = compare(cpu->loss(), *loss, {{{2}}, activation_like(shape)}, tolerances,
                                           [&](auto& on, Side at, const auto& out) {
                                             on.soft_cross_entropy(at(x), at(to), 0.3f, smoothing, out[0], out[1]);
                                           });
      EXPECT_EQ(expected[0].f32()[1], got[0].f32()[1]);
      const auto alone = results({{{2}}}, [&](const auto& out) {
        loss->soft_cross_entropy(x.device, to.device, 0.3f, smoothing, out[0], Tensor());
      });
      expect_same(got[0], alone[0]);
      // Over the logits themselves, and with a pitch.
      const auto over = results({{{2}}, activation_like(shape, host)}, [&](const auto& out) {
        loss->soft_cross_entropy(out[1], to.device, 0.3f, smoothing, out[0], out[1]);
      });
      expect_same(got[1], over[1]);
      const Tensor apart_x = apart(host), dx = apart_like(shape);
      const auto pitched = results(
          {{{2}}}, [&](const auto& out) { loss->soft_cross_entropy(apart_x, to.device, 0.3f, smoothing, out[0], dx); });
      expect_close(expected[0], pitched[0], tolerances[0]);
      expect_close(expected[1], joined(dx, std::byte{0}), tolerances[1]);
    }
  }
  // A logit of −∞ for a class that nobody asks for, and a logit that is no number.
  const Tensor host = logits({3, 600}, 1), p = cpu->zeros({3, 600});
  for (std::int64_t i = 0; i < 3; ++i) p.f32()[i * 600 + 5] = 1;
  host.f32()[7] = -kInfinity;
  const Operand x = activations(host), to = plains(p);
  const auto both = compare(
      cpu->loss(), *loss, {{{2}}, activation_like({3, 600})}, {{DType::kF32, 64.0}, {type(), 64.0}},
      [&](auto& on, Side at, const auto& out) { on.soft_cross_entropy(at(x), at(to), 1.0f, 0.0f, out[0], out[1]); });
  EXPECT_TRUE(std::isfinite(both.expected[0].f32()[0]));
  host.f32()[600 + 3] = kNaN;
  upload(host, x.device);
  const auto spoilt = results({{{2}}, activation_like({3, 600})}, [&](const auto& out) {
    loss->soft_cross_entropy(x.device, to.device, 1.0f, 0.0f, out[0], out[1]);
  });
  EXPECT_TRUE(std::isnan(spoilt[0].f32()[0]));
  for (std::int64_t i = 0; i < 3 * 600; ++i) ASSERT_EQ(std::isnan(spoilt[1].f32()[i]), i / 600 == 1) << i;
}

// Rows of the label that is ignored, which is a class or none: nothing of them is in loss, gradient or count.
TEST_P(CudaLoss, IgnoredRows) {
  for (const std::int64_t classes : {1, 10, 1000, 3000, 20000})
    for (const std::int32_t ignored : {-100, 0}) {
      SCOPED_TRACE(fmt::format("{} classes without {}", classes, ignored));
      const Tensor host = logits({5, classes}, 1);
      host.f32()[2 * classes] = kNaN;
      const Operand x = activations(host);
      const auto last = static_cast<std::int32_t>(classes - 1);
      const Operand to = plains(labels_of({last, ignored, ignored, last, 0}));
      const double ulps = 8.0 + std::sqrt(static_cast<double>(classes));
      for (const float smoothing : {0.0f, 0.1f}) {
        const auto [expected, got] =
            compare(cpu->loss(), *loss, {{{2}}, activation_like({5, classes})},
                    {{DType::kF32, ulps}, {type(), ulps, 0.5}}, [&](auto& on, Side at, const auto& out) {
                      on.cross_entropy(at(x), at(to), 0.5f, {smoothing, ignored}, out[0], out[1]);
                    });
        EXPECT_EQ(expected[0].f32()[1], got[0].f32()[1]);
        EXPECT_TRUE(std::isfinite(expected[0].f32()[0]));
        for (std::int64_t i = classes; i < 3 * classes; ++i) ASSERT_EQ(got[1].f32()[i], 0.0f) << i;
      }
    }
  const Operand x = activations(logits({2, 7}, 1)), none = plains(labels_of({-1, -1}));
  compare(cpu->loss(), *loss, {{{2}}, activation_like({2, 7})}, {kSame, kSame},
          [&](auto& on, Side at, const auto& out) {
            on.cross_entropy(at(x), at(none), 0.5f, {0.0f, -1}, out[0], out[1]);
          });
}

TEST_P(CudaLoss, SmallValuesOfTheGradientAreExactToTheirSize) {
  const std::int64_t classes = 2000;
  const Tensor host = cpu->empty({1, classes});
  for (std::int64_t i = 0; i < classes; ++i) host.f32()[i] = -0.03125f * static_cast<float>(i);
  rounded(host);
  const Operand x = activations(host), to = plains(labels_of({3}));
  // Below its normal numbers f16 has as many as fit: they are why losses are scaled.
  compare(cpu->loss(), *loss, {activation_like({1, classes}), {{2}}},
          {{type(), 64.0, type() == DType::kF16 ? 0x1p-8 : 0.0}},
          [&](auto& on, Side at, const auto& out) { on.cross_entropy(at(x), at(to), 1.0f, 0.0f, out[1], out[0]); });
}

// LossScale: of the gradient alone.
TEST_P(CudaLoss, ANumberOnTheDeviceScalesToo) {
  const Operand factor = plains(tensor_of(*cpu, {1}, {1024.0f}));
  for (const std::int64_t classes : {10, 2000, 20000}) {
    const Shape shape = {3, classes};
    const Operand x = activations(logits(shape, 1)), to = plains(labels_of({0, 3, 9}));
    const Tensor totals = cpu->empty({2}), dlogits = cpu->empty(shape);
    cpu->loss().cross_entropy(x.host, to.host, 512.0f, 0.1f, totals, dlogits);
    const double ulps = 8.0 + std::sqrt(static_cast<double>(classes));
    const auto scaled = compare(cpu->loss(), *loss, {{{2}}, activation_like(shape)},
                                {{DType::kF32, ulps}, {type(), ulps, 512.0}}, [&](auto& on, Side at, const auto& out) {
                                  on.cross_entropy(at(x), at(to), {0.5f, at(factor)}, 0.1f, out[0], out[1]);
                                });
    expect_same(dlogits, scaled.expected[1]);
  }
  const Tensor x_host = random_tensor(*cpu, {1037}, 1);
  const Operand x = {x_host, on_device(x_host, DType::kF32, GetParam().offset)};
  const Operand target = plains(random_tensor(*cpu, {1037}, 2));
  compare(cpu->loss(), *loss, {{{2}}, {{1037}}}, {{DType::kF32, 8.0, 1037.0}, {DType::kF32, 2.0}},
          [&](auto& on, Side at, const auto& out) {
            on.squared_error(at(x), at(target), {0.5f, at(factor)}, out[0], out[1]);
          });
}

TEST_P(CudaLoss, TheFirstOfEqualLogitsIsThePrediction) {
  for (const std::int64_t classes : {2, 8, 40, 1000, 3000, 20000}) {
    const Tensor host = cpu->zeros({4, classes});
    const auto last = static_cast<std::int32_t>(classes - 1);
    host.f32()[2 * classes + last] = 1.0f;
    host.f32()[3 * classes + last] = host.f32()[3 * classes + last / 2] = 2.0f;
    const Operand x = activations(host);
    for (const auto& labels :
         std::vector<std::vector<std::int32_t>>{{0, last, last, last / 2}, {last, last, 0, last}, {0, 0, last, last}}) {
      const Operand to = plains(labels_of(labels));
      const auto [expected, got] = compare(cpu->loss(), *loss, {{{2}}}, {}, [&](auto& on, Side at, const auto& out) {
        on.cross_entropy(at(x), at(to), 1.0f, 0.0f, out[0], Tensor());
      });
      EXPECT_EQ(expected[0].f32()[1], got[0].f32()[1]) << classes;
    }
  }
}

// Ties go to the lower class; a label's logit that is no number counts for nothing, others that are none come before no
// one.
TEST_P(CudaLoss, CountsInTop) {
  for (const std::int64_t rows : {0, 1, 7, 40})
    for (const std::int64_t classes : {1, 3, 10, 33, 1000}) {
      const Tensor host = logits({rows, classes}, 3);
      for (std::int64_t i = 0; i < host.count(); ++i) {
        if (i % 11 == 3) host.f32()[i] = 2.0f;  // equal to others of its row
        if (i % 29 == 5) host.f32()[i] = -kInfinity;
        if (i % 97 == 6) host.f32()[i] = kNaN;
      }
      std::vector<std::int32_t> labels;
      for (std::int64_t i = 0; i < rows; ++i) labels.push_back(static_cast<std::int32_t>(i * 7919 % classes));
      const Operand x = activations(host), to = plains(labels_of(labels));
      for (const std::int64_t k : {1, 2, 5, 1000}) {
        SCOPED_TRACE(fmt::format("{} x {}, top {}", rows, classes, k));
        for (const std::optional<std::int32_t> ignored : {std::optional<std::int32_t>(), std::optional(0)})
          compare(cpu->loss(), *loss, {{{1}}}, {kSame},
                  [&](auto& on, Side at, const auto& out) { on.count_in_top(at(x), at(to), k, out[0], ignored); });
      }
    }
}

// As masks make them. A row without any other logit has no softmax.
TEST_P(CudaLoss, MinusInfinityIsNoProbability) {
  for (const std::int64_t classes : {5, 600, 4000, 20000}) {
    SCOPED_TRACE(classes);
    const Tensor host = logits({3, classes}, 1);
    for (std::int64_t i = 0; i < 2 * classes; ++i)
      if (i % classes % 5 != 3) host.f32()[i] = -kInfinity;
    const Operand x = activations(host), to = plains(labels_of({3, 3, 1}));
    const std::vector<Output> outputs = {{{2}}, activation_like({3, classes})};
    const auto both = compare(
        cpu->loss(), *loss, outputs, {{DType::kF32, 64.0}, {type(), 64.0, 0.5}},
        [&](auto& on, Side at, const auto& out) { on.cross_entropy(at(x), at(to), 0.5f, 0.0f, out[0], out[1]); });
    ASSERT_TRUE(std::isfinite(both.expected[0].f32()[0]));

    // Smoothed labels want something of all classes.
    const auto smoothed = results(
        {{{2}}}, [&](const auto& out) { loss->cross_entropy(x.device, to.device, 0.5f, 0.1f, out[0], Tensor()); });
    EXPECT_EQ(smoothed[0].f32()[0], kInfinity);

    for (float& v : host.span<float>()) v = -kInfinity;
    upload(host, x.device);
    const auto none = results(
        outputs, [&](const auto& out) { loss->cross_entropy(x.device, to.device, 0.5f, 0.0f, out[0], out[1]); });
    EXPECT_TRUE(std::isnan(none[0].f32()[0]));
    for (const float v : none[1].span<float>()) ASSERT_TRUE(std::isnan(v));
  }
}

TEST_P(CudaLoss, NaNSpoilsItsRow) {
  for (const std::int64_t classes : {3, 500, 3000, 20000})
    for (const float odd : {kNaN, kInfinity})
      for (const std::int64_t place : {std::int64_t{0}, classes / 2, classes - 1}) {
        SCOPED_TRACE(fmt::format("{} of {} is {}", place, classes, odd));
        const Tensor host = logits({3, classes}, 1);
        host.f32()[classes + place] = odd;
        const Tensor x = activation(host), to = plain(labels_of({0, 1, 2}));
        const auto got = results({{{2}}, activation_like({3, classes})},
                                 [&](const auto& out) { loss->cross_entropy(x, to, 1.0f, 0.0f, out[0], out[1]); });
        EXPECT_TRUE(std::isnan(got[0].f32()[0]));
        for (std::int64_t i = 0; i < 3 * classes; ++i) ASSERT_EQ(std::isnan(got[1].f32()[i]), i / classes == 1) << i;
      }
}

TEST_P(CudaLoss, InvalidLabelGivesNaN) {
  for (const std::int32_t label :
       {-1, 10, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
    const Tensor x = activation(logits({20, 10}, 1));
    std::vector<std::int32_t> labels(20, 4);
    labels[13] = label;
    const Tensor to = plain(labels_of(labels));
    const auto got = results({{{2}}, activation_like({20, 10})},
                             [&](const auto& out) { loss->cross_entropy(x, to, 1.0f, 0.0f, out[0], out[1]); });
    EXPECT_TRUE(std::isnan(got[0].f32()[0]));
    EXPECT_TRUE(std::isfinite(got[0].f32()[1]));
    for (std::int64_t i = 0; i < 200; ++i) ASSERT_EQ(std::isnan(got[1].f32()[i]), i / 10 == 13) << i;
  }
}

TEST_P(CudaLoss, NoSamples) {
  const Tensor x = activation(cpu->empty({0, 10})), to = plain(cpu->empty({0}, DType::kI32));
  const auto got = results({{{2}}}, [&](const auto& out) { loss->cross_entropy(x, to, 1.0f, 0.0f, out[0], x); });
  expect_same(cpu->zeros({2}), got[0]);
  const Tensor none = on_device(cpu->empty({0}), DType::kF32, 0);
  const auto error = results({{{2}}}, [&](const auto& out) { loss->squared_error(none, none, 1.0f, out[0], none); });
  expect_same(cpu->zeros({2}), error[0]);
}

TEST_P(CudaLoss, Total) {
  if (type() != DType::kF32) return;  // it has no other
  for (const std::int64_t n : {0, 1, 1023, 5000, 2000001}) {
    const Tensor x_host = random_tensor(*cpu, {n}, 1);
    const Operand x = {x_host, on_device(x_host, DType::kF32, GetParam().offset)};
    const auto [expected, got] =
        compare(cpu->loss(), *loss, {{{2}}}, {}, [&](auto& on, Side at, const auto& out) { on.total(at(x), out[0]); });
    EXPECT_NEAR(expected[0].f32()[0], got[0].f32()[0], 1e-6f * std::abs(expected[0].f32()[0]));
    EXPECT_TRUE(std::isnan(got[0].f32()[1]));
    EXPECT_TRUE(std::isnan(expected[0].f32()[1]));
  }
}

TEST_P(CudaLoss, SquaredError) {
  if (type() != DType::kF32) return;  // it has no other
  for (const std::int64_t n : {1, 3, 4, 5, 1023, 4096, 4099, 20000}) {
    const Operand x = activations(random({n}, 1)), target = activations(random({n}, 2));
    const auto both =
        compare(cpu->loss(), *loss, {{{2}}, activation_like({n})}, {{DType::kF32, 1.0, 0.0}, {DType::kF32, 2.0}},
                [&](auto& on, Side at, const auto& out) { on.squared_error(at(x), at(target), 0.3f, out[0], out[1]); });
    const auto alone =
        results({{{2}}}, [&](const auto& out) { loss->squared_error(x.device, target.device, 0.3f, out[0], {}); });
    expect_same(both.got[0], alone[0]);
  }
  const Tensor host = random({5000}, 1);
  host.f32()[4321] = kNaN;
  const Tensor x = activation(host), target = activation(random({5000}, 2));
  const auto got = results({{{2}}, activation_like({5000})},
                           [&](const auto& out) { loss->squared_error(x, target, 1.0f, out[0], out[1]); });
  EXPECT_TRUE(std::isnan(got[0].f32()[0]));
  for (std::int64_t i = 0; i < 5000; ++i) ASSERT_EQ(std::isnan(got[1].f32()[i]), i == 4321);
}

INSTANTIATE_TEST_SUITE_P(, CudaLoss, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
