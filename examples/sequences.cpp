// 16 sequences of 10 steps with 5 features, on four devices, with the batch as the first axis and as the second.
//
//   sequences            on four CPU devices
//   sequences cuda       on four GPUs
#include <algorithm>
#include <cstdio>

#include "lockstep/base/run_main.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/data_parallel.h"

using namespace lockstep;

namespace {

class Model final : public nn::Module {
 public:
  Model(nn::Context& context, bool batch_first, bool tells)
      : rnn_(register_module(
            "rnn", std::make_unique<nn::Lstm>(context, 5, 8, nn::RecurrentOptions{.batch_first = batch_first}))),
        out_(register_module("out", std::make_unique<nn::Linear>(context, 8, 5))),
        tells_(tells) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    if (tells_) std::printf("\tIn Model: input size %s\n", to_string(x.shape()).c_str());
    return out_(tape, rnn_(tape, x));
  }

 private:
  nn::Lstm& rnn_;
  nn::Linear& out_;
  bool tells_;
};

// ‖a − b‖∞
float difference(const std::vector<float>& a, const std::vector<float>& b) {
  float largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

// Trains a module to reproduce its input, on several devices and on one, and compares both.
void run(parallel::Devices& devices, const nn::Shape& shape, int dim) {
  const bool batch_first = dim == 0;
  nn::Generator generator(/*seed=*/1), same(/*seed=*/1);
  nn::Context context{devices[0], generator}, alone_context{devices[0], same};
  parallel::DataParallel model(nn::build<Model>(context, batch_first, true), devices, {0, 1, 2, 3},
                               /*output_device=*/0, dim);
  Model alone(alone_context, batch_first, false);

  std::vector<float> values(static_cast<std::size_t>(shape.count()));
  nn::Generator(/*seed=*/2).normal(values, 0, 1);
  const nn::Tensor x = nn::tensor_of(devices[0], shape, values);
  const auto optimizer = nn::make_sgd(model.named_parameters(), {.momentum = 0.9});
  const auto alone_optimizer = nn::make_sgd(alone.named_parameters(), {.momentum = 0.9});
  nn::Tape tape(model.output_backend()), alone_tape(devices[0]);
  const float scale = 1.0f / static_cast<float>(shape.count());
  for (int step = 1; step <= 3; ++step) {
    const nn::Var y = model(tape, tape.input(x)), wanted = alone(alone_tape, alone_tape.input(x));
    std::printf("Outside: input size %s output size %s, difference to one device %.0e\n", to_string(shape).c_str(),
                to_string(y.shape()).c_str(),
                double{difference(nn::values_of(devices[0], y.value()), nn::values_of(devices[0], wanted.value()))});
    const nn::Loss loss = nn::squared_error(tape, y, x, scale);
    std::printf("loss %.5f\n", double{scale * nn::values_of(devices[0], loss.totals())[0]});
    optimizer->zero_grad();
    tape.backward(loss.value);
    optimizer->step(/*lr=*/0.01);

    alone_optimizer->zero_grad();
    alone_tape.backward(nn::squared_error(alone_tape, wanted, x, scale).value);
    alone_optimizer->step(/*lr=*/0.01);
    tape.reset();
    alone_tape.reset();
  }
}

}  // namespace

int main(int argc, char**) {
  return run_main([&] {
    parallel::Devices devices = argc > 1 ? parallel::Devices::cuda() : parallel::Devices::cpu(4);
    std::printf("batch first\n");
    run(devices, {16, 10, 5}, /*dim=*/0);
    std::printf("sequence first\n");
    run(devices, {10, 16, 5}, /*dim=*/1);
  });
}
