// What a program can add to a run: a metric of its own, a learning rate of its own, and what it does after steps,
// evaluations and epochs. `hooks --save-best balanced_accuracy --save best.safetensors` keeps the best weights by that
// metric; `hooks eval --weights best.safetensors` evaluates them.
#include <lockstep/trainer.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

using namespace lockstep;

namespace {

constexpr std::size_t kClasses = 10;

// Of each class how many samples there are, and how many were recognised.
void count_by_class(const trainer::EvaluatedBatch& batch, std::span<double> sums) {
  for (std::size_t i = 0; i < batch.samples; ++i) {
    const auto row = batch.outputs.subspan(i * kClasses, kClasses);
    const auto label = static_cast<std::size_t>(batch.labels[i]);
    sums[label] += 1;
    if (std::ranges::max_element(row) - row.begin() == batch.labels[i]) sums[kClasses + label] += 1;
  }
}
double mean_recall(std::span<const double> sums) {
  double sum = 0;
  for (std::size_t c = 0; c < kClasses; ++c) sum += sums[kClasses + c] / sums[c];
  return sum / kClasses;
}

std::unique_ptr<nn::Module> build_network(nn::Context& context) {
  auto network = std::make_unique<nn::Sequential>();
  network->then(std::make_unique<nn::Flatten>())
      .then(std::make_unique<nn::Linear>(context, 64, 96))
      .then(std::make_unique<nn::SiLU>())
      .then(std::make_unique<nn::Linear>(context, 96, 10));
  return network;
}

}  // namespace

int main(int argc, char** argv) {
  const bool speaks = comm::discover_world(env).rank == 0;
  trainer::TrainHooks hooks;
  hooks.metrics = {{.name = "balanced_accuracy", .sums = 2 * kClasses, .add = count_by_class, .value = mean_recall}};
  hooks.learning_rate = [](std::int64_t step, std::int64_t total) {  // a triangle
    return 4e-3 * (1 - std::abs(2.0 * static_cast<double>(step) / static_cast<double>(total) - 1)) + 1e-5;
  };
  double slowest = 0;
  hooks.on_step = [&](const trainer::StepReport& report) { slowest = std::max(slowest, report.step_ms); };
  hooks.on_evaluation = [&](const trainer::EvalReport& report) {
    if (speaks)
      std::printf("after step %d: %s %.4f\n", static_cast<int>(report.step), report.own[0].first.c_str(),
                  report.own[0].second);
  };
  hooks.on_epoch = [&](std::int64_t epoch) {
    if (speaks) std::printf("epoch %d, slowest step %.1f ms\n", static_cast<int>(epoch), std::exchange(slowest, 0));
  };
  trainer::TrainConfig defaults;  // of the flags
  defaults.epochs = 12;
  return run_main([&] {
    return train(argc, argv, defaults,
                 {.model = build_network, .data = data::open_data("digits"), .name = "network", .hooks = hooks});
  });
}
