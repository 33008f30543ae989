// Several ranks against one process: the same gradients, and all ranks the same bits after every step.
#include "trainer/replica.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "base/splitmix.h"
#include "nn/models/models.h"
#include "sampler/slice.h"
#include "tests/support/ranks.h"
#include "tests/support/settings_of.h"

namespace lockstep::trainer {
namespace {

using lockstep::testing::group;

constexpr std::int64_t kSide = 8, kDigits = 10;

struct Samples {
  std::vector<float> x;
  std::vector<std::int32_t> labels;
};

// Samples [first, first + count) of an endless made-up data set.
Samples samples(std::uint64_t first, std::uint64_t count) {
  Samples made;
  for (std::uint64_t i = first; i < first + count; ++i) {
    for (std::uint64_t k = 0; k < kSide * kSide; ++k)
      made.x.push_back(static_cast<float>(SplitMix64::word(i, k) % 1000) / 1000.0f);
    made.labels.push_back(static_cast<std::int32_t>(SplitMix64::word(i, 99) % kDigits));
  }
  return made;
}

struct ReplicaTrainee {
  explicit ReplicaTrainee(const std::string& name, std::uint64_t seed)
      : backend(nn::make_cpu_backend(1)), generator(seed), context{*backend, generator} {
    module = nn::make_model(
        context, {.name = name,
                  .sample_shape = {kSide, kSide, 1},
                  .classes = kDigits,
                  .settings = testing::settings_of(name, {{"hidden", {33, 17}}, {"layers", 2}, {"width", 24}})});
    tape.emplace(*backend);
  }
  nn::Loss forward(Samples& batch, std::uint64_t global_count) {
    const auto n = static_cast<std::int64_t>(batch.labels.size());
    const auto x = tape->input(backend->from_host(batch.x.data(), {n, kSide, kSide, 1}, DType::kF32));
    return nn::cross_entropy(*tape, module->forward(*tape, x),
                             backend->from_host(batch.labels.data(), {n}, DType::kI32),
                             1.0f / static_cast<float>(global_count));
  }
  std::unique_ptr<nn::Backend> backend;
  nn::Generator generator;
  nn::Context context;
  std::unique_ptr<nn::Module> module;
  std::optional<nn::Tape> tape;
};

struct ReplicaCase {
  std::string model;
  std::size_t bucket_bytes;
};

class ReplicaTest : public ::testing::TestWithParam<ReplicaCase> {};

TEST_P(ReplicaTest, TrainsAsOneProcessOnTheGlobalBatchWould) {
  // Rank r starts from seed r + 1: the broadcast from rank 0 must make them equal to `alone`, which has seed 1.
  ReplicaTrainee mine(GetParam().model, static_cast<std::uint64_t>(group().rank()) + 1);
  ReplicaTrainee alone(GetParam().model, 1);
  Replica replica(group(), *mine.backend, *mine.module,
                  {.first_bytes = GetParam().bucket_bytes, .bytes = GetParam().bucket_bytes});
  const auto reference = alone.module->named_parameters();
  const auto optimizer = nn::make_sgd(replica.parameters(), {.momentum = 0.9});
  const auto reference_optimizer = nn::make_sgd(reference, {.momentum = 0.9});

  // Uneven, fewer samples than ranks, one sample, one for each rank, more.
  std::uint64_t cursor = 0;
  std::int64_t step = 0;
  for (const std::uint64_t count : {13u, 2u, 1u, static_cast<unsigned>(group().size()), 32u, 3u}) {
    ++step;
    auto whole = samples(cursor, count);
    for (const auto& [name, parameter] : reference) parameter->clear_grad();
    const nn::Loss whole_loss = alone.forward(whole, count);
    const double wanted_loss = static_cast<double>(whole_loss.totals().f32()[0]);
    alone.tape->backward(whole_loss.value);

    const auto slice = sampler::slice_of(count, static_cast<std::uint64_t>(group().rank()),
                                         static_cast<std::uint64_t>(group().size()));
    auto local = samples(cursor + slice.begin, slice.count);
    replica.begin_step(step);
    if (slice.count == 0) {
      replica.contribute_nothing();
    } else {
      const nn::Loss loss = mine.forward(local, count);
      replica.backward(*mine.tape, loss, static_cast<std::int64_t>(slice.count));
    }
    replica.finish([&](std::span<const std::size_t> bucket) {
      const auto totals = Replica::Totals::from(std::as_bytes(replica.totals().span<float>()));
      EXPECT_EQ(totals.count, static_cast<double>(count));
      EXPECT_NEAR(totals.loss, wanted_loss, 1e-5 * std::abs(wanted_loss));
      // ‖a − b‖∞ ≤ 1e-5 ‖b‖∞: f32 sums of at most 32 samples in another order.
      for (const std::size_t index : bucket) {
        const auto got = replica.parameters()[index].parameter->gradient().span<float>();
        const auto wanted = reference[index].parameter->gradient().span<float>();
        float largest = 0, difference = 0;
        for (std::size_t i = 0; i < got.size(); ++i) {
          largest = std::max(largest, std::abs(wanted[i]));
          difference = std::max(difference, std::abs(got[i] - wanted[i]));
        }
        EXPECT_LE(difference, 1e-5f * largest) << replica.parameters()[index].name << " in step " << step;
      }
    });
    std::vector<std::size_t> every(reference.size());
    std::iota(every.begin(), every.end(), std::size_t{0});
    optimizer->begin_step(0.05);
    reference_optimizer->begin_step(0.05);
    optimizer->update(every);
    reference_optimizer->update(every);
    replica.check();  // all ranks' parameters, bit for bit
    mine.tape->reset();
    alone.tape->reset();
    cursor += count;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ReplicaTest,
                         ::testing::Values(ReplicaCase{"cnn", 300}, ReplicaCase{"cnn", std::size_t{1} << 20},
                                           ReplicaCase{"mlp", 300}, ReplicaCase{"mlp", 1}, ReplicaCase{"linear", 300},
                                           ReplicaCase{"lstm", 300}),
                         [](const auto& test) {
                           return test.param.model + "_buckets_of_" + std::to_string(test.param.bucket_bytes);
                         });

}  // namespace
}  // namespace lockstep::trainer
