#include "comm/shm/pair_rings.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace lockstep::comm {
namespace {

// Of all rings from one rank, and of one: what is in it should still be in the cache when it is read.
constexpr std::size_t kRankBytes = 512 << 10;
constexpr std::size_t kMostBytes = 128 << 10, kLeastBytes = 4 << 10;

// Fewer bytes are copied twice in less time than a system call and an answer take. Of more the reader would not look at
// other ranks for long.
constexpr std::size_t kLeastOffer = 8 << 10, kMostOffer = 4 << 20;

}  // namespace

std::size_t PairRings::capacity_of(int ranks) {
  return std::clamp(std::bit_floor(kRankBytes / static_cast<std::size_t>(ranks)), kLeastBytes, kMostBytes);
}

std::size_t PairRings::bytes_of(int ranks) {
  return static_cast<std::size_t>(ranks) * (sizeof(PairRing) + capacity_of(ranks));
}

PairRings::PairRings(int local, int ranks, const Segment& board, std::size_t offset)
    : local_(local),
      capacity_(capacity_of(ranks)),
      offers_(static_cast<std::size_t>(ranks), true),
      waits_(static_cast<std::size_t>(ranks)),
      taken_(static_cast<std::size_t>(ranks)) {
  for (int i = 0; i < ranks; ++i) parts_.push_back(board.part(i) + offset);
}

PairRing& PairRings::ring(int from, int to) const {
  return *reinterpret_cast<PairRing*>(parts_[static_cast<std::size_t>(from)] +
                                      static_cast<std::size_t>(to) * (sizeof(PairRing) + capacity_));
}

PairRings::Moved PairRings::write_some(int to, std::span<const std::byte> bytes) {
  PairRing& ring = this->ring(local_, to);
  const auto reader = static_cast<std::size_t>(to);
  if (waits_[reader]) {
    if (ring.answers.load(std::memory_order_acquire) < ring.offers.load(std::memory_order_relaxed)) return {};
    waits_[reader] = false;
    if (ring.taken_bytes < ring.offered_bytes) offers_[reader] = false;
    if (ring.taken_bytes > 0) return {static_cast<std::size_t>(ring.taken_bytes), false};
  }
  if (offers_[reader] && bytes.size() >= kLeastOffer) {
    ring.offered_address = reinterpret_cast<std::uintptr_t>(bytes.data());
    ring.offered_bytes = std::min(bytes.size(), kMostOffer);
    ring.writer_pid = ::getpid();
    ring.offers.store(ring.offers.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    waits_[reader] = true;
    return {0, true};
  }
  const std::uint64_t written = ring.written.load(std::memory_order_relaxed);
  const std::size_t free = capacity_ - (written - ring.read.load(std::memory_order_acquire));
  const std::size_t count = std::min(free, bytes.size());
  if (count == 0) return {};
  auto* const memory = reinterpret_cast<std::byte*>(&ring + 1);
  const std::size_t at = written % capacity_, first = std::min(count, capacity_ - at);
  std::memcpy(memory + at, bytes.data(), first);
  std::memcpy(memory, bytes.data() + first, count - first);
  ring.written.store(written + count, std::memory_order_release);
  return {count, true};
}

PairRings::Moved PairRings::read_some(int from, std::span<std::byte> bytes) {
  PairRing& ring = this->ring(from, local_);
  const std::uint64_t read = ring.read.load(std::memory_order_relaxed);
  // An offer comes after what was written before it: it is looked at first, and taken when that has been read.
  const bool offered = ring.offers.load(std::memory_order_acquire) > ring.answers.load(std::memory_order_relaxed);
  const std::size_t there = ring.written.load(std::memory_order_acquire) - read;
  const std::size_t count = std::min(there, bytes.size());
  if (count == 0) return there == 0 && offered && !bytes.empty() ? read_offered(from, bytes) : Moved{};
  const auto* const memory = reinterpret_cast<const std::byte*>(&ring + 1);
  const std::size_t at = read % capacity_, first = std::min(count, capacity_ - at);
  std::memcpy(bytes.data(), memory + at, first);
  std::memcpy(bytes.data() + first, memory, count - first);
  ring.read.store(read + count, std::memory_order_release);
  return {count, true};
}

PairRings::Moved PairRings::read_offered(int from, std::span<std::byte> bytes) {
  PairRing& ring = this->ring(from, local_);
  std::size_t& taken = taken_[static_cast<std::size_t>(from)];
  iovec to = {.iov_base = bytes.data(), .iov_len = std::min(bytes.size(), ring.offered_bytes - taken)};
  iovec source = {.iov_base = reinterpret_cast<void*>(ring.offered_address + taken), .iov_len = to.iov_len};
  const ssize_t got = ::process_vm_readv(static_cast<pid_t>(ring.writer_pid), &to, 1, &source, 1, 0);
  const std::size_t count = got > 0 ? static_cast<std::size_t>(got) : 0;
  taken += count;
  const int code = got < 0 ? errno : 0;
  const bool forbidden = got < 0 && code != EINTR;
  if ((code == EPERM || code == ENOSYS) && !std::exchange(reported_, true))
    log_info(
        "messages between ranks of this host are copied twice: reading another process's memory is forbidden ({}) → "
        "allow process_vm_readv in the seccomp profile, or set kernel.yama.ptrace_scope to 0, if they are large",
        errno_text(code));
  if (taken < ring.offered_bytes && !forbidden) return {count, false};
  ring.taken_bytes = taken;
  taken = 0;
  ring.answers.store(ring.answers.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  return {count, true};
}

}  // namespace lockstep::comm
