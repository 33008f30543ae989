// What each device of a DataParallel is given: 100 random vectors, 30 at a time.
//
//   data_parallel 3      on three CPU devices
//   data_parallel        on all GPUs; without any, on the CPU
#include <cstdio>
#include <cstdlib>

#include "lockstep/base/device.h"
#include "lockstep/base/run_main.h"
#include "lockstep/data/loader.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/parallel/data_parallel.h"
#include "lockstep/trainer/forward.h"

using namespace lockstep;

namespace {

class RandomDataset final : public data::Dataset {
 public:
  RandomDataset(std::int64_t features, std::uint64_t length)
      : Dataset({.name = "random vectors", .size = length, .dims = {features}, .classes = 1}),
        values_(sample_elements() * length) {
    nn::Generator(/*seed=*/1).normal(values_, 0, 1);
  }
  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    std::copy_n(values_.begin() + static_cast<std::ptrdiff_t>(index * x.size()), x.size(), x.begin());
    label = 0;
  }

 private:
  std::vector<float> values_;
};

class Model final : public nn::Module {
 public:
  Model(nn::Context& context, std::int64_t inputs, std::int64_t outputs)
      : fc_(register_module("fc", std::make_unique<nn::Linear>(context, inputs, outputs))) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    const nn::Var y = fc_(tape, x);
    std::printf("\tIn Model: input size %s output size %s\n", to_string(x.shape()).c_str(),
                to_string(y.shape()).c_str());
    return y;
  }

 private:
  nn::Linear& fc_;
};

parallel::Devices devices_of(int argc, char** argv) {
  if (argc > 1) return parallel::Devices::cpu(std::atoi(argv[1]));
  const bool is_available = probe_cuda().devices > 0;
  return is_available ? parallel::Devices::cuda() : parallel::Devices::cpu(1);
}

void run(parallel::Devices devices) {
  if (devices.count() > 1) std::printf("Let's use %d devices!\n", devices.count());
  nn::Generator generator(/*seed=*/1);
  nn::Context context{devices[0], generator};
  parallel::DataParallel model(nn::build<Model>(context, 5, 2), devices);

  const auto dataset = std::make_shared<RandomDataset>(5, 100);
  const sampler::DistributedSampler shuffled({.length = dataset->size(), .global_batch = 30}, /*rank=*/0,
                                             /*world_size=*/1);
  data::Loader loader(dataset, shuffled, {});
  nn::Tape tape(model.output_backend());
  for (const data::Batch& batch : loader.epoch()) {
    const nn::Tensor x = trainer::inputs_of(devices[0], batch, trainer::format_of(*dataset)).x;
    const nn::Var y = model(tape, tape.input(x));
    std::printf("Outside: input size %s output size %s\n", to_string(x.shape()).c_str(), to_string(y.shape()).c_str());
    tape.reset();
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] { run(devices_of(argc, argv)); });
}
