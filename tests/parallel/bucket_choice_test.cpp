// The size of buckets is chosen while a model trains.
#include <gmock/gmock.h>

#include "lockstep/base/error.h"
#include "tests/parallel/trainee.h"

namespace lockstep::parallel {
namespace {

using namespace fixture;
using lockstep::testing::group;

constexpr std::int64_t kWide = 300;  // 360 KB of weights a layer
constexpr std::size_t kMib = std::size_t{1} << 20;

class Layers final : public nn::Module {
 public:
  explicit Layers(nn::Context& context) {
    for (int i = 0; i < 8; ++i)
      layers_.push_back(&register_module(std::to_string(i), std::make_unique<nn::Linear>(context, kWide, kWide)));
  }
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    for (nn::Linear* layer : layers_) x = layer->forward(tape, x, nn::Epilogue::kRelu);
    return x;
  }

 private:
  std::vector<nn::Linear*> layers_;
};

std::unique_ptr<nn::Module> layers(nn::Context& context) { return std::make_unique<Layers>(context); }

// Two samples of each rank, and one process's gradients of all of them.
struct Steps {
  explicit Steps(const DistributedDataParallel::Options& options) : ddp(*mine.module, group(), options) {}

  void run(bool in_two_parts) {
    Batch all(first, 2 * ranks(), kWide), first_part(first + 2 * rank(), 1, kWide),
        second_part(first + 2 * rank() + 1, 1, kWide), own(first + 2 * rank(), 2, kWide);
    first += 2 * ranks();
    clear(mine);
    clear(reference);
    if (in_two_parts) {
      {
        const auto no_sync = ddp.no_sync();
        backward(mine, ddp, first_part);
      }
      backward(mine, ddp, second_part);
    } else {
      backward(mine, ddp, own);
    }
    backward(reference, *reference.module, all);
    expect_same_gradients(*mine.module, *reference.module, " in step " + std::to_string(++steps), 1e-4f);
  }

  void backward(Trainee<Layers>& trainee, nn::Module& module, Batch& batch) {
    trainee.tape->reset();
    const nn::Var x = trainee.input(batch, {0, kWide});
    trainee.tape->backward(trainee.loss_of(module.forward(*trainee.tape, x), batch, 2 * ranks()).value);
  }
  static void clear(Trainee<Layers>& trainee) {
    for (const auto& [name, parameter] : trainee.module->named_parameters()) parameter->clear_grad();
  }

  Trainee<Layers> mine{layers}, reference{layers};
  DistributedDataParallel ddp;
  std::uint64_t first = 0;
  int steps = 0;
};

const DistributedDataParallel::Options kTuned = {.tune_bucket_mb = true, .first_bucket_mb = 0.001};

void choose(const DistributedDataParallel::Options& options) {
  Steps steps(options);
  const std::size_t preferred = steps.ddp.reducer().limits().bucket_bytes;
  std::vector<std::size_t> sizes;  // in the order in which they were tried
  while (steps.ddp.choosing_buckets()) {
    ASSERT_LT(steps.steps, 100);
    EXPECT_FALSE(steps.ddp.settled());
    steps.run(steps.steps % 3 == 1);
    if (::testing::Test::HasFailure()) return;
    sizes.push_back(steps.ddp.reducer().limits().bucket_bytes);
  }
  const auto& choice = steps.ddp.bucket_choice();
  ASSERT_TRUE(choice);
  for (int i = 0; i < 3; ++i) steps.run(i == 1);
  EXPECT_TRUE(steps.ddp.settled());
  EXPECT_EQ(steps.ddp.reducer().limits().bucket_bytes, choice->bucket_bytes);
  const auto all = group().all_gather_numbers(static_cast<std::int64_t>(choice->bucket_bytes));
  EXPECT_THAT(all, ::testing::Each(all.front()));
  EXPECT_EQ(steps.ddp.bucket_order().size(), steps.ddp.parameters().size());
  if (ranks() == 1) {
    EXPECT_EQ(choice->bucket_bytes, preferred);
    EXPECT_EQ(choice->steps, 0u);
    return;
  }
  for (const std::size_t bytes : {kMib, 2 * kMib, preferred})
    EXPECT_THAT(sizes, ::testing::Contains(bytes)) << "was not tried";
  for (const auto& trial : choice->trials) EXPECT_GT(trial.step_seconds, 0) << trial.bucket_bytes;
}

TEST(BucketChoices, GradientsStayRightWhileSizesAreTried) { choose(kTuned); }

TEST(BucketChoices, GradientsThatAreNoViewsToo) {
  auto options = kTuned;
  options.gradient_as_bucket_view = false;
  choose(options);
}

TEST(BucketChoices, AnEarlierRunsChoiceIsTaken) {
  Steps steps(kTuned);
  steps.run(false);
  EXPECT_TRUE(steps.ddp.choosing_buckets());
  Steps resumed(kTuned);
  resumed.ddp.set_bucket_order(steps.ddp.bucket_order());
  resumed.ddp.set_bucket_choice(2 * kMib);
  EXPECT_FALSE(resumed.ddp.choosing_buckets());
  for (int i = 0; i < 6; ++i) {
    resumed.run(i % 2 == 1);
    EXPECT_EQ(resumed.ddp.reducer().limits().bucket_bytes, 2 * kMib);
    EXPECT_EQ(resumed.ddp.reducer().plan().buckets.size(), 3u);
  }
  EXPECT_TRUE(resumed.ddp.bucket_choice()->trials.empty());
}

TEST(BucketChoices, InvalidOptionsAreRefused) {
  Trainee<Layers> mine(layers);
  const auto complaint_about = [&](const DistributedDataParallel::Options& options) -> std::string {
    try {
      DistributedDataParallel(*mine.module, group(), options);
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing";
  };
  auto options = kTuned;
  options.bucket_mb = 3;
  EXPECT_THAT(complaint_about(options), ::testing::HasSubstr("tune_bucket_mb beside a bucket_mb"));
  options = kTuned;
  options.zero = 1;
  EXPECT_THAT(complaint_about(options), ::testing::HasSubstr("tune_bucket_mb with zero"));
  DistributedDataParallel without(*mine.module, group());
  EXPECT_THROW(without.set_bucket_choice(kMib), UsageError);
}

}  // namespace
}  // namespace lockstep::parallel
