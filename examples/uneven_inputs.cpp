// Ranks with inputs for different numbers of steps, for example because each reads its own files. join() ends the loop
// on all of them at once, and each gradient is that of all samples of the step.
//
//   lockstep launch -n 3 -- uneven_inputs
#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/base/run_main.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/session/session.h"

using namespace lockstep;

namespace {

constexpr std::int64_t kBatch = 8;

/// Rank r has 20 + 13 · r samples of y = 2 x.
class OwnSamples {
 public:
  OwnSamples(nn::Backend& backend, int rank) : backend_(backend), left_(20 + 13 * rank) {}
  std::int64_t next() {
    return count_ = std::min(kBatch, std::exchange(left_, std::max(left_ - kBatch, std::int64_t{0})));
  }
  nn::Tensor x() { return column(1.0f); }
  nn::Tensor y() { return column(2.0f); }

 private:
  nn::Tensor column(float factor) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < count_; ++i) values.push_back(factor * static_cast<float>(i % 5 - 2));
    return nn::tensor_of(backend_, {count_, 1}, values);
  }
  nn::Backend& backend_;
  std::int64_t left_, count_ = 0;
};

void train() {
  session::Session session = session::open_session(session::SessionOptions());
  comm::ProcessGroup& group = session.gradients();
  nn::Generator generator(/*seed=*/1);
  nn::Context context{*session.backend, generator};
  nn::Linear net(context, 1, 1);
  parallel::DistributedDataParallel model(net, group);
  const auto optimizer = nn::make_sgd(model.parameters(), {.momentum = 0.5});

  OwnSamples own(*session.backend, group.rank());
  nn::Tape tape(*session.backend);
  int steps = 0;
  std::int64_t samples = own.next(), all = 0;
  while (const auto step = model.join(samples)) {
    optimizer->zero_grad();
    if (samples > 0) {
      const nn::Var y = model(tape, tape.input(own.x()));
      tape.backward(nn::squared_error(tape, y, own.y(), 1.0f / static_cast<float>(step.samples)).value);
      tape.reset();
    } else {
      model.contribute_nothing();
    }
    optimizer->step(0.1);
    ++steps;
    all += step.samples;
    samples = own.next();
  }
  model.check();
  if (group.rank() == 0) std::printf("%d steps of %lld samples\n", steps, static_cast<long long>(all));
  session.shutdown();
}

}  // namespace

int main() { return run_main(train); }
