#include "comm/pairs.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/flight_record.h"
#include "comm/flight.h"
#include "comm/stall.h"

namespace lockstep::comm {
namespace {

constexpr std::size_t kHeaderBytes = sizeof(PairDescriptor);

// Of more the time to allocate a transfer is no longer a part.
constexpr std::size_t kMostAtOnce = std::size_t{4} << 10;

std::string text_of(const PairDescriptor& what) { return fmt::format("{} {}", what.count, name_of(what.dtype)); }

/// "send #3 to this rank (8 f32)".
std::string sent_text(const PairDescriptor& sent) {
  if (sent.all_to_all > 0)
    return fmt::format("its part of all-to-all #{} for this rank ({})", sent.all_to_all, text_of(sent));
  return fmt::format("send #{} to this rank ({})", sent.number, text_of(sent));
}

constexpr const char* kMatch = "match each send with a receive of as many values of the same type, in the same order";

}  // namespace

std::string describe(const PairTransfer& transfer, const std::string& peer) {
  const PairDescriptor& what = transfer.what;
  if (what.all_to_all > 0)
    return fmt::format("all-to-all #{}, the part {} {} ({})", what.all_to_all, transfer.sends ? "for" : "of", peer,
                       text_of(what));
  return fmt::format("{} #{} {} {} ({})", transfer.sends ? "send" : "receive", what.number,
                     transfer.sends ? "to" : "from", peer, text_of(what));
}

std::size_t join_some(std::span<const std::byte> header, std::span<const std::byte> values, std::span<std::byte> out) {
  const std::size_t first = std::min(header.size(), out.size()), second = std::min(values.size(), out.size() - first);
  if (first > 0) std::memcpy(out.data(), header.data(), first);
  if (second > 0) std::memcpy(out.data() + first, values.data(), second);
  return first + second;
}

PairQueues::Queue& PairQueues::queue_of(const PairTransfer& transfer) {
  if (out_.empty()) {
    out_.resize(static_cast<std::size_t>(size_));
    in_.resize(static_cast<std::size_t>(size_));
  }
  return (transfer.sends ? out_ : in_)[static_cast<std::size_t>(transfer.peer)];
}

void PairQueues::add(std::shared_ptr<PairTransfer> transfer) {
  streams_.open_stream(transfer->peer);
  ++under_way_;
  Queue& queue = queue_of(*transfer);
  queue.transfers.push_back(std::move(transfer));
}

bool PairQueues::move_at_once(const PairTransfer& transfer) {
  const std::size_t bytes = transfer.what.bytes();
  if (bytes > kMostAtOnce) return false;
  Queue& queue = queue_of(transfer);
  if (!queue.transfers.empty()) return false;
  streams_.open_stream(transfer.peer);
  streams_.begin_round();
  if (transfer.sends ? write(queue, transfer) : read(queue, transfer)) ++progress_;
  streams_.end_round();
  if (queue.header_bytes < kHeaderBytes || queue.bytes < bytes) return false;
  if (transfer.sends && !streams_.is_flushed(transfer.peer, queue.stream_bytes)) return false;
  queue.header_bytes = queue.bytes = 0;
  return true;
}

bool PairQueues::send_all() {
  bool moved = false;
  for (int rank = 0; rank < size_ && !out_.empty(); ++rank)
    if (Queue& out = out_[static_cast<std::size_t>(rank)]; !out.transfers.empty()) moved |= send(out, rank);
  return moved;
}

void PairQueues::advance_sends() {
  streams_.begin_round();
  if (send_all()) ++progress_;
  streams_.end_round();
}

bool PairQueues::advance() {
  if (idle()) return false;
  streams_.begin_round();
  // What another rank can take meanwhile comes first: receiving may copy much at a time.
  bool moved = send_all();
  for (int rank = 0; rank < size_; ++rank)
    if (Queue& in = in_[static_cast<std::size_t>(rank)]; !in.transfers.empty()) moved |= receive(in);
  streams_.end_round();
  if (moved) ++progress_;
  return moved;
}

/// As many of the transfers as the stream takes.
bool PairQueues::send(Queue& queue, int to) {
  bool moved = false;
  for (; queue.taken < queue.transfers.size(); ++queue.taken) {
    PairTransfer& transfer = *queue.transfers[queue.taken];
    moved |= write(queue, transfer);
    if (queue.header_bytes < kHeaderBytes || queue.bytes < transfer.what.bytes()) break;
    transfer.end = queue.stream_bytes;
    queue.header_bytes = queue.bytes = 0;
  }
  for (; queue.taken > 0 && streams_.is_flushed(to, queue.transfers.front()->end); --queue.taken) {
    finish(queue);
    moved = true;
  }
  return moved;
}

/// Once, since whoever issues a send does not want to wait for all of it.
bool PairQueues::write(Queue& queue, const PairTransfer& transfer) {
  const auto header = std::as_bytes(std::span(&transfer.what, 1)).subspan(queue.header_bytes);
  const std::span<const std::byte> values(transfer.data + queue.bytes, transfer.what.bytes() - queue.bytes);
  const std::size_t taken = streams_.write_some(transfer.peer, header, values);
  queue.header_bytes += std::min(taken, header.size());
  queue.bytes += taken - std::min(taken, header.size());
  queue.stream_bytes += taken;
  return taken > 0;
}

/// As many of the transfers as there are bytes for, but not for long: other ranks have some, too.
bool PairQueues::receive(Queue& queue) {
  constexpr std::size_t kLong = std::size_t{1} << 20;
  bool moved = false;
  for (std::size_t bytes = 0; !queue.transfers.empty() && bytes < kLong;) {
    moved |= read(queue, *queue.transfers.front());
    const std::size_t all = queue.transfers.front()->what.bytes();
    if (queue.header_bytes < kHeaderBytes || queue.bytes < all) break;
    bytes += all;
    queue.header_bytes = queue.bytes = 0;
    finish(queue);
    moved = true;
  }
  return moved;
}

bool PairQueues::read(Queue& queue, const PairTransfer& transfer) {
  const int from = transfer.peer;
  const std::size_t bytes = transfer.what.bytes();
  std::size_t moved = 0;
  if (queue.header_bytes < kHeaderBytes) {
    moved = streams_.read_some(from, std::as_writable_bytes(std::span(&queue.header, 1)).subspan(queue.header_bytes));
    queue.header_bytes += moved;
    if (queue.header_bytes < kHeaderBytes) return moved > 0;
    if (queue.header != transfer.what) throw_mismatch(transfer, queue.header, streams_.name_of(from));
  }
  if (queue.bytes < bytes) {
    const std::size_t got = streams_.read_some(from, {transfer.data + queue.bytes, bytes - queue.bytes});
    queue.bytes += got;
    moved += got;
  }
  return moved > 0;
}

void throw_mismatch(const PairTransfer& expected, const PairDescriptor& sent, const std::string& peer) {
  throw OutOfStepError(
      fmt::format("out of step: {} is in {}, this rank is in {}", peer, sent_text(sent), describe(expected, peer)),
      kMatch);
}

void throw_transfer_timeout(const PairTransfer& transfer, double waited_seconds, int job_rank, const std::string& peer,
                            const std::string& trouble) {
  give_up_on({&job_rank, 1});
  throw TimeoutError(fmt::format("{} timed out after {:.3g} s waiting for {}{}", describe(transfer, peer),
                                 waited_seconds, peer, trouble.empty() ? "" : fmt::format(" ({})", trouble)),
                     fmt::format("look at the log of rank {}; if it is only slow, raise --timeout-seconds", job_rank));
}

void warn_of_stall(const PairTransfer& transfer, double waited_seconds, int job_rank, const std::string& peer) {
  flight::set_missing({&job_rank, 1});
  warn_of_stall(describe(transfer, peer), waited_seconds, peer + where_is(job_rank));
}

void PairQueues::finish(Queue& queue) {
  const auto done = std::move(queue.transfers.front());
  queue.transfers.pop_front();
  --under_way_;
  done->keeps.reset();
  done->done.store(true, std::memory_order_release);
}

std::vector<const PairTransfer*> PairQueues::waiting() const {
  std::vector<const PairTransfer*> first;
  if (idle()) return first;
  for (const auto* queues : {&in_, &out_})
    for (const Queue& queue : *queues)
      if (!queue.transfers.empty()) first.push_back(queue.transfers.front().get());
  return first;
}

bool PairQueues::has(const PairTransfer* transfer) const {
  for (const auto* queues : {&in_, &out_})
    for (const Queue& queue : *queues)
      for (const auto& one : queue.transfers)
        if (one.get() == transfer) return true;
  return false;
}

void PairQueues::check_nothing_left() {
  // A group without transfers on this rank looks too: it may be the receiver who has left all of them out.
  for (int rank = 0; rank < size_; ++rank) {
    PairDescriptor sent;
    const auto header = std::as_writable_bytes(std::span(&sent, 1));
    if (streams_.read_some(rank, header) < header.size()) continue;
    throw OutOfStepError(fmt::format("out of step: {} has issued {}, and this rank ends without receiving it",
                                     streams_.name_of(rank), sent_text(sent)),
                         kMatch);
  }
}

}  // namespace lockstep::comm
