// One training loop over both ways of using several devices, with a custom data set and module.
//
//   two_ways dp 3                              one process, three CPU devices (two_ways dp: all GPUs)
//   lockstep launch -n 3 -- two_ways ddp       three processes, each on a device of its own; mpirun and torchrun too
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/base/run_main.h"
#include "lockstep/data/loader.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/data_parallel.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/forward.h"

using namespace lockstep;

namespace {

constexpr int kEpochs = 8;
constexpr std::uint64_t kBatch = 40;
constexpr double kLearningRate = 0.1;

// Points of a square, half of them within a circle.
class Points final : public data::Dataset {
 public:
  explicit Points(std::uint64_t length)
      : Dataset({.name = "points", .size = length, .dims = {2}, .classes = 2}), coordinates_(2 * length) {
    nn::Generator(/*seed=*/1).uniform(coordinates_, -1, 1);
  }
  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    x[0] = coordinates_[2 * index];
    x[1] = coordinates_[2 * index + 1];
    label = x[0] * x[0] + x[1] * x[1] < 0.6366f ? 1 : 0;
  }

 private:
  std::vector<float> coordinates_;
};

class Net final : public nn::Module {
 public:
  explicit Net(nn::Context& context)
      : hidden_(register_module("hidden", std::make_unique<nn::Linear>(context, 2, 32))),
        out_(register_module("out", std::make_unique<nn::Linear>(context, 32, 2))) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override { return out_(tape, nn::relu(tape, hidden_(tape, x))); }

 private:
  nn::Linear& hidden_;
  nn::Linear& out_;
};

// Loss and accuracy over all samples.
void evaluate(nn::Module& module, nn::Backend& backend, const std::shared_ptr<const data::Dataset>& dataset) {
  module.train(false);
  nn::Tape tape(backend);
  tape.set_recording(false);
  float loss = 0, correct = 0;
  data::Loader loader(dataset, {0, dataset->size()}, /*batch=*/100, {});
  for (const data::Batch& batch : loader.epoch()) {
    const auto [x, labels] = trainer::inputs_of(backend, batch, trainer::format_of(*dataset));
    const auto sums = nn::values_of(backend, nn::cross_entropy(tape, module(tape, tape.input(x)), labels, 1).totals());
    loss += sums[0];
    correct += sums[1];
    tape.reset();
  }
  const auto count = static_cast<float>(dataset->size());
  std::printf("loss %.4f  accuracy %.1f %%\n", double{loss / count}, double{100 * correct / count});
}

void train_dp(parallel::Devices devices) {
  nn::Generator generator(/*seed=*/1);
  nn::Context context{devices[0], generator};
  parallel::DataParallel model(nn::build<Net>(context), devices);
  const auto optimizer = nn::make_sgd(model.named_parameters(), {.momentum = 0.9});

  const auto dataset = std::make_shared<Points>(1000);
  const sampler::DistributedSampler sampler({.length = dataset->size(), .global_batch = kBatch}, /*rank=*/0,
                                            /*world_size=*/1);
  data::Loader loader(dataset, sampler, {.workers = 1});

  nn::Tape tape(model.output_backend());
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (const data::Batch& batch : loader.epoch()) {
      const auto [x, labels] = trainer::inputs_of(devices[0], batch, trainer::format_of(*dataset));
      optimizer->zero_grad();
      const nn::Var y = model(tape, tape.input(x));
      const nn::Loss loss = nn::cross_entropy(tape, y, labels, 1.0f / static_cast<float>(batch.count));
      tape.backward(loss.value);
      optimizer->step(kLearningRate);
      tape.reset();
    }
  }
  evaluate(model.module(), devices[0], dataset);
}

void train_ddp() {
  session::Session session = session::open_session();  // connects the ranks; each has a device
  nn::Generator generator(/*seed=*/1);
  nn::Context context{*session.backend, generator};
  Net net(context);
  parallel::DistributedDataParallel model(net, session.gradients());
  const auto optimizer = nn::make_sgd(model.parameters(), {.momentum = 0.9});

  const auto dataset = std::make_shared<Points>(1000);
  const sampler::DistributedSampler sampler({.length = dataset->size(), .global_batch = kBatch}, session.world.rank,
                                            session.world.size);
  data::Loader loader(dataset, sampler, {.workers = 1});

  nn::Tape tape(*session.backend);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (const data::Batch& batch : loader.epoch()) {
      const auto [x, labels] = trainer::inputs_of(*session.backend, batch, trainer::format_of(*dataset));
      const nn::Var y = model(tape, tape.input(x));
      const nn::Loss loss = nn::cross_entropy(tape, y, labels, 1.0f / static_cast<float>(batch.plan.global_count));
      optimizer->zero_grad();  // early enough: gradients come from backward
      tape.backward(loss.value);
      optimizer->step(kLearningRate);
      tape.reset();
    }
  }
  if (session.world.rank == 0) evaluate(net, *session.backend, dataset);
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view way = argc > 1 ? argv[1] : "";
  return run_main([&] {
    if (way == "dp") {
      train_dp(argc > 2 ? parallel::Devices::cpu(std::atoi(argv[2])) : parallel::Devices::cuda());
    } else if (way == "ddp") {
      train_ddp();
    } else {
      throw UsageError("one of two ways", "two_ways dp 3, or two_ways ddp");
    }
  });
}
