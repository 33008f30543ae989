// Optimizers over 20 steps against f64 versions of the formulas in PyTorch's torch.optim documentation, or in papers.
#include "lockstep/nn/optim/optimizers.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "nn/ops/update_rules.h"
#include "tests/nn/values.h"
#include "tests/support/refusal.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

constexpr std::int64_t kCounts[] = {1, 7, 40000};  // the last is split over threads

// torch.optim.SGD with dampening 0 and maximize off.
struct SgdReference {
  SgdOptions options;
  std::vector<double> b;

  void step(std::vector<double>& p, const std::vector<double>& gradient, double lr) {
    const bool first = b.empty();
    for (std::size_t i = 0; i < p.size(); ++i) {
      double g = gradient[i];
      if (options.weight_decay != 0) g += options.weight_decay * p[i];
      if (options.momentum != 0) {
        if (first)
          b.push_back(g);
        else
          b[i] = options.momentum * b[i] + g;
        g = options.nesterov ? g + options.momentum * b[i] : b[i];
      }
      p[i] -= lr * g;
    }
  }
};

// torch.optim.AdamW, or torch.optim.Adam whose decay is part of the gradient, with amsgrad and maximize off.
struct AdamReference {
  AdamWOptions options;
  bool decoupled = true;
  std::vector<double> m = {}, v = {};
  int t = 0;

  void step(std::vector<double>& p, const std::vector<double>& gradient, double lr) {
    m.resize(p.size());
    v.resize(p.size());
    ++t;
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double decay = options.weight_decay * p[i], g = gradient[i] + (decoupled ? 0.0 : decay);
      if (decoupled) p[i] -= lr * decay;
      m[i] = options.beta1 * m[i] + (1 - options.beta1) * g;
      v[i] = options.beta2 * v[i] + (1 - options.beta2) * g * g;
      const double m_hat = m[i] / (1 - std::pow(options.beta1, t)), v_hat = v[i] / (1 - std::pow(options.beta2, t));
      p[i] -= lr * m_hat / (std::sqrt(v_hat) + options.eps);
    }
  }
};

// torch.optim.NAdam.
struct NadamReference {
  AdamWOptions options = {.weight_decay = 0};
  double decay = 0.004, product = 1;
  std::vector<double> m = {}, v = {};
  int t = 0;

  double momentum_of(int step) const { return options.beta1 * (1 - 0.5 * std::pow(0.96, step * decay)); }
  void step(std::vector<double>& p, const std::vector<double>& gradient, double lr) {
    m.resize(p.size());
    v.resize(p.size());
    ++t;
    const double now = momentum_of(t), next = momentum_of(t + 1);
    product *= now;
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double g = gradient[i] + options.weight_decay * p[i];
      m[i] = options.beta1 * m[i] + (1 - options.beta1) * g;
      v[i] = options.beta2 * v[i] + (1 - options.beta2) * g * g;
      const double s = std::sqrt(v[i] / (1 - std::pow(options.beta2, t))) + options.eps;
      p[i] -= lr * (1 - now) / (1 - product) * g / s + lr * next / (1 - product * next) * m[i] / s;
    }
  }
};

// Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, program 2.
struct LionReference {
  double beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
  std::vector<double> m = {};

  void step(std::vector<double>& p, const std::vector<double>& gradient, double lr) {
    m.resize(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double c = beta1 * m[i] + (1 - beta1) * gradient[i];
      const double sign = c > 0 ? 1.0 : c < 0 ? -1.0 : 0.0;
      p[i] -= lr * (sign + weight_decay * p[i]);
      m[i] = beta2 * m[i] + (1 - beta2) * gradient[i];
    }
  }
};

// torch.optim.RMSprop, uncentred, and torch.optim.Adagrad without lr_decay.
struct SquaresReference {
  bool adagrad = false;
  double alpha = 0.99, momentum = 0, eps = 1e-8, weight_decay = 0;
  std::vector<double> v = {}, b = {};

  void step(std::vector<double>& p, const std::vector<double>& gradient, double lr) {
    v.resize(p.size());
    b.resize(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double d = gradient[i] + weight_decay * p[i];
      v[i] = adagrad ? v[i] + d * d : alpha * v[i] + (1 - alpha) * d * d;
      b[i] = momentum * b[i] + d / (std::sqrt(v[i]) + eps);
      p[i] -= lr * b[i];
    }
  }
};

std::vector<double> doubles(const Tensor& tensor) {
  const auto values = tensor.span<float>();
  return {values.begin(), values.end()};
}

// Two parameters, of which the second is updated first; the gradients, rate and scale change from step to step.
template <class Make, class Reference>
void expect_follows(const Make& make, const Reference& reference, double tolerance) {
  const auto backend = make_cpu_backend(2);
  for (const std::int64_t size : kCounts) {
    Parameter first(*backend, {size}), second(*backend, {3});
    std::vector<NamedParameter> named = {{"first", &first}, {"second", &second}};
    std::vector<Reference> references(2, reference);
    std::vector<std::vector<double>> expected;
    for (const auto& [name, parameter] : named) {
      backend->pointwise().copy(random_tensor(*backend, parameter->value().shape(), 7), parameter->value());
      expected.push_back(doubles(parameter->value()));
    }
    const auto optimizer = make(named);
    for (int step = 1; step <= 20; ++step) {
      const double lr = 0.1 / step, scale = step % 3 == 0 ? 0.5 : 1.0;
      optimizer->begin_step(lr);
      if (scale != 1.0) {  // gradients of norm 2 clipped to 1
        const Tensor squares = backend->empty({}, DType::kF64);
        *squares.data<double>() = 4.0;
        optimizer->compute_update_scale(backend->zeros({1}), squares, 2 * scale + 1e-6);
      }
      for (const std::size_t index : {1, 0}) {
        Parameter& parameter = *named[index].parameter;
        const Tensor gradient = random_tensor(*backend, parameter.value().shape(), 100u * index + step);
        parameter.bind_gradient(gradient);
        auto scaled = doubles(gradient);
        for (double& g : scaled) g *= scale;
        references[index].step(expected[index], scaled, lr);
        const auto version = parameter.version();
        optimizer->update(std::array{index});
        EXPECT_NE(parameter.version(), version);
        const auto actual = doubles(parameter.value());
        for (std::size_t i = 0; i < actual.size(); ++i)
          ASSERT_NEAR(actual[i], expected[index][i], tolerance * step) << "step " << step << " element " << i;
      }
    }
  }
}

void expect_sgd_follows(const SgdOptions& options) {
  expect_follows([&](const auto& named) { return make_sgd(named, options); }, SgdReference{options, {}}, 3e-7);
}

TEST(Sgd, Plain) { expect_sgd_follows({}); }
TEST(Sgd, WeightDecay) { expect_sgd_follows({.weight_decay = 0.1}); }
TEST(Sgd, Momentum) { expect_sgd_follows({.momentum = 0.9, .weight_decay = 0.01}); }
TEST(Sgd, Nesterov) { expect_sgd_follows({.momentum = 0.8, .nesterov = true, .weight_decay = 0.05}); }

// At step 1 the update is ± lr whatever the gradient: a 1 − β₂ that was rounded with β₂ would be 1e-5 off there.
TEST(AdamW, Defaults) {
  expect_follows([](const auto& named) { return make_adamw(named, {}); }, AdamReference{{}}, 3e-7);
}
TEST(AdamW, OtherOptions) {
  const AdamWOptions options = {.beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.3};
  expect_follows([&](const auto& named) { return make_adamw(named, options); }, AdamReference{options}, 3e-7);
}
TEST(AdamW, NoDecayAndNoMoments) {
  const AdamWOptions options = {.beta1 = 0.0, .beta2 = 0.0, .eps = 1e-4, .weight_decay = 0.0};
  expect_follows([&](const auto& named) { return make_adamw(named, options); }, AdamReference{options}, 3e-7);
}

// Two terms, each with a rate of its own, are rounded where Adam has one.
TEST(Nadam, MatchesPyTorch) {
  expect_follows([](const auto& named) { return make_optimizer("nadam", named, {}, 0.0); }, NadamReference{}, 6e-7);
  expect_follows(
      [](const auto& named) {
        return make_optimizer("nadam", named, {{"betas", {0.7, 0.95}}, {"momentum-decay", 0.5}, {"eps", 1e-3}}, 0.1);
      },
      NadamReference{.options = {.beta1 = 0.7, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.1}, .decay = 0.5}, 6e-7);
}

// From the number of steps alone.
TEST(Nadam, ProductOfMomenta) {
  for (const double beta : {0.0, 0.9, 0.9999999})
    for (const double decay : {0.0, 1e-9, 0.004, 3.0}) {
      double product = 1;
      for (int t = 1; t <= 20'000; ++t) {
        product *= nadam_momentum(beta, decay, t);
        if (t > 4 && t % 997 != 0) continue;
        ASSERT_NEAR(nadam_product(beta, decay, t), product, 1e-12 * product + 1e-300)
            << beta << ", " << decay << ", step " << t;
      }
    }
}

// Jordan et al., 2024, with the sizes of Liu et al., 2025.
struct MuonReference {
  std::int64_t rows, columns;
  double momentum = 0.95, weight_decay = 0;
  std::vector<double> m = {};

  void step(std::vector<double>& p, const std::vector<double>& gradient, double lr) {
    m.resize(p.size());
    std::vector<double> x(p.size());
    double squares = 0;
    for (std::size_t i = 0; i < p.size(); ++i) {
      m[i] = momentum * m[i] + (1 - momentum) * gradient[i];
      x[i] = (1 - momentum) * gradient[i] + momentum * m[i];
      squares += x[i] * x[i];
    }
    for (double& value : x) value /= std::sqrt(squares);
    const auto r = static_cast<std::size_t>(rows), c = static_cast<std::size_t>(columns);
    for (int iteration = 0; iteration < 5; ++iteration) {
      // Always on the left, whichever side is smaller: in exact numbers it is the same.
      std::vector<double> a(r * r), next(x.size());
      for (std::size_t i = 0; i < r; ++i)
        for (std::size_t j = 0; j < r; ++j)
          for (std::size_t k = 0; k < c; ++k) a[i * r + j] += x[i * c + k] * x[j * c + k];
      for (std::size_t i = 0; i < r; ++i)
        for (std::size_t j = 0; j < r; ++j) {
          double b = -4.775 * a[i * r + j];
          for (std::size_t k = 0; k < r; ++k) b += 2.0315 * a[i * r + k] * a[k * r + j];
          for (std::size_t k = 0; k < c; ++k) next[i * c + k] += b * x[j * c + k];
        }
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + next[i];
    }
    const double size = 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns)));
    for (std::size_t i = 0; i < p.size(); ++i) p[i] -= lr * (weight_decay * p[i] + size * x[i]);
  }
};

// A square, a wide and a tall matrix, one row, a convolution's four dimensions; what is none follows AdamW.
TEST(Muon, FollowsThePaper) {
  const auto backend = make_cpu_backend(2);
  const Shape shapes[] = {{7, 7}, {5, 40}, {33, 4}, {1, 9}, {6, 3, 3, 2}, {11}, {8, 3}};
  std::vector<std::unique_ptr<Parameter>> owned;
  std::vector<NamedParameter> named;
  std::vector<MuonReference> matrices;
  std::vector<AdamReference> others;
  std::vector<std::vector<double>> expected;
  for (const Shape& shape : shapes) {
    auto& parameter = *owned.emplace_back(std::make_unique<Parameter>(*backend, shape));
    backend->pointwise().copy(random_tensor(*backend, shape, owned.size()), parameter.value());
    named.push_back({fmt::format("p{}", owned.size()), &parameter});
    expected.push_back(doubles(parameter.value()));
    const std::int64_t count = parameter.value().count();
    matrices.push_back({.rows = shape[0], .columns = count / shape[0], .weight_decay = 0.1});
    others.push_back({.options = {.weight_decay = 0.1}});
  }
  owned.back()->set_elementwise();
  const auto muon = make_optimizer("muon", named, {}, 0.1);
  for (int step = 1; step <= 5; ++step) {
    for (std::size_t i = 0; i < named.size(); ++i) {
      const Tensor gradient = random_tensor(*backend, shapes[i], 100u * step + i);
      named[i].parameter->bind_gradient(gradient);
      named[i].parameter->mark_grad_valid();
      const auto g = doubles(gradient);
      named[i].parameter->is_matrix() ? matrices[i].step(expected[i], g, 0.02) : others[i].step(expected[i], g, 0.02);
    }
    muon->step(0.02);
    for (std::size_t i = 0; i < named.size(); ++i) {
      const auto actual = doubles(named[i].parameter->value());
      for (std::size_t j = 0; j < actual.size(); ++j)
        ASSERT_NEAR(actual[j], expected[i][j], 2e-5) << named[i].name << ", step " << step << ", element " << j;
    }
  }
  EXPECT_FALSE(owned[5]->is_matrix());
  const OptimizerShare slices = {.slices = std::vector<ParameterSlice>(named.size())};
  EXPECT_THROW(make_optimizer("muon", named, {}, 0.1, {}, slices), UsageError);
}

TEST(Momentum, MayDifferFromStepToStep) {
  const auto backend = make_cpu_backend(1);
  Parameter parameter(*backend, {1});
  parameter.value().f32()[0] = 0;
  const std::vector<NamedParameter> named = {{"p", &parameter}};
  const auto sgd = make_sgd(named, {.momentum = 0.9});
  const std::optional<double> momenta[] = {0.5, 0.25, std::nullopt};
  double p = 0, m = 0;
  for (const auto& momentum : momenta) {
    parameter.bind_gradient(tensor_of(*backend, {1}, {1.0f}));
    parameter.mark_grad_valid();
    sgd->step({.lr = 0.1, .momentum = momentum});
    m = momentum.value_or(0.9) * m + 1;
    p -= 0.1 * m;
    EXPECT_NEAR(parameter.value().f32()[0], p, 1e-6);
  }
  for (const double wrong : {-0.1, 1.0, std::nan("")}) EXPECT_THROW(sgd->begin_step(0.1, wrong), UsageError) << wrong;
  EXPECT_THROW(make_sgd(named, {})->begin_step(0.1, 0.5), UsageError) << "it has none";
  for (const char* constant : {"nadam", "lamb", "lion"})
    EXPECT_FALSE(make_optimizer(constant, named, {}, 0.1)->takes_momentum()) << constant;
}

TEST(Lion, FollowsThePaper) {
  expect_follows([](const auto& named) { return make_optimizer("lion", named, {}, 0.0); }, LionReference{}, 3e-7);
  expect_follows(
      [](const auto& named) {
        return make_optimizer("lion", named, {{"betas", {0.5, 0.8}}}, 0.2);
      },
      LionReference{.beta1 = 0.5, .beta2 = 0.8, .weight_decay = 0.2}, 3e-7);
}

TEST(Lion, KeepsNoNaNFromAnybody) {
  const LionRule rule{.beta1 = 0.9f, .rest1 = 0.1f, .beta2 = 0.99f, .rest2 = 0.01f};
  std::array<float, StepControl::kSize> control;
  control.fill(1.0f);
  float p = 1.0f, first = 0.0f, second = 0.0f;
  rule(control.data(), std::nanf(""), p, first, second);
  EXPECT_TRUE(std::isnan(p));
}

TEST(Rmsprop, MatchesPyTorch) {
  expect_follows([](const auto& named) { return make_optimizer("rmsprop", named, {}, 0.0); }, SquaresReference{}, 2e-6);
  expect_follows(
      [](const auto& named) {
        return make_optimizer("rmsprop", named, {{"alpha", 0.9}, {"momentum", 0.8}, {"eps", 1e-3}}, 0.1);
      },
      SquaresReference{.alpha = 0.9, .momentum = 0.8, .eps = 1e-3, .weight_decay = 0.1}, 2e-6);
}

TEST(Adagrad, MatchesPyTorch) {
  expect_follows([](const auto& named) { return make_optimizer("adagrad", named, {}, 0.0); },
                 SquaresReference{.adagrad = true, .eps = 1e-10}, 3e-7);
  expect_follows(
      [](const auto& named) {
        return make_optimizer("adagrad", named, {{"eps", 1e-3}}, 0.1);
      },
      SquaresReference{.adagrad = true, .eps = 1e-3, .weight_decay = 0.1}, 2e-6);
}

TEST(Adam, MatchesPyTorch) {
  for (const double weight_decay : {0.0, 0.2})
    for (const auto& [beta1, beta2] : {std::pair(0.9, 0.999), {0.8, 0.95}})
      expect_follows(
          [&](const auto& named) {
            return make_optimizer("adam", named, {{"betas", {beta1, beta2}}}, weight_decay);
          },
          AdamReference{{.beta1 = beta1, .beta2 = beta2, .weight_decay = weight_decay}, false},
          // Where gradient and decay nearly cancel each other, the step is one of their rounding.
          weight_decay > 0 ? 2e-6 : 3e-7);
  EXPECT_EQ(optimizer_family("adam").weight_decay, 0.0);
}

TEST(Adam, EpsIsASettingOfBoth) {
  const AdamWOptions decoupled = {.eps = 1e-3, .weight_decay = 0.0};
  for (const char* name : {"adam", "adamw"})
    expect_follows(
        [&](const auto& named) {
          return make_optimizer(name, named, {{"eps", 1e-3}}, 0.0);
        },
        AdamReference{decoupled}, 3e-7);
  EXPECT_NO_THROW(make_optimizer("adam", {}, {{"eps", 0.0}}, 0.0));
  EXPECT_THROW(make_optimizer("adam", {}, {{"eps", -1e-8}}, 0.0), UsageError);
}

TEST(AdamW, TheFirstStepIsTheRate) {
  const auto backend = make_cpu_backend(1);
  Parameter p(*backend, {2});
  backend->pointwise().fill(p.value(), 0.0f);
  p.bind_gradient(tensor_of(*backend, {2}, {0.5f, -20.0f}));
  const auto optimizer = make_adamw({{"p", &p}}, {.weight_decay = 0.0});
  optimizer->begin_step(1.0);
  optimizer->update(std::array{std::size_t{0}});
  EXPECT_NEAR(p.value().f32()[0], -1.0f, 1e-6f);
  EXPECT_NEAR(p.value().f32()[1], 1.0f, 1e-6f);
}

TEST(Optimizer, RefusesWhatPyTorchRefuses) {
  const double nan = std::nan("");
  EXPECT_THROW(make_sgd({}, {.momentum = -0.1}), UsageError);
  EXPECT_THROW(make_sgd({}, {.weight_decay = -0.1}), UsageError);
  EXPECT_THROW(make_sgd({}, {.momentum = 0.0, .nesterov = true}), UsageError);
  EXPECT_THROW(make_sgd({}, {.momentum = nan}), UsageError);
  EXPECT_THROW(make_adamw({}, {.beta1 = 1.0}), UsageError);
  EXPECT_THROW(make_adamw({}, {.beta1 = -0.1}), UsageError);
  EXPECT_THROW(make_adamw({}, {.beta2 = 1.0}), UsageError);
  EXPECT_THROW(make_adamw({}, {.eps = -1e-8}), UsageError);
  EXPECT_THROW(make_adamw({}, {.weight_decay = nan}), UsageError);
  EXPECT_THROW(make_optimizer("adam", {}, {{"betas", {0.9, 1.0}}}, 0.0), UsageError);
  EXPECT_THROW(make_optimizer("adam", {}, {}, -0.1), UsageError);
  const auto optimizer = make_sgd({}, {});
  EXPECT_THROW(optimizer->begin_step(-0.1), UsageError);
  EXPECT_THROW(optimizer->begin_step(nan), UsageError);
  EXPECT_NO_THROW(optimizer->begin_step(0.0));
}

TEST(Optimizer, MisuseIsTheCallers) {
  const auto backend = make_cpu_backend(1);
  Parameter p(*backend, {2});
  const auto optimizer = make_sgd({{"p", &p}}, {});
  const std::array<std::size_t, 1> first = {0}, unknown = {1};
  EXPECT_THROW(optimizer->update(first), UsageError);  // no step has begun
  optimizer->begin_step(0.1);
  EXPECT_THROW(optimizer->update(first), UsageError);  // no gradient
  EXPECT_THROW(optimizer->update(unknown), UsageError);
}

TEST(Optimizer, ALossThatIsNotFiniteMovesNothing) {
  const auto backend = make_cpu_backend(1);
  for (const float loss : {std::nanf(""), INFINITY, -INFINITY, 1.0f}) {
    Parameter a(*backend, {3}), b(*backend, {5});
    std::vector<NamedParameter> named = {{"a", &a}, {"b", &b}};
    for (auto& [name, parameter] : named) {
      backend->pointwise().fill(parameter->value(), 1.0f);
      parameter->bind_gradient(random_tensor(*backend, parameter->value().shape(), 3));
    }
    for (const auto& optimizer : {make_sgd(named, {.momentum = 0.9}), make_adamw(named, {})}) {
      const auto before_a = doubles(a.value()), before_b = doubles(b.value());
      optimizer->begin_step(0.1);
      optimizer->compute_update_scale(tensor_of(*backend, {2}, {loss, 7.0f}), {}, 0);
      optimizer->update(std::array<std::size_t, 2>{0, 1});
      EXPECT_EQ(doubles(a.value()) == before_a, !std::isfinite(loss)) << loss;
      EXPECT_EQ(doubles(b.value()) == before_b, !std::isfinite(loss)) << loss;
    }
  }
}

TEST(Optimizer, ClipsAsPyTorchDoes) {
  const auto backend = make_cpu_backend(1);
  Parameter a(*backend, {2}), b(*backend, {1});
  const auto optimizer = make_sgd({{"a", &a}, {"b", &b}}, {});
  for (Parameter* p : {&a, &b}) backend->pointwise().fill(p->value(), 0.0f);
  a.bind_gradient(tensor_of(*backend, {2}, {1.0f, 2.0f}));
  b.bind_gradient(tensor_of(*backend, {1}, {-2.0f}));
  const std::array<std::size_t, 2> all = {1, 0};
  const Tensor squares = backend->empty({}, DType::kF64), loss = backend->zeros({1});
  optimizer->begin_step(1.0);
  optimizer->add_squares(all);
  optimizer->sum_squares(squares);
  EXPECT_EQ(*squares.data<double>(), 9.0);
  optimizer->compute_update_scale(loss, squares, 1.5);  // the norm is 3: half of it is left
  optimizer->update(all);
  EXPECT_NEAR(a.value().f32()[1], -1.0f, 1e-6f);
  EXPECT_NEAR(b.value().f32()[0], 1.0f, 1e-6f);
  optimizer->begin_step(1.0);
  optimizer->compute_update_scale(loss, squares, 100.0);  // and here all of it
  optimizer->update(all);
  EXPECT_NEAR(a.value().f32()[1], -3.0f, 1e-6f);
}

TEST(Optimizer, ClippingByANormThatIsNotFiniteMovesNothing) {
  const auto backend = make_cpu_backend(1);
  for (const float gradient : {std::nanf(""), INFINITY, 3.0f}) {
    Parameter p(*backend, {2});
    backend->pointwise().fill(p.value(), 1.0f);
    p.bind_gradient(tensor_of(*backend, {2}, {0.5f, gradient}));
    for (const auto& optimizer : {make_sgd({{"p", &p}}, {}), make_adamw({{"p", &p}}, {})}) {
      const auto before = doubles(p.value());
      const Tensor squares = backend->empty({}, DType::kF64);
      optimizer->begin_step(0.1);
      optimizer->add_squares(std::array<std::size_t, 1>{0});
      optimizer->sum_squares(squares);
      optimizer->compute_update_scale(backend->zeros({1}), squares, 1.0);
      optimizer->update(std::array<std::size_t, 1>{0});
      EXPECT_EQ(doubles(p.value()) == before, !std::isfinite(gradient)) << gradient;
    }
  }
}

TEST(Optimizer, WritesTheRoundedCopyAlong) {
  const auto backend = make_cpu_backend(1);
  for (const bool adam : {false, true}) {
    Parameter p(*backend, {37});
    backend->pointwise().copy(random_tensor(*backend, {37}, 1), p.value());
    p.changed();
    p.bind_gradient(random_tensor(*backend, {37}, 2));
    const auto optimizer = adam ? make_adamw({{"p", &p}}, {}) : make_sgd({{"p", &p}}, {.momentum = 0.5});
    EXPECT_FALSE(p.copy());
    const Tensor copy = p.as(DType::kBF16);
    optimizer->begin_step(0.1);
    optimizer->update(std::array{std::size_t{0}});
    for (std::int64_t i = 0; i < 37; ++i)
      ASSERT_EQ(copy.data<BFloat16>()[i].bits, BFloat16::from_float(p.value().f32()[i]).bits) << i;
  }
}

// Trained in f32 first: the copy that is asked for then is made of what there is.
TEST(Optimizer, CopiesThatAreAskedForAfterAnUpdate) {
  const auto backend = make_cpu_backend(1);
  Parameter p(*backend, {37});
  backend->pointwise().copy(random_tensor(*backend, {37}, 1), p.value());
  p.bind_gradient(random_tensor(*backend, {37}, 2));
  const auto optimizer = make_sgd({{"p", &p}}, {});
  optimizer->begin_step(0.1);
  optimizer->update(std::array{std::size_t{0}});
  const Tensor copy = p.as(DType::kBF16);
  for (std::int64_t i = 0; i < 37; ++i)
    ASSERT_EQ(copy.data<BFloat16>()[i].bits, BFloat16::from_float(p.value().f32()[i]).bits) << i;
}

// PyTorch's optimizers pass over parameters whose grad is None, which then have made fewer steps.
TEST(Optimizer, StepsLeaveParametersWithoutAGradientAlone) {
  const auto backend = make_cpu_backend(1);
  Parameter always(*backend, {3}), sometimes(*backend, {3});
  const std::vector<NamedParameter> named = {{"sometimes", &sometimes}, {"always", &always}};
  const AdamWOptions options = {.weight_decay = 0.1};
  std::vector<AdamReference> references(2, AdamReference{options});
  std::vector<std::vector<double>> expected;
  for (const auto& [name, parameter] : named) {
    backend->pointwise().copy(random_tensor(*backend, {3}, 7), parameter->value());
    expected.push_back(doubles(parameter->value()));
  }
  const auto optimizer = make_adamw(named, options);
  for (std::uint64_t step = 1; step <= 9; ++step) {
    optimizer->zero_grad();
    for (std::size_t k = 0; k < named.size(); ++k) {
      if (k == 0 && step % 3 != 0) continue;
      const Tensor gradient = random_tensor(*backend, {3}, 10 * step + k);
      backend->pointwise().copy(gradient, named[k].parameter->contribute().gradient);
      references[k].step(expected[k], doubles(gradient), 0.01);
    }
    optimizer->step(0.01);
    for (std::size_t k = 0; k < named.size(); ++k)
      for (std::int64_t i = 0; i < 3; ++i)
        EXPECT_NEAR(static_cast<double>(named[k].parameter->value().f32()[i]), expected[k][static_cast<std::size_t>(i)],
                    2e-6)
            << named[k].name << " after step " << step;
  }
}

// Parameters "a.weight", "a.bias" and "b.weight" of 5 numbers, with gradients.
class Groups : public ::testing::Test {
 protected:
  Groups() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i] = std::make_unique<Parameter>(*backend_, Shape{5});
      backend_->pointwise().copy(random_tensor(*backend_, {5}, i + 1), parameters_[i]->value());
    }
    give_gradients();
  }
  void give_gradients() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i]->clear_grad();
      backend_->pointwise().copy(random_tensor(*backend_, {5}, i + 10), parameters_[i]->contribute().gradient);
    }
  }
  std::vector<NamedParameter> named(const std::vector<std::size_t>& which) {
    const char* names[] = {"a.weight", "a.bias", "b.weight"};
    std::vector<NamedParameter> all;
    for (const std::size_t i : which) all.push_back({names[i], parameters_[i].get()});
    return all;
  }
  std::vector<float> values(std::size_t i) { return values_of(parameters_[i]->value()); }
  void restore() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      backend_->pointwise().copy(random_tensor(*backend_, {5}, i + 1), parameters_[i]->value());
      parameters_[i]->changed();
    }
    give_gradients();
  }

  std::unique_ptr<Backend> backend_ = make_cpu_backend(1);
  std::array<std::unique_ptr<Parameter>, 3> parameters_;
};

// The same bits as optimizers of their own.
TEST_F(Groups, RatesAndDecayAreTheirOwn) {
  const auto together =
      make_adamw(named({0, 1, 2}), {.weight_decay = 0.1},
                 {{.patterns = {"*.bias"}, .weight_decay = 0.0}, {.patterns = {"b.*", "a.bias"}, .lr_factor = 0.5}});
  for (int step = 0; step < 3; ++step) together->step(0.01);
  const std::vector<std::vector<float>> got = {values(0), values(1), values(2)};
  restore();
  const auto first = make_adamw(named({0}), {.weight_decay = 0.1}),
             second = make_adamw(named({1}), {.weight_decay = 0}),
             third = make_adamw(named({2}), {.weight_decay = 0.1});
  for (int step = 0; step < 3; ++step) {
    first->step(0.01);
    second->step(0.01);
    third->step(0.005);
  }
  EXPECT_EQ(got[0], values(0));
  EXPECT_EQ(got[1], values(1)) << "of the first group that names it";
  EXPECT_EQ(got[2], values(2));
}

TEST_F(Groups, DecayOfSgdIsInItsRule) {
  const auto together =
      make_sgd(named({0, 1}), {.momentum = 0.9, .weight_decay = 0.1}, {{.patterns = {"a.bias"}, .weight_decay = 0.0}});
  for (int step = 0; step < 3; ++step) together->step(0.01);
  const auto got = values(0), got_bias = values(1);
  restore();
  const auto first = make_sgd(named({0}), {.momentum = 0.9, .weight_decay = 0.1}),
             second = make_sgd(named({1}), {.momentum = 0.9});
  for (int step = 0; step < 3; ++step) first->step(0.01), second->step(0.01);
  EXPECT_EQ(got, values(0));
  EXPECT_EQ(got_bias, values(1));
}

// torch.nn.utils.clip_grad_norm_, over all groups together.
TEST_F(Groups, ClippingScalesAllGradients) {
  double squares = 0;
  std::vector<std::vector<float>> before, gradients;
  for (std::size_t i = 0; i < 3; ++i) {
    before.push_back(values(i));
    gradients.push_back(values_of(parameters_[i]->gradient()));
    for (const float g : gradients.back()) squares += static_cast<double>(g) * static_cast<double>(g);
  }
  const auto optimizer = make_sgd(named({0, 1, 2}), {}, {{.patterns = {"*.bias"}, .lr_factor = 0.5}});
  optimizer->step({.lr = 0.1, .clip_norm = 0.25});
  const double scale = 0.25 / (std::sqrt(squares) + 1e-6);
  ASSERT_LT(scale, 1);
  for (std::size_t i = 0; i < 3; ++i)
    for (std::size_t k = 0; k < 5; ++k)
      EXPECT_NEAR(
          static_cast<double>(values(i)[k]),
          static_cast<double>(before[i][k]) - (i == 1 ? 0.05 : 0.1) * scale * static_cast<double>(gradients[i][k]),
          1e-6);
  restore();
  optimizer->step({.lr = 0.1, .clip_norm = 1e6});
  const auto unclipped = values(2);
  restore();
  optimizer->step(0.1);
  EXPECT_EQ(unclipped, values(2)) << "a norm below it changes nothing";
}

TEST_F(Groups, NothingMovesByANormThatIsNoNumber) {
  parameters_[1]->gradient().f32()[3] = std::nanf("");
  const auto before = values(0);
  make_sgd(named({0, 1, 2}), {})->step({.lr = 0.1, .clip_norm = 1});
  EXPECT_EQ(values(0), before);
}

TEST_F(Groups, MistakesAreNamed) {
  const auto error_of = [&](const std::vector<ParameterGroup>& groups) {
    return lockstep::testing::line_of<UsageError>([&] { make_sgd(named({0, 1, 2}), {}, groups); }, "none");
  };
  EXPECT_EQ(error_of({{.patterns = {"a.biass"}}}),
            "a group of 'a.biass': no parameter has such a name → did you mean 'a.bias'? * stands for any characters");
  EXPECT_EQ(error_of({{.patterns = {"*"}, .lr_factor = -1}}),
            "a group of parameters with a negative factor of the learning rate");
  EXPECT_EQ(error_of({{.patterns = {"*"}, .weight_decay = -1.0}}), "an optimizer with a negative weight decay");
  EXPECT_THROW(make_sgd(named({0}), {})->step({.lr = 0.1, .clip_norm = -1}), UsageError);
}

// Further copies get what the parameters get, at any size, and nothing where nothing moves.
TEST(Replicas, GetTheNewValues) {
  for (const int threads : {1, 3})
    for (const std::int64_t count : {1, 1023, 1025, 40001}) {
      const auto backend = make_cpu_backend(threads);
      // The parameters in the middle, a copy on either side, and a guard after each.
      const std::int64_t apart = count + 3;
      const Tensor all = backend->zeros({3 * apart}), g = backend->zeros({count}), alone = backend->zeros({count});
      const Tensor control = backend->zeros({StepControl::kSize});
      float* const p = all.f32() + apart;
      for (std::int64_t i = 0; i < count; ++i) {
        g.f32()[i] = static_cast<float>(i % 97) - 40;
        alone.f32()[i] = p[i] = static_cast<float>(i % 31);
      }
      control.f32()[SgdRule::kRate] = 0.37f;
      control.f32()[StepControl::kGradientScale] = 1.0f;
      const std::ptrdiff_t replicas[] = {apart, -apart};
      const UpdateArrays arrays = {.count = count, .gradient = g.f32(), .parameter = p};
      const UpdateArrays without = {.count = count, .gradient = g.f32(), .parameter = alone.f32()};
      backend->optim().update(SgdRule{}, control, std::span(&arrays, 1), {}, replicas);
      for (const std::ptrdiff_t replica : replicas) EXPECT_EQ(p[replica + count / 2], 0) << "kApply is 0";
      control.f32()[StepControl::kApply] = 1.0f;
      backend->optim().update(SgdRule{}, control, std::span(&arrays, 1), {}, replicas);
      backend->optim().update(SgdRule{}, control, std::span(&without, 1), {});
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(p[i], alone.f32()[i]) << i;
        for (const std::ptrdiff_t replica : replicas) ASSERT_EQ(p[replica + i], p[i]) << i;
      }
      for (const std::ptrdiff_t place : {std::ptrdiff_t{0}, apart, -apart})
        for (std::ptrdiff_t guard = count; guard < apart; ++guard) EXPECT_EQ(p[place + guard], 0);
    }
}

}  // namespace
}  // namespace lockstep::nn
