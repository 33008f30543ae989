#include "base/cuda/runtime.h"
#include "base/error.h"
#include "bench/timeline.h"
#include "lockstep/comm/device_group.h"

namespace lockstep::bench {
namespace {

class CudaTimer final : public DeviceTimer {
 public:
  CudaTimer(nn::Backend& backend, comm::DeviceGroup& gradients)
      : stream_(native(backend.stream())), gradients_(gradients) {}

  void begin() override {
    ready_.clear();
    gradients_.time_operations(true);
    begin_.record(stream_);
  }

  void bucket_ready(std::size_t bytes) override {
    ready_.push_back({bytes, CudaEvent(CudaEvent::Timing::kOn)});
    ready_.back().event.record(stream_);
  }

  void end() override { end_.record(stream_); }

  Timeline read() override {
    end_.synchronize();
    const auto operations = gradients_.device_times(begin_);
    gradients_.time_operations(false);
    LOCKSTEP_ASSERT(operations.empty() || operations.size() == ready_.size(), "{} operations of {} buckets",
                    operations.size(), ready_.size());
    Timeline timeline{.clock = "device", .buckets = {}, .end_ms = CudaEvent::ms_between(begin_, end_)};
    for (std::size_t i = 0; i < ready_.size(); ++i) {
      const double ready = CudaEvent::ms_between(begin_, ready_[i].event);
      timeline.last_ready_ms = ready;
      timeline.buckets.push_back({.bytes = ready_[i].bytes,
                                  .ready_ms = ready,
                                  .start_ms = operations.empty() ? ready : operations[i].begin_ms,
                                  .end_ms = operations.empty() ? ready : operations[i].end_ms});
    }
    return timeline;
  }

 private:
  struct Ready {
    std::size_t bytes;
    CudaEvent event;
  };
  cudaStream_t stream_;
  comm::DeviceGroup& gradients_;
  CudaEvent begin_{CudaEvent::Timing::kOn}, end_{CudaEvent::Timing::kOn};
  std::vector<Ready> ready_;
};

}  // namespace

std::unique_ptr<DeviceTimer> make_device_timer(nn::Backend& backend, comm::ProcessGroup& gradients) {
  auto* const group = dynamic_cast<comm::DeviceGroup*>(&gradients);
  LOCKSTEP_ASSERT(group != nullptr, "a timeline of a GPU over '{}'", gradients.name());
  return std::make_unique<CudaTimer>(backend, *group);
}

}  // namespace lockstep::bench
