// A training on one device, for tests that compare those of two.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <optional>

#include "base/splitmix.h"
#include "comm/nccl/nccl_group.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/data/open.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/trainer/evaluate.h"
#include "tests/support/models.h"
#include "tests/support/temporary_directory.h"
#include "trainer/step.h"

namespace lockstep::trainer {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);

struct Setting {
  bool cuda = false;
  std::string model = "mlp";
  bool adam = true;
  double clip_norm = 0;
  DType activations = DType::kF32;
  bool capture = true;
  std::uint64_t global_batch = 48;
  sampler::Tail tail = sampler::Tail::kExact;
  double lr = 1e-2;
  std::string data = "digits";  // and for tokens:FILE a tiny gpt, lstm or gru
  double dropout = 0;
  bool stateful = false;
  std::optional<nn::GradScaler::Options> scaling = {};  // of losses
  bool weighted = false;                                // classes by the loss, too
  Settings data_settings = {}, loss_settings = {};      // of digits and of cross entropy
  std::optional<std::int32_t> ignored = {};             // what those settings of the loss say
};

constexpr int kVocabulary = 24;
constexpr std::int64_t kTokens = 10;  // of a sample

bool has_blocks(const std::string& model) { return model == "gpt" || model == "llama"; }

// A world of one on one device.
class Training {
 public:
  explicit Training(const Setting& setting)
      : setting_(setting),
        backend_(setting.cuda ? nn::make_cuda_backend({}) : nn::make_cpu_backend(1)),
        splits_(setting.data == "digits" || setting.data.starts_with("table:")
                    ? data::open_data(setting.data, {.settings = setting.data_settings})
                    : data::open_data(setting.data, {.classes = kVocabulary, .context = kTokens})),
        module_(nn::make_model(
            context_, {.name = setting.model,
                       .sample_shape = splits_.train->sample_dims(),
                       .classes = splits_.train->has_numeric_targets() ? 1 : splits_.train->classes(),
                       .settings = testing::settings_of(setting.model, {{"hidden", {32, 24}},
                                                                        {"layers", has_blocks(setting.model) ? 1 : 2},
                                                                        {"heads", 2},
                                                                        {"width", has_blocks(setting.model) ? 16 : 12},
                                                                        {"context", kTokens},
                                                                        {"dropout", setting.dropout}}),
                       .categories = splits_.train->info().categories})),
        group_(make_group()),
        loader_(splits_.train,
                sampler::DistributedSampler(
                    {.length = splits_.train->size(),
                     .seed = 3,
                     .global_batch = setting.global_batch,
                     .tail = setting.tail,
                     .order = setting.stateful ? sampler::Order::kColumns : sampler::Order::kShuffled},
                    0, 1),
                {.workers = 1, .memory = backend_->staging_memory()}),
        ddp_(*module_, *group_, {.bucket_mb = 1.0 / 128, .first_bucket_mb = 1.0 / 1024, .defer_unused_check = true}),
        carried_(setting.stateful
                     ? std::make_unique<CarriedState>(*module_, control_, setting.global_batch, setting.activations)
                     : nullptr),
        scaler_(setting.scaling ? std::make_unique<nn::GradScaler>(*backend_, *setting.scaling) : nullptr),
        graphs_(*backend_, ddp_, setting.activations),
        step_(*backend_, ddp_,
              setting.adam ? nn::make_adamw(ddp_.parameters(), {})
                           : nn::make_sgd(ddp_.parameters(), {.momentum = 0.9, .nesterov = true}),
              training_format_of(*splits_.train),
              {.loss = loss_of(*splits_.train),
               .clip_norm = setting.clip_norm,
               .norm_every = 1,
               .activations = setting.activations,
               .dropout = setting.dropout > 0,
               .seed = 5,
               .ignored = setting.ignored,
               .scaler = scaler_.get(),
               .carried = carried_.get()}) {
    if (setting.capture) step_.set_graphs(&graphs_);
  }

  std::vector<TrainingStep::Outcome> run(int steps) {
    std::vector<TrainingStep::Outcome> outcomes;
    for (int i = 0; i < steps; ++i) {
      backend_->finish_inputs();
      step_.run(++steps_, loader_.next(), setting_.lr);
      while (step_.outcome_due()) outcomes.push_back(step_.take_outcome());
    }
    while (step_.outcomes_waiting() > 0) outcomes.push_back(step_.take_outcome());
    return outcomes;
  }

  EvalReport evaluate() {
    comm::SelfGroup control(kPatience);
    Evaluator evaluator(control, *backend_, splits_.validation, 50, 0, setting_.activations,
                        loss_of(*splits_.validation));
    evaluator.measure();
    evaluator.ignore(setting_.ignored);
    return evaluator.run(*module_, steps_);
  }

  const nn::Optimizer& optimizer() const { return step_.optimizer(); }
  nn::GradScaler::State scaler_state() const { return scaler_->state(); }
  std::vector<nn::HostTensor> state() const { return nn::state_of(*module_); }
  std::string hash() const { return nn::parameters_sha256(*module_); }
  nn::Module& module() { return *module_; }
  /// The parameters in 16 bits.
  std::vector<std::vector<std::byte>> copies() {
    const DType half = is_half(setting_.activations) ? setting_.activations : DType::kBF16;
    std::vector<std::vector<std::byte>> all;
    for (const auto& [name, parameter] : module_->named_parameters()) {
      const nn::Tensor copy = parameter->as(half);
      backend_->download(copy, all.emplace_back(copy.bytes()));
    }
    return all;
  }
  nn::Backend& backend() { return *backend_; }
  const StepGraphs& graphs() const { return graphs_; }
  std::vector<nn::HostTensor> carried() const { return carried_->gather(); }

 private:
  nn::LossFunction loss_of(const data::Dataset& dataset) const {
    if (setting_.weighted)
      return nn::make_loss(nn::loss_family("focal"), {{"class-weights", std::vector<double>{1, 2.5}}});
    return nn::make_loss(nn::loss_family(dataset.has_numeric_targets() ? "huber" : "cross_entropy"),
                         setting_.loss_settings);
  }

  std::unique_ptr<comm::ProcessGroup> make_group() {
    if (!setting_.cuda) return std::make_unique<comm::SelfGroup>(kPatience);
    return comm::make_device_self_group({.device = 0, .producer = backend_->stream(), .timeout = kPatience});
  }

  Setting setting_;
  std::unique_ptr<nn::Backend> backend_;
  nn::Generator generator_{1};
  nn::Context context_{*backend_, generator_};
  data::DataSplits splits_;
  std::unique_ptr<nn::Module> module_;
  std::unique_ptr<comm::ProcessGroup> group_;
  data::Loader loader_;
  parallel::DistributedDataParallel ddp_;
  comm::SelfGroup control_{kPatience};
  std::unique_ptr<CarriedState> carried_;
  std::unique_ptr<nn::GradScaler> scaler_;
  StepGraphs graphs_;
  TrainingStep step_;
  std::int64_t steps_ = 0;
};

float largest_difference(const nn::HostTensor& a, const nn::HostTensor& b) {
  float largest = 0;
  for (std::size_t at = 0; at < a.bytes.size(); at += sizeof(float)) {
    float x = 0, y = 0;
    std::memcpy(&x, a.bytes.data() + at, sizeof x);
    std::memcpy(&y, b.bytes.data() + at, sizeof y);
    largest = std::max(largest, std::isfinite(x) && std::isfinite(y) ? std::abs(x - y) : INFINITY);
  }
  return largest;
}

void expect_close(const Training& a, const Training& b, float tolerance) {
  const auto left = a.state(), right = b.state();
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i)
    EXPECT_LE(largest_difference(left[i], right[i]), tolerance) << left[i].name;
}

}  // namespace
}  // namespace lockstep::trainer
