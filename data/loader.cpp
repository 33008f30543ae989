#include "lockstep/data/loader.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/flight_record.h"
#include "base/signals.h"
#include "base/splitmix.h"
#include "data/mixing.h"

namespace lockstep::data {

/// One step for a loader: what it is, and this rank's samples.
struct Step {
  sampler::StepPlan plan;
  sampler::SamplerState state_after;   // what to resume from once the step is done
  std::vector<std::uint64_t> indices;  // plan.local_count of them
  /// Training reads sample i changed at random, by mix64(*key, i), which depends on neither the rank, the world size
  /// nor the place within the epoch; nothing: samples are read as they are.
  std::optional<std::uint64_t> key;
};

/// A row of steps. Not thread-safe.
class StepSource {
 public:
  virtual ~StepSource() = default;
  /// An upper bound of plan.local_count.
  virtual std::uint64_t max_count() const = 0;
  /// Writes the next step and advances; allocates nothing if step.indices has capacity for max_count().
  virtual void next(Step& step) = 0;
};

namespace {

constexpr int kMostWorkers = 1024;

/// Memory of a batch, given back to where it came from.
class Buffer {
 public:
  Buffer() = default;
  Buffer(MemorySource& source, std::size_t bytes) : source_(&source), bytes_(bytes), data_(source.allocate(bytes)) {}
  Buffer(Buffer&& other) noexcept
      : source_(other.source_), bytes_(other.bytes_), data_(std::exchange(other.data_, nullptr)) {}
  Buffer& operator=(Buffer other) noexcept {
    std::swap(source_, other.source_);
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) source_->free(data_, bytes_);
  }
  template <class T>
  T* data() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  MemorySource* source_ = nullptr;
  std::size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

/// A buffer for `samples` times `elements` numbers of four bytes.
Buffer allocate_numbers(MemorySource& source, std::uint64_t samples, std::uint64_t elements) {
  std::size_t bytes = 0;
  constexpr std::size_t kMost = std::size_t{1} << 60;
  if (!__builtin_mul_overflow(samples, elements, &bytes) && !__builtin_mul_overflow(bytes, 4, &bytes) &&
      bytes < kMost) {
    try {
      return {source, std::max<std::size_t>(bytes, 64)};
    } catch (const Error&) {
      // Said below, in the caller's terms.
    }
  }
  throw UsageError(fmt::format("no memory for a batch of {} samples of {} numbers", samples, elements),
                   "give a smaller batch, or fewer data workers");
}

std::size_t slot_count(const LoaderOptions& options) {
  if (options.workers < 0 || options.workers > kMostWorkers) {
    throw UsageError(fmt::format("{} data workers", options.workers), fmt::format("give 0 to {}", kMostWorkers));
  }
  check_usage(options.depth >= 0, "a negative number of batches to prefetch", "give 0 or more");
  if (options.workers == 0) return 1;
  return 1 + static_cast<std::size_t>(options.depth > 0 ? options.depth : 2 * options.workers);
}

/// Training: the sampler's steps, without end.
class SampledSteps final : public StepSource {
 public:
  explicit SampledSteps(sampler::DistributedSampler sampler) : sampler_(std::move(sampler)) {}
  std::uint64_t max_count() const override { return sampler_.max_local_count(); }
  void next(Step& step) override {
    step.plan = sampler_.plan();
    step.indices.resize(step.plan.local_count);
    sampler_.indices(step.plan, step.indices);
    // Other bits than those that the same seed orders the epoch by.
    constexpr std::uint64_t kChanges = 0x6368616e676573;
    step.key = mix64(sampler_.config().seed ^ kChanges, step.plan.epoch);
    sampler_.advance();
    step.state_after = sampler_.state();
  }

 private:
  sampler::DistributedSampler sampler_;
};

/// Evaluation: the samples of `range` in order, `batch` ≥ 1 at a time, and empty steps after the last. The plans know
/// this rank's part only: global and local ranges are the same, state_after stays at zero.
class RangeSteps final : public StepSource {
 public:
  RangeSteps(sampler::Slice range, std::uint64_t batch) : range_(range), batch_(batch) {
    check_usage(batch >= 1, "an evaluation batch of 0 samples", "give 1 or more");
  }
  std::uint64_t max_count() const override { return std::min(batch_, range_.count); }
  void next(Step& step) override {
    step.plan = {};
    step.plan.step_in_epoch = done_ / batch_;
    step.plan.global_begin = step.plan.local_begin = range_.begin + done_;
    step.plan.global_count = step.plan.local_count = std::min(batch_, range_.count - done_);
    done_ += step.plan.local_count;
    step.plan.last_of_epoch = done_ == range_.count;
    step.indices.resize(step.plan.local_count);
    std::iota(step.indices.begin(), step.indices.end(), step.plan.local_begin);
  }

 private:
  sampler::Slice range_;
  std::uint64_t batch_;
  std::uint64_t done_ = 0;
};

}  // namespace

/// The buffers of one batch. A worker owns a slot from when it takes the step until `ready`, the caller from then until
/// its following next().
struct Loader::Slot {
  Step step;
  Buffer x;                    // f32, or i32 tokens
  Buffer targets;              // labels (i32), or numbers (f32)
  std::vector<float> partner;  // the sample that one is mixed with
  std::vector<Buffer> further;
  std::vector<Array> arrays, sample;  // in `further`: of the batch, and of the sample that is read
  Batch batch;
  std::exception_ptr error;  // once set, the caller never gets past this step, unless keeps_going_
  bool ready = false;
};

namespace {

// Before threads read.
const Dataset& there(const std::shared_ptr<const Dataset>& dataset) {
  check_usage(dataset != nullptr, "a loader without a data set", "give it one");
  return *dataset;
}

const sampler::DistributedSampler& checked(const sampler::DistributedSampler& sampler, const Dataset& dataset) {
  if (sampler.config().length != dataset.size())
    throw UsageError(fmt::format("a sampler of {} samples for {}, which has {}", sampler.config().length,
                                 dataset.name(), dataset.size()),
                     "make the sampler with .length = dataset->size()");
  return sampler;
}

/// Whether a training of them mixes samples.
bool mixes(const Dataset& dataset) {
  const Dataset::Info& info = dataset.info();
  if (!info.mixing.any()) return false;
  if (info.tokens || info.numeric_targets || info.dims.size() != 3 || dataset.targets_per_sample() != 1 ||
      !info.further_inputs.empty() || info.classes < 1)
    throw UsageError(fmt::format("samples of {} are to be mixed, and are not images with one label each", info.name),
                     "leave Dataset::Info::mixing out");
  return true;
}

/// Numbers of a batch for each sample: of what training mixes, targets are probabilities of all classes.
std::uint64_t targets_of(const Dataset& dataset, bool mixed) {
  return mixed ? static_cast<std::uint64_t>(dataset.classes()) : dataset.targets_per_sample();
}

sampler::Slice checked(sampler::Slice range, const Dataset& dataset) {
  if (range.count > dataset.size() || range.begin > dataset.size() - range.count)
    throw UsageError(fmt::format("samples from {} up to {} of {}, which has {}", range.begin, range.end(),
                                 dataset.name(), dataset.size()),
                     "give a range of the data set's own samples: {0, dataset->size()} is all of them");
  return range;
}

}  // namespace

void Loader::Epoch::Iterator::refuse_gone() {
  throw UsageError("an epoch is continued after its loader was destroyed",
                   "keep the loader until the loop over its batches has ended");
}

// In braces arguments are evaluated in their order: the data set is looked at, and then moved.
Loader::Loader(std::shared_ptr<const Dataset> dataset, const sampler::DistributedSampler& sampler,
               LoaderOptions options)
    : Loader{std::make_unique<SampledSteps>(checked(sampler, there(dataset))), mixes(there(dataset)),
             std::move(dataset), std::move(options)} {}

std::uint64_t Loader::bytes_of(const Dataset& dataset, std::uint64_t most, const LoaderOptions& options) {
  constexpr std::uint64_t kNumber = 4;
  const bool mixed = dataset.info().mixing.any();
  std::uint64_t numbers = dataset.sample_elements() + targets_of(dataset, mixed);
  for (std::size_t i = 0; i < dataset.further_inputs().size(); ++i) numbers += dataset.further_elements(i);
  return slot_count(options) * (most * numbers + (mixed ? dataset.sample_elements() : 0)) * kNumber;
}

Loader::Loader(std::shared_ptr<const Dataset> dataset, sampler::Slice range, std::uint64_t batch, LoaderOptions options)
    : Loader{std::make_unique<RangeSteps>(checked(range, there(dataset)), batch), false, std::move(dataset),
             std::move(options)} {}

Loader::Loader(std::unique_ptr<StepSource> steps, bool mixes, std::shared_ptr<const Dataset> dataset,
               LoaderOptions options)
    : dataset_(std::move(dataset)),
      memory_(options.memory != nullptr ? std::move(options.memory) : make_host_memory()),
      mixes_(mixes),
      keeps_going_(options.keeps_going),
      slots_(slot_count(options)),
      steps_(std::move(steps)) {
  const std::uint64_t most = steps_->max_count();
  for (Slot& slot : slots_) {
    slot.x = allocate_numbers(*memory_, most, dataset_->sample_elements());
    slot.targets = allocate_numbers(*memory_, most, targets_of(*dataset_, mixes_));
    if (mixes_) slot.partner.resize(dataset_->sample_elements());
    for (std::size_t i = 0; i < dataset_->further_inputs().size(); ++i)
      slot.further.push_back(allocate_numbers(*memory_, most, dataset_->further_elements(i)));
    slot.arrays.resize(slot.further.size());
    slot.sample.resize(slot.further.size());
    slot.step.indices.reserve(most);
  }
  start_workers(options.workers);
}

Loader::~Loader() { stop_workers(); }

void Loader::start_workers(int count) {
  workers_.reserve(static_cast<std::size_t>(count));
  try {
    for (int i = 0; i < count; ++i) workers_.push_back(start_thread([this, i] { work(i); }));
  } catch (const DeviceError& error) {
    const std::size_t started = workers_.size();
    stop_workers();
    throw DeviceError(fmt::format("data worker {} of {} cannot start: {}", started + 1, count, error.what()),
                      fmt::format("give fewer data workers (--workers), or {}", error.remedy()));
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

const Batch& Loader::next() & {
  const bool gives_back = released_ != taken_;  // this thread alone changes the two
  if (gives_back) memory_->wait_until_read();
  std::unique_lock lock(mutex_);
  if (gives_back) {
    released_ = taken_;
    slot_free_.notify_one();
  }
  if (workers_.empty() && produced_ == taken_) produce(lock, 0);
  Slot& slot = slot_of(taken_);
  slot_ready_.wait(lock, [&] { return produced_ > taken_ && slot.ready; });
  if (slot.error && !keeps_going_) std::rethrow_exception(slot.error);
  slot.batch.error = slot.error;
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
  slot.error = nullptr;
  try {
    steps_->next(slot.step);
    slot.batch.plan = slot.step.plan;
    slot.batch.state_after = slot.step.state_after;
    slot.batch.indices = slot.step.indices;
    lock.unlock();
    const auto begin = Clock::now();
    assemble(slot, worker);
    slot.batch.worker = worker;
    slot.batch.assembly_begin = begin;
    slot.batch.assembly_end = Clock::now();
  } catch (...) {
    slot.error = std::current_exception();
    if (keeps_going_) flight::end_reading(worker);
  }
  if (!lock.owns_lock()) lock.lock();
  slot.ready = true;
  if (number == taken_) slot_ready_.notify_one();
}

void Loader::assemble(Slot& slot, int worker) const {
  const std::size_t elements = dataset_->sample_elements(), targets = targets_of(*dataset_, mixes_);
  const std::size_t count = slot.step.indices.size();
  Batch& batch = slot.batch;
  batch.count = count;
  if (mixes_ || dataset_->has_numeric_targets())
    batch.targets = {slot.targets.data<float>(), count * targets};
  else
    batch.labels = {slot.targets.data<std::int32_t>(), count * targets};
  if (dataset_->has_tokens())
    batch.tokens = {slot.x.data<std::int32_t>(), count * elements};
  else
    batch.x = {slot.x.data<float>(), count * elements};
  for (std::size_t a = 0; a < slot.arrays.size(); ++a) {
    const std::size_t values = count * dataset_->further_elements(a);
    if (dataset_->further_inputs()[a].integers)
      slot.arrays[a].integers = {slot.further[a].data<std::int32_t>(), values};
    else
      slot.arrays[a].numbers = {slot.further[a].data<float>(), values};
  }
  batch.further = slot.arrays;
  for (std::size_t i = 0; i < count; ++i) {
    if (stopping_.load(std::memory_order_relaxed)) return;
    const std::uint64_t index = slot.step.indices[i];
    if (mixes_) {
      read_mixed(slot, index, i, worker);
      continue;
    }
    const auto part = [i](const auto& all, std::size_t each) {
      return all.empty() ? all : all.subspan(i * each, each);
    };
    Sample sample{.x = part(batch.x, elements),
                  .tokens = part(batch.tokens, elements),
                  .labels = part(batch.labels, targets),
                  .targets = part(batch.targets, targets),
                  .further = slot.sample};
    for (std::size_t a = 0; a < slot.arrays.size(); ++a)
      slot.sample[a] = {.numbers = part(slot.arrays[a].numbers, dataset_->further_elements(a)),
                        .integers = part(slot.arrays[a].integers, dataset_->further_elements(a))};
    if (slot.step.key) sample.draw = mix64(*slot.step.key, index);
    flight::begin_reading(worker, index);
    dataset_->read_sample(index, sample);
  }
  flight::end_reading(worker);
}

// Sample `index`, the batch's number `i`. Its partner is read as that sample itself is in this epoch.
void Loader::read_mixed(Slot& slot, std::uint64_t index, std::size_t i, int worker) const {
  const auto& dims = dataset_->sample_dims();
  const ImageSize size = {.width = static_cast<int>(dims[1]), .height = static_cast<int>(dims[0])};
  const auto draw_of = [&](std::uint64_t sample) { return mix64(*slot.step.key, sample); };
  const auto classes = static_cast<std::size_t>(dataset_->classes());
  const auto target = slot.batch.targets.subspan(i * classes, classes);
  std::ranges::fill(target, 0.0f);
  const auto read = [&](std::uint64_t sample, std::span<float> x, double share) {
    std::int32_t label = -1;
    flight::begin_reading(worker, sample);
    dataset_->read_sample(sample,
                          {.x = x, .tokens = {}, .labels = {&label, 1}, .targets = {}, .draw = draw_of(sample)});
    if (label < 0 || static_cast<std::size_t>(label) >= classes)
      throw UsageError(
          fmt::format("label {} of sample {} of {}, which has {} classes", label, sample, dataset_->name(), classes),
          "give labels from 0 to below Info::classes");
    target[static_cast<std::size_t>(label)] += static_cast<float>(share);
  };
  const std::span<float> x = slot.batch.x.subspan(i * dataset_->sample_elements(), dataset_->sample_elements());
  const Mix mix = draw_mix(dataset_->info().mixing, draw_of(index), dataset_->size(), size);
  const bool alone = mix.partner == index || mix.share == 1;
  read(index, x, alone ? 1 : mix.share);
  if (alone) return;
  read(mix.partner, slot.partner, 1 - mix.share);
  mix_into(x, slot.partner, mix, size);
}

}  // namespace lockstep::data
