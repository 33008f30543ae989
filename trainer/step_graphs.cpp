#include "trainer/step_graphs.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace lockstep::trainer {
namespace {

// Steps of a key that run as they are: in them all plans are built. The one behind them is the rehearsal, which runs as
// it is too, but in the memory that the recording will have.
constexpr int kWarmUp = 3;
// More shapes than these come from data that has no fixed shape.
constexpr std::size_t kMostEntries = 8;

}  // namespace

StepGraphs::StepGraphs(nn::Backend& backend, Replica& replica, const nn::Module& module, DType activations)
    : backend_(backend), replica_(replica), parameters_(module.named_parameters()), activations_(activations) {
  entries_.reserve(kMostEntries);
}

StepGraphs::Entry& StepGraphs::entry_of(const Key& key) {
  const auto found = std::ranges::find(entries_, key, &Entry::key);
  if (found != entries_.end()) return *found;
  if (entries_.size() == kMostEntries) entries_.erase(entries_.begin());
  Entry& entry = entries_.emplace_back();
  entry.key = key;
  return entry;
}

bool StepGraphs::run(std::int64_t step, const Key& key, const Inputs& inputs,
                     FunctionRef<void(const Inputs&)> compute) {
  if (!backend_.records() || !refusal_.empty() || !replica_.settled()) return false;
  Entry& entry = entry_of(key);
  if (++entry.seen <= kWarmUp) return false;
  const bool rehearsal = !std::exchange(entry.rehearsed, true);
  if (inputs.x.defined()) {
    const bool tokens = inputs.x.dtype() == DType::kI32;
    if (rehearsal)
      entry.inputs = {.x = backend_.empty(inputs.x.shape(), tokens ? DType::kI32 : activations_),
                      .labels = backend_.empty(inputs.labels.shape(), inputs.labels.dtype())};
    if (tokens)
      backend_.pointwise().copy(inputs.x, entry.inputs.x);
    else
      backend_.pointwise().cast(inputs.x, entry.inputs.x);
    backend_.pointwise().copy(inputs.labels, entry.inputs.labels);
  }
  if (rehearsal) {
    const nn::RecordedMemory memory(backend_.allocator());
    compute(entry.inputs);
    return true;
  }
  refresh_copies();
  if (entry.recording == nullptr) record(entry, compute);
  if (entry.recording == nullptr) return false;
  entry.recording->run();
  replica_.replayed(step, entry.operations);
  note_update(entry);
  ++replayed_;
  return true;
}

// A recording reads the bf16 copies of parameters as they are: should somebody have loaded other weights, they are made
// again here, as a forward pass does it.
void StepGraphs::refresh_copies() {
  if (activations_ != DType::kBF16) return;
  for (const auto& [name, parameter] : parameters_)
    if (parameter->copy() != nullptr) parameter->as(DType::kBF16);
}

// What the host notes of an update that runs as it is. The recording writes the copies that there were when it was
// made.
void StepGraphs::note_update(const Entry& entry) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    nn::Parameter& parameter = *parameters_[i].parameter;
    parameter.copy() == entry.copies[i] ? parameter.changed_with_copy() : parameter.changed();
  }
}

void StepGraphs::record(Entry& entry, FunctionRef<void(const Inputs&)> compute) {
  const nn::RecordedMemory memory(backend_.allocator());
  std::string why_not;
  replica_.begin_capture();
  entry.recording = backend_.record([&] { compute(entry.inputs); }, why_not);
  entry.operations = replica_.end_capture();
  const bool mine = entry.recording != nullptr;
  entry.copies.clear();
  for (const auto& [name, parameter] : parameters_) entry.copies.push_back(parameter->copy());
  if (replica_.on_all(mine)) return;
  entry.recording.reset();
  refusal_ = mine ? "another rank could not record them" : why_not;
  replica_.abandon_step();
  log_info("steps are not recorded, each kernel is started by itself: {}", refusal_);
}

}  // namespace lockstep::trainer
