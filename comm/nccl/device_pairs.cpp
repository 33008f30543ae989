#include "comm/nccl/device_pairs.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace lockstep::comm {
namespace {

/// What the sender says of each transfer; `id` matters in the first.
struct Announcement {
  PairDescriptor what;
  ncclUniqueId id;
};
static_assert(std::is_trivially_copyable_v<Announcement>);

}  // namespace

struct DevicePairs::Pending {
  std::shared_ptr<PairTransfer> transfer;
  // The control group's transfer has a share in it: the group may outlive this, and move it still.
  std::shared_ptr<Announcement> announcement = std::make_shared<Announcement>();
  Transfer announced;  // sent, or to come
  CudaEvent ready;     // of the producer: what the transfer comes after
  CudaEvent done;
  bool launched = false;
};

struct DevicePairs::Way {
  int peer = 0;
  bool sends = false;
  CudaStream stream{CudaStream::Priority::kHigh};
  std::deque<Pending> queue;
  Pending* in_call = nullptr;  // NCCL continues its call in the background
  // The sender is its rank 0; nullptr: the id has not come. It ends before the stream that it works in.
  std::unique_ptr<Communicator> communicator;
};

DevicePairs::DevicePairs(const NcclApi& api, int device, ProcessGroup& control, StreamView producer)
    : api_(api), device_(device), control_(control), producer_(producer) {}

DevicePairs::~DevicePairs() { abort(); }

DevicePairs::Way& DevicePairs::way_of(const PairTransfer& transfer) {
  const int own = control_.rank();
  auto& way = ways_[transfer.sends ? std::pair(own, transfer.peer) : std::pair(transfer.peer, own)];
  if (way == nullptr) {
    way = std::make_unique<Way>();
    way->peer = transfer.peer;
    way->sends = transfer.sends;
  }
  return *way;
}

void DevicePairs::start(std::shared_ptr<PairTransfer> transfer) {
  Way& way = way_of(*transfer);
  Pending& pending = way.queue.emplace_back();
  pending.transfer = std::move(transfer);
  pending.ready.record(native(producer_));
  ++under_way_;
  const auto& announcement = pending.announcement;
  if (!way.sends) {
    pending.announced = control_.irecv(announcement.get(), sizeof(Announcement), DType::kU8, way.peer, announcement);
    return;
  }
  announcement->what = pending.transfer->what;
  if (way.communicator == nullptr) {
    const ncclResult_t result = api_.get_unique_id(&announcement->id);
    if (result != ncclSuccess) throw_nccl_error(api_, nullptr, result, "making an id for two ranks");
  }
  pending.announced = control_.isend(announcement.get(), sizeof(Announcement), DType::kU8, way.peer, announcement);
  if (way.communicator != nullptr) return;
  way.communicator = std::make_unique<Communicator>(api_, device_, 0, 2);
  way.communicator->begin_join(announcement->id);
}

bool DevicePairs::advance() {
  if (idle()) return false;
  control_.poll();  // it carries the announcements
  bool moved = false;
  for (auto& [ranks, way] : ways_) {
    if (way->queue.empty()) continue;
    moved |= join(*way) || settle(*way) || launch_next(*way) || finish_first(*way);
  }
  if (moved) ++progress_;
  return moved;
}

std::string DevicePairs::name_of(int rank) const { return fmt::format("rank {}", control_.job_rank(rank)); }

/// The receiver learns the id with the first announcement.
bool DevicePairs::join(Way& way) {
  if (way.communicator != nullptr) {
    if (way.communicator->state() != Communicator::State::kInitialising) return false;
    return way.communicator->has_joined();
  }
  Pending& first = way.queue.front();
  if (!first.announced.done()) return false;
  way.communicator = std::make_unique<Communicator>(api_, device_, 1, 2);
  way.communicator->begin_join(first.announcement->id);
  return true;
}

bool DevicePairs::launch_next(Way& way) {
  if (way.in_call != nullptr || way.communicator == nullptr || way.communicator->state() != Communicator::State::kReady)
    return false;
  const auto next = std::ranges::find(way.queue, false, &Pending::launched);
  if (next == way.queue.end() || (!way.sends && !next->announced.done())) return false;
  const PairTransfer& transfer = *next->transfer;
  if (!way.sends && next->announcement->what != transfer.what)
    throw_mismatch(transfer, next->announcement->what, name_of(way.peer));
  next->ready.make_wait(way.stream.get());
  const PairDescriptor& what = transfer.what;
  const ncclDataType_t type = nccl_type_of(what.dtype);
  const ncclComm_t comm = way.communicator->get();
  ncclResult_t result = ncclSuccess;
  if (what.count > 0)
    result = way.sends ? api_.send(transfer.data, what.count, type, 1, comm, way.stream.get())
                       : api_.recv(transfer.data, what.count, type, 0, comm, way.stream.get());
  if (result != ncclSuccess && result != ncclInProgress)
    throw_nccl_error(api_, comm, result, describe(transfer, name_of(way.peer)));
  way.in_call = &*next;
  if (result == ncclSuccess) settle(way);
  return true;
}

/// What is recorded in the stream comes after the transfer once NCCL's call is over.
bool DevicePairs::settle(Way& way) {
  if (way.in_call == nullptr) return false;
  const ncclResult_t result = way.communicator->state_of_call();
  if (result == ncclInProgress) return false;
  if (result != ncclSuccess)
    throw_nccl_error(api_, way.communicator->get(), result, "a send or a receive between two GPUs");
  Pending& pending = *std::exchange(way.in_call, nullptr);
  pending.done.record(way.stream.get());
  pending.launched = true;
  return true;
}

bool DevicePairs::finish_first(Way& way) {
  Pending& first = way.queue.front();
  if (!first.launched || !first.done.done() || !first.announced.done()) return false;
  first.transfer->done.store(true, std::memory_order_release);
  way.queue.pop_front();
  --under_way_;
  return true;
}

const DevicePairs::Pending* DevicePairs::find(const PairTransfer& transfer) const {
  for (const auto& [ranks, way] : ways_)
    for (const Pending& pending : way->queue)
      if (pending.transfer.get() == &transfer) return &pending;
  return nullptr;
}

const PairTransfer* DevicePairs::first_launched() const {
  for (const auto& [ranks, way] : ways_)
    if (!way->queue.empty() && way->queue.front().launched) return way->queue.front().transfer.get();
  return nullptr;
}

bool DevicePairs::is_launched(const PairTransfer& transfer) const {
  const Pending* const pending = find(transfer);
  return pending == nullptr || pending->launched;
}

void DevicePairs::make_wait(const PairTransfer& transfer, cudaStream_t stream) const {
  if (const Pending* const pending = find(transfer)) pending->done.make_wait(stream);
}

void DevicePairs::leave(FunctionRef<void()> look) {
  for (auto& [ranks, way] : ways_) way->communicator->leave(look);
}

void DevicePairs::abort() noexcept {
  for (auto& [ranks, way] : ways_)
    if (way->communicator != nullptr) way->communicator->abort();
}

}  // namespace lockstep::comm
