#include "lockstep/data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "base/error.h"
#include "lockstep/data/open.h"
#include "tests/support/refusal.h"

namespace lockstep::data {
namespace {

using lockstep::testing::refusal_of;
using sampler::DistributedSampler;
using sampler::SamplerConfig;
using sampler::SamplerState;
using sampler::Slice;
using ::testing::AllOf;
using ::testing::HasSubstr;

// x = {index, -index}, label = index; counts what is read, and can fail or dawdle.
class Probe : public Dataset {
 public:
  explicit Probe(std::uint64_t size) : Dataset({"probe", size, {2}, static_cast<int>(size)}) {}

  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    ++reads;
    if (index == fails_at) throw IoError("sample " + std::to_string(index) + " is broken", "mend it");
    if (slow) std::this_thread::sleep_for(std::chrono::microseconds((index * 7919) % 300));
    x[0] = static_cast<float>(index);
    x[1] = -static_cast<float>(index);
    label = static_cast<std::int32_t>(index);
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    if (sigismember(&mask, SIGINT) == 0 || sigismember(&mask, SIGTERM) == 0) open_to_signals = true;
  }

  mutable std::atomic<int> reads = 0;
  mutable std::atomic<bool> open_to_signals = false;
  std::uint64_t fails_at = ~std::uint64_t{0};
  bool slow = false;
};

DistributedSampler sampler_of(std::uint64_t length, std::uint64_t batch, int rank = 0, int world = 1) {
  SamplerConfig config;
  config.length = length;
  config.global_batch = batch;
  return {config, rank, world};
}

void expect_batch_of(const Batch& batch, const DistributedSampler& sampler) {
  const auto plan = sampler.plan();
  ASSERT_EQ(batch.plan, plan);
  ASSERT_EQ(batch.labels.size(), plan.local_count);
  ASSERT_EQ(batch.x.size(), 2 * plan.local_count);
  ASSERT_EQ(batch.empty(), plan.local_count == 0);
  ASSERT_EQ(reinterpret_cast<std::uintptr_t>(batch.x.data()) % 64, 0u);
  std::vector<std::uint64_t> indices(plan.local_count);
  sampler.indices(plan, indices);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    ASSERT_EQ(batch.labels[i], static_cast<std::int32_t>(indices[i]));
    ASSERT_EQ(batch.x[2 * i], static_cast<float>(indices[i]));
    ASSERT_EQ(batch.x[2 * i + 1], -static_cast<float>(indices[i]));
  }
}

class LoaderTest : public ::testing::TestWithParam<LoaderOptions> {};

TEST_P(LoaderTest, HandsOutTheSamplersSteps) {
  const auto dataset = std::make_shared<Probe>(101);
  dataset->slow = true;
  for (const int world : {1, 3}) {
    DistributedSampler sampler = sampler_of(101, 8, world - 1, world);
    Loader loader(dataset, sampler, GetParam());
    for (int step = 0; step < 3 * 13; ++step) {
      const Batch& batch = loader.next();
      ASSERT_NO_FATAL_FAILURE(expect_batch_of(batch, sampler));
      sampler.advance();
      ASSERT_EQ(batch.state_after, sampler.state());
      for (float& v : batch.x) v = 1e9f;  // the caller's to overwrite
    }
  }
}

TEST_P(LoaderTest, ResumesFromAnyBatchsState) {
  const auto dataset = std::make_shared<Probe>(50);
  Loader whole(dataset, sampler_of(50, 7), GetParam());
  for (int step = 0; step < 20; ++step) {
    const SamplerState state = whole.next().state_after;
    DistributedSampler resumed = sampler_of(50, 7);
    resumed.restore(state);
    Loader rest(dataset, resumed, GetParam());
    ASSERT_NO_FATAL_FAILURE(expect_batch_of(rest.next(), resumed));
  }
}

TEST_P(LoaderTest, RanksWithoutSamplesGetEmptyBatches) {
  const auto dataset = std::make_shared<Probe>(3);
  DistributedSampler sampler = sampler_of(3, 2, 0, 5);
  ASSERT_EQ(sampler.plan().local_count, 0u);
  Loader loader(dataset, sampler, GetParam());
  for (int step = 0; step < 10; ++step) {
    ASSERT_NO_FATAL_FAILURE(expect_batch_of(loader.next(), sampler));
    sampler.advance();
  }
}

TEST_P(LoaderTest, EvaluatesARangeOnceInOrder) {
  const auto dataset = std::make_shared<Probe>(100);
  for (const Slice range : {Slice{0, 100}, Slice{33, 34}, Slice{99, 1}, Slice{50, 0}, Slice{100, 0}}) {
    for (const std::uint64_t size : {1u, 7u, 34u, 1000u}) {
      Loader loader(dataset, range, size, GetParam());
      std::uint64_t at = range.begin;
      while (true) {
        const Batch& batch = loader.next();
        ASSERT_EQ(batch.plan.local_begin, at);
        if (batch.empty()) break;
        ASSERT_LE(batch.labels.size(), size);
        for (const auto label : batch.labels) ASSERT_EQ(label, static_cast<std::int32_t>(at++));
        ASSERT_EQ(batch.plan.last_of_epoch, at == range.end());
      }
      ASSERT_EQ(at, range.end());
      ASSERT_TRUE(loader.next().empty());
    }
  }
}

TEST_P(LoaderTest, EpochsEndWhereTheyEnd) {
  const auto dataset = std::make_shared<Probe>(10);
  DistributedSampler sampler = sampler_of(10, 4);
  Loader loader(dataset, sampler, GetParam());
  for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<std::uint64_t> counts;
    for (const Batch& batch : loader.epoch()) {
      ASSERT_NO_FATAL_FAILURE(expect_batch_of(batch, sampler));
      ASSERT_EQ(batch.plan.epoch, epoch);
      sampler.advance();
      counts.push_back(batch.count);
      if (epoch == 1) break;
    }
    if (epoch == 1)
      for (const Batch& batch : loader.epoch()) {  // its rest
        ASSERT_NO_FATAL_FAILURE(expect_batch_of(batch, sampler));
        sampler.advance();
        counts.push_back(batch.count);
      }
    EXPECT_EQ(counts, (std::vector<std::uint64_t>{4, 4, 2}));
  }
}

TEST_P(LoaderTest, EpochsHaveEmptyBatchesAndEvaluationsHaveNone) {
  const auto dataset = std::make_shared<Probe>(3);
  Loader without(dataset, sampler_of(3, 2, 0, 5), GetParam());
  int steps = 0;
  for (const Batch& batch : without.epoch()) {
    EXPECT_TRUE(batch.empty());
    ++steps;
  }
  EXPECT_EQ(steps, 2);
  for (const Slice range : {Slice{0, 3}, Slice{1, 0}}) {
    Loader loader(dataset, range, 2, GetParam());
    for (const std::uint64_t wanted : {range.count, std::uint64_t{0}, std::uint64_t{0}}) {
      std::uint64_t samples = 0;
      for (const Batch& batch : loader.epoch()) {
        EXPECT_FALSE(batch.empty());
        samples += batch.count;
      }
      EXPECT_EQ(samples, wanted);
    }
  }
}

TEST_P(LoaderTest, ErrorsSurfaceInTheirStep) {
  const auto dataset = std::make_shared<Probe>(40);
  DistributedSampler sampler = sampler_of(40, 4);
  for (int step = 0; step < 6; ++step) sampler.advance();
  std::vector<std::uint64_t> indices(4);
  sampler.indices(sampler.plan(), indices);
  dataset->fails_at = indices[2];

  Loader loader(dataset, sampler_of(40, 4), GetParam());
  for (std::uint64_t step = 0; step < 6; ++step) ASSERT_EQ(loader.next().plan.step_in_epoch, step);
  for (int again = 0; again < 3; ++again) {
    const auto error = testing::thrown<IoError>([&] { loader.next(); });
    EXPECT_EQ(error.what(), "sample " + std::to_string(indices[2]) + " is broken");
    EXPECT_EQ(error.remedy(), "mend it");
  }
}

TEST_P(LoaderTest, EndsAtAnyMoment) {
  const auto dataset = std::make_shared<Probe>(1000);
  dataset->slow = true;
  for (int taken = 0; taken < 20; ++taken) {
    {
      Loader loader(dataset, sampler_of(1000, 10), GetParam());
      for (int step = 0; step < taken % 7; ++step) loader.next();
    }
    // Nobody reads any more.
    EXPECT_EQ(dataset.use_count(), 1);
    const int reads = dataset->reads;
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    EXPECT_EQ(dataset->reads, reads);
  }
}

TEST_P(LoaderTest, DoesNotFinishABatchThatNobodyWants) {
  const auto dataset = std::make_shared<Probe>(1000000);
  dataset->slow = true;  // 150 µs a sample: a batch would take minutes
  {
    Loader loader(dataset, sampler_of(1000000, 1000000), GetParam());
    while (GetParam().workers > 0 && dataset->reads == 0) std::this_thread::yield();
  }
  EXPECT_LT(dataset->reads, 500000);
}

INSTANTIATE_TEST_SUITE_P(Workers, LoaderTest,
                         ::testing::Values(LoaderOptions{0, 0}, LoaderOptions{1, 0}, LoaderOptions{1, 1},
                                           LoaderOptions{3, 0}, LoaderOptions{3, 1}, LoaderOptions{2, 9}),
                         [](const auto& param_info) {
                           return "workers" + std::to_string(param_info.param.workers) + "depth" +
                                  std::to_string(param_info.param.depth);
                         });

TEST(Loader, PrefetchesNoFurtherThanItsDepth) {
  const auto dataset = std::make_shared<Probe>(1000);
  Loader loader(dataset, sampler_of(1000, 10), {.workers = 2, .depth = 3});
  for (int step = 1; step <= 20; ++step) {
    loader.next();
    // This batch and three more: workers get that far, and then have nothing to do.
    while (dataset->reads < (step + 3) * 10) std::this_thread::yield();
    for (int i = 0; i < 100; ++i) std::this_thread::yield();
    ASSERT_EQ(dataset->reads, (step + 3) * 10);
  }
}

TEST(Loader, WorkersBlockSignalsAndTheCallerDoesNot) {
  const auto dataset = std::make_shared<Probe>(100);
  {
    Loader loader(dataset, sampler_of(100, 10), {.workers = 2});
    for (int step = 0; step < 10; ++step) loader.next();
  }
  EXPECT_FALSE(dataset->open_to_signals);
  Loader inline_loader(dataset, sampler_of(100, 10), {.workers = 0});
  inline_loader.next();
  EXPECT_TRUE(dataset->open_to_signals);
}

TEST(Loader, ReusesItsBuffers) {
  Loader loader(std::make_shared<Probe>(1000), sampler_of(1000, 10), {.workers = 2, .depth = 3});
  std::set<const float*> buffers;
  for (int step = 0; step < 200; ++step) buffers.insert(loader.next().x.data());
  EXPECT_LE(buffers.size(), 4u);
}

TEST(Loader, InvalidOptionsAreRefused) {
  const auto dataset = std::make_shared<Probe>(10);
  const auto loader = [&](const LoaderOptions& options) { Loader made(dataset, sampler_of(10, 2), options); };
  EXPECT_THROW(loader({.workers = -1}), UsageError);
  EXPECT_THROW(loader({.workers = 100000}), UsageError);
  EXPECT_THROW(loader({.workers = 1, .depth = -1}), UsageError);
  EXPECT_THROW(Loader(dataset, Slice{0, 10}, 0, {}), UsageError);
  EXPECT_THROW(Loader(dataset, Slice{5, 6}, 2, {}), UsageError);
  EXPECT_THROW(Loader(dataset, sampler_of(11, 2), {}), UsageError);
  const auto huge = open_data("random:3x10000x10000,9223372036854775807").train;
  EXPECT_THROW(Loader(huge, sampler_of(huge->size(), huge->size()), {.workers = 0}), UsageError);
}

// Errors for programs that use a loader wrongly.
class Unread : public Dataset {
 public:
  explicit Unread(bool tokens = false)
      : Dataset({.name = "points", .size = 4, .dims = {2}, .classes = 2, .tokens = tokens}) {}
};

TEST(Loader, ADataSetThatDoesNotSayHowItIsRead) {
  for (const int workers : {0, 1}) {
    Loader numbers(std::make_shared<Unread>(), sampler_of(4, 2), {.workers = workers});
    EXPECT_THAT(refusal_of([&] { numbers.next(); }),
                AllOf(HasSubstr("'points' does not say how its samples are read"), HasSubstr("or read(")));
    Loader tokens(std::make_shared<Unread>(true), sampler_of(4, 2), {.workers = workers});
    EXPECT_REFUSED("override read_tokens(", tokens.next());
    Loader in_order(std::make_shared<Unread>(), Slice{0, 4}, 2, {.workers = workers});
    EXPECT_REFUSED("or read(", in_order.next());
  }
  float x[2];
  std::int32_t label = 0, tokens[2], labels[2];
  EXPECT_REFUSED("has tokens, and is read as numbers", Unread(true).read(0, x, label));
  EXPECT_REFUSED("has numbers, and is read as", Probe(4).read_tokens(0, tokens, labels));
}

// A sample with a mask of numbers, which is its index all over, and a kind, an integer.
class Masked final : public Dataset {
 public:
  explicit Masked(std::uint64_t size,
                  std::vector<Input> further = {{.name = "mask", .dims = {2, 3}}, {.name = "kind", .integers = true}})
      : Dataset({.name = "masked", .size = size, .dims = {2}, .classes = 2, .further_inputs = std::move(further)}) {}
  void read_sample(std::uint64_t index, const Sample& sample) const override {
    ASSERT_EQ(sample.further.size(), 2U);
    ASSERT_EQ(sample.further[0].numbers.size(), 6U);
    ASSERT_TRUE(sample.further[0].integers.empty());
    ASSERT_EQ(sample.further[1].integers.size(), 1U);
    for (float& x : sample.x) x = 0;
    for (float& x : sample.further[0].numbers) x = static_cast<float>(index);
    sample.further[1].integers[0] = -static_cast<std::int32_t>(index);
    sample.labels[0] = static_cast<std::int32_t>(index % 2);
  }
};

TEST_P(LoaderTest, HandsOutFurtherInputs) {
  const auto dataset = std::make_shared<Masked>(21);
  DistributedSampler expected = sampler_of(21, 8);
  Loader loader(dataset, expected, GetParam());
  for (int step = 0; step < 7; ++step) {
    const Batch& batch = loader.next();
    const auto plan = expected.plan();
    std::vector<std::uint64_t> indices(plan.local_count);
    expected.indices(plan, indices);
    expected.advance();
    ASSERT_EQ(batch.further.size(), 2U);
    ASSERT_EQ(batch.further[0].numbers.size(), 6 * plan.local_count);
    ASSERT_EQ(batch.further[1].integers.size(), plan.local_count);
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(batch.further[0].numbers.data()) % 64, 0u);
    for (std::size_t i = 0; i < indices.size(); ++i) {
      for (std::size_t k = 0; k < 6; ++k)
        EXPECT_EQ(batch.further[0].numbers[6 * i + k], static_cast<float>(indices[i]));
      EXPECT_EQ(batch.further[1].integers[i], -static_cast<std::int32_t>(indices[i]));
    }
  }
  EXPECT_EQ(Loader::bytes_of(*dataset, 5, {.workers = 0}), 5u * (2 + 1 + 6 + 1) * 4);
}

TEST(Loader, FurtherInputsThatCannotBe) {
  EXPECT_REFUSED("the data set 'masked' has two further inputs named 'mask'",
                 Masked(3, {{.name = "mask"}, {.name = "mask"}}));
  EXPECT_REFUSED("has a further input without a name", Masked(3, {{.name = "", .dims = {2}}}));
  EXPECT_REFUSED("has the input 'mask' of an extent of -1", Masked(3, {{.name = "mask", .dims = {-1}}}));
  class Lazy final : public Dataset {
   public:
    Lazy() : Dataset({.name = "lazy", .size = 4, .dims = {2}, .classes = 2, .further_inputs = {{.name = "mask"}}}) {}
    void read(std::uint64_t, std::span<float>, std::int32_t&) const override {}
  };
  Loader loader(std::make_shared<Lazy>(), sampler_of(4, 2), {.workers = 0});
  EXPECT_THAT(refusal_of([&] { loader.next(); }),
              AllOf(HasSubstr("'lazy' does not say how its further inputs are read"), HasSubstr("Sample::further")));
}

TEST(Loader, InvalidArgumentsAreRefused) {
  const auto dataset = std::make_shared<Probe>(10);
  EXPECT_REFUSED("without a data set", Loader(nullptr, sampler_of(10, 2), {}));
  EXPECT_REFUSED("without a data set", Loader(nullptr, Slice{0, 1}, 1, {}));
  EXPECT_REFUSED("make the sampler with .length", Loader(dataset, sampler_of(11, 2), {}));
  for (const Slice slice : {Slice{5, 6}, Slice{11, 0}, Slice{~std::uint64_t{0}, 2}})
    EXPECT_REFUSED("the data set's own samples", Loader(dataset, slice, 2, {}));
  struct Sized : Dataset {
    explicit Sized(std::vector<std::int64_t> dims) : Dataset({.name = "sized", .size = 1, .dims = std::move(dims)}) {}
  };
  EXPECT_REFUSED("an extent of -3", Sized({2, -3}));
  EXPECT_REFUSED("fits into memory", Sized({1 << 30, 1 << 30, 1 << 30}));
}

template <class L>
concept GivesBatches = requires(L&& loader) {
  std::forward<L>(loader).next();
}
|| requires(L&& loader) { std::forward<L>(loader).epoch(); };

TEST(Loader, DestroyedInTheMiddleOfAnEpoch) {
  // A temporary cannot be looped over: the batches of `for (… : Loader(…).epoch())` would be gone at once.
  static_assert(GivesBatches<Loader&> && !GivesBatches<Loader>);
  for (const int workers : {0, 2}) {
    std::optional<Loader> loader;
    loader.emplace(std::make_shared<Probe>(10), sampler_of(10, 2), LoaderOptions{.workers = workers});
    const auto destroy_on_the_way = [&] {
      for ([[maybe_unused]] const Batch& batch : loader->epoch()) loader.reset();
    };
    EXPECT_REFUSED("an epoch is continued after its loader was destroyed", destroy_on_the_way());
  }
}

TEST(Loader, ReportsTheBytesOfItsBuffers) {
  const Probe dataset(10);
  EXPECT_EQ(Loader::bytes_of(dataset, 5, {.workers = 0}), 5u * (2 + 1) * 4);
  EXPECT_EQ(Loader::bytes_of(dataset, 5, {.workers = 2}), 5u * 5 * (2 + 1) * 4);
  EXPECT_EQ(Loader::bytes_of(dataset, 5, {.workers = 2, .depth = 1}), 2u * 5 * (2 + 1) * 4);
}

TEST(Loader, ReadsDigits) {
  const auto digits = open_data("digits").train;
  Loader loader(digits, sampler_of(digits->size(), 64), {});
  std::uint64_t samples = 0;
  while (true) {
    const Batch& batch = loader.next();
    samples += batch.plan.local_count;
    for (const float v : batch.x) ASSERT_TRUE(v >= 0 && v <= 1);
    if (batch.plan.last_of_epoch) break;
  }
  EXPECT_EQ(samples, 1437u);
}

TEST(LoaderMisuse, AnEpochThatOutlivesItsLoader) {
  std::optional<Loader> loader(std::in_place, std::make_shared<Probe>(10), sampler_of(10, 4),
                               LoaderOptions{.workers = 0});
  const auto epoch = loader->epoch();
  loader.reset();
  EXPECT_REFUSED("loader", epoch.begin());
}

TEST(LoaderMisuse, InvalidParts) {
  EXPECT_REFUSED("one that is none", concatenate({nullptr}, "all"));
  EXPECT_REFUSED("one that is none", concatenate({std::make_shared<Probe>(3), nullptr}, "all"));
}

// A device may still read a batch when the caller asks for the following one.
class ReadLater final : public MemorySource {
 public:
  std::byte* allocate(std::size_t bytes) override { return host_->allocate(bytes); }
  void free(std::byte* data, std::size_t bytes) noexcept override { host_->free(data, bytes); }
  void wait_until_read() override { ++waits; }
  std::atomic<int> waits = 0;

 private:
  std::unique_ptr<MemorySource> host_ = make_host_memory();
};

TEST(Loader, BatchIsNotOverwrittenBeforeTheDeviceHasReadIt) {
  const auto memory = std::make_shared<ReadLater>();
  Loader loader(std::make_shared<Probe>(40), sampler_of(40, 4), {.workers = 0, .memory = memory});
  loader.next();
  EXPECT_EQ(memory->waits, 0);
  for (int i = 1; i < 5; ++i) {
    loader.next();
    EXPECT_EQ(memory->waits, i);
  }
}

}  // namespace
}  // namespace lockstep::data
