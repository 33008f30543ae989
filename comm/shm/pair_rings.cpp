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
      outgoing_(static_cast<std::size_t>(ranks)),
      incoming_(static_cast<std::size_t>(ranks)),
      has_news_(static_cast<std::size_t>(ranks)) {
  for (int i = 0; i < ranks; ++i) parts_.push_back(board.part(i) + offset);
}

PairRing& PairRings::ring(int from, int to) const {
  return *reinterpret_cast<PairRing*>(parts_[static_cast<std::size_t>(from)] +
                                      static_cast<std::size_t>(to) * (sizeof(PairRing) + capacity_));
}

std::size_t PairRings::write_some(int to, std::span<const std::byte> header, std::span<const std::byte> values) {
  PairRing& ring = this->ring(local_, to);
  Outgoing& out = outgoing_[static_cast<std::size_t>(to)];
  take_answers(out, ring);
  if (out.reads == Outgoing::Reads::kRing || values.size() < kLeastOffer) return copy_some(to, header, values);
  const std::size_t copied = header.empty() ? 0 : copy_some(to, header, {});
  if (copied < header.size()) return copied;
  if (out.reads == Outgoing::Reads::kUnknown) {
    const std::size_t taken = try_offer(to, values);
    if (out.reads == Outgoing::Reads::kUnknown || taken > 0) return copied + taken;
  }
  if (out.reads == Outgoing::Reads::kRing) return copied + copy_some(to, {}, values);
  if (out.open.size() == PairRing::kOffers) return copied;
  const std::size_t count = std::min(values.size(), kMostOffer);
  offer(ring, values.first(count));
  out.open.push_back(out.taken);
  out.taken += count;
  has_news_[static_cast<std::size_t>(to)] = true;
  return copied + count;
}

/// Through the ring. Both parts are there at once for whoever reads it: each word of it costs a cache miss.
std::size_t PairRings::copy_some(int to, std::span<const std::byte> header, std::span<const std::byte> values) {
  PairRing& ring = this->ring(local_, to);
  Outgoing& out = outgoing_[static_cast<std::size_t>(to)];
  const std::uint64_t written = ring.written.load(std::memory_order_relaxed);
  const std::size_t bytes = header.size() + values.size();
  if (capacity_ - (written - out.read) < bytes) out.read = ring.read.load(std::memory_order_acquire);
  const std::size_t count = std::min<std::size_t>(capacity_ - (written - out.read), bytes);
  if (count == 0) return 0;
  auto* const memory = reinterpret_cast<std::byte*>(&ring + 1);
  std::size_t at = written % capacity_;
  for (const auto part :
       {header.first(std::min(header.size(), count)), values.first(count - std::min(header.size(), count))}) {
    if (part.empty()) continue;
    const std::size_t first = std::min(part.size(), capacity_ - at);
    std::memcpy(memory + at, part.data(), first);
    std::memcpy(memory, part.data() + first, part.size() - first);
    at = (at + part.size()) % capacity_;
  }
  ring.written.store(written + count, std::memory_order_release);
  out.taken += count;
  has_news_[static_cast<std::size_t>(to)] = true;
  return count;
}

/// The first offer: nothing of it is taken before its answer, which says what will become of others.
std::size_t PairRings::try_offer(int to, std::span<const std::byte> bytes) {
  PairRing& ring = this->ring(local_, to);
  Outgoing& out = outgoing_[static_cast<std::size_t>(to)];
  const std::uint64_t offers = ring.offers.load(std::memory_order_relaxed);
  if (offers == 0) {
    offer(ring, bytes.first(std::min(bytes.size(), kMostOffer)));
    has_news_[static_cast<std::size_t>(to)] = true;
    return 0;
  }
  if (ring.answers.load(std::memory_order_acquire) == 0) return 0;
  out.reads = ring.taken_bytes < ring.open_offers[0].bytes ? Outgoing::Reads::kRing : Outgoing::Reads::kOffered;
  out.taken += ring.taken_bytes;
  return static_cast<std::size_t>(ring.taken_bytes);
}

void PairRings::offer(PairRing& ring, std::span<const std::byte> bytes) const {
  const std::uint64_t offers = ring.offers.load(std::memory_order_relaxed);
  ring.open_offers[offers % PairRing::kOffers] = {.after = ring.written.load(std::memory_order_relaxed),
                                                  .address = reinterpret_cast<std::uintptr_t>(bytes.data()),
                                                  .bytes = bytes.size()};
  ring.writer_pid = ::getpid();
  ring.offers.store(offers + 1, std::memory_order_release);
}

void PairRings::take_answers(Outgoing& out, const PairRing& ring) {
  if (out.open.empty()) return;
  const std::uint64_t unanswered =
      ring.offers.load(std::memory_order_relaxed) - ring.answers.load(std::memory_order_acquire);
  while (out.open.size() > unanswered) out.open.pop_front();
}

bool PairRings::is_flushed(int to, std::uint64_t bytes) {
  Outgoing& out = outgoing_[static_cast<std::size_t>(to)];
  take_answers(out, ring(local_, to));
  return out.open.empty() || bytes <= out.open.front();
}

std::size_t PairRings::read_some(int from, std::span<std::byte> bytes) {
  PairRing& ring = this->ring(from, local_);
  Incoming& in = incoming_[static_cast<std::size_t>(from)];
  if (in.end - in.read < bytes.size()) {
    // In this order: an offer is there when bytes that come after it are.
    in.end = ring.written.load(std::memory_order_acquire);
    const std::uint64_t answers = ring.answers.load(std::memory_order_relaxed);
    if (ring.offers.load(std::memory_order_acquire) > answers) {
      in.end = std::min(in.end, ring.open_offers[answers % PairRing::kOffers].after);
      if (in.read == ring.open_offers[answers % PairRing::kOffers].after && !bytes.empty())
        return read_offered(from, bytes);
    }
  }
  const std::size_t count = std::min<std::size_t>(in.end - in.read, bytes.size());
  if (count == 0) return 0;
  const auto* const memory = reinterpret_cast<const std::byte*>(&ring + 1);
  const std::size_t at = in.read % capacity_, first = std::min(count, capacity_ - at);
  std::memcpy(bytes.data(), memory + at, first);
  std::memcpy(bytes.data() + first, memory, count - first);
  in.read += count;
  // Of little the writer hears when this round ends: it is not short of space, and each word costs a cache miss.
  if (in.read - ring.read.load(std::memory_order_relaxed) >= capacity_ / 4)
    ring.read.store(in.read, std::memory_order_release);
  has_news_[static_cast<std::size_t>(from)] = true;
  return count;
}

std::size_t PairRings::read_offered(int from, std::span<std::byte> bytes) {
  PairRing& ring = this->ring(from, local_);
  const std::uint64_t answers = ring.answers.load(std::memory_order_relaxed);
  const PairRing::Offer& offer = ring.open_offers[answers % PairRing::kOffers];
  std::size_t& copied = incoming_[static_cast<std::size_t>(from)].copied;
  iovec to = {.iov_base = bytes.data(), .iov_len = std::min(bytes.size(), offer.bytes - copied)};
  iovec source = {.iov_base = reinterpret_cast<void*>(offer.address + copied), .iov_len = to.iov_len};
  const ssize_t got = ::process_vm_readv(static_cast<pid_t>(ring.writer_pid), &to, 1, &source, 1, 0);
  const int code = got < 0 ? errno : 0;
  // Of a process that has ended nothing comes any more: whoever waits for it finds that out.
  if (code == EINTR || code == ESRCH) return 0;
  if (got < 0 && answers > 0)
    throw DeviceError(
        fmt::format("what another rank of this host sends cannot be read where it lies: {}", errno_text(code)),
        "keep the memory of a send until it is done, and forbid the reading of a process's memory "
        "(prctl, seccomp) before its first send, if at all");
  if ((code == EPERM || code == ENOSYS) && !std::exchange(reported_, true))
    log_info(
        "messages between ranks of this host are copied twice: reading another process's memory is forbidden ({}) → "
        "allow process_vm_readv in the seccomp profile, or set kernel.yama.ptrace_scope to 0, if they are large",
        errno_text(code));
  const std::size_t count = got > 0 ? static_cast<std::size_t>(got) : 0;
  copied += count;
  if (copied < offer.bytes && got >= 0) return count;
  if (answers == 0) ring.taken_bytes = copied;
  copied = 0;
  ring.answers.store(answers + 1, std::memory_order_release);
  has_news_[static_cast<std::size_t>(from)] = true;
  return count;
}

void PairRings::end_round(const SlotBoard& board) {
  for (std::size_t rank = 0; rank < has_news_.size(); ++rank) {
    if (!has_news_[rank]) continue;
    const int other = static_cast<int>(rank);
    PairRing& from = ring(other, local_);
    if (const std::uint64_t read = incoming_[rank].read; from.read.load(std::memory_order_relaxed) != read)
      from.read.store(read, std::memory_order_release);
    board.wake(other);
    has_news_[rank] = false;
  }
}

}  // namespace lockstep::comm
