// A module with two inputs and two outputs. The inputs are several readings of a sensor and a mask of the good ones;
// the outputs are an estimate of the measured value and its certainty.
//
//   several_inputs --epochs 20                    trained by lockstep; --parallel dp --device cpu:0,1, and other flags
//   several_inputs loop 3                         a loop of its own, on three CPU devices
#include <lockstep/trainer.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>

using namespace lockstep;

namespace {

constexpr std::int64_t kReadings = 4, kWidth = 32;

// Readings of a value, with noise; some of them are missing.
class Sensor final : public data::Dataset {
 public:
  Sensor(const char* name, std::uint64_t size, std::uint64_t seed)
      : Dataset({
            .name = name,
            .size = size,
            .dims = {kReadings},
            .target_dims = {1},
            .numeric_targets = true,
            .further_inputs = {{.name = "good", .dims = {kReadings}}},
        }),
        values_(size * (2 * kReadings + 1)) {
    nn::Generator(seed).uniform(values_, -1, 1);
  }
  void read_sample(std::uint64_t index, const data::Sample& sample) const override {
    const float* const values = values_.data() + index * (2 * kReadings + 1);
    const float truth = values[2 * kReadings];
    const std::span<float> good = sample.further[0].numbers;
    for (std::size_t i = 0; i < good.size(); ++i) {
      good[i] = values[kReadings + i] > -0.4f ? 1.0f : 0.0f;
      sample.x[i] = truth + 0.3f * values[i];
    }
    sample.targets[0] = truth;
  }

 private:
  std::vector<float> values_;
};

class Estimator final : public nn::Module {
 public:
  explicit Estimator(nn::Context& context)
      : from_readings_(register_module<nn::Linear>("readings", context, kReadings, kWidth)),
        from_good_(register_module<nn::Linear>("good", context, kReadings, kWidth)),
        mean_(register_module<nn::Linear>("mean", context, kWidth, 1)),
        log_variance_(register_module<nn::Linear>("log_variance", context, kWidth, 1)) {}
  nn::Vars forward_all(nn::Tape& tape, const nn::Vars& inputs) override {
    const auto [readings, good] = take<2>(inputs);
    const nn::Var seen = from_readings_(tape, nn::mul(tape, readings, good));
    const nn::Var hidden = nn::gelu(tape, nn::add(tape, seen, from_good_(tape, good)));
    return {mean_(tape, hidden), log_variance_(tape, hidden)};
  }

 private:
  nn::Linear &from_readings_, &from_good_, &mean_, &log_variance_;
};

// That the targets come from such a normal distribution: the negative logarithm of how likely it is.
nn::Loss gaussian(nn::Tape& tape, const nn::Vars& outputs, const nn::Tensor& targets, float scale) {
  const auto [mean, log_variance] = outputs.as<2>();
  const nn::Var error = nn::square(tape, nn::sub(tape, mean, tape.input(targets)));
  const nn::Var in_variances = nn::mul(tape, error, nn::exp(tape, nn::affine(tape, log_variance, -1)));
  return nn::sum(tape, nn::affine(tape, nn::add(tape, in_variances, log_variance), 0.5f), scale);
}

void run_loop(int count) {
  parallel::Devices devices = parallel::Devices::cpu(count);
  nn::Generator generator(/*seed=*/1);
  nn::Context context{devices[0], generator};
  parallel::DataParallel model(nn::build<Estimator>(context), devices);
  const auto optimizer = nn::make_adamw(model.named_parameters(), {});
  const auto dataset = std::make_shared<Sensor>("sensor", 2000, /*seed=*/1);
  const sampler::DistributedSampler sampler({.length = dataset->size(), .global_batch = 50}, /*rank=*/0,
                                            /*world_size=*/1);
  data::Loader loader(dataset, sampler, {.workers = 1});
  nn::Tape tape(model.output_backend());
  for (int epoch = 1; epoch <= 8; ++epoch) {
    double sum = 0;
    for (const data::Batch& batch : loader.epoch()) {
      const trainer::Inputs inputs = trainer::inputs_of(devices[0], batch, trainer::format_of(*dataset));
      const float scale = 1.0f / static_cast<float>(batch.count);
      optimizer->zero_grad();
      // Each device computes the loss of its samples. With the loss outside it is
      // gaussian(tape, model(tape, inputs.on(tape)), inputs.targets, scale).
      const nn::Loss loss = model.forward_loss(tape, inputs.on(tape), inputs.targets, gaussian, scale);
      sum += static_cast<double>(nn::values_of(devices[0], loss.totals())[0]);
      tape.backward(loss.value);
      optimizer->step(0.01);
      tape.reset();
    }
    std::printf("epoch %d: loss %.3f\n", epoch, sum / static_cast<double>(dataset->size()));
  }
  constexpr std::array<float, kReadings> kSeen = {0.4f, 0.5f, 0.6f, 0.5f}, kAllGood = {1, 1, 1, 1};
  const nn::Tensor readings = nn::tensor_of(devices[0], {1, kReadings}, kSeen);
  const nn::Tensor good = nn::tensor_of(devices[0], {1, kReadings}, kAllGood);
  const auto [mean, log_variance] = model(tape, {tape.input(readings), tape.input(good)}).as<2>();
  std::printf("estimate %.2f, log of the variance %.1f\n",
              static_cast<double>(nn::values_of(devices[0], mean.value())[0]),
              static_cast<double>(nn::values_of(devices[0], log_variance.value())[0]));
}

}  // namespace

int main(int argc, char** argv) {
  trainer::TrainConfig defaults;  // of the flags
  defaults.epochs = 20;
  defaults.lr = 0.01;
  defaults.optimizer = "adamw";
  return run_main([&] {
    if (argc > 1 && std::string_view(argv[1]) == "loop") {
      run_loop(argc > 2 ? std::atoi(argv[2]) : 1);
      return 0;
    }
    return train(argc, argv, defaults,
                 {.model = nn::factory<Estimator>(),
                  .data = {.train = std::make_shared<Sensor>("sensor", 2000, 1),
                           .validation = std::make_shared<Sensor>("sensor to test", 500, 2)},
                  .loss = gaussian,
                  .name = "estimator"});
  });
}
