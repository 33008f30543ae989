#include "data/loader.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/signals.h"

namespace lockstep::data {

namespace {

constexpr int kMostWorkers = 1024;
constexpr std::align_val_t kAlignment{64};

struct AlignedDelete {
  void operator()(float* p) const { ::operator delete(p, kAlignment); }
};
using AlignedFloats = std::unique_ptr<float, AlignedDelete>;

AlignedFloats allocate_floats(std::uint64_t samples, std::uint64_t elements) {
  std::size_t bytes = 0;
  void* memory = nullptr;
  if (!__builtin_mul_overflow(samples, elements, &bytes) && !__builtin_mul_overflow(bytes, sizeof(float), &bytes)) {
    memory = ::operator new(std::max<std::size_t>(bytes, 1), kAlignment, std::nothrow);
  }
  if (memory == nullptr) {
    throw UsageError(fmt::format("no memory for a batch of {} samples of {} numbers", samples, elements),
                     "give a smaller batch, or fewer data workers");
  }
  return AlignedFloats(static_cast<float*>(memory));
}

std::size_t slot_count(const LoaderOptions& options) {
  if (options.workers < 0 || options.workers > kMostWorkers) {
    throw UsageError(fmt::format("{} data workers", options.workers), fmt::format("give 0 to {}", kMostWorkers));
  }
  check_usage(options.depth >= 0, "a negative number of batches to prefetch", "give 0 or more");
  if (options.workers == 0) return 1;
  return 1 + static_cast<std::size_t>(options.depth > 0 ? options.depth : 2 * options.workers);
}

}  // namespace

/// The buffers of one batch. A worker owns a slot from when it takes the step until `ready`, the caller from then until
/// its following next().
struct Loader::Slot {
  Step step;
  AlignedFloats x;
  std::vector<std::int32_t> labels;
  Batch batch;
  std::exception_ptr error;  // once set, the caller never gets past this step
  bool ready = false;
};

Loader::Loader(std::shared_ptr<const Dataset> dataset, const sampler::DistributedSampler& sampler,
               LoaderOptions options)
    : Loader(dataset, std::make_unique<SampledSteps>(sampler), options) {
  LOCKSTEP_ASSERT(sampler.config().length == dataset->size(), "a sampler of {} for {} samples", sampler.config().length,
                  dataset->size());
}

Loader::Loader(std::shared_ptr<const Dataset> dataset, sampler::Slice range, std::uint64_t batch, LoaderOptions options)
    : Loader(dataset, std::make_unique<RangeSteps>(range, batch), options) {
  LOCKSTEP_ASSERT(range.end() <= dataset->size(), "samples up to {} of {}", range.end(), dataset->size());
}

Loader::Loader(std::shared_ptr<const Dataset> dataset, std::unique_ptr<StepSource> steps, LoaderOptions options)
    : dataset_(std::move(dataset)), slots_(slot_count(options)), steps_(std::move(steps)) {
  const std::uint64_t most = steps_->max_count();
  for (Slot& slot : slots_) {
    slot.x = allocate_floats(most, dataset_->sample_elements());
    slot.labels.resize(most);
    slot.step.indices.reserve(most);
  }
  start_workers(options.workers);
}

Loader::~Loader() { stop_workers(); }

void Loader::start_workers(int count) {
  const AllSignalsBlocked blocked;
  workers_.reserve(static_cast<std::size_t>(count));
  try {
    for (int i = 0; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (const std::exception& error) {
    const std::size_t started = workers_.size();
    stop_workers();
    throw UsageError(fmt::format("cannot start data worker {} of {}: {}", started + 1, count, error.what()),
                     "give fewer data workers (--workers)");
  }
}

void Loader::stop_workers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  slot_free_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
}

Loader::Slot& Loader::slot_of(std::uint64_t step) { return slots_[step % slots_.size()]; }

const Batch& Loader::next() {
  std::unique_lock lock(mutex_);
  if (released_ != taken_) {
    released_ = taken_;
    slot_free_.notify_one();
  }
  if (workers_.empty() && produced_ == taken_) produce(lock, 0);
  Slot& slot = slot_of(taken_);
  slot_ready_.wait(lock, [&] { return produced_ > taken_ && slot.ready; });
  if (slot.error) std::rethrow_exception(slot.error);
  ++taken_;
  return slot.batch;
}

void Loader::work(int worker) {
  std::unique_lock lock(mutex_);
  while (true) {
    slot_free_.wait(lock, [this] { return stopping_ || produced_ < released_ + slots_.size(); });
    if (stopping_) return;
    produce(lock, worker);
  }
}

// Takes the following step, under the lock so that steps go out in order, and fills its slot without the lock.
void Loader::produce(std::unique_lock<std::mutex>& lock, int worker) {
  const std::uint64_t number = produced_++;
  Slot& slot = slot_of(number);
  slot.ready = false;
  try {
    steps_->next(slot.step);
    lock.unlock();
    const auto begin = Clock::now();
    assemble(slot);
    slot.batch.worker = worker;
    slot.batch.assembly_begin = begin;
    slot.batch.assembly_end = Clock::now();
  } catch (...) {
    slot.error = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  slot.ready = true;
  if (number == taken_) slot_ready_.notify_one();
}

void Loader::assemble(Slot& slot) const {
  const std::size_t elements = dataset_->sample_elements();
  const std::size_t count = slot.step.indices.size();
  const std::span<float> x(slot.x.get(), count * elements);
  const std::span<std::int32_t> labels(slot.labels.data(), count);
  for (std::size_t i = 0; i < count; ++i) {
    if (stopping_.load(std::memory_order_relaxed)) return;
    dataset_->read(slot.step.indices[i], x.subspan(i * elements, elements), labels[i]);
  }
  slot.batch.x = x;
  slot.batch.labels = labels;
  slot.batch.plan = slot.step.plan;
  slot.batch.state_after = slot.step.state_after;
}

}  // namespace lockstep::data
