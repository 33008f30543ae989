// Models of text learn one: on any number of ranks, whose parameters stay the same bits, with samples for some of them
// alone at the ends of epochs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/open.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/trainer/evaluate.h"
#include "tests/support/models.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_directory.h"
#include "trainer/step.h"

namespace lockstep::trainer {
namespace {

using lockstep::testing::group;

constexpr std::int64_t kContext = 12;

class TextTraining : public ::testing::TestWithParam<std::string> {
 protected:
  TextTraining() {
    std::ofstream file(directory_.path("text"));
    for (int i = 0; i < 60; ++i) file << "one two, three four: five; six seven. ";
  }
  std::string data() const { return "text:" + directory_.path("text"); }

 private:
  testing::TemporaryDirectory directory_;
};

TEST_P(TextTraining, IsLearnt) {
  const auto backend = nn::make_cpu_backend(1);
  nn::Generator generator(1);
  nn::Context context{*backend, generator};
  const auto splits = data::open_data(data(), {.context = kContext});
  const auto module =
      nn::make_model(context, {.name = GetParam(),
                               .sample_shape = splits.train->sample_dims(),
                               .classes = splits.train->classes(),
                               .settings = testing::settings_of(GetParam(), {{"layers", GetParam() == "gpt" ? 1 : 2},
                                                                             {"heads", 2},
                                                                             {"width", 32},
                                                                             {"context", kContext},
                                                                             {"dropout", 0.05}})});
  // Steps of 13 samples leave a tail in each epoch.
  const sampler::DistributedSampler sampler({.length = splits.train->size(), .seed = 1, .global_batch = 13},
                                            group().rank(), group().size());
  data::Loader loader(splits.train, sampler, {.workers = 1});
  parallel::DistributedDataParallel ddp(*module, group(), {.bucket_mb = 1.0 / 64, .first_bucket_mb = 1.0 / 1024});
  TrainingStep step(*backend, ddp, nn::make_adamw(ddp.parameters(), {}), format_of(*splits.train),
                    {.norm_every = 1, .dropout = true, .seed = 3});
  double loss = 0.0;
  for (std::int64_t i = 1; i <= 120; ++i) {
    const data::Batch& batch = loader.next();
    step.run(i, batch, 1e-2);
    const auto outcome = step.take_outcome();
    loss = outcome.totals.loss / (outcome.totals.count * static_cast<double>(kContext));
    if (i == 1) {
      EXPECT_NEAR(loss, std::log(static_cast<double>(splits.train->classes())), 0.8);
    }
  }
  EXPECT_LT(loss, 0.3);
  ddp.check();
  Evaluator evaluator(group(), *backend, splits.validation, 5, 0);
  const EvalReport report = evaluator.run(*module, 120);
  EXPECT_LT(report.loss, 0.3);
  EXPECT_EQ(evaluator.run(*module, 120).loss, report.loss);
  EXPECT_TRUE(module->training());
}

INSTANTIATE_TEST_SUITE_P(Models, TextTraining, ::testing::Values("gpt", "rnn", "lstm", "gru"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace lockstep::trainer
