#include "lockstep/trainer/evaluate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/flight_record.h"
#include "base/stop.h"
#include "lockstep/data/loader.h"
#include "lockstep/sampler/slice.h"
#include "lockstep/trainer/forward.h"
#include "trainer/in_flight.h"

namespace lockstep::trainer {
namespace {

constexpr std::size_t kSums = 5;

}  // namespace

Evaluator::Evaluator(comm::ProcessGroup& group, nn::Backend& backend, std::shared_ptr<const data::Dataset> dataset,
                     std::int64_t batch, int workers, DType activations, nn::LossFunction loss)
    : group_(group),
      backend_(backend),
      dataset_(std::move(dataset)),
      batch_(batch),
      workers_(workers),
      activations_(activations),
      loss_(std::move(loss)),
      tape_(backend),
      sums_(group.allocate(kSums * sizeof(double))) {
  tape_.set_recording(false);
  tape_.set_activations(activations);
}

EvalReport Evaluator::run(nn::Module& module, std::int64_t step) {
  flight::set_phase(flight::Phase::kEvaluation);
  const SampleFormat format = format_of(*dataset_);
  module.train(false);
  data::Loader loader(dataset_, sampler::eval_slice(dataset_->size(), group_.rank(), group_.size()),
                      static_cast<std::uint64_t>(batch_), {.workers = workers_, .memory = backend_.staging_memory()});
  const auto sums = sums_->view<double>(0, kSums);  // loss, correct, samples, in the top five, ranks that stopped
  std::ranges::fill(sums, 0.0);
  const nn::Tensor numbers = backend_.empty({3});  // of a batch: loss, correct, in the top five
  InFlight<std::uint64_t> batches(backend_, numbers.bytes());
  const auto take = [&] {
    const auto [samples, bytes] = batches.take([] { throw_if_stopped("evaluating"); });
    std::array<float, 3> totals{};
    std::memcpy(totals.data(), bytes.data(), sizeof totals);
    sums[0] += static_cast<double>(totals[0]);
    sums[1] += static_cast<double>(totals[1]);
    sums[2] += static_cast<double>(samples);
    if (top5_) sums[3] += static_cast<double>(totals[2]);
  };
  for (const data::Batch* batch = &loader.next(); !batch->empty(); batch = &loader.next()) {
    throw_if_stopped("evaluating");
    if (stop_request() != 0) {
      sums[4] = 1;
      break;
    }
    const Inputs inputs = with_activations(backend_, inputs_of(backend_, *batch, format), activations_);
    nn::Loss loss;
    if (top5_) {
      const nn::Var logits = module.forward_all(tape_, inputs.on(tape_));
      loss = loss_of(tape_, logits, inputs, loss_, 1.0f);
      backend_.loss().count_in_top(logits.rows(), inputs.targets, 5,
                                   nn::Tensor::view_of(numbers.data<float>() + 2, {}));
    } else {
      loss = forward(tape_, module, inputs, loss_, 1.0f);  // on several devices: where the outputs are
    }
    backend_.pointwise().copy(loss.totals(), numbers.slice(0, 2));
    batches.add(batch->count, numbers);
    tape_.reset();
    if (batches.full()) take();
    backend_.finish_inputs();
  }
  while (batches.waiting() > 0) take();
  module.train(true);
  group_.all_reduce({.arena = sums_.get(), .count = kSums, .dtype = DType::kF64}, comm::ReduceOp::kSum).wait_host();
  flight::set_phase(flight::Phase::kRunning);
  const double targets = sums[2] * static_cast<double>(format.targets);
  return {.step = step,
          .loss = sums[0] / targets,
          .accuracy = format.numeric_targets ? std::nan("") : sums[1] / targets,
          .samples = static_cast<std::int64_t>(sums[2]),
          .top5 = top5_ ? std::optional(sums[3] / targets) : std::nullopt,
          .stopped = sums[4] > 0};
}

}  // namespace lockstep::trainer
