// Several ranks against one process: the same gradients, and all ranks the same bits after every step.
#include "lockstep/parallel/distributed_data_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/splitmix.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/sampler/slice.h"
#include "tests/support/models.h"
#include "tests/support/ranks.h"

namespace lockstep::parallel {
namespace {

using lockstep::testing::group;

constexpr std::int64_t kSide = 8, kDigits = 10;

struct Samples {
  std::vector<float> x;
  std::vector<std::int32_t> labels;
};

// Samples [first, first + count) of an endless synthetic data set.
Samples samples(std::uint64_t first, std::uint64_t count) {
  Samples made;
  for (std::uint64_t i = first; i < first + count; ++i) {
    for (std::uint64_t k = 0; k < kSide * kSide; ++k)
      made.x.push_back(static_cast<float>(SplitMix64::word(i, k) % 1000) / 1000.0f);
    made.labels.push_back(static_cast<std::int32_t>(SplitMix64::word(i, 99) % kDigits));
  }
  return made;
}

struct GradientsTrainee {
  explicit GradientsTrainee(const std::string& name, std::uint64_t seed)
      : backend(nn::make_cpu_backend(1)), generator(seed), context{*backend, generator} {
    module = nn::make_model(
        context, {.name = name,
                  .sample_shape = {kSide, kSide, 1},
                  .classes = kDigits,
                  .settings = testing::settings_of(name, {{"hidden", {33, 17}}, {"layers", 2}, {"width", 24}})});
    tape.emplace(*backend);
  }
  nn::Loss forward(nn::Module& through, Samples& batch, std::uint64_t global_count) {
    const auto n = static_cast<std::int64_t>(batch.labels.size());
    const auto x = tape->input(backend->from_host(batch.x.data(), {n, kSide, kSide, 1}, DType::kF32));
    return nn::cross_entropy(*tape, through.forward(*tape, x),
                             backend->from_host(batch.labels.data(), {n}, DType::kI32),
                             1.0f / static_cast<float>(global_count));
  }
  std::unique_ptr<nn::Backend> backend;
  nn::Generator generator;
  nn::Context context;
  std::unique_ptr<nn::Module> module;
  std::optional<nn::Tape> tape;
};

struct GradientsCase {
  std::string model;
  std::size_t bucket_bytes;
  std::string hook = "none";
  // ‖a − b‖∞ / ‖b‖∞, at most: f32 sums of at most 32 samples in another order; what a hook rounds, of gradients that
  // may cancel.
  float tolerance = 1e-5f;
};

class GradientsTest : public ::testing::TestWithParam<GradientsCase> {};

TEST_P(GradientsTest, TrainsAsOneProcessOnTheGlobalBatchWould) {
  // Rank r starts from seed r + 1: the broadcast from rank 0 must make them equal to `alone`, which has seed 1.
  GradientsTrainee mine(GetParam().model, static_cast<std::uint64_t>(group().rank()) + 1);
  GradientsTrainee alone(GetParam().model, 1);
  const double mib = static_cast<double>(GetParam().bucket_bytes) / 1048576.0;
  DistributedDataParallel ddp(*mine.module, group(), {.bucket_mb = mib, .first_bucket_mb = mib});
  if (auto hook = ddp::make_comm_hook(GetParam().hook)) ddp.register_comm_hook(std::move(hook));
  const auto reference = alone.module->named_parameters();
  const auto optimizer = nn::make_sgd(ddp.parameters(), {.momentum = 0.9});
  const auto reference_optimizer = nn::make_sgd(reference, {.momentum = 0.9});

  // Uneven, fewer samples than ranks, one sample, one for each rank, more.
  std::uint64_t cursor = 0;
  std::int64_t step = 0;
  for (const std::uint64_t count : {13u, 2u, 1u, static_cast<unsigned>(group().size()), 32u, 3u}) {
    ++step;
    auto whole = samples(cursor, count);
    for (const auto& [name, parameter] : reference) parameter->clear_grad();
    const nn::Loss whole_loss = alone.forward(*alone.module, whole, count);
    const double wanted_loss = static_cast<double>(whole_loss.totals().f32()[0]);
    alone.tape->backward(whole_loss.value);

    const auto slice = sampler::slice_of(count, static_cast<std::uint64_t>(group().rank()),
                                         static_cast<std::uint64_t>(group().size()));
    auto local = samples(cursor + slice.begin, slice.count);
    optimizer->zero_grad();
    ddp.set_step(step);
    std::size_t called_for = 0;
    ddp.set_bucket_callback([&](std::span<const std::size_t> bucket) {
      called_for += bucket.size();
      EXPECT_EQ(ddp.summed_scalars().f32()[0], static_cast<float>(count));
      EXPECT_NEAR(static_cast<double>(ddp.summed_scalars().f32()[1]), wanted_loss, 1e-5 * std::abs(wanted_loss));
      for (const std::size_t index : bucket) {
        const auto got = ddp.parameters()[index].parameter->gradient().span<float>();
        const auto wanted = reference[index].parameter->gradient().span<float>();
        float largest = 0, difference = 0;
        for (std::size_t i = 0; i < got.size(); ++i) {
          largest = std::max(largest, std::abs(wanted[i]));
          difference = std::max(difference, std::abs(got[i] - wanted[i]));
        }
        EXPECT_LE(difference, GetParam().tolerance * largest) << ddp.parameters()[index].name << " in step " << step;
      }
    });
    ddp.scalars().f32()[0] = static_cast<float>(slice.count);
    ddp.scalars().f32()[1] = 0;
    if (slice.count == 0) {
      ddp.contribute_nothing();
    } else {
      const nn::Loss loss = mine.forward(ddp, local, count);
      ddp.scalars().f32()[1] = loss.totals().f32()[0];
      mine.tape->backward(loss.value);
    }
    EXPECT_EQ(called_for, reference.size());
    std::vector<std::size_t> every(reference.size());
    std::iota(every.begin(), every.end(), std::size_t{0});
    optimizer->begin_step(0.05);
    reference_optimizer->begin_step(0.05);
    optimizer->update(every);
    reference_optimizer->update(every);
    // What a hook has rounded stays out of the next step.
    if (GetParam().hook != "none")
      for (const std::size_t index : every) {
        std::ranges::copy(ddp.parameters()[index].parameter->value().span<float>(),
                          reference[index].parameter->value().span<float>().begin());
        reference[index].parameter->changed();
      }
    ddp.check();  // all ranks' parameters, bit for bit
    mine.tape->reset();
    alone.tape->reset();
    cursor += count;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GradientsTest,
                         ::testing::Values(GradientsCase{"cnn", 300}, GradientsCase{"cnn", std::size_t{1} << 20},
                                           GradientsCase{"mlp", 300}, GradientsCase{"mlp", 1},
                                           GradientsCase{"linear", 300}, GradientsCase{"lstm", 300},
                                           GradientsCase{"cnn", 300, "bf16", 0.03f},
                                           GradientsCase{"mlp", std::size_t{1} << 20, "bf16:exact", 0.03f},
                                           GradientsCase{"mlp", 300, "fp16", 0.004f},
                                           GradientsCase{"cnn", std::size_t{1} << 20, "fp16", 0.004f},
                                           GradientsCase{"cnn", 300, "topk:100"},
                                           GradientsCase{"linear", std::size_t{1} << 20, "topk:100"},
                                           GradientsCase{"lstm", 300, "powersgd:64"}),
                         [](const auto& test) {
                           std::string hook = test.param.hook == "none" ? "" : "_" + test.param.hook;
                           std::ranges::replace(hook, ':', '_');
                           return test.param.model + "_buckets_of_" + std::to_string(test.param.bucket_bytes) + hook;
                         });

}  // namespace
}  // namespace lockstep::parallel
