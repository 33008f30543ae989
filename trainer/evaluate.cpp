#include "trainer/evaluate.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/stop.h"
#include "data/loader.h"
#include "sampler/slice.h"
#include "trainer/async_scalars.h"
#include "trainer/forward.h"

namespace lockstep::trainer {
namespace {

constexpr std::size_t kSums = 5;

}  // namespace

Evaluator::Evaluator(comm::ProcessGroup& group, nn::Backend& backend, std::shared_ptr<const data::Dataset> dataset,
                     std::int64_t batch, int workers, DType activations)
    : group_(group),
      backend_(backend),
      dataset_(std::move(dataset)),
      batch_(batch),
      workers_(workers),
      activations_(activations),
      tape_(backend),
      sums_(group.allocate(kSums * sizeof(double))) {
  tape_.set_recording(false);
  tape_.set_activations(activations);
}

EvalReport Evaluator::run(nn::Module& module, std::int64_t step) {
  const SampleFormat format = format_of(*dataset_);
  module.train(false);
  data::Loader loader(dataset_, sampler::eval_slice(dataset_->size(), group_.rank(), group_.size()),
                      static_cast<std::uint64_t>(batch_), {.workers = workers_, .memory = backend_.staging_memory()});
  const auto sums = sums_->view<double>(0, kSums);  // loss, correct, samples, in the top five, ranks that stopped
  std::ranges::fill(sums, 0.0);
  AsyncScalars results(backend_, 2 * sizeof(float)), inside(backend_, sizeof(float));
  const nn::Tensor in_top = backend_.empty({});
  const auto take = [](AsyncScalars& from, std::span<float> to) {
    std::memcpy(to.data(), from.take([] { throw_if_stopped("evaluating"); }).data(), to.size_bytes());
  };
  const auto add_result = [&] {
    std::array<float, 2> totals{};
    take(results, totals);
    sums[0] += static_cast<double>(totals[0]);
    sums[1] += static_cast<double>(totals[1]);
    if (!top5_) return;
    take(inside, std::span(totals).first(1));
    sums[3] += static_cast<double>(totals[0]);
  };
  for (const data::Batch* batch = &loader.next(); !batch->empty(); batch = &loader.next()) {
    throw_if_stopped("evaluating");
    if (stop_request() != 0) {
      sums[4] = 1;
      break;
    }
    const Inputs inputs = with_activations(backend_, inputs_of(backend_, *batch, format), activations_);
    const nn::Var outputs = module.forward(tape_, tape_.input(inputs.x));
    results.add(nn::cross_entropy(tape_, outputs, inputs.labels, 1.0f).totals());
    if (top5_) {
      backend_.loss().count_in_top(outputs.value(), inputs.labels, 5, in_top);
      inside.add(in_top);
    }
    sums[2] += static_cast<double>(batch->count);
    tape_.reset();
    if (results.full()) add_result();
    backend_.finish_inputs();
  }
  while (results.waiting() > 0) add_result();
  module.train(true);
  group_.all_reduce({.arena = sums_.get(), .count = kSums, .dtype = DType::kF64}, comm::ReduceOp::kSum).wait_host();
  const double labels = sums[2] * static_cast<double>(format.labels);
  return {.step = step,
          .loss = sums[0] / labels,
          .accuracy = sums[1] / labels,
          .samples = static_cast<std::int64_t>(sums[2]),
          .top5 = top5_ ? std::optional(sums[3] / labels) : std::nullopt,
          .stopped = sums[4] > 0};
}

}  // namespace lockstep::trainer
