// Gloo's collectives over its TCP transport, as PyTorch uses them: a shared library of its own, so that the program
// needs no Gloo (rivals.cpp).
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/reduce.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>

#include "bench/rivals/rivals.h"

namespace lockstep::bench {
namespace {

/// What ranks say before they are connected, over a group that they have. Every rank sets its keys in the same order,
/// and before it asks for those of others: so each set() is an exchange.
class GroupStore final : public gloo::rendezvous::Store {
 public:
  explicit GroupStore(comm::ProcessGroup& group) : group_(group) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    std::vector<std::byte> mine(1 + key.size() + data.size());
    mine[0] = static_cast<std::byte>(key.size());
    std::memcpy(mine.data() + 1, key.data(), key.size());
    if (!data.empty()) std::memcpy(mine.data() + 1 + key.size(), data.data(), data.size());
    for (const auto& each : group_.all_gather_objects(mine)) {
      const auto* const bytes = reinterpret_cast<const char*>(each.data());
      const auto size = static_cast<std::size_t>(each[0]);
      values_[std::string(bytes + 1, size)] = std::vector<char>(bytes + 1 + size, bytes + each.size());
    }
  }
  std::vector<char> get(const std::string& key) override { return values_.at(key); }
  void wait(const std::vector<std::string>&) override {}

 private:
  comm::ProcessGroup& group_;
  std::map<std::string, std::vector<char>> values_;
};

using Reduce = void (*)(void* to, const void* a, const void* b, std::size_t count);

template <class T>
Reduce reduction_of(comm::ReduceOp op) {
  switch (op) {
    case comm::ReduceOp::kSum: return gloo::sum<T>;
    case comm::ReduceOp::kMin: return gloo::min<T>;
    case comm::ReduceOp::kMax: return gloo::max<T>;
    case comm::ReduceOp::kProd: return gloo::product<T>;
  }
  return nullptr;
}

class GlooRival final : public Rival {
 public:
  GlooRival(const comm::World& world, comm::ProcessGroup& group) {
    gloo::transport::tcp::attr attributes;
    std::string name(256, '\0');
    if (world.local_size == world.size)
      name = "127.0.0.1";
    else if (::gethostname(name.data(), name.size() - 1) == 0)
      name.resize(std::strlen(name.c_str()));
    attributes.hostname = name;
    auto device = gloo::transport::tcp::CreateDevice(attributes);
    GroupStore store(group);
    auto context = std::make_shared<gloo::rendezvous::Context>(world.rank, world.size);
    context->connectFullMesh(store, device);
    context_ = std::move(context);
  }

  bool has(const CollectiveOptions& options) const override {
    const bool reduces = options.collective == Collective::kAllReduce || options.collective == Collective::kReduce;
    if (reduces) return options.dtype != DType::kBF16 && options.dtype != DType::kF16;
    return options.collective != Collective::kReduceScatter;
  }

  void run(const CollectiveOptions& options, std::byte* values, std::byte* other, std::size_t bytes) override {
    switch (options.dtype) {
      case DType::kF32: return run_as<float>(options, values, other, bytes);
      case DType::kF64: return run_as<double>(options, values, other, bytes);
      case DType::kI32: return run_as<std::int32_t>(options, values, other, bytes);
      case DType::kI64: return run_as<std::int64_t>(options, values, other, bytes);
      case DType::kU8: return run_as<std::uint8_t>(options, values, other, bytes);
      case DType::kBF16:
      case DType::kF16: return run_as<std::uint16_t>(options, values, other, bytes);  // to be moved, not to be summed
    }
  }

 private:
  template <class T>
  void run_as(const CollectiveOptions& options, std::byte* values, std::byte* other, std::size_t bytes) {
    const std::size_t count = bytes / sizeof(T), part = count / static_cast<std::size_t>(context_->size);
    auto* const all = reinterpret_cast<T*>(values);
    auto* const second = reinterpret_cast<T*>(other);
    switch (options.collective) {
      case Collective::kAllReduce: {
        gloo::AllreduceOptions wanted(context_);
        wanted.setOutput(all, count);
        wanted.setReduceFunction(reduction_of<T>(options.op));
        gloo::allreduce(wanted);
        return;
      }
      case Collective::kReduce: {
        gloo::ReduceOptions wanted(context_);
        wanted.setOutput(all, count);
        wanted.setRoot(options.root);
        wanted.setReduceFunction(reduction_of<T>(options.op));
        gloo::reduce(wanted);
        return;
      }
      case Collective::kAllGather: {
        gloo::AllgatherOptions wanted(context_);
        wanted.setInput(second, part);
        wanted.setOutput(all, count);
        gloo::allgather(wanted);
        return;
      }
      case Collective::kBroadcast: {
        gloo::BroadcastOptions wanted(context_);
        wanted.setOutput(all, count);
        wanted.setRoot(options.root);
        gloo::broadcast(wanted);
        return;
      }
      case Collective::kAllToAll: {
        gloo::AlltoallOptions wanted(context_);
        wanted.setInput(all, count);
        wanted.setOutput(second, count);
        gloo::alltoall(wanted);
        return;
      }
      case Collective::kBarrier: {
        gloo::BarrierOptions wanted(context_);
        gloo::barrier(wanted);
        return;
      }
      case Collective::kSendRecv: return send_and_receive(options.pattern, values, other, bytes);
      case Collective::kReduceScatter: return;  // has() says no
    }
  }

  void send_and_receive(Pattern pattern, std::byte* values, std::byte* other, std::size_t bytes) {
    constexpr std::uint64_t kSlot = 77, kDoneSlot = 78;
    const auto partners = partners_of(pattern, context_->rank, context_->size);
    if (!partners) return;
    const auto [to, from, first] = *partners;
    if (pattern == Pattern::kRing) {
      const auto out = context_->createUnboundBuffer(values, bytes), in = context_->createUnboundBuffer(other, bytes);
      out->send(to, kSlot);
      in->recv(from, kSlot);
      out->waitSend();
      in->waitRecv();
      return;
    }
    if (pattern == Pattern::kLatency) {
      const auto out = context_->createUnboundBuffer(values, bytes), in = context_->createUnboundBuffer(other, bytes);
      in->recv(from, kSlot);
      if (!first) in->waitRecv();
      out->send(to, kSlot);
      out->waitSend();
      if (first) in->waitRecv();
      return;
    }
    // A buffer has one operation at a time.
    std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> sent, received;
    const bool both = pattern == Pattern::kBidirectional;
    for (int i = window_of(bytes); i > 0; --i) {
      if (both || !first) received.push_back(context_->createUnboundBuffer(other, bytes));
      if (both || !first) received.back()->recv(from, kSlot);
      if (both || first) sent.push_back(context_->createUnboundBuffer(values, bytes));
      if (both || first) sent.back()->send(to, kSlot);
    }
    for (const auto& each : received) each->waitRecv();
    for (const auto& each : sent) each->waitSend();
    std::byte done{};
    const auto last = context_->createUnboundBuffer(&done, 1);
    if (first) {
      last->recv(from, kDoneSlot);
      last->waitRecv();
    } else {
      last->send(to, kDoneSlot);
      last->waitSend();
    }
  }

  std::shared_ptr<gloo::Context> context_;
};

}  // namespace
}  // namespace lockstep::bench

extern "C" lockstep::bench::Rival* lockstep_make_gloo_rival(const lockstep::comm::World& world,
                                                            lockstep::comm::ProcessGroup& group) {
  return new lockstep::bench::GlooRival(world, group);
}
