#include "base/cuda/runtime.h"
#include "base/error.h"
#include "comm/nccl/device_arena.h"
#include "lockstep/comm/device_group.h"

namespace lockstep::comm {
namespace {

/// As SelfGroup, but that the work in question is the stream's: an operation is done when what came before it is. A
/// part that is apart from the rest is copied.
class DeviceSelfGroup final : public DeviceGroup {
 public:
  explicit DeviceSelfGroup(const DeviceGroupOptions& options)
      : DeviceGroup(0, 1, options.timeout.value_or(std::chrono::seconds(300)), options.device),
        producer_(options.producer),
        bytes_(options.producer) {}

  StreamView producer_stream() const override { return producer_; }
  std::string name() const override { return "self"; }
  void copy(void* to, const void* from, std::size_t bytes) override { bytes_.copy(to, from, bytes); }
  void zero(const Region& region) override {
    check_region(region, "zeroing");
    bytes_.zero(region.data(), region.bytes());
  }
  std::vector<std::vector<std::byte>> all_gather_objects(std::span<const std::byte> mine) override {
    return {{mine.begin(), mine.end()}};
  }
  void poll() override {}
  void shutdown() override {}

  void begin_capture() override {
    LOCKSTEP_ASSERT(!capturing_, "a capture in a capture");
    capturing_ = true;
    before_ = last_issued();
  }
  std::uint64_t end_capture() override {
    LOCKSTEP_ASSERT(capturing_, "the end of a capture that was not begun");
    capturing_ = false;
    const std::uint64_t count = last_issued() - before_;
    set_last_issued(before_);
    return count;
  }
  void replayed(std::uint64_t count) override { set_last_issued(last_issued() + count); }

  void time_operations(bool) override {}
  std::vector<OpTime> device_times(const CudaEvent&) override { return {}; }

 protected:
  std::unique_ptr<Arena> map_arena(std::size_t bytes) override {
    DeviceArena::check_size(bytes);
    return DeviceArena::allocate(bytes, nullptr);
  }
  std::vector<std::string> exchange(const std::string& mine) override { return {mine}; }
  bool has_let_go(std::uint64_t) const noexcept override { return true; }  // freeing waits for the GPU
  void start(const Op& op) override {
    if (op.part == nullptr || op.part == op.data || op.count == 0) return;
    const bool gathers = op.kind == OpKind::kAllGather;
    check_cuda(cudaMemcpyAsync(gathers ? op.data : op.part, gathers ? op.part : op.data, op.bytes(),
                               cudaMemcpyDeviceToDevice, native(producer_)),
               "copying a rank's own part");
  }
  bool is_done(std::uint64_t) override { return true; }
  void wait_done(std::uint64_t, Deadline) override {
    LOCKSTEP_ASSERT(!capturing_, "a wait of the host in a capture");
    check_cuda(cudaStreamSynchronize(native(producer_)), "waiting for a stream");
  }
  void make_wait(std::uint64_t, StreamView stream) override {
    if (stream.native == producer_.native) return;
    ready_.record(native(producer_));
    ready_.make_wait(native(stream));
  }

 private:
  const StreamView producer_;
  DeviceBytes bytes_;
  CudaEvent ready_;
  bool capturing_ = false;
  std::uint64_t before_ = 0;  // a capture
};

}  // namespace

std::unique_ptr<DeviceGroup> make_device_self_group(const DeviceGroupOptions& options) {
  check_device(options.device);
  check_cuda(cudaSetDevice(options.device), "choosing a GPU");
  return std::make_unique<DeviceSelfGroup>(options);
}

}  // namespace lockstep::comm
