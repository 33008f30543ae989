// A custom training loop: own module, lockstep's ranks. Run it alone, with lockstep launch -n N, mpirun -np N or
// torchrun's variables.
#include <cstdio>

#include "lockstep/comm.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/open.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/trainer/evaluate.h"

using namespace lockstep;

namespace {

class TwoLayers final : public nn::Module {
 public:
  explicit TwoLayers(nn::Context& context)
      : hidden_(register_module("hidden", std::make_unique<nn::Linear>(context, 64, 128))),
        out_(register_module("out", std::make_unique<nn::Linear>(context, 128, 10))) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    return out_.forward(tape, hidden_.forward(tape, nn::flatten(tape, x), nn::Epilogue::kRelu));
  }

 private:
  nn::Linear& hidden_;
  nn::Linear& out_;
};

void train() {
  // Connects the ranks. Each has a device and a copy of the model; rank 0's parameters are broadcast.
  const auto group = comm::make_group();
  const auto backend = nn::make_cpu_backend(/*threads=*/1);
  nn::Generator generator(/*seed=*/1);
  nn::Context context{*backend, generator};
  TwoLayers model(context);
  parallel::DistributedDataParallel ddp(model, *group);
  const auto optimizer = nn::make_adamw(ddp.parameters(), {});

  // Each rank draws its own part of every global batch of 48 samples.
  const auto digits = data::open_data("digits");
  const sampler::DistributedSampler sampler({.length = digits.train->size(), .seed = 1, .global_batch = 48},
                                            group->rank(), group->size());
  data::Loader loader(digits.train, sampler, {.workers = 1});

  nn::Tape tape(*backend);
  for (int step = 0; step < 300; ++step) {
    const data::Batch& batch = loader.next();
    const auto samples = static_cast<std::int64_t>(batch.plan.local_count);
    ddp.set_step(step);  // ranks compare it: one whose loop left out a step would be named
    optimizer->zero_grad();
    if (batch.empty()) {
      ddp.contribute_nothing();  // fewer samples than ranks
    } else {
      const auto x = tape.input(backend->from_host(batch.x.data(), {samples, 8, 8, 1}, DType::kF32));
      const auto labels = backend->from_host(batch.labels.data(), {samples}, DType::kI32);
      // Gradients are summed over the ranks: each sample counts 1 / samples of all ranks.
      const auto loss =
          nn::cross_entropy(tape, ddp(tape, x), labels, 1.0f / static_cast<float>(batch.plan.global_count));
      tape.backward(loss.value);  // collectives run while it does
    }
    optimizer->step(/*lr=*/1e-3);
    tape.reset();
  }

  trainer::Evaluator evaluator(*group, *backend, digits.validation, /*batch=*/32, /*workers=*/0);
  const auto report = evaluator.run(model, 300);
  if (group->rank() == 0)
    std::printf("accuracy %.1f %% on %d rank%s\n", 100 * report.accuracy, group->size(), group->size() == 1 ? "" : "s");
  group->shutdown();
}

}  // namespace

int main() { return run_main(train); }
