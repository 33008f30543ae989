// A small model of which a pass takes some layers, with what trains it on one rank of a group; and one process's
// gradients to compare with.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/splitmix.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "tests/parallel/rank_backend.h"
#include "tests/support/ranks.h"

namespace lockstep::parallel::fixture {

using lockstep::testing::rank_backend;

inline constexpr std::int64_t kFeatures = 6, kClasses = 3;
inline constexpr double kTinyMib = 1e-5;  // ten bytes: each parameter has a bucket of its own

inline std::uint64_t rank() { return static_cast<std::uint64_t>(lockstep::testing::group().rank()); }
inline std::uint64_t ranks() { return static_cast<std::uint64_t>(lockstep::testing::group().size()); }

// Four layers of which a pass takes some.
class Branches final : public nn::Module {
 public:
  explicit Branches(nn::Context& context)
      : first_(register_module("first", std::make_unique<nn::Linear>(context, kFeatures, 8))),
        left_(register_module("left", std::make_unique<nn::Linear>(context, 8, 8))),
        right_(register_module("right", std::make_unique<nn::Linear>(context, 8, 8))),
        last_(register_module("last", std::make_unique<nn::Linear>(context, 8, kClasses))) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    x = first_.forward(tape, x, nn::Epilogue::kRelu);
    nn::Var y = x;
    if (left) y = left_.forward(tape, y);
    if (right) y = right_.forward(tape, y);
    if (dead_end) right_.forward(tape, x);  // recorded, and no loss comes of it
    return last_.forward(tape, y);
  }
  bool left = true, right = true, dead_end = false;

 private:
  nn::Linear &first_, &left_, &right_, &last_;
};

// Of an endless synthetic data set: samples [first, first + count).
struct Batch {
  Batch(std::uint64_t first, std::uint64_t count, std::int64_t elements = kFeatures) {
    for (std::uint64_t i = first; i < first + count; ++i) {
      for (std::int64_t k = 0; k < elements; ++k)
        x.push_back(static_cast<float>(SplitMix64::word(i, static_cast<std::uint64_t>(k)) % 1000) / 500.0f - 1.0f);
      labels.push_back(static_cast<std::int32_t>(SplitMix64::word(i, 99) % kClasses));
    }
  }
  std::vector<float> x;
  std::vector<std::int32_t> labels;
};

template <class Model>
struct Trainee {
  explicit Trainee(std::unique_ptr<nn::Module> (*make)(nn::Context&), std::uint64_t seed = 1)
      : generator(seed), context{*backend, generator} {
    auto made = make(context);
    module.reset(static_cast<Model*>(made.release()));
    tape.emplace(*backend);
  }
  nn::Loss loss_of(nn::Var y, Batch& batch, std::uint64_t global_count) {
    const auto n = static_cast<std::int64_t>(batch.labels.size());
    return nn::cross_entropy(*tape, y, backend->from_host(batch.labels.data(), {n}, DType::kI32),
                             1.0f / static_cast<float>(global_count));
  }
  nn::Var input(Batch& batch, nn::Shape shape) {
    shape[0] = static_cast<std::int64_t>(batch.labels.size());
    return tape->input(batch.x.empty() ? backend->empty(shape)
                                       : backend->from_host(batch.x.data(), shape, DType::kF32));
  }
  nn::Var input(Batch& batch) { return input(batch, {0, kFeatures}); }
  nn::Backend* backend = &rank_backend();
  nn::Generator generator;
  nn::Context context;
  std::unique_ptr<Model> module;
  std::optional<nn::Tape> tape;
};

inline std::unique_ptr<nn::Module> branches(nn::Context& context) { return std::make_unique<Branches>(context); }
using Branching = Trainee<Branches>;

template <class T>
std::vector<T> values_of(const nn::Tensor& tensor) {
  std::vector<T> values(static_cast<std::size_t>(tensor.count()));
  rank_backend().download(tensor, std::as_writable_bytes(std::span(values)));
  return values;
}

// ‖a − b‖∞ ≤ tolerance · max(‖b‖∞, floor): f32 sums in another order.
inline void expect_near(const nn::Tensor& got, const nn::Tensor& wanted, const std::string& what,
                        float tolerance = 1e-5f, float floor = 0) {
  ASSERT_EQ(got.count(), wanted.count()) << what;
  const auto a = values_of<float>(got), b = values_of<float>(wanted);
  float largest = floor, difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(b[i]));
    difference = std::max(difference, std::abs(a[i] - b[i]));
  }
  EXPECT_LE(difference, tolerance * largest) << what;
}

inline void expect_same_gradients(const nn::Module& got, const nn::Module& wanted, const std::string& when,
                                  float tolerance = 1e-5f, float floor = 0) {
  const auto a = got.named_parameters(), b = wanted.named_parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].parameter->has_gradient(), b[i].parameter->has_gradient()) << a[i].name << when;
    if (b[i].parameter->has_gradient())
      expect_near(a[i].parameter->gradient(), b[i].parameter->gradient(), a[i].name + when, tolerance, floor);
  }
}

inline void expect_same_parameters(const nn::Module& got, const nn::Module& wanted, const std::string& when) {
  const auto a = got.named_parameters(), b = wanted.named_parameters();
  for (std::size_t i = 0; i < a.size(); ++i)
    expect_near(a[i].parameter->value(), b[i].parameter->value(), a[i].name + when, 1e-5f);
}

/// Tests with the default sizes of buckets, and with the parameter's, in MiB, where it has one.
class BucketSizes : public ::testing::TestWithParam<std::optional<double>> {
 protected:
  static DistributedDataParallel::Options options(DistributedDataParallel::Options base = {}) {
    base.bucket_mb = GetParam();
    base.first_bucket_mb = GetParam().value_or(1.0);
    return base;
  }
};

}  // namespace lockstep::parallel::fixture
