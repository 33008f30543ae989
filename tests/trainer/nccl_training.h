// A training run of a rank whose GPU and NCCL are software.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/nccl/nccl_group.h"
#include "lockstep/data/open.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/trainer/evaluate.h"
#include "tests/comm/nccl/fake_nccl.h"
#include "tests/soft_cuda/soft_cuda.h"
#include "tests/support/ranks.h"
#include "trainer/step.h"

namespace lockstep::trainer {

inline constexpr auto kPatience = std::chrono::seconds(60);

struct NcclSetting {
  bool cuda = true;
  bool capture = true;
  double clip_norm = 0;
  std::string data = "random:1x8x8,237";  // in steps of 30: 27 are left for the eighth, the last one of an epoch
  std::uint64_t global_batch = 30;
  std::vector<std::int64_t> hidden = {32, 24};
  std::string hook = "none";
  int zero = 0;
  DType activations = DType::kF32;
  std::optional<nn::GradScaler::Options> scaling = {};  // of losses
};

inline std::size_t memory_used() {
  std::size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  return total - free;
}

class NcclTraining {
 public:
  explicit NcclTraining(const NcclSetting& setting)
      : backend_(setting.cuda ? nn::make_cuda_backend({}) : nn::make_cpu_backend(1)),
        generator_(static_cast<std::uint64_t>(testing::group().rank()) + 1),  // rank 0's parameters become everyone's
        splits_(data::open_data(setting.data, {.classes = 10})),
        module_(nn::make_model(context_, {.name = "mlp",
                                          .sample_shape = splits_.train->sample_dims(),
                                          .classes = splits_.train->classes(),
                                          .settings = {{"hidden", setting.hidden}}})),
        loader_(splits_.train,
                sampler::DistributedSampler(
                    {.length = splits_.train->size(), .seed = 3, .global_batch = setting.global_batch},
                    testing::group().rank(), testing::group().size()),
                {.workers = 1, .memory = backend_->staging_memory()}),
        gpus_(setting.cuda
                  ? comm::make_nccl_group(testing::group(), {.producer = backend_->stream(), .timeout = kPatience},
                                          &comm::fake_nccl::api())
                  : nullptr),
        activations_(setting.activations),
        scaler_(setting.scaling ? std::make_unique<nn::GradScaler>(*backend_, *setting.scaling) : nullptr) {
    comm::ProcessGroup& gradients = gpus_ != nullptr ? *gpus_ : testing::group();
    using Options = parallel::DistributedDataParallel::Options;
    ddp_.emplace(
        *module_, gradients,
        Options{
            .bucket_mb = 1.0 / 128, .first_bucket_mb = 1.0 / 1024, .defer_unused_check = true, .zero = setting.zero});
    if (auto hook = ddp::make_comm_hook(setting.hook)) ddp_->register_comm_hook(std::move(hook));
    graphs_.emplace(*backend_, *ddp_, setting.activations);
    step_.emplace(*backend_, *ddp_, nn::make_adamw(ddp_->parameters(), {}, {}, ddp_->share()),
                  format_of(*splits_.train),
                  TrainingStep::Options{.clip_norm = setting.clip_norm,
                                        .norm_every = 1,
                                        .activations = setting.activations,
                                        .scaler = scaler_.get()});
    if (setting.capture) step_->set_graphs(&*graphs_);
  }
  // As a run ends: nothing that is captured is left when the group is.
  ~NcclTraining() {
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
    return Evaluator(alone, *backend_, splits_.validation, 50, 0, activations_).run(*module_, steps_).loss;
  }

  /// From now on so many bytes are all that there are, beside those in use and what the graphs keep.
  void leave_only(std::size_t bytes) {
    soft_cuda::set_memory_bytes(memory_used());
    EXPECT_THROW(backend_->empty({1 << 28}), OutOfMemoryError);  // blocks that lie idle go first
    soft_cuda::set_memory_bytes(memory_used() + bytes);
  }

  std::int64_t optimizer_steps() const { return step_->optimizer().steps(); }
  std::string hash() const { return nn::parameters_sha256(*module_); }
  const StepGraphs& graphs() const { return *graphs_; }

 private:
  std::unique_ptr<nn::Backend> backend_;
  nn::Generator generator_;
  nn::Context context_{*backend_, generator_};
  data::DataSplits splits_;
  std::unique_ptr<nn::Module> module_;
  data::Loader loader_;  // ends after the group, with which copies out of its memory end that wait for other ranks
  std::unique_ptr<comm::DeviceGroup> gpus_;
  DType activations_;
  std::unique_ptr<nn::GradScaler> scaler_;
  std::optional<parallel::DistributedDataParallel> ddp_;
  std::optional<StepGraphs> graphs_;
  std::optional<TrainingStep> step_;
  std::int64_t steps_ = 0;
  bool broken_ = false;
};

}  // namespace lockstep::trainer
