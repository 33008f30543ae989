#include "trainer/config.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "base/error.h"

namespace lockstep::trainer {
namespace {

TrainConfig good() {
  TrainConfig config;
  config.model.name = "cnn";
  config.data = "digits";
  return config;
}

TEST(TrainConfig, DefaultsAreValid) { EXPECT_NO_THROW(validate(good())); }

TEST(TrainConfig, ContradictionsAreRefused) {
  const std::vector<std::function<void(TrainConfig&)>> faults = {
      [](auto& c) { c.model.name.clear(); },
      [](auto& c) { c.data.clear(); },
      [](auto& c) { c.batch = 8, c.global_batch = 16; },
      [](auto& c) { c.lr = -1; },
      [](auto& c) { c.min_lr = 1; },
      [](auto& c) { c.nesterov = true; },
      [](auto& c) { c.optimizer = Optimizer::kSgd, c.nesterov = true, c.momentum = 0; },
      [](auto& c) {
        c.betas = {1.0, 0.9};
      },
      [](auto& c) { c.weight_decay = -0.1; },
      [](auto& c) { c.clip_norm = -1; },
      [](auto& c) { c.save = "dir/"; },
      [](auto& c) { c.log_level = "loud"; },
      [](auto& c) { c.batch = 0; },
      [](auto& c) { c.global_batch = -1; },
      [](auto& c) { c.epochs = 0; },
      [](auto& c) { c.steps = 0; },
      [](auto& c) { c.log_every = 0; },
      [](auto& c) { c.workers = -1; },
      [](auto& c) { c.threads = -1; },
      [](auto& c) { c.lr = std::numeric_limits<double>::infinity(); },
      [](auto& c) { c.lr = std::numeric_limits<double>::quiet_NaN(); },
      [](auto& c) { c.clip_norm = std::numeric_limits<double>::quiet_NaN(); },
      [](auto& c) { c.momentum = 1.5; },
      [](auto& c) { c.betas.second = std::numeric_limits<double>::quiet_NaN(); },
      [](auto& c) { c.bucket_mb = 1e300; },
      [](auto& c) { c.first_bucket_mb = 0; },
  };
  for (std::size_t i = 0; i < faults.size(); ++i) {
    auto config = good();
    faults[i](config);
    try {
      validate(config);
      ADD_FAILURE() << "fault " << i << " was accepted";
    } catch (const UsageError& error) {
      EXPECT_FALSE(error.remedy().empty()) << error.what();
    }
  }
}

// What the ranks compare: a field that changes numbers and is not described would let ranks drift apart unnoticed.
TEST(TrainConfig, DescribesWhatChangesNumbers) {
  const std::vector<std::function<void(TrainConfig&)>> changes = {
      [](auto& c) { c.model.name = "mlp"; },
      [](auto& c) { c.model.hidden = {7}; },
      [](auto& c) { c.data = "random:5,100"; },
      [](auto& c) { c.classes = 3; },
      [](auto& c) { c.batch = 7; },
      [](auto& c) { c.global_batch = 7; },
      [](auto& c) { c.tail = sampler::Tail::kDrop; },
      [](auto& c) { c.epochs = 3; },
      [](auto& c) { c.steps = 3; },
      [](auto& c) { c.eval_every = 3; },
      [](auto& c) { c.optimizer = Optimizer::kSgd; },
      [](auto& c) { c.lr = 0.2; },
      [](auto& c) { c.min_lr = 1e-9; },
      [](auto& c) { c.momentum = 0.1; },
      [](auto& c) { c.nesterov = true; },
      [](auto& c) { c.betas.second = 0.5; },
      [](auto& c) { c.weight_decay = 0.5; },
      [](auto& c) { c.schedule = Schedule::kStep; },
      [](auto& c) { c.warmup = 3; },
      [](auto& c) { c.clip_norm = 3; },
      [](auto& c) { c.seed = 3; },
      [](auto& c) { c.bucket_mb = 3; },
      [](auto& c) { c.first_bucket_mb = 3; },
      [](auto& c) { c.check_replicas = 3; },
  };
  const auto before = describe(good());
  for (std::size_t i = 0; i < changes.size(); ++i) {
    auto config = good();
    changes[i](config);
    EXPECT_NE(describe(config), before) << "change " << i << " is not described";
  }
}

}  // namespace
}  // namespace lockstep::trainer
