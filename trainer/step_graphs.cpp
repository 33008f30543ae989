#include "trainer/step_graphs.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/scope.h"

namespace lockstep::trainer {
namespace {

// Steps of a key that run as they are: in them all plans are built. The one after them is the rehearsal, which runs as
// it is too, but in the memory that the graph will have.
constexpr int kWarmUp = 3;
// More shapes than these come from data that has no fixed shape.
constexpr std::size_t kMostEntries = 8;

}  // namespace

StepGraphs::StepGraphs(nn::Backend& backend, parallel::DistributedDataParallel& ddp, DType activations)
    : backend_(backend),
      ddp_(ddp),
      parameters_(ddp.module().named_parameters()),
      activations_(activations),
      sliced_(!ddp.share().slices.empty()) {
  entries_.reserve(kMostEntries);
  backend_.allocator().add(*this);
}

StepGraphs::~StepGraphs() { backend_.allocator().remove(*this); }

std::int64_t StepGraphs::kernels() const {
  std::int64_t most = 0;
  for (const Entry& entry : entries_)
    if (entry.graph != nullptr) most = std::max(most, entry.graph->kernels());
  return most;
}

bool StepGraphs::give_up() noexcept {
  if (!may_give_up_) return false;
  given_up_ = true;
  for (Entry& entry : entries_) {
    entry.graph.reset();
    if (&entry != rehearsing_) entry.inputs = {};
  }
  return true;
}

bool StepGraphs::all_have_them() {
  if (!std::exchange(may_give_up_, false) || !rehearsed_) return true;
  const auto all = ddp_.group().all_gather_numbers(given_up_ ? 0 : 1);
  if (std::ranges::find(all, 0) == all.end()) return true;
  entries_.clear();
  may_give_up_ = true;  // there is nothing to give up any more, and others of this device may
  refusal_ = given_up_ ? "the memory that they keep was needed" : "another rank needed the memory that they keep";
  if (given_up_)
    log_warn("steps are no longer run from graphs: {} → use a smaller batch, or --graphs no from the start", refusal_);
  else
    log_info("steps are no longer run from graphs: {}", refusal_);
  return false;
}

StepGraphs::Entry& StepGraphs::entry_of(std::uint64_t global_count) {
  const auto found = std::ranges::find(entries_, global_count, &Entry::global_count);
  if (found != entries_.end()) return *found;
  if (entries_.size() == kMostEntries) entries_.erase(entries_.begin());
  Entry& entry = entries_.emplace_back();
  entry.global_count = global_count;
  return entry;
}

void StepGraphs::expect_step(std::uint64_t global_count) {
  const auto found = std::ranges::find(entries_, global_count, &Entry::global_count);
  if (found == entries_.end() || found->graph == nullptr) expect_other_work();
}

Inputs StepGraphs::memory_for(const Inputs& inputs) {
  const auto as_computed = [&](const nn::Tensor& like) {
    return backend_.empty(like.shape(), computed_type(like.dtype(), activations_));
  };
  Inputs made = {.x = as_computed(inputs.x), .targets = backend_.empty(inputs.targets.shape(), inputs.targets.dtype())};
  for (const nn::Tensor& one : inputs.further) made.further.push_back(as_computed(one));
  return made;
}

bool StepGraphs::run(std::int64_t step, std::uint64_t global_count, const Inputs& inputs,
                     FunctionRef<void(const Inputs&)> compute) {
  if (!backend_.can_capture() || !refusal_.empty() || !ddp_.settled() || !all_have_them()) return false;
  Entry& entry = entry_of(global_count);
  const bool rehearsal = entry.seen == kWarmUp;
  if (entry.seen <= kWarmUp) {
    ++entry.seen;
    may_give_up_ = true;
    if (!rehearsal) return false;
    rehearsed_ = true;
  }
  if (inputs.x.defined()) {
    if (rehearsal) entry.inputs = memory_for(inputs);
    const auto fill = [&](const nn::Tensor& from, const nn::Tensor& to) {
      from.dtype() == DType::kF32 ? backend_.pointwise().cast(from, to) : backend_.pointwise().copy(from, to);
    };
    fill(inputs.x, entry.inputs.x);
    for (std::size_t i = 0; i < inputs.further.size(); ++i) fill(inputs.further[i], entry.inputs.further[i]);
    backend_.pointwise().copy(inputs.targets, entry.inputs.targets);
  }
  if (rehearsal) {
    rehearsing_ = &entry;
    const OnExit end([this] { rehearsing_ = nullptr; });
    const nn::GraphMemory memory(backend_.allocator());
    compute(entry.inputs);
    return true;
  }
  refresh_copies();
  if (entry.graph == nullptr) capture(entry, compute);
  if (entry.graph == nullptr) return false;
  entry.graph->run();
  ddp_.group().set_step(step);
  ddp_.group().replayed(entry.operations);
  note_update(entry);
  ++replayed_;
  return true;
}

// A graph reads the rounded copies of parameters as they are: should somebody have loaded other weights, they are made
// again here, as a forward pass does it.
void StepGraphs::refresh_copies() {
  if (!is_half(activations_)) return;
  for (const auto& [name, parameter] : parameters_)
    if (parameter->copy()) parameter->as(activations_);
}

// What the host notes of an update that runs as it is. The graph writes the copies that there were when it was
// made; of sharded updates, this rank's slices of them, and refresh_copies() makes the rest.
void StepGraphs::note_update(const Entry& entry) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    nn::Parameter& parameter = *parameters_[i].parameter;
    parameter.copy() == entry.copies[i] && !sliced_ ? parameter.changed_with_copy() : parameter.changed();
  }
}

void StepGraphs::capture(Entry& entry, FunctionRef<void(const Inputs&)> compute) {
  try {
    capture_together(entry, compute);
  } catch (const NcclError& error) {  // the group is broken: the run cannot continue without graphs
    throw NcclError(fmt::format("{}, while a step was captured as a CUDA graph", error.what()),
                    "--graphs no starts each kernel by itself; or " + error.remedy());
  }
}

void StepGraphs::capture_together(Entry& entry, FunctionRef<void(const Inputs&)> compute) {
  const nn::GraphMemory memory(backend_.allocator());
  std::string why_not;
  ddp_.group().begin_capture();
  entry.graph = backend_.capture([&] { compute(entry.inputs); }, why_not);
  entry.operations = ddp_.group().end_capture();
  const bool mine = entry.graph != nullptr;
  entry.copies.clear();
  for (const auto& [name, parameter] : parameters_) entry.copies.push_back(parameter->copy());
  const auto all = ddp_.group().all_gather_numbers(mine ? 1 : 0);
  if (std::ranges::find(all, 0) == all.end()) return;
  entry.graph.reset();
  refusal_ = mine ? "another rank could not capture them" : why_not;
  ddp_.abandon_step();
  if (mine)
    log_info("steps are not captured as graphs: {}", refusal_);
  else
    log_warn("steps are not captured as graphs, each kernel is started by itself: {} → --graphs no asks for that",
             refusal_);
}

}  // namespace lockstep::trainer
