// Training on several ranks over NCCL's group, on GPUs and an NCCL in software: against the same ranks on the CPU, and
// from recordings against kernel by kernel.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "comm/nccl/nccl_group.h"
#include "data/open.h"
#include "nn/io/state.h"
#include "nn/models/models.h"
#include "tests/comm/nccl/fake_nccl.h"
#include "tests/soft_cuda/soft_cuda.h"
#include "tests/support/ranks.h"
#include "trainer/evaluate.h"
#include "trainer/step.h"

namespace lockstep::trainer {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using testing::group;
using ::testing::HasSubstr;

constexpr auto kPatience = std::chrono::seconds(60);

struct Setting {
  bool cuda = true;
  bool record = true;
  double clip_norm = 0;
  std::uint64_t global_batch = 180;
  std::vector<std::int64_t> hidden = {32, 24};
};

std::size_t memory_used() {
  std::size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  return total - free;
}

class Training {
 public:
  explicit Training(const Setting& setting)
      : backend_(setting.cuda ? nn::make_cuda_backend({}) : nn::make_cpu_backend(1)),
        generator_(static_cast<std::uint64_t>(group().rank()) + 1),  // rank 0's parameters become everyone's
        splits_(data::open_data("digits")),
        module_(nn::make_model(context_, {.name = "mlp",
                                          .sample_shape = splits_.train->sample_dims(),
                                          .classes = splits_.train->classes(),
                                          .settings = {{"hidden", setting.hidden}}})),
        gpus_(setting.cuda ? comm::make_nccl_group(group(), {.producer = backend_->stream(), .timeout = kPatience},
                                                   &comm::fake_nccl::api())
                           : nullptr),
        loader_(splits_.train,
                sampler::DistributedSampler(
                    {.length = splits_.train->size(), .seed = 3, .global_batch = setting.global_batch}, group().rank(),
                    group().size()),
                {.workers = 1, .memory = backend_->staging_memory()}) {
    comm::ProcessGroup& gradients = gpus_ != nullptr ? *gpus_ : group();
    using Options = parallel::DistributedDataParallel::Options;
    ddp_.emplace(*module_, gradients,
                 Options{.bucket_cap_mb = 1.0 / 128, .first_bucket_mb = 1.0 / 1024, .defer_unused_check = true});
    graphs_.emplace(*backend_, *ddp_, DType::kF32);
    step_.emplace(*backend_, *ddp_, nn::make_adamw(ddp_->parameters(), {}), format_of(*splits_.train),
                  TrainingStep::Options{.clip_norm = setting.clip_norm, .want_norm = true});
    if (setting.record) step_->set_graphs(&*graphs_);
  }
  // As a run ends: nothing that is recorded is left when the group is.
  ~Training() {
    step_.reset();
    graphs_.reset();
    ddp_.reset();
    if (gpus_ != nullptr && !broken_) gpus_->shutdown();
  }

  std::vector<TrainingStep::Outcome> run(int steps) {
    std::vector<TrainingStep::Outcome> outcomes;
    try {
      for (int i = 0; i < steps; ++i) {
        backend_->finish_inputs();
        step_->run(++steps_, loader_.next(), 1e-3);
        while (step_->outcome_due()) outcomes.push_back(step_->take_outcome());
      }
      while (step_->outcomes_waiting() > 0) outcomes.push_back(step_->take_outcome());
      ddp_->check();
    } catch (const Error&) {
      broken_ = true;
      throw;
    }
    return outcomes;
  }
  std::int64_t steps() const { return steps_; }

  void leave_out_a_step() { ++steps_; }

  /// The loss of the test set, which this rank computes alone.
  double evaluate() {
    graphs_->expect_other_work();
    comm::SelfGroup alone(kPatience);
    return Evaluator(alone, *backend_, splits_.test, 50, 0, DType::kF32).run(*module_, steps_).loss;
  }

  /// From now on so many bytes are all that there are, beside those in use and what the graphs keep.
  void leave_only(std::size_t bytes) {
    soft_cuda::set_memory_bytes(memory_used());
    EXPECT_THROW(backend_->empty({1 << 28}), OutOfMemoryError);  // blocks that lie idle go first
    soft_cuda::set_memory_bytes(memory_used() + bytes);
  }

  std::string hash() const { return nn::parameters_sha256(*module_); }
  const StepGraphs& recorded() const { return *graphs_; }

 private:
  std::unique_ptr<nn::Backend> backend_;
  nn::Generator generator_;
  nn::Context context_{*backend_, generator_};
  data::DataSplits splits_;
  std::unique_ptr<nn::Module> module_;
  std::unique_ptr<comm::DeviceGroup> gpus_;
  data::Loader loader_;
  std::optional<parallel::DistributedDataParallel> ddp_;
  std::optional<StepGraphs> graphs_;
  std::optional<TrainingStep> step_;
  std::int64_t steps_ = 0;
  bool broken_ = false;
};

class NcclStep : public ::testing::TestWithParam<soft_cuda::Streams> {
 protected:
  void SetUp() override {
    comm::fake_nccl::reset();
    soft_cuda::set_streams(GetParam());
    // As NCCL does it: no call has come to its end when it returns.
    comm::fake_nccl::script().looks_in_progress = 1;
  }
  void TearDown() override {
    EXPECT_EQ(comm::fake_nccl::counts().aborts, aborts_);
    EXPECT_EQ(comm::fake_nccl::counts().calls_in_progress, 0);
    soft_cuda::set_streams(soft_cuda::Streams::kEager);
  }
  int aborts_ = 0;
};

TEST_P(NcclStep, FollowsTheRanksOnTheCpu) {
  for (const double clip : {0.0, 0.5}) {
    Training cpu({.cuda = false, .clip_norm = clip});
    Training cuda({.clip_norm = clip});
    const auto wanted = cpu.run(12), got = cuda.run(12);
    EXPECT_GT(cuda.recorded().replayed(), 3);
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].totals.count, wanted[i].totals.count);
      EXPECT_NEAR(got[i].totals.loss, wanted[i].totals.loss, 1e-4 * wanted[i].totals.loss) << "step " << i + 1;
      EXPECT_NEAR(got[i].grad_norm, wanted[i].grad_norm, 1e-3 * wanted[i].grad_norm) << "step " << i + 1;
    }
  }
}

// 1,437 digits in steps of 180 leave 177 for the last one of an epoch.
TEST_P(NcclStep, StepGraphsAreTheSteps) {
  Training eager({.record = false, .clip_norm = 1.0});
  Training recorded({.clip_norm = 1.0});
  const auto wanted = eager.run(20), got = recorded.run(20);
  EXPECT_EQ(recorded.recorded().refusal(), "");
  EXPECT_GT(recorded.recorded().replayed(), 10);
  EXPECT_EQ(eager.recorded().replayed(), 0);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].totals.loss, wanted[i].totals.loss) << "step " << i + 1;
    ASSERT_EQ(got[i].grad_norm, wanted[i].grad_norm) << "step " << i + 1;
  }
  EXPECT_EQ(recorded.hash(), eager.hash());
  EXPECT_THAT(group().all_gather_text(recorded.hash()), Each(eager.hash()));
}

// One sample: all ranks but the first record that they contribute nothing.
TEST_P(NcclStep, RanksWithoutSamplesRecordToo) {
  Training eager({.record = false, .global_batch = 1});
  Training recorded({.global_batch = 1});
  const auto wanted = eager.run(9), got = recorded.run(9);
  EXPECT_EQ(recorded.recorded().refusal(), "");
  EXPECT_GT(recorded.recorded().replayed(), 2);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].totals.count, 1);
    ASSERT_EQ(got[i].totals.loss, wanted[i].totals.loss) << "step " << i + 1;
  }
  EXPECT_THAT(group().all_gather_text(recorded.hash()), Each(eager.hash()));
}

// The device repeats what it has recorded, whatever step that is on the other ranks.
TEST_P(NcclStep, AStepLeftOutIsFoundAmongRecordedOnes) {
  aborts_ = 1;
  Training training({});
  training.run(20);
  EXPECT_GT(training.recorded().replayed(), 10);
  if (group().rank() == 1) training.leave_out_a_step();
  try {
    training.run(200);
    FAIL() << "nobody has seen it";
  } catch (const OutOfStepError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("out of step: rank 1 came to allreduce #"), HasSubstr(", step ")));
  }
  EXPECT_LE(training.steps(), 20 + 100 + 1) << "within a hundred steps";
}

constexpr std::size_t kRoom = 96 << 10;  // inputs, and less than a step or an evaluation takes

// The memory of graphs is kept for them. Where it is all that there is, the last step of an epoch and an evaluation
// need it: on one rank here, and no rank runs another step from a graph.
TEST_P(NcclStep, GraphsGiveUpTheirMemoryOnAllRanks) {
  for (const bool evaluates : {false, true}) {
    SCOPED_TRACE(evaluates);
    const int before = 7;  // 1,437 digits: the eighth step is the last of an epoch
    Setting setting = {.record = false, .hidden = {256, 256}};
    std::vector<TrainingStep::Outcome> wanted;
    std::string hash;
    double loss = 0;
    {
      Training eager(setting);
      eager.run(before);
      if (evaluates) loss = eager.evaluate();
      wanted = eager.run(5);
      hash = eager.hash();
    }
    setting.record = true;
    Training recorded(setting);
    recorded.run(before);
    const bool short_of_it = group().rank() + 1 == group().size();
    if (short_of_it) recorded.leave_only(kRoom);
    EXPECT_EQ(recorded.recorded().refusal(), "");
    EXPECT_GT(recorded.recorded().replayed(), 0);
    EXPECT_EQ(evaluates ? recorded.evaluate() : 0.0, loss);
    const auto got = recorded.run(5);
    EXPECT_THAT(recorded.recorded().refusal(), HasSubstr(short_of_it ? "was needed" : "another rank needed"));
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_EQ(got[i].totals.loss, wanted[i].totals.loss) << "step " << i + 1;
    EXPECT_EQ(recorded.hash(), hash);
    soft_cuda::set_memory_bytes(soft_cuda::Machine{}.memory_bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(Streams, NcclStep, ::testing::Values(soft_cuda::Streams::kEager, soft_cuda::Streams::kThreads),
                         [](const auto& test) {
                           return test.param == soft_cuda::Streams::kEager ? "eager" : "threads";
                         });

}  // namespace
}  // namespace lockstep::trainer
