#include "comm/hosts/intra_host_sync.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/error.h"
#include "comm/engine.h"
#include "comm/shm/pair_rings.h"

namespace lockstep::comm {

WakeupPipes::WakeupPipes() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    throw DeviceError(fmt::format("making a pipe: {}", errno_text(errno)), "raise ulimit -n");
  read_end_.reset(ends[0]);
  write_end_.reset(ends[1]);
}

void WakeupPipes::open(std::size_t local, int pid, int number) {
  const std::string path = fmt::format("/proc/{}/fd/{}", pid, number);
  // For reading too: writing to a pipe whose readers have all died would be the end of this process.
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!fd) throw DeviceError(fmt::format("cannot open another rank's pipe {}: {}", path, errno_text(errno)));
  if (others_.size() <= local) others_.resize(local + 1);
  others_[local] = std::move(fd);
}

void WakeupPipes::wake(std::size_t local) const {
  // A pipe that is full wakes already.
  [[maybe_unused]] const ssize_t written = ::write(others_[local].get(), "", 1);
}

void WakeupPipes::wake_own() const { [[maybe_unused]] const ssize_t written = ::write(write_end_.get(), "", 1); }

void WakeupPipes::drain() const {
  std::array<char, 64> bytes;
  while (::read(read_end_.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size())) {
  }
}

static_assert(offsetof(NodeControlBlock, control) == 0);

HostBoard::HostBoard(int ranks, int here)
    : texts(align_up(sizeof(NodeControlBlock))),
      rings(texts + static_cast<std::size_t>(ranks) * Engine::kTextBytes),
      bytes(rings + PairRings::bytes_of(here)) {}

IntraHostSync::IntraHostSync(int local, int size, int drivers, const Segment& board, WakeupPipes pipes)
    : SlotBoard(local, size, board), drivers_(drivers), pipes_(std::move(pipes)) {
  for (int i = 0; i < size; ++i) nodes_.push_back(reinterpret_cast<NodeControlBlock*>(board.part(i)));
}

// Whoever clears `asleep` writes into the pipe, once (see shm/slot_board.cpp).

void IntraHostSync::wake_sleepers() const {
  if (size() == 1) return;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int i = 0; i < size(); ++i)
    if (i != local()) wake_if_asleep(i);
}

void IntraHostSync::wake(int local) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_if_asleep(local);
}

void IntraHostSync::wake_if_asleep(int local) const {
  if (control(local).asleep.load(std::memory_order_relaxed) != 0 &&
      control(local).asleep.exchange(0, std::memory_order_relaxed) != 0)
    pipes_.wake(static_cast<std::size_t>(local));
}

void IntraHostSync::wake_up() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (control(local()).asleep.exchange(0, std::memory_order_relaxed) != 0) pipes_.wake_own();
}

void IntraHostSync::announce_sleep() const {
  control(local()).asleep.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void IntraHostSync::end_sleep() const {
  // Whoever has cleared it writes, or has written: a byte that comes later only ends the next sleep early.
  if (control(local()).asleep.exchange(0, std::memory_order_relaxed) == 0) pipes_.drain();
}

void IntraHostSync::blame(std::uint64_t index, const std::vector<int>& ranks) const {
  NodeControlBlock& own = node(local());
  own.blame_index.store(0, std::memory_order_release);
  const std::size_t count = std::min(ranks.size(), NodeControlBlock::kMostBlamed);
  for (std::size_t i = 0; i < count; ++i) own.blamed[i].store(ranks[i], std::memory_order_relaxed);
  own.blamed_count.store(static_cast<std::uint32_t>(count), std::memory_order_relaxed);
  own.blame_index.store(index, std::memory_order_release);
}

std::vector<int> IntraHostSync::blamed_by(int local, std::uint64_t index) const {
  const NodeControlBlock& theirs = node(local);
  std::vector<int> ranks;
  if (theirs.blame_index.load(std::memory_order_acquire) != index) return ranks;
  const std::size_t count =
      std::min<std::size_t>(theirs.blamed_count.load(std::memory_order_relaxed), NodeControlBlock::kMostBlamed);
  for (std::size_t i = 0; i < count; ++i) ranks.push_back(theirs.blamed[i].load(std::memory_order_relaxed));
  return ranks;
}

void IntraHostSync::announce(const AbortReason& reason) const {
  NodeControlBlock& first = node(0);
  std::uint32_t none = NodeControlBlock::kNoAbort;
  if (!first.abort_state.compare_exchange_strong(none, NodeControlBlock::kAbortBeingWritten)) return;
  const std::string bytes = reason.encode();
  std::memcpy(first.reason.data(), bytes.data(), bytes.size());
  first.abort_bytes = static_cast<std::uint32_t>(bytes.size());
  first.abort_state.store(NodeControlBlock::kAbortWritten, std::memory_order_release);
  wake_sleepers();
}

std::optional<AbortReason> IntraHostSync::abort_reason() const {
  const NodeControlBlock& first = node(0);
  if (first.abort_state.load(std::memory_order_acquire) != NodeControlBlock::kAbortWritten) return std::nullopt;
  return AbortReason::decode({first.reason.data(), first.abort_bytes});
}

}  // namespace lockstep::comm
