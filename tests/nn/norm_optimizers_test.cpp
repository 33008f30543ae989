// LAMB and LARS, whose steps depend on norms of whole parameters: against plain loops in f64, and the same bits however
// the blocks of a parameter are shared out.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>

#include "base/error.h"
#include "lockstep/nn/optim/optimizers.h"
#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

std::vector<double> f64s_of(const Tensor& tensor) {
  const auto values = tensor.span<float>();
  return {values.begin(), values.end()};
}

double norm(const std::vector<double>& values) {
  double squares = 0;
  for (const double v : values) squares += v * v;
  return std::sqrt(squares);
}

struct Constants {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-6;
  double trust = 0.001, momentum = 0;
  double weight_decay = 0.01;
  bool adapts = true;
};

// Of one parameter: a step with gradient g.
struct NormReference {
  bool lamb;
  Constants c;
  std::vector<double> m = {}, v = {};
  int t = 0;

  void step(std::vector<double>& p, const std::vector<double>& g, double lr) {
    m.resize(p.size());
    v.resize(p.size());
    ++t;
    lamb ? lamb_step(p, g, lr) : lars_step(p, g, lr);
  }

  // Algorithm 2 of "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", φ the identity.
  void lamb_step(std::vector<double>& p, const std::vector<double>& g, double lr) {
    std::vector<double> u(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      m[i] = c.beta1 * m[i] + (1 - c.beta1) * g[i];
      v[i] = c.beta2 * v[i] + (1 - c.beta2) * g[i] * g[i];
      const double m_hat = m[i] / (1 - std::pow(c.beta1, t)), v_hat = v[i] / (1 - std::pow(c.beta2, t));
      u[i] = m_hat / (std::sqrt(v_hat) + c.eps) + c.weight_decay * p[i];
    }
    const double ratio = c.adapts && norm(p) > 0 && norm(u) > 0 ? norm(p) / norm(u) : 1;
    for (std::size_t i = 0; i < p.size(); ++i) p[i] -= lr * ratio * u[i];
  }

  // Algorithm 1 of "Large Batch Training of Convolutional Networks".
  void lars_step(std::vector<double>& p, const std::vector<double>& g, double lr) {
    const double ratio =
        c.adapts && norm(p) > 0 && norm(g) > 0 ? c.trust * norm(p) / (norm(g) + c.weight_decay * norm(p) + c.eps) : 1;
    for (std::size_t i = 0; i < p.size(); ++i) {
      m[i] = c.momentum * m[i] + ratio * (g[i] + c.weight_decay * p[i]);
      p[i] -= lr * m[i];
    }
  }
};

// Below, at and above a block, and split over threads; one that begins with zeros has no norm to go by.
const std::array<std::int64_t, 6> kSizes = {1, 7, 2048, 2049, 40000, 5};

class Trained {
 public:
  using Make = std::function<std::unique_ptr<Optimizer>(std::vector<NamedParameter>)>;

  Trained(int threads, const Make& make) : backend(make_cpu_backend(threads)) {
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      owned.push_back(std::make_unique<Parameter>(*backend, Shape{kSizes[i]}));
      named.push_back({"p" + std::to_string(i), owned.back().get()});
      if (i + 1 < kSizes.size())
        backend->pointwise().copy(random_tensor(*backend, {kSizes[i]}, 7 + i), owned[i]->value());
      else
        backend->pointwise().fill(owned[i]->value(), 0.0f);
    }
    optimizer = make(named);
  }

  static double lr(int step) { return 0.1 / step; }
  void give_gradients(int step) {
    for (std::size_t i = 0; i < owned.size(); ++i)
      owned[i]->bind_gradient(random_tensor(*backend, {kSizes[i]}, 100 * i + static_cast<std::size_t>(step)));
  }
  void step(int number, const StepOptions& options) {
    give_gradients(number);
    for (const auto& parameter : owned) parameter->mark_grad_valid();
    optimizer->step(options);
  }

  std::unique_ptr<Backend> backend;
  std::vector<std::unique_ptr<Parameter>> owned;
  std::vector<NamedParameter> named;
  std::unique_ptr<Optimizer> optimizer;
};

void expect_norms_follow(const Trained::Make& make, bool lamb, const Constants& constants) {
  Trained run(2, make);
  std::vector<NormReference> references(kSizes.size(), NormReference{lamb, constants});
  std::vector<std::vector<double>> expected;
  for (const auto& parameter : run.owned) expected.push_back(f64s_of(parameter->value()));
  for (int step = 1; step <= 20; ++step) {
    run.step(step, {.lr = Trained::lr(step)});
    for (std::size_t k = 0; k < kSizes.size(); ++k) {
      references[k].step(expected[k], f64s_of(run.owned[k]->gradient()), Trained::lr(step));
      const auto actual = f64s_of(run.owned[k]->value());
      for (std::size_t i = 0; i < actual.size(); ++i)
        ASSERT_NEAR(actual[i], expected[k][i], 1e-6 * step)
            << "parameter " << k << " step " << step << " element " << i;
    }
  }
}

Trained::Make family(const std::string& name, const Settings& settings, double weight_decay) {
  return [=](std::vector<NamedParameter> parameters) {
    return make_optimizer(name, std::move(parameters), settings, weight_decay);
  };
}

TEST(Lamb, MatchesThePaper) {
  expect_norms_follow(family("lamb", {}, 0.01), true, {});
  expect_norms_follow(family("lamb", {{"betas", {0.8, 0.95}}, {"eps", 1e-3}}, 0.3), true,
                      {.beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.3});
  expect_norms_follow(family("lamb", {{"always-adapt", true}}, 0.0), true, {.weight_decay = 0.0});
}

TEST(Lars, MatchesThePaper) {
  expect_norms_follow(family("lars", {{"momentum", 0.0}}, 1e-4), false, {.eps = 1e-8, .weight_decay = 1e-4});
  expect_norms_follow(family("lars", {{"trust-coefficient", 0.02}, {"eps", 1e-3}}, 0.1), false,
                      {.eps = 1e-3, .trust = 0.02, .momentum = 0.9, .weight_decay = 0.1});
  expect_norms_follow(family("lars", {{"always-adapt", true}}, 0.0), false,
                      {.eps = 1e-8, .momentum = 0.9, .weight_decay = 0.0});
}

// Biases in a group without decay move as with Adam and SGD.
TEST(NormOptimizers, ParametersWithoutDecayAreNotAdapted) {
  for (const bool lamb : {true, false}) {
    const auto make = [&](std::vector<NamedParameter> parameters) {
      return make_optimizer(lamb ? "lamb" : "lars", std::move(parameters), {}, 0.01,
                            {{.patterns = {"*"}, .weight_decay = 0.0}});
    };
    Constants constants = {.momentum = 0.9, .weight_decay = 0.0, .adapts = false};
    if (!lamb) constants.eps = 1e-8;
    expect_norms_follow(make, lamb, constants);
  }
}

TEST(NormOptimizers, DefaultsMatchOtherLibraries) {
  EXPECT_EQ(optimizer_family("lamb").weight_decay, 0.01);
  EXPECT_EQ(optimizer_family("lamb").lr, 1e-3);
  EXPECT_EQ(optimizer_family("lars").weight_decay, 1e-4);
  EXPECT_EQ(optimizer_family("lars").lr, 1.0);
}

TEST(NormOptimizers, RefuseARunThatAdaptsNothing) {
  try {
    make_optimizer("lamb", {}, {}, 0.0);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_EQ(
        error.line(),
        "--optimizer lamb without weight decay, where no parameter moves by its norm → add --always-adapt, give a "
        "--weight-decay, or use --optimizer adam");
  }
  EXPECT_THROW(make_optimizer("lars", {}, {}, 0.0), UsageError);
  EXPECT_NO_THROW(make_optimizer("lars", {}, {{"always-adapt", true}}, 0.0));
}

TEST(NormOptimizers, ALossThatIsNotFiniteMovesNothing) {
  for (const char* name : {"lamb", "lars"}) {
    Trained run(1, family(name, {}, 0.01));
    run.give_gradients(1);
    std::vector<std::vector<double>> before;
    for (const auto& parameter : run.owned) before.push_back(f64s_of(parameter->value()));
    run.optimizer->begin_step(0.1);
    run.optimizer->compute_update_scale(tensor_of(*run.backend, {1}, {std::nanf("")}), {}, 0);
    run.optimizer->update(std::array<std::size_t, 6>{0, 1, 2, 3, 4, 5});
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(f64s_of(run.owned[i]->value()), before[i]);
    for (const auto& moment : run.optimizer->moments())
      for (const double m : f64s_of(moment.value)) ASSERT_EQ(m, 0.0) << moment.name;
  }
}

// As where a device refuses to record a step that has been taken down half: zero_grad() begins it anew.
TEST(NormOptimizers, StateRestarts) {
  const std::array<std::size_t, 6> all = {0, 1, 2, 3, 4, 5};
  Trained once(1, family("lamb", {}, 0.01)), twice(1, family("lamb", {}, 0.01));
  twice.give_gradients(7);
  twice.optimizer->begin_step(0.05);
  twice.optimizer->add_squares(all);
  twice.optimizer->prepare(all);
  for (const auto& moment : twice.optimizer->moments()) twice.backend->pointwise().fill(moment.value, 0.0f);
  twice.optimizer->zero_grad();
  once.optimizer->begin_step(0.05);
  for (Trained* run : {&once, &twice}) {
    run->give_gradients(1);
    run->optimizer->update(all);
  }
  for (std::size_t i = 0; i < once.owned.size(); ++i)
    EXPECT_EQ(values_of(twice.owned[i]->value()), values_of(once.owned[i]->value()));
}

std::vector<std::vector<float>> values(const Trained& run) {
  std::vector<std::vector<float>> all;
  for (const auto& parameter : run.owned) all.push_back(values_of(parameter->value()));
  return all;
}

TEST(NormBlocks, BitsDoNotDependOnThreads) {
  for (const std::string& name : optimizer_names())
    for (const double clip : {0.0, 3.0}) {
      std::vector<std::vector<float>> first;
      for (const int threads : {1, 2, 3}) {
        Trained run(threads, family(name, {}, 0.01));
        for (int step = 1; step <= 4; ++step) run.step(step, {.lr = 0.05, .clip_norm = clip});
        if (threads == 1) first = values(run);
        EXPECT_EQ(values(run), first) << name << " with " << threads << " threads, clip " << clip;
      }
    }
}

// Two optimizers, each of some blocks of the same parameters, which add up their sums: what ranks do (Note [Slices]).
TEST(NormBlocks, BitsDoNotDependOnSlices) {
  const std::array<std::size_t, 6> all = {3, 1, 0, 5, 4, 2};
  std::vector<ParameterSlice> low, high;
  for (const std::int64_t count : kSizes) {
    const std::int64_t cut = count / 2 / kNormBlock * kNormBlock;
    low.push_back({.begin = 0, .count = cut});
    high.push_back({.begin = cut, .count = count - cut});
  }
  for (const std::string& name : optimizer_names())
    for (const double clip : {0.0, 3.0}) {
      if (optimizer_family(name).whole_matrices) continue;
      Trained whole(1, family(name, {}, 0.01));
      for (int step = 1; step <= 4; ++step) whole.step(step, {.lr = 0.05, .clip_norm = clip});

      std::unique_ptr<Optimizer> other;
      Trained sliced(2, [&](const std::vector<NamedParameter>& parameters) {
        other = make_optimizer(name, parameters, {}, 0.01, {}, {.slices = high});
        return make_optimizer(name, parameters, {}, 0.01, {}, {.slices = low});
      });
      Optimizer& one = *sliced.optimizer;
      Backend& backend = *sliced.backend;
      const Tensor loss = backend.zeros({1}), squares = backend.empty({1}, DType::kF64);
      const auto add_up = [](const Tensor& a, const Tensor& b) {
        for (std::int64_t i = 0; i < a.count(); ++i) {
          const double sum = a.data<double>()[i] + b.data<double>()[i];
          a.data<double>()[i] = b.data<double>()[i] = sum;
        }
      };
      for (int step = 1; step <= 4; ++step) {
        sliced.give_gradients(step);
        for (Optimizer* optimizer : {&one, other.get()}) {
          optimizer->begin_step(0.05);
          if (clip > 0) optimizer->add_squares(all);
        }
        if (clip > 0) {
          add_up(one.square_sums(), other->square_sums());
          for (Optimizer* optimizer : {&one, other.get()}) {
            optimizer->sum_squares(squares);
            optimizer->compute_update_scale(loss, squares, clip);
          }
        }
        if (one.needs_norms()) {
          for (Optimizer* optimizer : {&one, other.get()}) optimizer->prepare(all);
          add_up(one.norm_sums(), other->norm_sums());
        }
        for (Optimizer* optimizer : {&one, other.get()}) optimizer->update(all);
      }
      EXPECT_EQ(values(sliced), values(whole)) << name << ", clip " << clip;
      std::int64_t remembered = 0, in_slices = 0;
      for (const auto& moment : whole.optimizer->moments()) remembered += moment.value.count();
      for (Optimizer* optimizer : {&one, other.get()})
        for (const auto& moment : optimizer->moments()) in_slices += moment.value.count();
      EXPECT_EQ(remembered, in_slices) << name;
    }
}

TEST(NormBlocks, SlicesThatAreNoneAreRefused) {
  const auto backend = make_cpu_backend(1);
  Parameter p(*backend, {5000});
  const auto error_of = [&](const std::vector<ParameterSlice>& slices) -> std::string {
    try {
      make_optimizer("sgd", {{"p", &p}}, {}, 0, {}, {.slices = slices});
    } catch (const UsageError& error) {
      return error.line();
    }
    return "none";
  };
  for (const auto& [begin, count] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {-2048, 2048}, {0, 5001}, {1, 2048}, {0, 100}, {2048, -2048}, {6144, 0}})
    EXPECT_EQ(error_of({{begin, count}}),
              fmt::format("elements [{}, {}) as the slice of p, which has 5000 → give whole blocks of 2048 elements",
                          begin, begin + count));
  for (const auto& [begin, count] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 2048}, {2048, 2952}, {4096, 904}, {0, 0}, {0, 5000}})
    EXPECT_EQ(error_of({{begin, count}}), "none");
  EXPECT_EQ(error_of({{0, 5000}, {0, 0}}),
            "another number of slices than of parameters → give a slice for each parameter, or none at all");
}

}  // namespace
}  // namespace lockstep::nn
