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

struct DevicePairs::Channel {
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

DevicePairs::Channel& DevicePairs::channel_of(const PairTransfer& transfer) {
  const int own = control_.rank();
  auto& channel = channels_[transfer.sends ? std::pair(own, transfer.peer) : std::pair(transfer.peer, own)];
  if (channel == nullptr) {
    channel = std::make_unique<Channel>();
    channel->peer = transfer.peer;
    channel->sends = transfer.sends;
  }
  return *channel;
}

void DevicePairs::start(std::shared_ptr<PairTransfer> transfer) {
  Channel& channel = channel_of(*transfer);
  Pending& pending = channel.queue.emplace_back();
  pending.transfer = std::move(transfer);
  pending.ready.record(native(producer_));
  ++under_way_;
  const auto& announcement = pending.announcement;
  if (!channel.sends) {
    pending.announced =
        control_.irecv(announcement.get(), sizeof(Announcement), DType::kU8, channel.peer, announcement);
    return;
  }
  announcement->what = pending.transfer->what;
  if (channel.communicator == nullptr) {
    const ncclResult_t result = api_.get_unique_id(&announcement->id);
    if (result != ncclSuccess) throw_nccl_error(api_, nullptr, result, "making an id for two ranks");
  }
  pending.announced = control_.isend(announcement.get(), sizeof(Announcement), DType::kU8, channel.peer, announcement);
  if (channel.communicator != nullptr) return;
  channel.communicator = std::make_unique<Communicator>(api_, device_, 0, 2);
  channel.communicator->begin_join(announcement->id);
}

bool DevicePairs::advance() {
  if (idle()) return false;
  control_.poll();  // it carries the announcements
  bool moved = false;
  for (auto& [ranks, channel] : channels_) {
    if (channel->queue.empty()) continue;
    moved |= join(*channel) || settle(*channel) || launch_next(*channel) || finish_first(*channel);
  }
  if (moved) ++progress_;
  return moved;
}

std::string DevicePairs::name_of(int rank) const { return fmt::format("rank {}", control_.job_rank(rank)); }

/// The receiver learns the id with the first announcement.
bool DevicePairs::join(Channel& channel) {
  if (channel.communicator != nullptr) {
    if (channel.communicator->state() != Communicator::State::kInitialising) return false;
    return channel.communicator->has_joined();
  }
  Pending& first = channel.queue.front();
  if (!first.announced.done()) return false;
  channel.communicator = std::make_unique<Communicator>(api_, device_, 1, 2);
  channel.communicator->begin_join(first.announcement->id);
  return true;
}

bool DevicePairs::launch_next(Channel& channel) {
  if (channel.in_call != nullptr || channel.communicator == nullptr ||
      channel.communicator->state() != Communicator::State::kReady)
    return false;
  const auto next = std::ranges::find(channel.queue, false, &Pending::launched);
  if (next == channel.queue.end() || (!channel.sends && !next->announced.done())) return false;
  const PairTransfer& transfer = *next->transfer;
  if (!channel.sends && next->announcement->what != transfer.what)
    throw_mismatch(transfer, next->announcement->what, name_of(channel.peer));
  next->ready.make_wait(channel.stream.get());
  const PairDescriptor& what = transfer.what;
  const ncclDataType_t type = nccl_type_of(what.dtype);
  const ncclComm_t comm = channel.communicator->get();
  ncclResult_t result = ncclSuccess;
  if (what.count > 0)
    result = channel.sends ? api_.send(transfer.data, what.count, type, 1, comm, channel.stream.get())
                           : api_.recv(transfer.data, what.count, type, 0, comm, channel.stream.get());
  if (result != ncclSuccess && result != ncclInProgress)
    throw_nccl_error(api_, comm, result, describe(transfer, name_of(channel.peer)));
  channel.in_call = &*next;
  if (result == ncclSuccess) settle(channel);
  return true;
}

/// What is recorded in the stream comes after the transfer once NCCL's call is over.
bool DevicePairs::settle(Channel& channel) {
  if (channel.in_call == nullptr) return false;
  const ncclResult_t result = channel.communicator->state_of_call();
  if (result == ncclInProgress) return false;
  if (result != ncclSuccess)
    throw_nccl_error(api_, channel.communicator->get(), result, "a send or a receive between two GPUs");
  Pending& pending = *std::exchange(channel.in_call, nullptr);
  pending.done.record(channel.stream.get());
  pending.launched = true;
  return true;
}

bool DevicePairs::finish_first(Channel& channel) {
  Pending& first = channel.queue.front();
  if (!first.launched || !first.done.done() || !first.announced.done()) return false;
  first.transfer->done.store(true, std::memory_order_release);
  channel.queue.pop_front();
  --under_way_;
  return true;
}

const DevicePairs::Pending* DevicePairs::find(const PairTransfer& transfer) const {
  for (const auto& [ranks, channel] : channels_)
    for (const Pending& pending : channel->queue)
      if (pending.transfer.get() == &transfer) return &pending;
  return nullptr;
}

const PairTransfer* DevicePairs::first_launched() const {
  for (const auto& [ranks, channel] : channels_)
    if (!channel->queue.empty() && channel->queue.front().launched) return channel->queue.front().transfer.get();
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
  for (auto& [ranks, channel] : channels_) channel->communicator->leave(look);
}

void DevicePairs::abort() noexcept {
  for (auto& [ranks, channel] : channels_)
    if (channel->communicator != nullptr) channel->communicator->abort();
}

}  // namespace lockstep::comm
