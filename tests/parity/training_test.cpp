// Optimizers, schedules and the sampler, against torch's (make_training.py).
#include <gtest/gtest.h>

#include <iostream>

#include "lockstep/nn/io/state.h"
#include "lockstep/nn/optim/optimizers.h"
#include "lockstep/sampler/sampler.h"
#include "lockstep/trainer/config.h"
#include "tests/nn/gradient_backend.h"
#include "tests/parity/counter.h"
#include "tests/parity/golden.h"

namespace lockstep::parity {
namespace {

constexpr int kTrainingSteps = 20;

using MakeOptimizer = std::function<std::unique_ptr<nn::Optimizer>(std::vector<nn::NamedParameter>)>;

MakeOptimizer sgd(const nn::SgdOptions& options) {
  return [options](auto all) { return nn::make_sgd(std::move(all), options); };
}
MakeOptimizer adamw(const nn::AdamWOptions& options) {
  return [options](auto all) { return nn::make_adamw(std::move(all), options); };
}

MakeOptimizer by_name(const std::string& name, const Settings& settings, double weight_decay) {
  return [=](auto all) { return nn::make_optimizer(name, std::move(all), settings, weight_decay); };
}

// OPTIMIZERS in make_training.py.
const std::map<std::string, MakeOptimizer> kOptimizers = {
    {"sgd", sgd({})},
    {"sgd-decay", sgd({.weight_decay = 0.1})},
    {"sgd-momentum", sgd({.momentum = 0.9})},
    {"sgd-momentum-decay", sgd({.momentum = 0.9, .weight_decay = 0.01})},
    {"sgd-nesterov", sgd({.momentum = 0.8, .nesterov = true})},
    {"sgd-nesterov-decay", sgd({.momentum = 0.9, .nesterov = true, .weight_decay = 0.05})},
    {"adamw", adamw({})},
    {"adamw-betas", adamw({.beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.3})},
    {"adamw-no-decay", adamw({.weight_decay = 0.0})},
    {"adamw-eps", adamw({.eps = 1e-2})},
    {"adam-decay", by_name("adam", {}, 0.1)},
    {"rmsprop", by_name("rmsprop", {}, 0)},
    {"rmsprop-momentum-decay", by_name("rmsprop", {{"alpha", 0.9}, {"momentum", 0.8}}, 0.05)},
    {"adagrad", by_name("adagrad", {}, 0)},
    {"adagrad-decay", by_name("adagrad", {{"eps", 1e-6}}, 0.1)},
    {"nadam", by_name("nadam", {}, 0)},
    {"nadam-decay", by_name("nadam", {{"betas", {0.8, 0.95}}, {"momentum-decay", 0.1}}, 0.1)},
    {"sgd-nesterov-cycled", sgd({.momentum = 0.9, .nesterov = true})},
    {"adam-cycled", by_name("adam", {}, 0)},
    {"adamw-cycled", adamw({})},
    {"adam-betas", by_name("adam", {{"betas", {0.8, 0.95}}}, 0.3)},
};
constexpr double kClipNorm = 4.0;

class Optimizers : public ::testing::Test {
 protected:
  static const Golden& golden() {
    static const Golden kGolden("optimizers");
    return kGolden;
  }
  static void TearDownTestSuite() {
    const auto& suite = *::testing::UnitTest::GetInstance()->current_test_suite();
    if (suite.test_to_run_count() + suite.disabled_test_count() >= suite.total_test_count()) {
      EXPECT_EQ(golden().not_compared(), std::vector<std::string>{});
    }
  }

  // The largest error of any parameter after any step, as a share of the largest of its values.
  double error_of(const std::string& name, const MakeOptimizer& make, bool clipped) {
    std::vector<std::unique_ptr<nn::Parameter>> owned;
    std::vector<nn::NamedParameter> named;
    const std::pair<const char*, nn::Shape> all[] = {
        {"first.weight", {3, 5}}, {"first.bias", {3}}, {"second.weight", {2, 17}}};
    for (const auto& [key, shape] : all) {
      owned.push_back(std::make_unique<nn::Parameter>(*backend_, shape));
      named.push_back({key, owned.back().get()});
      const auto values = initial("optimizers", key, {shape.dims().begin(), shape.dims().end()});
      backend_->upload(std::as_bytes(std::span(values)), owned.back()->value());
    }
    const auto rates = uniform("rates", kTrainingSteps, -5, 0.0625);
    const auto momenta = uniform("momenta", kTrainingSteps, -3, 0.75);
    const bool is_cycled = name.find("-cycled") != std::string::npos;
    const auto optimizer = make(named);
    const std::array<std::size_t, 3> indices = {2, 0, 1};
    double worst = 0.0;
    for (int step = 0; step < kTrainingSteps; ++step) {
      for (const auto& [key, parameter] : named) {
        const auto gradient =
            uniform(key + "/gradient/" + std::to_string(step), parameter->value().count(), step % 3 == 2 ? -3 : 0);
        nn::Tensor on_device = backend_->empty(parameter->value().shape());
        backend_->upload(std::as_bytes(std::span(gradient)), on_device);
        parameter->bind_gradient(on_device);
      }
      const auto at = static_cast<std::size_t>(step);
      const bool moves = is_cycled && optimizer->takes_momentum();
      optimizer->begin_step(static_cast<double>(rates[at]), moves ? std::optional<double>(momenta[at]) : std::nullopt);
      if (clipped) {
        const nn::Tensor squares = backend_->empty({}, DType::kF64);
        optimizer->add_squares(indices);
        optimizer->sum_squares(squares);
        optimizer->compute_update_scale(backend_->zeros({1}), squares, kClipNorm);
      }
      optimizer->update(indices);
      for (const auto& [key, parameter] : named) {
        const auto actual = download(*backend_, parameter->value());
        const auto expected = elements<float>(golden().extra(name + "/" + key))
                                  .subspan(static_cast<std::size_t>(step) * actual.size(), actual.size());
        float largest = 0.0f, furthest = 0.0f;
        for (std::size_t i = 0; i < actual.size(); ++i) {
          largest = std::max(largest, std::abs(expected[i]));
          furthest = std::max(furthest, std::abs(actual[i] - expected[i]));
        }
        worst = std::max(worst, static_cast<double>(furthest) / static_cast<double>(largest));
      }
    }
    return worst;
  }

  std::unique_ptr<nn::Backend> backend_ = nn::testing::make_gradient_backend();
};

// f32 rounds each of 20 steps by up to 6e-8 of the largest value, a few times.
constexpr double kOptimizerTolerance = 2e-6;

TEST_F(Optimizers, MatchPyTorchOverTwentySteps) {
  for (const auto& [name, make] : kOptimizers) {
    const double error = error_of(name, make, false);
    EXPECT_LE(error, kOptimizerTolerance) << name;
    std::cout << name << " " << error << "\n";
  }
}

TEST_F(Optimizers, MatchPyTorchWithClippedGradients) {
  for (const auto& [name, make] : kOptimizers)
    EXPECT_LE(error_of(name + "-clipped", make, true), kOptimizerTolerance) << name;
}

// The golden files distinguish them; momenta are given to whoever takes them.
TEST_F(Optimizers, DifferFromEachOther) {
  for (const auto& [name, make] : kOptimizers)
    for (const auto& [other, unused] : kOptimizers)
      if (name != other && !name.ends_with("-cycled") && !other.ends_with("-cycled")) {
        EXPECT_GT(error_of(other, make, false), 1e-4) << name << " passes for " << other;
      }
  EXPECT_GT(error_of("sgd-clipped", kOptimizers.at("sgd"), false), 1e-3);
}

constexpr std::int64_t kLength = 200;  // of a schedule: LENGTH in make_training.py

TEST(Schedules, MatchPyTorchOverTwoHundredSteps) {
  struct Case {
    const char* name;
    const char* schedule;
    std::int64_t warmup, steps;
    double lr;
    Settings settings = {};
  };
  const Case cases[] = {
      {"constant", "constant", 0, kLength, 0.1},
      {"constant-warmup-5", "constant", 5, kLength, 0.1},
      {"cosine", "cosine", 0, kLength, 0.3},
      {"cosine-min", "cosine", 0, kLength, 0.3, {{"min-lr", 0.02}}},
      {"cosine-warmup-5-min", "cosine", 5, kLength, 0.3, {{"min-lr", 0.01}}},
      {"cosine-warmup-2", "cosine", 2, kLength, 1.5},
      {"step-of-198", "step", 0, 198, 0.5},
      {"step-warmup-5", "step", 5, kLength, 0.5},
      {"linear", "linear", 0, kLength, 0.3},
      {"linear-end", "linear", 0, kLength, 0.3, {{"end-factor", 0.25}}},
      {"cosine-restarts-of-4", "restarts", 0, kLength, 0.3, {{"min-lr", 0.01}, {"cycles", 4}}},
      {"cosine-restarts-of-140", "restarts", 0, 140, 0.3, {{"min-lr", 0.01}, {"cycles", 3}, {"cycle-factor", 2}}},
      {"step-of-4-stages", "step", 0, kLength, 0.5, {{"stages", 4}, {"gamma", 0.5}}},
      {"multi-step", "multi-step", 0, kLength, 0.5, {}},
      {"multi-step-warmup-5",
       "multi-step",
       5,
       kLength,
       0.5,
       {{"gamma", 0.5}, {"milestones", std::vector<double>{0.2, 0.6, 0.8}}}},
      {"exponential", "exponential", 0, kLength, 0.3, {{"end-factor", 0.05}}},
      {"polynomial", "polynomial", 0, kLength, 0.3, {{"power", 2.5}}},
      {"one-cycle", "one-cycle", 0, kLength, 0.3},
      {"one-cycle-of-three-quarters",
       "one-cycle",
       0,
       kLength,
       0.5,
       {{"rise", 0.75}, {"start-divisor", 4.0}, {"end-divisor", 10.0}}},
      {"linear-warmup-5-end", "linear", 5, kLength, 0.5, {{"end-factor", 0.1}}},
  };
  const Golden golden("schedules");
  for (const Case& c : cases) {
    trainer::TrainConfig config;
    config.schedule = c.schedule;
    config.warmup = c.warmup;
    config.lr = c.lr;
    config.schedule_settings = c.settings;
    const nn::LearningRate rate = trainer::schedule_of(config, c.steps);
    const auto expected = elements<double>(golden.extra(c.name));
    ASSERT_EQ(expected.size(), static_cast<std::size_t>(kLength));
    for (std::int64_t step = 0; step < c.steps; ++step)
      EXPECT_NEAR(rate.at(step), expected[static_cast<std::size_t>(step)], 1e-12 * c.lr) << c.name << ", step " << step;
  }
  const nn::LearningRate cycle =
      nn::make_schedule("one-cycle", 0.3, kLength, 0, {{"rise", 0.4}, {"cycle-momentum", {0.95, 0.8}}});
  const auto momenta = elements<double>(golden.extra("one-cycle-momentum"));
  for (std::int64_t step = 0; step < kLength; ++step)
    EXPECT_NEAR(cycle.momentum_at(step).value(), momenta[static_cast<std::size_t>(step)], 1e-12) << "step " << step;
  EXPECT_FALSE(nn::make_schedule("one-cycle", 0.3, kLength).momentum_at(3));
  EXPECT_EQ(golden.not_compared(), std::vector<std::string>{});
}

// How often all ranks together see each sample in an epoch, and how many samples a rank takes.
struct Epoch {
  std::vector<std::uint64_t> taken;
  std::vector<std::uint64_t> seen;
};

Epoch epoch_of(std::uint64_t length, int world, std::uint64_t batch, sampler::Tail tail) {
  Epoch epoch{std::vector<std::uint64_t>(static_cast<std::size_t>(world)), std::vector<std::uint64_t>(length)};
  for (int rank = 0; rank < world; ++rank) {
    sampler::DistributedSampler one({.length = length,
                                     .global_batch = batch * static_cast<std::uint64_t>(world),
                                     .tail = tail,
                                     .order = sampler::Order::kSequential},
                                    rank, world);
    for (auto plan = one.plan(); plan.epoch == 0; plan = one.plan()) {
      std::vector<std::uint64_t> samples(plan.local_count);
      one.indices(plan, samples);
      for (const std::uint64_t sample : samples) ++epoch.seen[sample];
      epoch.taken[static_cast<std::size_t>(rank)] += samples.size();
      one.advance();
    }
  }
  return epoch;
}

constexpr std::uint64_t kMostSamples = 40;
constexpr int kMostRanks = 7;

struct Torchs {
  std::uint64_t samples;  // of a rank
  std::vector<std::uint64_t> seen;
};
Torchs torchs(const Golden& golden, std::uint64_t length, int world, bool drop_last) {
  const std::size_t at = ((length - 1) * kMostRanks + static_cast<std::size_t>(world - 1)) * 2 + (drop_last ? 1 : 0);
  const auto seen = elements<std::uint8_t>(golden.extra("seen")).subspan(at * kMostSamples, length);
  return {static_cast<std::uint64_t>(elements<std::int64_t>(golden.extra("sizes"))[at]), {seen.begin(), seen.end()}};
}

TEST(Sampler, PadsAsPyTorchDoes) {
  const Golden golden("sampler");
  for (std::uint64_t length = 1; length <= kMostSamples; ++length)
    for (int world = 1; world <= kMostRanks; ++world) {
      const Torchs expected = torchs(golden, length, world, false);
      for (const std::uint64_t batch : {1u, 2u, 3u, 8u}) {  // a rank's
        const Epoch epoch = epoch_of(length, world, batch, sampler::Tail::kPad);
        EXPECT_EQ(epoch.taken, std::vector<std::uint64_t>(static_cast<std::size_t>(world), expected.samples))
            << length << " samples, " << world << " ranks, batch " << batch;
        EXPECT_EQ(epoch.seen, expected.seen) << length << " samples, " << world << " ranks, batch " << batch;
      }
    }
  EXPECT_EQ(golden.not_compared(), std::vector<std::string>{});
}

// `drop` leaves whole global batches: with one sample per rank and step, those are what drop_last leaves.
TEST(Sampler, DropsAsPyTorchDoes) {
  const Golden golden("sampler");
  for (std::uint64_t length = 1; length <= kMostSamples; ++length)
    for (int world = 1; world <= kMostRanks; ++world) {
      const Torchs expected = torchs(golden, length, world, true);
      if (expected.samples == 0) {
        EXPECT_THROW(epoch_of(length, world, 1, sampler::Tail::kDrop), UsageError);
        continue;
      }
      const Epoch epoch = epoch_of(length, world, 1, sampler::Tail::kDrop);
      EXPECT_EQ(epoch.taken, std::vector<std::uint64_t>(static_cast<std::size_t>(world), expected.samples));
      EXPECT_EQ(epoch.seen, expected.seen) << length << " samples, " << world << " ranks";
    }
}

}  // namespace
}  // namespace lockstep::parity
