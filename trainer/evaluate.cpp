#include "lockstep/trainer/evaluate.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/flight_record.h"
#include "base/scope.h"
#include "base/signals.h"
#include "lockstep/data/loader.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/sampler/slice.h"
#include "lockstep/trainer/forward.h"
#include "trainer/confusion.h"
#include "trainer/in_flight.h"
#include "trainer/scores.h"

namespace lockstep::trainer {
namespace {

constexpr std::size_t kSums = 10;

/// Of some samples: loss, correct, samples, in the top five, whether the rank was asked to stop, targets that count,
/// and ErrorSums.
using Sums = std::array<double, kSums>;

void add(Sums& sums, const Sums& more) {
  for (std::size_t i = 0; i < kSums; ++i) sums[i] += more[i];
}

/// Note [Reduction tree]
Sums sum_along_tree(std::span<const Sums> leaves) {
  if (leaves.empty()) return {};
  if (leaves.size() == 1) return leaves.front();
  const std::size_t left = std::bit_floor(leaves.size() - 1);
  Sums sums = sum_along_tree(leaves.first(left));
  add(sums, sum_along_tree(leaves.subspan(left)));
  return sums;
}

/// All ranks' passes together, in their order; each rank's first element is what it has outside of them.
Sums sum_of_passes(comm::ProcessGroup& group, const std::vector<Sums>& mine) {
  std::vector<Sums> passes;
  Sums outside{};
  for (const auto& bytes : group.all_gather_objects(std::as_bytes(std::span(mine)))) {
    std::vector<Sums> theirs(bytes.size() / sizeof(Sums));
    std::memcpy(theirs.data(), bytes.data(), bytes.size());
    add(outside, theirs.front());
    passes.insert(passes.end(), theirs.begin() + 1, theirs.end());
  }
  Sums sums = sum_along_tree(passes);
  add(sums, outside);
  return sums;
}

void keep(SampleOutputs& all, std::span<const float> values, const data::Batch& batch) {
  all.outputs.insert(all.outputs.end(), values.begin(), values.end());
  all.targets.insert(all.targets.end(), batch.targets.begin(), batch.targets.end());
  for (const std::int32_t label : batch.labels) all.targets.push_back(static_cast<float>(label));
}

/// Those of all ranks, whose samples follow one another.
SampleOutputs on_rank_0(comm::ProcessGroup& group, const SampleOutputs& mine) {
  const auto gathered = [&](const std::vector<float>& values) {
    return joined<float>(group.gather_objects(std::as_bytes(std::span(values)), 0));
  };
  SampleOutputs all{.outputs = gathered(mine.outputs), .targets = {}};
  all.targets = gathered(mine.targets);
  return all;
}

/// Without rows of this label.
void leave_out(std::int32_t label, std::vector<float>& values, std::vector<std::int32_t>& labels) {
  if (labels.empty()) return;
  const std::size_t each = values.size() / labels.size();
  std::size_t kept = 0;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] == label) continue;
    std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(i * each), each,
                values.begin() + static_cast<std::ptrdiff_t>(kept * each));
    labels[kept++] = labels[i];
  }
  values.resize(kept * each);
  labels.resize(kept);
}

/// A program's own sums: of each pass one row after the other, so that with a tree they do not depend on the ranks.
class OwnSums {
 public:
  explicit OwnSums(const std::vector<OwnMetric>& metrics) : metrics_(metrics) {
    for (const OwnMetric& metric : metrics_) each_ += metric.sums;
  }
  void add(const EvaluatedBatch& batch, bool new_row) {
    if (each_ == 0) return;
    if (new_row || rows_.empty()) rows_.resize(rows_.size() + each_, 0.0);
    double* at = rows_.data() + rows_.size() - each_;
    for (const OwnMetric& metric : metrics_) {
      metric.add(batch, {at, metric.sums});
      at += metric.sums;
    }
  }
  std::vector<std::pair<std::string, double>> values(comm::ProcessGroup& group) const {
    if (each_ == 0) return {};
    const auto all = joined<double>(group.all_gather_objects(std::as_bytes(std::span(rows_))));
    std::vector<double> sums(each_, 0.0);
    for (std::size_t i = 0; i < all.size(); ++i) sums[i % each_] += all[i];
    std::vector<std::pair<std::string, double>> values;
    const double* at = sums.data();
    for (const OwnMetric& metric : metrics_) {
      values.emplace_back(metric.name, metric.value({at, metric.sums}));
      at += metric.sums;
    }
    return values;
  }

 private:
  const std::vector<OwnMetric>& metrics_;
  std::size_t each_ = 0;
  std::vector<double> rows_;
};

/// Passes over `batch` samples each, of which a rank has neighbouring ones.
sampler::Slice slice_in_passes(std::uint64_t samples, std::uint64_t batch, int rank, int ranks) {
  const sampler::Slice passes = sampler::eval_slice((samples + batch - 1) / batch, rank, ranks);
  const std::uint64_t begin = std::min(passes.begin * batch, samples);
  return {begin, std::min(passes.end() * batch, samples) - begin};
}

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

void Evaluator::count_confusion() {
  const int classes = dataset_->classes();
  if (dataset_->targets_per_sample() != 1 || dataset_->has_numeric_targets() || classes < 2 || classes > kMostConfused)
    throw UsageError(fmt::format("figures of classes, of {}, whose samples do not have one label of 2 to {}",
                                 dataset_->name(), kMostConfused),
                     "leave --report out");
  confusion_ = true;
}

void Evaluator::measure() {
  errors_ = has_errors(*dataset_);
  ranking_ = has_ranking(*dataset_);
}

EvalReport Evaluator::run(nn::Module& module, std::int64_t step) {
  check_usage(dataset_ != nullptr && batch_ > 0, "an evaluation without data, or with batches of no samples",
              "give an Evaluator a data set and a batch of at least 1");
  flight::set_phase(flight::Phase::kEvaluation);
  const SampleFormat format = format_of(*dataset_);
  const bool was_training = module.training();
  module.train(false);
  const OnExit end_pass([&] {
    tape_.reset();
    if (was_training) module.train(true);
  });
  const auto batch_size = static_cast<std::uint64_t>(batch_);
  data::Loader loader(dataset_,
                      along_tree_ ? slice_in_passes(dataset_->size(), batch_size, group_.rank(), group_.size())
                                  : sampler::eval_slice(dataset_->size(), group_.rank(), group_.size()),
                      batch_size, {.workers = workers_, .memory = backend_.staging_memory()});
  std::vector<Sums> passes(1);                     // without a tree, all in one; with one, what is no pass's
  const nn::Tensor numbers = backend_.empty({3});  // of a batch: loss, correct, in the top five
  struct Counts {
    std::uint64_t samples, targets;
  };
  InFlight<Counts> batches(backend_, numbers.bytes());
  const bool reads_outputs = confusion_ || errors_ || ranking_ || keeps_outputs_ || !metrics_.empty();
  OwnSums own(metrics_);
  std::deque<ErrorSums> errors;  // of the batches under way
  RankedSamples ranked;
  const auto take = [&] {
    const auto [counts, bytes] = batches.take([] { throw_if_stopped("evaluating"); });
    std::array<float, 3> totals{};
    std::memcpy(totals.data(), bytes.data(), sizeof totals);
    if (along_tree_) passes.emplace_back();
    Sums sums = {static_cast<double>(totals[0]),
                 static_cast<double>(totals[1]),
                 static_cast<double>(counts.samples),
                 top5_ ? static_cast<double>(totals[2]) : 0.0,
                 0.0,
                 static_cast<double>(counts.targets)};
    if (errors_) {
      std::ranges::copy(errors.front(), sums.end() - std::tuple_size_v<ErrorSums>);
      errors.pop_front();
    }
    add(passes.back(), sums);
  };
  Confusion confusion(confusion_ ? dataset_->classes() : 0);
  outputs_ = {};
  for (const data::Batch* batch = &loader.next(); !batch->empty(); batch = &loader.next()) {
    throw_if_stopped("evaluating");
    flight::set_phase(flight::Phase::kEvaluation);  // again: it lasts, and who looks sees that it moves
    if (stop_request() != 0) {
      passes.front()[4] = 1;
      break;
    }
    const Inputs inputs = with_activations(backend_, inputs_of(backend_, *batch, format), activations_);
    nn::Loss loss;
    if (top5_ || reads_outputs) {
      const nn::Var logits = module.forward_all(tape_, inputs.on(tape_));
      loss = loss_of(tape_, logits, inputs, loss_, 1.0f);
      if (top5_)
        backend_.loss().count_in_top(logits.rows(), inputs.targets, 5,
                                     nn::Tensor::view_of(numbers.data<float>() + 2, {}), ignored_);
      std::vector<float> values;
      if (reads_outputs) values = nn::values_of(backend_, logits.value());
      if (errors_) errors.push_back(error_sums(values, batch->targets));
      if (keeps_outputs_) keep(outputs_, values, *batch);
      std::vector<std::int32_t> labels(batch->labels.begin(), batch->labels.end());
      const bool leaves_out = ignored_ && format.targets == 1;
      if (leaves_out) leave_out(*ignored_, values, labels);
      if (confusion_) confusion.count(values, labels);
      if (ranking_) ranked.add(values, labels);
      own.add({.samples = leaves_out ? labels.size() : static_cast<std::size_t>(batch->count),
               .outputs = values,
               .targets = batch->targets,
               .labels = labels},
              /*new_row=*/along_tree_);
    } else {
      loss = forward(tape_, module, inputs, loss_, 1.0f);  // on several devices: where the outputs are
    }
    backend_.pointwise().copy(loss.totals(), numbers.slice(0, 2));
    batches.add({.samples = batch->count, .targets = counted_targets(*batch, ignored_)}, numbers);
    tape_.reset();
    if (batches.full()) take();
    backend_.finish_inputs();
  }
  while (batches.waiting() > 0) take();
  Sums sums = passes.front();
  if (along_tree_) {
    sums = sum_of_passes(group_, passes);
  } else {
    std::ranges::copy(sums, sums_->view<double>(0, kSums).begin());
    group_.all_reduce({.arena = sums_.get(), .count = kSums, .dtype = DType::kF64}, comm::ReduceOp::kSum).wait_host();
    std::ranges::copy(sums_->view<double>(0, kSums), sums.begin());
  }
  if (confusion_) group_.all_reduce(confusion.counts());
  if (keeps_outputs_) outputs_ = on_rank_0(group_, std::exchange(outputs_, {}));
  const std::optional<double> auc = ranking_ ? std::optional(ranked.auc(group_)) : std::nullopt;
  flight::set_phase(flight::Phase::kRunning);  // not after an error, of which the flight record says where it was
  const double targets = sums[5];
  ErrorSums all_errors{};
  std::copy(sums.end() - all_errors.size(), sums.end(), all_errors.begin());
  return {.step = step,
          .loss = targets > 0 || !ignored_ ? sums[0] / targets : 0,
          .accuracy = format.numeric_targets ? std::nan("") : sums[1] / targets,
          .samples = static_cast<std::int64_t>(sums[2]),
          .top5 = top5_ ? std::optional(sums[3] / targets) : std::nullopt,
          .auc = auc,
          .errors = errors_ ? std::optional(errors_of(all_errors, static_cast<std::uint64_t>(sums[2]), *dataset_))
                            : std::nullopt,
          .stopped = sums[4] > 0,
          .confusion = {confusion.counts().begin(), confusion.counts().end()},
          .own = own.values(group_)};
}

}  // namespace lockstep::trainer
