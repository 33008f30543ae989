// What a run is said to take, against what it takes.
#include "trainer/memory_estimate.h"
#include "base/error.h"
#include "base/resource_limits.h"

#include <gmock/gmock.h>

#include <functional>

#include "lockstep/parallel/data_parallel.h"
#include "lockstep/trainer/forward.h"
#include "tests/support/ranks.h"
#include "trainer/build.h"

namespace lockstep::trainer {
namespace {

using session::check_memory;
using session::MemoryNeed;
using session::MemoryNeeds;

using lockstep::testing::group;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(MemoryEstimate, CountsWhatAHookTakes) {
  TrainConfig config;
  config.model.name = "cnn";
  config.data = "digits";
  const auto dataset = open_splits(config).train;
  const auto backend = nn::make_cpu_backend(1);
  const auto need = [&](const std::string& hook, int ranks) {
    config.comm_hook = hook;
    return estimate_memory(config, *backend, *dataset, {.samples = 4, .batch = 4, .ranks = ranks, .checkpoints = true})
        .host;
  };
  const MemoryNeed none = need("none", 2);
  EXPECT_NEAR(static_cast<double>(need("bf16", 2).gradients), 1.5 * static_cast<double>(none.gradients),
              0.01 * static_cast<double>(none.gradients));
  const MemoryNeed topk = need("topk:1", 3);
  EXPECT_GE(topk.gradients, 2 * none.gradients);
  EXPECT_EQ(topk.checkpoint, none.checkpoint + 3 * none.gradients) << "each rank's errors";
  EXPECT_GT(need("powersgd:1", 2).gradients, none.gradients);
}

struct EstimateCase {
  std::string model, data;
  std::int64_t batch;
  Precision precision = Precision::kF32;
};
void PrintTo(const EstimateCase& c, std::ostream* to) {
  *to << c.model << " at " << c.batch << (c.precision == Precision::kBF16 ? ", bf16" : "");
}

class Estimate : public ::testing::TestWithParam<EstimateCase> {
 protected:
  Estimate() {
    config.model.name = GetParam().model;
    config.data = GetParam().data;
    config.precision = GetParam().precision;
    if (config.model.name == "gpt2" || config.model.name == "llama") config.model.settings.set("layers", 1);
    if (config.data.starts_with("random:tokens")) config.model.settings.set("context", 16);
    dataset = open_splits(config).train;
  }
  void SetUp() override {
    if (group().rank() > 0) GTEST_SKIP() << "the first rank shows it";
    if (!backend->computes_in(dtype_of(config.precision))) GTEST_SKIP() << "this CPU computes in f32 alone";
  }

  /// One pass over the first samples, forward alone or backward, too.
  void pass(nn::Module& module, bool train) {
    const std::int64_t batch = GetParam().batch;
    data::Loader loader(dataset, {0, static_cast<std::uint64_t>(batch)}, static_cast<std::uint64_t>(batch),
                        {.workers = 0});
    nn::Tape tape(*backend);
    tape.set_recording(train);
    if (train && is_random(config.model)) tape.set_dropout_state(backend->empty({3}, DType::kI64));
    tape.set_activations(dtype_of(config.precision));
    const Inputs inputs =
        with_activations(*backend, inputs_of(*backend, loader.next(), format_of(*dataset)), dtype_of(config.precision));
    const nn::Loss loss = forward(tape, module, inputs, nn::make_loss(), 1.0f);
    if (train) tape.backward(loss.value);
  }
  /// Of the parameters in 16 bits, as a first pass has made them.
  static std::uint64_t bytes_of_copies(nn::Module& module) {
    std::uint64_t bytes = 0;
    for (const auto& [name, parameter] : module.named_parameters())
      if (parameter->copy()) bytes += parameter->value().bytes() / 2;
    return bytes;
  }
  std::uint64_t peak() const { return backend->allocator().stats().peak_bytes_asked; }
  std::uint64_t now() const { return backend->allocator().stats().bytes_asked; }

  TrainConfig config;
  std::shared_ptr<const data::Dataset> dataset;
  std::unique_ptr<nn::Backend> backend = nn::make_cpu_backend(1);
};

TEST_P(Estimate, IsWhatAStepTakesAtLeast) {
  const std::int64_t batch = GetParam().batch;
  const MemoryNeeds needs = estimate_memory(config, *backend, *dataset, {.samples = batch, .batch = batch});
  EXPECT_EQ(now(), 0u);  // it has taken nothing
  EXPECT_EQ(needs.device.total(), 0u);
  const MemoryNeed& said = needs.host;

  const auto model = build_model(config, *backend, *dataset, {}, false);
  std::uint64_t gradients = 0;
  for (const auto& [name, parameter] : model->named_parameters()) gradients += parameter->value().bytes();
  EXPECT_EQ(said.gradients, gradients);
  const std::uint64_t built = now();  // parameters, buffers, tables
  const auto optimizer = make_optimizer(config, model->named_parameters());
  EXPECT_EQ(said.moments, now() - built);

  // A step whose gradients lie in memory of their own, as the reducer's arena is.
  std::vector<std::vector<float>> arena;
  for (const auto& [name, parameter] : model->named_parameters()) {
    arena.emplace_back(static_cast<std::size_t>(parameter->value().count()));
    parameter->bind_gradient(nn::Tensor::view_of(arena.back().data(), parameter->value().shape()));
  }
  if (config.precision == Precision::kBF16) {
    pass(*model, true);
    for (const auto& [name, parameter] : model->named_parameters()) parameter->clear_grad();
    EXPECT_GT(bytes_of_copies(*model), 0u);
  }
  EXPECT_EQ(said.parameters, built + bytes_of_copies(*model));
  const std::uint64_t before = now();
  pass(*model, true);
  const std::uint64_t took = peak() - before;
  RecordProperty("said", std::to_string(said.activations));
  RecordProperty("took", std::to_string(took));
  EXPECT_LE(said.activations, took);
  // The rest are the kernels' own: scratch, and packed weights, of which convolutions keep one for each product.
  EXPECT_LE(took, 3 * said.activations + 3 * gradients + (1u << 20)) << "the estimate has become idle";
}

TEST_P(Estimate, IsWhatAnEvaluationTakesAtLeast) {
  const std::int64_t batch = GetParam().batch;
  const MemoryNeeds needs =
      estimate_memory(config, *backend, *dataset, {.train = false, .samples = batch, .batch = batch});
  EXPECT_EQ(needs.host.gradients + needs.host.moments + needs.host.checkpoint, 0u);
  const auto model = build_model(config, *backend, *dataset, {}, false);
  model->train(false);
  if (config.precision == Precision::kBF16) pass(*model, false);
  const std::uint64_t before = now();
  pass(*model, false);
  EXPECT_LE(needs.host.activations, peak() - before);
  EXPECT_GT(needs.host.activations, 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Models, Estimate,
    ::testing::Values(
        EstimateCase{"linear", "random:5,100", 32}, EstimateCase{"mlp", "digits", 1},
        EstimateCase{"mlp", "digits", 256}, EstimateCase{"tabular", "random:16,400", 64},
        EstimateCase{"cnn", "digits", 1}, EstimateCase{"cnn", "digits", 200}, EstimateCase{"lstm", "digits", 64},
        EstimateCase{"lstm", "random:tokens,64", 8}, EstimateCase{"resnet18-cifar", "random:3x32x32,64", 2},
        EstimateCase{"resnet18-cifar", "random:3x32x32,64", 8}, EstimateCase{"resnet18", "random:3x64x64,64", 4},
        EstimateCase{"resnet50", "random:3x64x64,64", 4}, EstimateCase{"mobilenet-v2", "random:3x64x64,64", 4},
        EstimateCase{"gpt", "random:tokens,64", 1}, EstimateCase{"gpt", "random:tokens,64", 16},
        EstimateCase{"gpt2", "random:tokens,64", 2}, EstimateCase{"llama", "random:tokens,64", 4},
        EstimateCase{"mlp", "digits", 256, Precision::kBF16}, EstimateCase{"cnn", "digits", 200, Precision::kBF16},
        EstimateCase{"lstm", "digits", 64, Precision::kBF16},
        EstimateCase{"lstm", "random:tokens,64", 8, Precision::kBF16},
        EstimateCase{"resnet18-cifar", "random:3x32x32,64", 8, Precision::kBF16},
        EstimateCase{"gpt", "random:tokens,64", 16, Precision::kBF16}));

// Activations take half; what is there twice are the parameters that products read, but nothing that a run saves.
TEST(MemoryEstimate, OfBf16IsHalfTheActivationsAndCopies) {
  const auto backend = nn::make_cpu_backend(1);
  if (!backend->computes_in(DType::kBF16)) GTEST_SKIP() << "this CPU computes in f32 alone";
  TrainConfig config;
  config.model.name = "resnet18-cifar";
  config.data = "random:3x32x32,64";
  const auto dataset = open_splits(config).train;
  const auto need = [&](Precision precision, std::size_t passes) {
    config.precision = precision;
    return estimate_memory(config, *backend, *dataset, {.samples = 16, .passes = passes, .checkpoints = true}).host;
  };
  const MemoryNeed f32 = need(Precision::kF32, 1), bf16 = need(Precision::kBF16, 1), twice = need(Precision::kBF16, 2);
  const auto ratio = [](std::uint64_t a, std::uint64_t b) { return static_cast<double>(a) / static_cast<double>(b); };
  EXPECT_NEAR(ratio(bf16.activations, f32.activations), 0.5, 0.03);
  EXPECT_NEAR(ratio(bf16.parameters, f32.parameters), 1.5, 0.01);
  EXPECT_EQ(bf16.gradients, f32.gradients);
  EXPECT_EQ(bf16.moments, f32.moments);
  EXPECT_EQ(bf16.checkpoint, f32.checkpoint);
  EXPECT_EQ(twice.activations, 2 * bf16.activations) << "copies are of no pass";
  EXPECT_EQ(twice.parameters, bf16.parameters);
}

TEST(SmallestPasses, AreThoseOfTheLastStepAndOfPartsShardsAndDevices) {
  const auto of = [](std::uint64_t length, std::uint64_t batch, const TrainConfig& config, int ranks,
                     std::size_t devices = 1, sampler::Tail tail = sampler::Tail::kExact) {
    const sampler::DistributedSampler sampler(
        {.length = length, .global_batch = batch, .tail = tail, .shards = static_cast<std::uint64_t>(config.shards)}, 0,
        ranks);
    const SmallestPass pass = smallest_pass(config, sampler, devices);
    return std::pair(pass.samples, pass.last_of_epoch);
  };
  const auto with = [](const std::function<void(TrainConfig&)>& set) {
    TrainConfig config;
    set(config);
    return config;
  };
  const TrainConfig plain;
  EXPECT_EQ(of(17, 16, plain, 1), std::pair(1L, true));
  EXPECT_EQ(of(17, 16, plain, 1, 1, sampler::Tail::kDrop), std::pair(16L, false));
  EXPECT_EQ(of(17, 16, with([](auto& c) { c.steps = 1; }), 1), std::pair(16L, false)) << "the last one is not reached";
  EXPECT_EQ(of(18, 16, plain, 2), std::pair(1L, true)) << "one on each";
  EXPECT_EQ(of(18, 16, with([](auto& c) { c.sync_batchnorm = true; }), 2), std::pair(2L, true)) << "of both together";
  EXPECT_EQ(of(17, 16, plain, 3), std::pair(1L, true)) << "ranks without samples run none";
  EXPECT_EQ(of(32, 5, with([](auto& c) { c.accumulate = 4; }), 1), std::pair(1L, false));
  EXPECT_EQ(of(32, 16, with([](auto& c) { c.shards = 16; }), 3), std::pair(1L, false));
  EXPECT_EQ(of(32, 16, with([](auto& c) { c.shards = 8; }), 3), std::pair(2L, false));
  EXPECT_EQ(of(25, 5, plain, 1, 4), std::pair(1L, false)) << "2, 2 and 1";
}

TEST(SmallestPasses, ThatALayerCannotTrainOnAreRefused) {
  const auto backend = nn::make_cpu_backend(1);
  TrainConfig config;
  config.model.name = "resnet18";
  config.data = "random:3x32x32,17";
  const auto dataset = open_splits(config).train;
  const auto refusal = [&](const SmallestPass& smallest) -> std::string {
    try {
      estimate_memory(config, *backend, *dataset, {.samples = 16, .smallest = smallest});
    } catch (const UsageError& error) {
      return error.line();
    }
    return "";
  };
  EXPECT_THAT(refusal({.samples = 1, .last_of_epoch = true}),
              AllOf(HasSubstr("the last step of an epoch leaves 1 sample for a pass"), HasSubstr("use --tail drop")));
  EXPECT_THAT(refusal({.samples = 1}), AllOf(HasSubstr("BatchNorm"), HasSubstr("use a larger --batch-size")));
  EXPECT_EQ(refusal({.samples = 2, .last_of_epoch = true}), "");
  config.data = "random:3x64x64,17";  // 2 x 2 pixels reach the last layers
  EXPECT_EQ(estimate_memory(config, *backend, *open_splits(config).train, {.samples = 16, .smallest = {.samples = 1}})
                .host.moments,
            estimate_memory(config, *backend, *open_splits(config).train, {.samples = 16}).host.moments);
}

class EstimateOf : public ::testing::Test {
 protected:
  MemoryNeed need(const MemoryPlan& plan) const {
    return estimate_memory(config, *backend, *open_splits(config).train, plan).host;
  }
  TrainConfig config = [] {
    TrainConfig made;
    made.model.name = "mlp";
    made.model.settings = {{"hidden", {64, 32}}};
    made.data = "digits";
    return made;
  }();
  static constexpr std::uint64_t kFirst = (64 + 1) * 64 * 4, kSecond = (64 + 1) * 32 * 4, kLast = (32 + 1) * 10 * 4;
  std::unique_ptr<nn::Backend> backend = nn::make_cpu_backend(1);
};

TEST_F(EstimateOf, FollowsOptimizerAndFreezing) {
  constexpr std::uint64_t kAll = kFirst + kSecond + kLast;
  MemoryNeed found = need({.samples = 4, .workers = 1, .batch = 4});
  EXPECT_EQ(found.parameters, kAll);
  EXPECT_EQ(found.gradients, kAll);
  EXPECT_GE(found.moments, 2 * kAll);  // AdamW's two, and a few numbers of the step
  EXPECT_LT(found.moments, 2 * kAll + 256);
  EXPECT_EQ(found.batches, 3u * 4 * (64 + 1) * 4);
  EXPECT_EQ(found.checkpoint, 0u);
  EXPECT_GE(need({.samples = 4, .checkpoints = true}).checkpoint, 3 * kAll);
  config.optimizer = "sgd";
  EXPECT_LT(need({.samples = 4}).moments, kAll + 256);
  config.optimizer_settings = {{"momentum", 0.0}};
  EXPECT_LT(need({.samples = 4}).moments, 256u);
  config.freeze = "fc1.*";
  found = need({.samples = 4});
  EXPECT_EQ(found.parameters, kAll);
  EXPECT_EQ(found.gradients, kSecond + kLast);
  config.freeze.clear();
  // Several devices of one process have copies of parameters and gradients, and parts of the batch.
  const MemoryNeed one = need({.samples = 4}), two = need({.samples = 4, .devices = 2});
  EXPECT_EQ(two.parameters, 2 * one.parameters);
  EXPECT_EQ(two.gradients, 2 * one.gradients);
  EXPECT_EQ(two.moments, one.moments);
  EXPECT_LT(two.activations, 2 * one.activations);
}

// If each rank writes its own share, it copies only that; else the one that writes copies all.
TEST_F(EstimateOf, ShardedMomentsInCheckpoints) {
  const std::uint64_t whole = need({.samples = 4}).moments, parameters = need({.samples = 4}).parameters;
  const auto copied = [&](bool writes, bool part) {
    return need({.samples = 4, .updates = 4, .ranks = 4, .checkpoints = writes, .checkpoint_part = part}).checkpoint;
  };
  EXPECT_EQ(copied(true, true), parameters + (whole + 3) / 4);
  EXPECT_EQ(copied(false, true), (whole + 3) / 4);
  EXPECT_EQ(copied(true, false), parameters + whole);
  EXPECT_EQ(copied(false, false), 0u);
}

// The loss of each part is computed where its outputs are, so all devices need the same.
TEST_F(EstimateOf, DevicesThatShareABatch) {
  constexpr std::int64_t kBatch = 64, kDevices = 2;
  const MemoryNeed said = need({.samples = kBatch, .devices = kDevices, .batch = kBatch});
  const auto dataset = open_splits(config).train;
  parallel::Devices devices = parallel::Devices::cpu(kDevices);
  parallel::DataParallel model(build_model(config, devices[0], *dataset), devices);
  nn::Tape tape(devices[0]);
  data::Loader loader(dataset, {0, kBatch}, kBatch, {.workers = 0});
  const Inputs inputs = inputs_of(devices[0], loader.next(), format_of(*dataset));
  std::uint64_t parameters = 0, state = 0;
  for (const auto& [name, parameter] : model.named_parameters()) parameters += parameter->value().bytes();
  for (int pass = 0; pass < 2; ++pass) {  // in the second one there are gradients from its beginning
    tape.backward(forward(tape, model, inputs, nn::make_loss(), 1.0f).value);
    tape.reset();
  }
  std::vector<std::uint64_t> peaks;
  for (int d = 0; d < kDevices; ++d) peaks.push_back(devices[d].allocator().stats().peak_bytes_asked);
  state = kDevices * 2 * parameters;  // and gradients
  EXPECT_EQ(said.parameters + said.gradients, state);
  EXPECT_LE(said.activations, peaks[0] + peaks[1] - state);
  EXPECT_LT(peaks[0], peaks[1] + peaks[1] / 4) << "hardly more than the other one";
}

TEST_F(EstimateOf, SizesThatNoMachineHasTakeNoTime) {
  config.model.settings = {{"hidden", {3000000, 3000000}}};
  EXPECT_GT(need({.samples = 1 << 20}).total(), std::uint64_t{100} << 40);
}

TEST_F(EstimateOf, RanksOfAMachineAreCountedTogether) {
  const auto bounds = memory_bounds();
  ASSERT_FALSE(bounds.empty());
  std::uint64_t least = bounds.front().free_bytes;
  for (const auto& bound : bounds) least = std::min(least, bound.free_bytes);
  least = static_cast<std::uint64_t>(group().all_gather_numbers(static_cast<std::int64_t>(least)).front());
  // Each of them has enough, and all of them have not.
  MemoryNeeds mine{.host = {.parameters = least / 100 * 80}, .device = {}};
  const auto check = [&]() -> std::string {
    try {
      check_memory(group(), *backend, mine);
    } catch (const OutOfMemoryError& error) {
      return error.line();
    } catch (const PeerError& error) {
      return fmt::format("a peer's {}", error.code());
    }
    return "";
  };
  if (group().size() == 1)
    EXPECT_EQ(check(), "");
  else if (group().rank() == 0)
    EXPECT_THAT(check(), AllOf(HasSubstr(fmt::format("for {} ranks: parameters", group().size())),
                               HasSubstr("a rank; "), HasSubstr("fewer ranks here")));
  else
    EXPECT_EQ(check(), "a peer's 4");
  mine.host.parameters = 1;
  EXPECT_EQ(check(), "");
}

}  // namespace
}  // namespace lockstep::trainer
