// Reads batches ahead of training, on its own threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/device.h"
#include "lockstep/base/misuse.h"
#include "lockstep/data/dataset.h"
#include "lockstep/sampler/sampler.h"

namespace lockstep::data {

class StepSource;

/// A rank's part of one step. Of mixed samples (Dataset::Info::mixing) a training has targets (count, classes), the
/// probabilities of all classes, and no labels. The memory is the loader's: valid, and the caller's to overwrite, until
/// the following next(). A GPU may read LoaderOptions::memory after Backend::stage() has returned: next() waits for
/// that.
struct Batch {
  std::uint64_t count = 0;         // samples: plan.local_count
  std::span<float> x;              // (count, sample dims…), 64-byte aligned; empty where samples are tokens
  std::span<std::int32_t> tokens;  // (count, T), 64-byte aligned; empty where they are not
  std::span<std::int32_t> labels;  // (count, target dims…), or (count, T) of tokens; empty where targets are numbers
  std::span<float> targets;        // (count, target dims…); empty where they are labels
  std::span<const Array> further;  // (count, dims…) each: the data set's further inputs
  sampler::StepPlan plan;
  sampler::SamplerState state_after;       // resuming from here continues with the following step
  std::span<const std::uint64_t> indices;  // (count) samples of the data set, in the batch's order
  std::exception_ptr
      error;  // with LoaderOptions::keeps_going: what reading has thrown; x and targets mean nothing then

  // For traces: the thread that assembled it (from 0; next() itself where there are none), and when.
  int worker = 0;
  Clock::time_point assembly_begin, assembly_end;

  bool empty() const { return count == 0; }
};

struct LoaderOptions {
  int workers = 1;  // threads; 0: batches are assembled inside next()
  int depth = 0;    // batches kept ready, at most; 0: two per worker
  /// Where the buffers come from; nullptr: the heap. Backend::staging_memory() is what a GPU copies from fastest.
  std::shared_ptr<MemorySource> memory = nullptr;
  /// A batch that cannot be read has an error (Batch::error), and the ones after it follow; else next() throws for
  /// good.
  bool keeps_going = false;
};

/// A row of batches in the steps' order, whatever the number of workers. A fixed ring of depth + 1 buffers (one is the
/// caller's) is filled again and again: within an epoch nothing is allocated.
///
/// One thread uses it. It must outlive its batches, its epochs and their iterators. A violation is an error where it
/// can be detected, for a temporary loader at compile time. It shares the data set and the memory's source, and copies
/// the sampler: what is done to that one later changes nothing. Workers block all signals, so that handlers run on the
/// program's own threads. What a worker's read throws comes out of the next() whose batch it spoils, and out of each
/// later one, or lies in that batch (LoaderOptions::keeps_going). The destructor waits for at most one sample per
/// worker.
///
/// Constructors throw UsageError for no data set, a sampler of another length, a range outside of the data set, a batch
/// of 0, numbers of workers (0 to 1024) or depths that cannot be, and batches for which there is no memory; DeviceError
/// where the system has no thread for a worker.
class Loader {
 public:
  /// Training: the sampler's steps without end, from its present state; state_after says how far each batch is. Empty
  /// batches are steps in which this rank has no sample. Samples are read changed (Dataset::read_augmented), by draws
  /// that are a pure function of the sampler's seed, the epoch and the sample.
  Loader(std::shared_ptr<const Dataset> dataset, const sampler::DistributedSampler& sampler, LoaderOptions options);
  /// Evaluation: `range` of the data set in order and as it is, `batch` samples at a time; then empty batches.
  Loader(std::shared_ptr<const Dataset> dataset, sampler::Slice range, std::uint64_t batch, LoaderOptions options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// What a training's buffers take, in bytes, for batches of at most `most` samples.
  static std::uint64_t bytes_of(const Dataset& dataset, std::uint64_t most, const LoaderOptions& options);

  /// Waits for the following batch; the buffers of the one before are filled again.
  const Batch& next() &;
  const Batch& next() && = delete;  // of a temporary, the batch would be gone at once

  /// The rest of the epoch, for one range-based for: `for (const Batch& batch : loader.epoch())`. After a `break`, the
  /// next loop continues there. An evaluation has one epoch; those that follow have no batch. One loop at a time, and
  /// no next() within it: each ends the other's batch.
  class Epoch;
  Epoch epoch() &;
  Epoch epoch() && = delete;

 private:
  struct Slot;

  Loader(std::unique_ptr<StepSource> steps, bool mixes, std::shared_ptr<const Dataset> dataset, LoaderOptions options);
  void start_workers(int count);
  void stop_workers();
  void work(int worker);
  void produce(std::unique_lock<std::mutex>& lock, int worker);
  void assemble(Slot& slot, int worker) const;
  void read_mixed(Slot& slot, std::uint64_t index, std::size_t i, int worker) const;
  Slot& slot_of(std::uint64_t step);

  std::shared_ptr<const Dataset> dataset_;
  std::shared_ptr<MemorySource> memory_;
  const bool mixes_;  // Dataset::Info::mixing
  const bool keeps_going_;
  std::vector<Slot> slots_;

  std::mutex mutex_;  // guards the members below and the ownership of slots
  std::condition_variable slot_free_;
  std::condition_variable slot_ready_;
  std::unique_ptr<StepSource> steps_;
  std::uint64_t produced_ = 0;  // steps that have been handed to a worker
  std::uint64_t taken_ = 0;     // steps that have been handed to the caller; the last of them is still in use
  std::uint64_t released_ = 0;  // steps whose slot is free again

  std::atomic<bool> stopping_ = false;
  std::vector<std::thread> workers_;
  Lifetime lifetime_;
};

class Loader::Epoch {
 public:
  struct End {};
  class Iterator {
   public:
    Iterator(Loader& loader, Lifetime::Ref lifetime) : loader_(loader), lifetime_(lifetime) {
      if (!lifetime_.alive()) [[unlikely]]
        refuse_gone();
      take();
    }
    const Batch& operator*() const { return *batch_; }
    /// Throws UsageError where the loader is gone.
    Iterator& operator++() {
      if (!lifetime_.alive()) [[unlikely]]
        refuse_gone();
      if (batch_->plan.last_of_epoch)
        batch_ = nullptr;
      else
        take();
      return *this;
    }
    friend bool operator==(const Iterator& it, End) { return it.batch_ == nullptr; }

   private:
    void take() {
      batch_ = &loader_.next();
      if (batch_->plan.global_count == 0) batch_ = nullptr;  // after an evaluation
    }

    [[noreturn]] static void refuse_gone();

    Loader& loader_;
    Lifetime::Ref lifetime_;
    const Batch* batch_ = nullptr;
  };

  explicit Epoch(Loader& loader) : loader_(loader), lifetime_(loader.lifetime_.ref()) {}
  /// Throws UsageError where the loader is gone.
  Iterator begin() const { return Iterator(loader_, lifetime_); }
  End end() const { return {}; }

 private:
  Loader& loader_;
  Lifetime::Ref lifetime_;
};

inline Loader::Epoch Loader::epoch() & { return Epoch(*this); }

}  // namespace lockstep::data
