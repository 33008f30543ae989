#include "inference/streams.h"

#include <algorithm>
#include <latch>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/signals.h"
#include "devices/binding.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"

namespace lockstep::inference {
namespace {

// Results that wait for their turn, for each stream: enough that no stream stands still for another's slow input.
constexpr std::uint64_t kWaitingPerStream = 8;
constexpr auto kPatience = std::chrono::milliseconds(50);

/// The processors of each stream; none: wherever it likes.
std::vector<devices::CpuMask> places_of(const nn::Backend& backend, int streams) {
  std::vector<devices::CpuMask> places(static_cast<std::size_t>(streams));
  if (backend.device().kind != DeviceKind::kCpu || env("LOCKSTEP_BIND") == "none") return places;
  const auto cores = devices::discover_cores(devices::allowed_cpus());
  if (cores.empty()) return places;
  for (int i = 0; i < streams; ++i)
    for (const devices::Core& core : devices::core_share(cores, i, streams))
      places[static_cast<std::size_t>(i)] |= core.cpus;
  return places;
}

class Streams {
 public:
  Streams(std::span<nn::Backend* const> devices, const StreamsOptions& options, const MakeWorker& make_worker)
      : devices_(devices),
        options_(options),
        make_worker_(make_worker),
        queue_(options.jobs, kWaitingPerStream * static_cast<std::uint64_t>(options.streams)),
        ready_(options.streams),
        places_(places_of(*devices.front(), options.streams)),
        tallies_(static_cast<std::size_t>(options.streams)) {
    threads_.reserve(tallies_.size());
  }
  ~Streams() { end(); }
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  StreamsResult run() {
    for (std::size_t i = 0; i < tallies_.size(); ++i) threads_.push_back(start_thread([this, i] { live(i); }));
    ready_.wait();
    const auto start = Clock::now();
    let_go();
    std::string piece;
    auto read = OrderedQueue::Read::kNothingYet;
    while (read != OrderedQueue::Read::kEnd) {
      read = queue_.read(piece, kPatience);
      if (!piece.empty()) options_.print(piece);
      throw_if_stopped(options_.doing);
    }
    StreamsResult result{.tally = {}, .wall_s = seconds_between(start, Clock::now())};
    end();
    for (const Tally& tally : tallies_) result.tally.add(tally);
    return result;
  }

 private:
  // From the first to the last moment of a stream. Nothing leaves it as an exception.
  void live(std::size_t i) noexcept {
    bool is_ready = false;
    try {
      if (places_[i].any()) devices::set_allowed_cpus(places_[i]);
      constexpr int kThreads = 1;
      const std::size_t device = device_of_stream(static_cast<int>(i), options_.streams, devices_.size());
      const auto backend = devices_[device]->make_stream(kThreads);
      const auto worker = make_worker_(*backend, device);
      Tally unseen;
      for (std::int64_t run = 0; run < options_.warmup && stop_signal() == 0; ++run)
        worker->run(
            0, [](std::string_view) { return true; }, unseen);
      is_ready = true;
      ready_.count_down();
      start_.wait();
      work(*worker, tallies_[i]);
    } catch (...) {
      queue_.fail(std::current_exception());
    }
    if (!is_ready) ready_.count_down();
  }

  void work(InferWorker& worker, Tally& tally) {
    while (const auto job = queue_.take()) {
      worker.run(
          *job, [&](std::string_view piece) { return queue_.put(*job, piece); }, tally);
      queue_.finish(*job);
    }
  }

  void let_go() {
    if (!std::exchange(started_, true)) start_.count_down();
  }

  void end() {
    queue_.close();
    let_go();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  const std::span<nn::Backend* const> devices_;
  const StreamsOptions& options_;
  const MakeWorker& make_worker_;
  OrderedQueue queue_;
  std::latch ready_, start_{1};
  bool started_ = false;
  std::vector<devices::CpuMask> places_;
  std::vector<Tally> tallies_;
  std::vector<std::thread> threads_;
};

}  // namespace

StreamsResult run_streams(std::span<nn::Backend* const> devices, const StreamsOptions& options,
                          const MakeWorker& make_worker) {
  LOCKSTEP_ASSERT(options.streams >= 1 && !devices.empty());
  return Streams(devices, options, make_worker).run();
}

std::size_t device_of_stream(int stream, int streams, std::size_t devices) {
  const std::size_t used = std::min(devices, static_cast<std::size_t>(streams));
  return static_cast<std::size_t>(stream) * used / static_cast<std::size_t>(streams);
}

}  // namespace lockstep::inference
