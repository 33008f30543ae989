// A training loop on real batches, all modules of it, after its first steps: no heap allocation, no page fault, no new
// oneDNN primitive. The loader's threads are counted like the training thread.
//
// What libraries allocate inside of their own calls nobody here can prevent: oneDNN in every execute, Open MPI in every
// message. It is recognised by the address that the allocation returns to, and reported as a count.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <limits>
#include <thread>

#include "base/signals.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/open.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/optim/optimizers.h"
#include "tests/support/allocations.h"
#include "tests/support/models.h"
#include "tests/support/ranks.h"
#include "trainer/step.h"

namespace lockstep::trainer {
namespace {

using lockstep::testing::AllocationCounter;
using lockstep::testing::group;
using lockstep::testing::listed;
using lockstep::testing::without;

long page_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

// What one rank of a run has.
class Training {
 public:
  Training(const std::string& model, const std::string& data, std::uint64_t global_batch, bool adam,
           bool stateful = false, std::uint64_t shards = 0, int at_once = 1, const std::string& hook = "none",
           const std::string& zero_optimizer = {})
      : splits_(data::open_data(data, {.context = 16})),
        module_(nn::make_model(context_, {.name = model,
                                          .sample_shape = splits_.train->sample_dims(),
                                          .classes = splits_.train->classes(),
                                          .settings = testing::settings_of(
                                              model, {{"hidden", {128, 64}}, {"layers", 2}, {"width", 40}})})),
        sampler_({.length = splits_.train->size(),
                  .seed = 1,
                  .global_batch = global_batch,
                  .order = stateful ? sampler::Order::kColumns : sampler::Order::kShuffled,
                  .shards = shards},
                 group().rank(), group().size()),
        loader_(splits_.train, sampler_, {.workers = 2}),
        tree_(shards > 0 ? &group().define_tree(shards) : nullptr),
        ddp_(*module_, group(),
             {.bucket_mb = 1.0 / 16,
              .first_bucket_mb = 1.0 / 1024,
              .tree = tree_,
              .zero = zero_optimizer.empty() ? 0 : 1,
              .shards_at_once = at_once,
              .shard_backend = [] { return nn::make_cpu_backend(1); }}),
        carried_(stateful ? std::make_unique<CarriedState>(*module_, group(), global_batch, DType::kF32) : nullptr),
        training_step_(
            *backend_, ddp_,
            !zero_optimizer.empty()
                ? nn::make_optimizer(zero_optimizer, ddp_.parameters(), {}, 0.01, {}, ddp_.share())
                : (adam ? nn::make_adamw(ddp_.parameters(), {}) : nn::make_sgd(ddp_.parameters(), {.momentum = 0.9})),
            format_of(*splits_.train),
            {.clip_norm = adam ? 0.0 : 1.0, .norm_every = 1, .tree = tree_, .carried = carried_.get()}) {
    if (auto made = ddp::make_comm_hook(hook)) ddp_.register_comm_hook(std::move(made));
  }

  std::int64_t steps_per_epoch() const { return static_cast<std::int64_t>(sampler_.steps_per_epoch()); }
  nn::Backend& backend() { return *backend_; }
  std::int64_t steps() const { return step_; }

  void step() {
    const data::Batch& batch = loader_.next();
    training_step_.run(++step_, batch, 1e-3);
    const auto outcome = training_step_.take_outcome();
    EXPECT_EQ(outcome.totals.count, static_cast<double>(batch.plan.global_count));
    EXPECT_GT(outcome.totals.loss, 0);
    EXPECT_GT(outcome.grad_norm, 0);
  }

 private:
  std::unique_ptr<nn::Backend> backend_ = nn::make_cpu_backend(1);
  nn::Generator generator_{1};
  nn::Context context_{*backend_, generator_};
  data::DataSplits splits_;
  std::unique_ptr<nn::Module> module_;
  sampler::DistributedSampler sampler_;
  data::Loader loader_;
  const comm::ReductionTree* tree_;
  parallel::DistributedDataParallel ddp_;
  std::unique_ptr<CarriedState> carried_;
  TrainingStep training_step_;
  std::int64_t step_ = 0;
};

// Allocations and primitives count in every step. Page faults also come from outside (the kernel moves pages about,
// Open MPI touches more of its pools when messages pile up): what a step of ours did again and again would show in each
// of three rounds, so one of them must be without any.
void expect_steady(Training& run, std::int64_t steps, const std::string& what) {
  const auto primitives = run.backend().primitives_created();
  const auto memory = run.backend().allocator().stats();
  long fewest_faults = std::numeric_limits<long>::max(), by_libraries = 0;
  for (int round = 0; round < 3; ++round) {
    AllocationCounter counter;
    const long faults_before = page_faults();
    for (std::int64_t i = 0; i < steps; ++i) run.step();
    fewest_faults = std::min(fewest_faults, page_faults() - faults_before);
    const auto all = counter.by_caller();
    const auto ours = without(all, {"libdnnl.", "libgomp.", "libmpi.", "libopen-pal.", "libopen-rte.", "mca_"});
    for (const auto& [caller, times] : all) by_libraries += ours.contains(caller) ? 0 : times;
    EXPECT_TRUE(ours.empty()) << what << ": heap allocations in " << steps << " steps\n" << listed(ours);
  }
#if !defined(LOCKSTEP_SANITIZED)  // sanitizers keep books on pages of their own
  EXPECT_EQ(fewest_faults, 0) << what << ": page faults in " << steps << " steps";
#endif
  EXPECT_EQ(run.backend().primitives_created(), primitives) << what;
  EXPECT_EQ(run.backend().allocator().stats().system_allocations, memory.system_allocations) << what;
  EXPECT_EQ(run.backend().allocator().stats().bytes_in_use, memory.bytes_in_use) << what;
  if (group().rank() == 0)
    std::printf("%s, %d ranks, %s: %.1f allocations a step inside of libraries\n", what.c_str(), group().size(),
                group().name().c_str(), static_cast<double>(by_libraries) / static_cast<double>(3 * steps));
}

class TrainerSteadyState : public ::testing::TestWithParam<std::string> {};

// Every step has the same shapes: 4,096 samples are whole steps of one epoch.
TEST_P(TrainerSteadyState, NothingIsAllocatedWithinAnEpoch) {
  Training run(GetParam(), "random:1x28x28,4096", 64, /*adam=*/true);
  ASSERT_EQ(run.steps_per_epoch(), 64);
  while (run.steps() < 5) run.step();
  expect_steady(run, 15, GetParam());
}

TEST(TrainerSteadyStateOfHooks, NothingIsAllocated) {
  for (const char* hook : {"bf16", "fp16", "powersgd:2", "topk:1"}) {
    Training run("mlp", "random:1x28x28,4096", 64, /*adam=*/true, /*stateful=*/false, /*shards=*/0, /*at_once=*/1,
                 hook);
    while (run.steps() < 5) run.step();
    expect_steady(run, 15, hook);
  }
}

// The last step of an epoch is a shape of its own, and a rank may have no sample in it: 1,437 digits in steps of 60
// leave 57, in steps of 1,436 leave 1. Everything has been seen after one epoch.
TEST_P(TrainerSteadyState, NothingIsAllocatedInLaterEpochs) {
  for (const std::uint64_t global_batch : {60u, 1436u}) {
    Training run(GetParam(), "digits", global_batch, /*adam=*/false);
    for (std::int64_t i = 0; i < 2 * run.steps_per_epoch() + 5; ++i) run.step();
    expect_steady(run, run.steps_per_epoch(), GetParam() + " with tails of epochs");
  }
}

// In shards, one after the other and two at a time; the last step of an epoch leaves most of them without samples.
TEST(ShardsSteadyState, NothingIsAllocatedInShards) {
  for (const int at_once : {1, 2}) {
    Training run("cnn", "digits", 478, /*adam=*/false, /*stateful=*/false, /*shards=*/8, at_once);
    for (std::int64_t i = 0; i < 2 * run.steps_per_epoch() + 5; ++i) run.step();
    expect_steady(run, 2 * run.steps_per_epoch(), fmt::format("cnn in shards, {} at once", at_once));
  }
}

// With sharded updates; those of LAMB sum norms over the ranks for each bucket.
TEST(ZeroSteadyState, NothingIsAllocatedInShardedUpdates) {
  for (const char* optimizer : {"adamw", "lamb"}) {
    Training run("cnn", "digits", 60, /*adam=*/false, /*stateful=*/false, /*shards=*/0, /*at_once=*/1, /*hook=*/"none",
                 optimizer);
    for (std::int64_t i = 0; i < 2 * run.steps_per_epoch() + 5; ++i) run.step();
    expect_steady(run, run.steps_per_epoch(), std::string("cnn with sharded updates of ") + optimizer);
  }
}

// With states that are carried from row to row, and an epoch's last step of some places alone.
TEST(CarriedSteadyState, NothingIsAllocatedWhereStatesAreCarried) {
  for (const char* model : {"lstm", "gru"}) {
    Training run(model, "random:tokens,130", 12, /*adam=*/true, /*stateful=*/true);
    for (std::int64_t i = 0; i < 2 * run.steps_per_epoch() + 5; ++i) run.step();
    expect_steady(run, run.steps_per_epoch(), std::string(model) + " with its state");
  }
}

INSTANTIATE_TEST_SUITE_P(Models, TrainerSteadyState, ::testing::Values("mlp", "cnn", "lstm"),
                         [](const auto& test) { return test.param; });

// The counter itself: one that counts nothing would always pass.
TEST(AllocationCounter, SeesEveryWayToAllocate) {
  AllocationCounter counter;
  void* volatile kept = ::operator new(100);
  ::operator delete(kept);
  kept = ::operator new (100, std::align_val_t{64});
  ::operator delete (kept, std::align_val_t{64});
  long expected = 2;
#if !defined(LOCKSTEP_SANITIZED)
  kept = std::malloc(100);
  if (void* const larger = std::realloc(kept, 100'000)) kept = larger;
  std::free(kept);
  kept = std::calloc(3, 100);
  std::free(kept);
  kept = std::aligned_alloc(64, 128);
  std::free(kept);
  expected += 4;
#endif
  long seen = 0;
  const auto all = counter.by_caller();
  for (const auto& [caller, times] : all) seen += times;
  EXPECT_EQ(seen, expected) << listed(all);
  EXPECT_TRUE(without(all, {program_invocation_short_name}).empty()) << listed(all);
}

// A thread that first gets to run in the middle of a training, the loader's second worker say, takes nothing of the
// heap.
TEST(TrainerSteadyStateOfThreads, TheirFirstMomentsAllocateNothing) {
  std::atomic<int> stage = 0;
  std::thread thread([&] {
    stage.wait(0);
    use_alternate_signal_stack();
    stage = 2;
    stage.notify_all();
  });
  AllocationCounter counter;
  stage = 1;
  stage.notify_all();
  stage.wait(1);
  EXPECT_TRUE(counter.by_caller().empty()) << listed(counter.by_caller());
  thread.join();
}

TEST(PageFaults, AreSeen) {
  const long before = page_faults();
  const std::vector<char> touched(std::size_t{8} << 20, 'x');
  EXPECT_GT(page_faults(), before);
  EXPECT_EQ(touched.back(), 'x');
}

}  // namespace
}  // namespace lockstep::trainer
