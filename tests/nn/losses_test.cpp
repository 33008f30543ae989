// The registry of losses: each by its name, with its settings.
#include "lockstep/nn/losses/losses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/nn/layers/layers.h"
#include "tests/nn/values.h"
#include "tests/support/refusal.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using ::testing::Contains;

class Losses : public ::testing::Test {
 protected:
  // Sum, correct predictions and gradient, of 5 samples of 4 classes.
  std::vector<float> values_of_loss(const LossFunction& loss) {
    tape.reset();
    const Var x = tape.differentiable_input(random_tensor(*backend, {5, 4}, 1));
    const Tensor labels = backend->empty({5}, DType::kI32);
    for (std::int32_t i = 0; i < 5; ++i) labels.data<std::int32_t>()[i] = i % 4;
    const Loss made = loss(tape, x, labels, 0.5f);
    std::vector<float> values = {made.totals().f32()[0], made.totals().f32()[1]};
    tape.backward(made.value);
    const auto gradient = tape.grad(x).span<float>();
    values.insert(values.end(), gradient.begin(), gradient.end());
    return values;
  }

  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Tape tape{*backend};
};

TEST_F(Losses, CrossEntropyIsTheUsualOne) {
  EXPECT_THAT(loss_names(), Contains(usual_loss().name));
  EXPECT_EQ(&loss_family("cross_entropy"), &usual_loss());
  const auto plain = [](Tape& on, Var x, const Tensor& to, float scale) { return cross_entropy(on, x, to, scale); };
  EXPECT_EQ(values_of_loss(make_loss()), values_of_loss(plain));
}

TEST_F(Losses, SettingsReachTheKernel) {
  const auto smoothed = [](Tape& on, Var x, const Tensor& to, float scale) {
    return cross_entropy(on, x, to, scale, 0.25f);
  };
  const auto made = values_of_loss(make_loss(usual_loss(), {{"label-smoothing", 0.25}}));
  EXPECT_EQ(made, values_of_loss(smoothed));
  EXPECT_NE(made, values_of_loss(make_loss()));
}

/// Of numbers: sums and gradients beside `expected`(output, target), whose slope is taken numerically.
class LossesOfNumbers : public Losses {
 protected:
  void expect(const std::string& name, const Settings& settings, const std::vector<float>& outputs,
              const std::vector<float>& targets, const std::function<double(double, double)>& expected) {
    const Tensor y = backend->empty({static_cast<std::int64_t>(outputs.size()), 1});
    const Tensor t = backend->empty(y.shape());
    std::ranges::copy(outputs, y.data<float>());
    std::ranges::copy(targets, t.data<float>());
    const Var x = tape.differentiable_input(y);
    const Loss loss = make_loss(loss_family(name), settings)(tape, x, t, 0.25f);
    double sum = 0;
    for (std::size_t i = 0; i < outputs.size(); ++i) sum += expected(outputs[i], targets[i]);
    EXPECT_NEAR(loss.totals().f32()[0], sum, 1e-5 * std::abs(sum) + 1e-6);
    EXPECT_TRUE(std::isnan(loss.totals().f32()[1])) << "nothing is counted";
    tape.backward(loss.value);
    const auto gradient = tape.grad(x).span<float>();
    constexpr double kStep = 1e-6;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const double slope =
          (expected(double{outputs[i]} + kStep, targets[i]) - expected(double{outputs[i]} - kStep, targets[i])) /
          (2 * kStep);
      EXPECT_NEAR(gradient[i], 0.25 * slope, 1e-5) << name << " of " << outputs[i] << ", " << targets[i];
    }
    tape.reset();
  }
};

TEST_F(LossesOfNumbers, AreTheirFormulas) {
  const std::vector<float> outputs = {-3, -0.4f, 0.1f, 0.75f, 2.5f, 40, -40},
                           targets = {1, -1, 0.5f, 0.7f, 2.75f, 1, 0};
  expect("l1", {}, outputs, targets, [](double y, double t) { return std::abs(y - t); });
  for (const double delta : {0.3, 1.0, 5.0})
    expect("huber", {{"delta", delta}}, outputs, targets, [&](double y, double t) {
      const double d = std::abs(y - t);
      return d <= delta ? d * d / 2 : delta * (d - delta / 2);
    });
  const std::vector<float> probabilities = {1, 0, 0.5f, 0.7f, 0, 1, 0};
  for (const double weight : {1.0, 3.5})
    expect("bce", {{"pos-weight", weight}}, outputs, probabilities, [&](double y, double t) {
      const double of_one = std::max(-y, 0.0) + std::log1p(std::exp(-std::abs(y)));
      const double of_zero = std::max(y, 0.0) + std::log1p(std::exp(-std::abs(y)));
      return weight * t * of_one + (1 - t) * of_zero;
    });
}

/// Of classes: sums and gradients beside `expected`(logarithms of probabilities, label), whose slopes are numerical.
class LossesOfClasses : public Losses {
 protected:
  static constexpr std::int64_t kRows = 6, kClasses = 3;

  static std::vector<double> log_softmax_of(std::vector<double> row) {
    double sum = 0;
    for (const double x : row) sum += std::exp(x);
    for (double& x : row) x -= std::log(sum);
    return row;
  }
  void expect(const LossFunction& loss, const std::function<double(const std::vector<double>&, int)>& expected,
              DType dtype = DType::kF32) {
    const Tensor labels = backend->empty({kRows}, DType::kI32);
    for (std::int32_t i = 0; i < kRows; ++i) labels.data<std::int32_t>()[i] = (i * 2) % 3;
    expect_of(
        loss, labels,
        [&](const std::vector<double>& log_p, std::int64_t i) {
          return expected(log_p, labels.data<std::int32_t>()[i]);
        },
        dtype);
  }
  /// Of targets that are probabilities, of class `k` of a row: the sum of what each class has.
  void expect_soft(const LossFunction& loss,
                   const std::function<double(const std::vector<double>& log_p, double p, std::size_t k)>& expected,
                   DType dtype = DType::kF32) {
    const Tensor p = backend->zeros({kRows, kClasses});
    const float shares[] = {1, 0.75f, 0.5f, 0, 0.3f, 1e-6f};
    for (std::int64_t i = 0; i < kRows; ++i) {
      p.f32()[i * kClasses + i * 2 % 3] += shares[i];
      p.f32()[i * kClasses + i % 2] += 1 - shares[i];
    }
    expect_of(
        loss, p,
        [&](const std::vector<double>& log_p, std::int64_t i) {
          double sum = 0;
          for (std::size_t k = 0; k < log_p.size(); ++k)
            sum += expected(log_p, p.f32()[i * kClasses + static_cast<std::int64_t>(k)], k);
          return sum;
        },
        dtype);
  }
  /// In which this CPU computes: bf16 needs AVX-512.
  std::vector<DType> dtypes() const {
    return backend->computes_in(DType::kBF16) ? std::vector{DType::kF32, DType::kBF16} : std::vector{DType::kF32};
  }
  void expect_of(const LossFunction& loss, const Tensor& targets,
                 const std::function<double(const std::vector<double>& log_p, std::int64_t row)>& expected,
                 DType dtype) {
    const Tensor y = random_tensor(*backend, {kRows, kClasses}, 3);
    y.data<float>()[0] = 30;  // a label that is certain
    const Tensor given = backend->empty(y.shape(), dtype);
    backend->pointwise().cast(y, given);
    backend->pointwise().cast(given, y);
    tape.reset();
    const Var x = tape.differentiable_input(given);
    const Loss made = loss(tape, x, targets, 0.5f);
    const auto value = [&](const std::vector<double>& row, std::int64_t i) { return expected(log_softmax_of(row), i); };
    double sum = 0;
    std::vector<double> slopes;
    for (std::int64_t i = 0; i < kRows; ++i) {
      const std::vector<double> row(y.data<float>() + i * kClasses, y.data<float>() + (i + 1) * kClasses);
      sum += value(row, i);
      for (std::size_t k = 0; k < row.size(); ++k) {
        auto low = row, high = row;
        low[k] -= 1e-6;
        high[k] += 1e-6;
        slopes.push_back((value(high, i) - value(low, i)) / 2e-6);
      }
    }
    EXPECT_NEAR(made.totals().f32()[0], sum, 2e-6 * std::abs(sum));
    tape.backward(made.value);
    const Tensor gradient = backend->empty(y.shape());
    backend->pointwise().cast(tape.grad(x), gradient);
    for (std::size_t i = 0; i < slopes.size(); ++i)
      EXPECT_NEAR(gradient.f32()[i], 0.5 * slopes[i], dtype == DType::kF32 ? 2e-6 : 4e-3) << i;
  }
};

TEST_F(LossesOfClasses, AreTheirFormulas) {
  const std::vector<double> weights = {0.25, 3, 0};
  for (const DType dtype : dtypes()) {
    for (const double smoothing : {0.0, 0.3})
      expect(
          make_loss(usual_loss(), {{"class-weights", weights}, {"label-smoothing", smoothing}}),
          [&](const std::vector<double>& log_p, int label) {
            double sum = 0;
            for (std::size_t k = 0; k < log_p.size(); ++k) {
              const double share = (static_cast<int>(k) == label ? 1 - smoothing : 0) + smoothing / kClasses;
              sum -= share * weights[k] * log_p[k];
            }
            return sum;
          },
          dtype);
    for (const double gamma : {0.0, 0.5, 2.0})
      for (const bool weighted : {false, true}) {
        Settings settings = {{"focusing", gamma}};
        if (weighted) settings.set("class-weights", weights);
        expect(
            make_loss(loss_family("focal"), settings),
            [&](const std::vector<double>& log_p, int label) {
              const double of_label = log_p[static_cast<std::size_t>(label)];
              return (weighted ? weights[static_cast<std::size_t>(label)] : 1) *
                     std::pow(std::max(1 - std::exp(of_label), 1e-12), gamma) * -of_label;
            },
            dtype);
      }
  }
}

TEST_F(LossesOfClasses, AreTheirFormulasOfProbabilitiesToo) {
  const std::vector<double> weights = {0.25, 3, 0};
  for (const DType dtype : dtypes())
    for (const bool weighted : {false, true}) {
      const auto weight = [&](std::size_t k) { return weighted ? weights[k] : 1; };
      for (const double smoothing : {0.0, 0.3}) {
        Settings settings = {{"label-smoothing", smoothing}};
        if (weighted) settings.set("class-weights", weights);
        expect_soft(
            make_loss(usual_loss(), settings),
            [&](const std::vector<double>& log_p, double p, std::size_t k) {
              return -weight(k) * ((1 - smoothing) * p + smoothing / kClasses) * log_p[k];
            },
            dtype);
      }
      for (const double gamma : {0.0, 0.5, 2.0}) {
        Settings settings = {{"focusing", gamma}};
        if (weighted) settings.set("class-weights", weights);
        expect_soft(
            make_loss(loss_family("focal"), settings),
            [&](const std::vector<double>& log_p, double p, std::size_t k) {
              return weight(k) * p * std::pow(std::max(1 - std::exp(log_p[k]), 1e-12), gamma) * -log_p[k];
            },
            dtype);
      }
    }
}

// Probabilities of one class are its label, also in what is counted.
TEST_F(LossesOfClasses, CertainProbabilitiesAreLabels) {
  const Tensor y = random_tensor(*backend, {kRows, kClasses}, 5);
  const Tensor labels = backend->empty({kRows}, DType::kI32), p = backend->zeros({kRows, kClasses});
  for (std::int64_t i = 0; i < kRows; ++i) {
    labels.data<std::int32_t>()[i] = static_cast<std::int32_t>(i % 3);
    p.f32()[i * kClasses + i % 3] = 1;
  }
  for (const float smoothing : {0.0f, 0.1f}) {
    std::vector<std::vector<float>> both;
    for (const Tensor& targets : {labels, p}) {
      tape.reset();
      const Var x = tape.differentiable_input(y);
      const Loss made = cross_entropy(tape, x, targets, 0.5f, smoothing);
      both.push_back({made.totals().f32()[0], made.totals().f32()[1]});
      tape.backward(made.value);
      for (const float d : tape.grad(x).span<float>()) both.back().push_back(d);
    }
    EXPECT_EQ(both[0][1], both[1][1]);
    for (std::size_t i = 0; i < both[0].size(); ++i) EXPECT_NEAR(both[0][i], both[1][i], 1e-6f) << i;
  }
}

TEST_F(LossesOfClasses, AnotherNumberOfWeightsIsRefused) {
  const std::vector<double> weights = {1, 2};
  EXPECT_THAT(lockstep::testing::line_of<UsageError>([&] {
                expect(make_loss(usual_loss(), {{"class-weights", weights}}), [](const auto&, int) { return 0.0; });
              }),
              ::testing::HasSubstr("2 numbers for outputs of 3 classes"));
  EXPECT_THROW(make_loss(usual_loss(), {{"class-weights", std::vector<double>{1, -1}}}), UsageError);
}

TEST_F(Losses, UnknownLossesAreRefused) {
  EXPECT_THROW(loss_family("cross-entropy"), UsageError);
  EXPECT_THROW(make_loss(usual_loss(), {{"gamma", 2.0}}), UsageError);
  for (const double smoothing : {-0.1, 1.0, std::nan("")})
    EXPECT_THROW(make_loss(usual_loss(), {{"label-smoothing", smoothing}}), UsageError) << smoothing;
}

// Module::forward_loss() leaves the outputs to the loss, whose gradient then takes no memory of its own.
class OutputsLeftToTheLoss : public ::testing::TestWithParam<DType> {
 protected:
  static constexpr std::int64_t kRows = 64, kFeatures = 8, kClasses = 1000;
  enum class Does : std::uint8_t { kReturn, kKeepVar, kKeepHandle, kReadAgain, kActivate };

  class Head final : public Module {
   public:
    Head(Context& context, Does what)
        : layer(register_module("layer", std::make_unique<Linear>(context, kFeatures, kClasses))), does(what) {}
    Var forward(Tape& on, Var x) override {
      const Var y = layer.forward(on, x, does == Does::kActivate ? Epilogue::kRelu : Epilogue::kNone);
      if (does == Does::kKeepHandle) handle = y.value();
      if (does == Does::kReadAgain) relu(on, y);
      return var = y;
    }
    Linear& layer;
    Does does;
    Tensor handle;
    Var var;
  };

  void SetUp() override {
    if (!backend->computes_in(GetParam())) GTEST_SKIP() << "no AVX-512";
    tape.set_activations(GetParam());
    for (std::int32_t i = 0; i < kRows; ++i) labels.data<std::int32_t>()[i] = i;
  }

  struct Found {
    std::vector<float> values;  // totals and gradients
    std::int64_t loss_bytes;    // what the loss has taken of memory
  };
  Found pass(const LossFunction& loss, Does does = Does::kReturn, const std::function<void(Head&)>& look = {}) {
    tape.reset();
    Generator generator(5);
    Context context{*backend, generator};
    Head head(context, does);
    Found found;
    const auto in_use = [&] { return static_cast<std::int64_t>(backend->allocator().stats().bytes_asked); };
    const Var x = to_activations(tape, tape.input(random_tensor(*backend, {kRows, kFeatures}, 3)));
    const auto measured = [&](Tape& on, const Vars& outputs, const Tensor& targets, float scale) {
      const std::int64_t before = in_use();
      const Loss made = loss(on, outputs, targets, scale);
      found.loss_bytes = in_use() - before;
      return made;
    };
    const Loss made = head.forward_loss(tape, x, labels, measured, 0.5f);
    if (look) look(head);
    found.values = {made.totals().f32()[0], made.totals().f32()[1]};
    tape.backward(made.value);
    for (const NamedParameter& each : head.named_parameters()) {
      const auto gradient = each.parameter->gradient().span<float>();
      found.values.insert(found.values.end(), gradient.begin(), gradient.end());
    }
    return found;
  }
  Found plain(Does does) {
    return pass([](Tape& on, Var y, const Tensor& to, float scale) { return cross_entropy(on, y, to, scale); }, does);
  }
  std::int64_t gradient_bytes() const { return kRows * kClasses * static_cast<std::int64_t>(size_of(GetParam())); }

  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Tape tape{*backend};
  Tensor labels = backend->empty({kRows}, DType::kI32);
};
INSTANTIATE_TEST_SUITE_P(Each, OutputsLeftToTheLoss, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& each) { return std::string(name_of(each.param)); });

TEST_P(OutputsLeftToTheLoss, GradientReusesTheirMemory) {
  const Found kept = plain(Does::kReturn), taken = pass(make_loss());
  EXPECT_GE(kept.loss_bytes, gradient_bytes());
  EXPECT_LT(taken.loss_bytes, gradient_bytes() / 10);
  EXPECT_EQ(taken.values, kept.values);
  const LossFunction smoothed = make_loss(usual_loss(), {{"label-smoothing", 0.25}});
  const auto same = [](Tape& on, Var y, const Tensor& to, float scale) {
    return cross_entropy(on, y, to, scale, 0.25f);
  };
  EXPECT_EQ(pass(smoothed).values, pass(same).values);
}

TEST_P(OutputsLeftToTheLoss, OutputsInUseAreKept) {
  for (const Does does : {Does::kKeepHandle, Does::kReadAgain, Does::kActivate}) {
    const Found found = pass(make_loss(), does, [](Head& head) { EXPECT_TRUE(head.var.value().defined()); });
    EXPECT_GE(found.loss_bytes, gradient_bytes());
    EXPECT_EQ(found.values, plain(does).values);
  }
}

TEST_P(OutputsLeftToTheLoss, LaterReadIsRefused) {
  const auto look = [&](Head& head) {
    EXPECT_EQ(head.var.shape(), Shape({kRows, kClasses}));
    EXPECT_REFUSED("its loss has overwritten with its gradient", head.var.value());
    EXPECT_REFUSED("copy value() before the loss", relu(tape, head.var));
  };
  pass(make_loss(), Does::kKeepVar, look);
}

// A custom loss may read them as often as it likes.
TEST_P(OutputsLeftToTheLoss, OwnLossesReadThemTwice) {
  const LossFunction twice = [](Tape& on, Var y, const Tensor& to, float scale) {
    const Loss first = cross_entropy(on, y, to, scale), second = cross_entropy(on, y, to, scale, 0.5f);
    return Loss{add(on, first.value, second.value)};
  };
  EXPECT_GE(pass(twice).loss_bytes, 2 * gradient_bytes());
}

}  // namespace
}  // namespace lockstep::nn
