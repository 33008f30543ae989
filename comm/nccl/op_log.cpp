#include "comm/nccl/op_log.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/flight_record.h"
#include "comm/nccl/kernels.h"

namespace lockstep::comm {
namespace {

constexpr std::size_t kDeviceBytes = 128;

}  // namespace

void OpLog::complete(std::uint64_t completed) {
  if (completed == completed_) return;
  for (std::uint64_t done = completed_ + 1; done <= std::min(completed, launched_); ++done)
    flight::complete(at(done).flight);
  completed_ = completed;
  progress_ = RunningClock::now();
}

std::uint64_t OpLog::first_blocking(std::uint64_t count) const {
  const std::uint64_t last = launched_ + count;
  return last > completed_ + under_way_.size() ? last - under_way_.size() : 0;
}

void OpLog::launch(const Op& op) {
  LOCKSTEP_ASSERT(op.sequence == launched_ + 1, "operation #{} after #{}", op.sequence, launched_);
  if (!any_under_way()) progress_ = RunningClock::now();
  launched_ = op.sequence;
  history_ = digest(op, history_);
  Op& launched = at(launched_) = op;
  launched.op_index = launched_;
  launched.history = history_;
  launched.flight = record_issue(launched, flight_group_);
}

std::uint64_t OpLog::end_capture() {
  const std::uint64_t count = captured_.size();
  if (count == 0) return 0;
  if (under_way_.size() < 2 * count) {
    std::vector<Op> larger(2 * count);
    for (std::uint64_t sequence = completed_ + 1; sequence <= launched_; ++sequence)
      larger[sequence % larger.size()] = at(sequence);
    under_way_ = std::move(larger);
  }
  in_graphs_[count] = std::exchange(captured_, {});
  return count;
}

void OpLog::replay(std::uint64_t count, std::int64_t step) {
  for (Op op : in_graphs_.at(count)) {
    op.sequence = launched_ + 1;
    op.step = step;
    launch(op);
  }
}

void EventRing::record(std::uint64_t sequence, cudaStream_t stream) {
  Entry& entry = events_[recorded_ % kEvents];
  entry.event.record(stream);
  entry.sequence = sequence;
  ++recorded_;
}

void EventRing::make_wait(std::uint64_t sequence, cudaStream_t stream) const {
  const Entry* earliest = nullptr;
  for (std::uint64_t back = 1; back <= recorded_ && back <= kEvents; ++back) {
    const Entry& entry = events_[(recorded_ - back) % kEvents];
    if (entry.sequence < sequence) break;
    earliest = &entry;
  }
  LOCKSTEP_ASSERT(earliest != nullptr, "a stream waits for operation #{}, which was not issued", sequence);
  earliest->event.make_wait(stream);
}

CompletionWord::CompletionWord() : host_(4096) {
  std::memset(host_.data(), 0, host_.bytes());
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, kDeviceBytes), "allocating memory");
  device_ = static_cast<std::byte*>(memory);
  const CudaStream stream;
  check_cuda(cudaMemsetAsync(device_, 0, kDeviceBytes, stream.get()), "zeroing memory");
  stream.synchronize();
}

CompletionWord::~CompletionWord() { static_cast<void>(cudaFree(device_)); }

void CompletionWord::count_up(StreamView stream) {
  launch_count_up(reinterpret_cast<std::uint64_t*>(device_), reinterpret_cast<std::uint64_t*>(host_.data()), stream);
}

void OpTimer::turn(bool on) {
  on_ = on;
  if (on) used_ = 0;
}

void OpTimer::begin(const Op& op, cudaStream_t stream) {
  if (!on_) return;
  if (used_ == timed_.size()) timed_.emplace_back();
  timed_[used_].op = op;
  timed_[used_].begin.record(stream);
}

void OpTimer::end(cudaStream_t stream) {
  if (on_) timed_[used_++].end.record(stream);
}

std::vector<OpTime> OpTimer::times(const CudaEvent& origin) const {
  std::vector<OpTime> times;
  if (used_ > 0) timed_[used_ - 1].end.synchronize();
  for (std::size_t i = 0; i < used_; ++i) {
    const Timed& timed = timed_[i];
    times.push_back({timed.op.sequence, timed.op.kind, timed.op.bytes(), CudaEvent::ms_between(origin, timed.begin),
                     CudaEvent::ms_between(origin, timed.end)});
  }
  return times;
}

}  // namespace lockstep::comm
