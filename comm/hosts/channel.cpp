#include "comm/hosts/channel.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "comm/reduce.h"

namespace lockstep::comm {
namespace {

// Early data that a channel can buffer from the start, for all links together.
constexpr std::size_t kBytesAhead = 4 << 20;
// What a link may bring, or take, before the others have their turn: a few chunks.
constexpr int kTurns = 8;

}  // namespace

Channel::Channel(int number, int host, const Peers& peers, const IntraHostSync& sync, const HostTuning& tuning,
                 std::vector<Link> links)
    : number_(number),
      host_(host),
      names_(peers),
      hosts_(peers.hosts()),
      sync_(sync),
      tuning_(tuning),
      window_(kWindow),
      pool_(tuning.chunk_bytes, std::max<std::size_t>(kBytesAhead / tuning.chunk_bytes, links.size())),
      own_partial_(std::make_unique_for_overwrite<std::byte[]>(tuning.chunk_bytes)),
      sources_(peers.hosts().size()) {
  for (Link& link : links) {
    peers_.emplace_back(std::move(link));
    peers_.back().staging = std::make_unique_for_overwrite<std::byte[]>(tuning.chunk_bytes);
    peers_.back().outgoing.reserve(sizeof(std::int32_t) * NodeControlBlock::kMostBlamed);
  }
  for (Operation& operation : window_) operation.by_peer.resize(peers_.size());
  sources_.reserve(std::max(hosts_.size(), static_cast<std::size_t>(sync.size())));
  ready_.reserve(peers_.size());
}

int Channel::local_of(int rank) const {
  const auto& ranks = hosts_[static_cast<std::size_t>(host_)];
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// ---- Operations ----

void Channel::open(const Op& op) {
  LOCKSTEP_ASSERT(op.op_index == opened_ + 1 && op.op_index <= closed_ + kWindow, "operation {} after {}", op.op_index,
                  opened_);
  opened_ = op.op_index;
  Operation& operation = this->operation(opened_);
  operation.open = true;
  operation.together = false;
  operation.op = op;
  operation.tree = tree_of(op);
  operation.plan = Plan(op, hosts_, static_cast<int>(sync_.drivers()), tuning_,
                        operation.tree == nullptr ? std::span<const std::size_t>() : operation.tree->partials);
  operation.reduced = 0;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    PeerProgress& progress = operation.by_peer[i];
    if (progress.heard) compare(progress.first, operation, peers_[i].link);
    while (!progress.early.empty()) {
      const Chunk chunk = operation.plan.chunk(peers_[i].link.host(), number_, progress.collected++);
      ChunkPool::Block* const block = progress.early.pop();
      std::memcpy(op.data + chunk.begin, block->bytes, chunk.bytes);
      pool_.give_back(block);
    }
  }
}

const Channel::HostTree* Channel::tree_of(const Op& op) {
  if (op.along == nullptr) return nullptr;
  const ReductionTree& tree = *op.along;
  if (trees_.size() <= op.tree) trees_.resize(op.tree + std::size_t{1});
  if (trees_[op.tree] != nullptr) return trees_[op.tree].get();
  HostTree made;
  std::vector<TreeNode> all;
  for (const auto& ranks : hosts_) {
    const auto nodes = tree.nodes_within(tree.run_of(ranks.front()).first, tree.run_of(ranks.back()).end());
    made.partials.push_back(nodes.size());
    all.insert(all.end(), nodes.begin(), nodes.end());
  }
  made.all = TreeProgram(tree, all);
  std::vector<TreeNode> here;
  for (const int rank : hosts_[static_cast<std::size_t>(host_)]) {
    const auto partials = tree.partials_of(rank);
    here.insert(here.end(), partials.begin(), partials.end());
  }
  made.own = TreeProgram(tree, here);
  LOCKSTEP_ASSERT(made.own.results() == made.partials[static_cast<std::size_t>(host_)] && made.all.results() == 1,
                  "a tree whose runs are not in the order of the hosts");
  sources_.reserve(std::max(all.size(), here.size()));
  trees_[op.tree] = std::make_unique<const HostTree>(std::move(made));
  return trees_[op.tree].get();
}

bool Channel::is_done(std::uint64_t index) const {
  const Operation& operation = this->operation(index);
  const Plan& plan = operation.plan;
  const std::uint32_t own = plan.chunk_count(host_, number_);
  if (!operation.together || operation.reduced < own) return false;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const int other = peers_[i].link.host();
    const PeerProgress& progress = operation.by_peer[i];
    if (plan.scatters(host_) && progress.scattered < plan.chunk_count(other, number_)) return false;
    if (plan.gathers(host_, other) && progress.gathered < own) return false;
    if (plan.gathers(other, host_) && progress.spread < plan.chunk_count(other, number_)) return false;
  }
  return true;
}

void Channel::close(std::uint64_t index) {
  LOCKSTEP_ASSERT(index == closed_ + 1, "the end of operation {} after {}", index, closed_);
  closed_ = index;
  Operation& operation = this->operation(index);
  operation.open = false;
  for (PeerProgress& progress : operation.by_peer) progress = {};
}

// ---- What comes in ----

std::size_t Channel::index_of(const Link& link) const { return peer_of_host(link.host()); }

std::byte* Channel::room_for(Link& link, const MessageHeader& header) {
  Peer& peer = peers_[index_of(link)];
  if (header.magic != MessageHeader::kMagic) not_understood(link, "no header of lockstep's");
  if (header.kind == MessageKind::kNotice || header.kind == MessageKind::kAbort) {
    if (header.bytes > peer.words.size()) not_understood(link, "too many words");
    return peer.words.data();
  }
  if (header.kind != MessageKind::kReduceScatter && header.kind != MessageKind::kAllGather)
    not_understood(link, "an unknown message");
  if (header.op.op_index <= closed_) {
    compare_with_known(header, link);
    out_of_step(link, header, nullptr);
  }
  if (header.op.op_index > closed_ + kWindow) return nullptr;
  Operation& operation = this->operation(header.op.op_index);
  PeerProgress& progress = operation.by_peer[index_of(link)];
  if (!progress.heard) {
    progress.heard = true;
    progress.first = header;
  }
  if (operation.open) compare(header, operation, link);
  if (header.bytes > tuning_.chunk_bytes) not_understood(link, "a chunk that is too long");
  if (operation.open) {
    const bool scatters = header.kind == MessageKind::kReduceScatter;
    const int owner = scatters ? host_ : link.host();
    const std::uint32_t next = scatters ? progress.arrived : progress.collected;
    if (header.chunk != next || next >= operation.plan.chunk_count(owner, number_))
      not_understood(link, "a chunk out of turn");
    const Chunk chunk = operation.plan.chunk(owner, number_, next);
    if (header.bytes != (scatters ? operation.plan.wire_bytes(chunk, link.host()) : chunk.bytes))
      not_understood(link, "a chunk of another length");
    if (!scatters) return operation.op.data + chunk.begin;
  }
  peer.filling = pool_.take();
  return peer.filling->bytes;
}

void Channel::arrived(Link& link, const MessageHeader& header) {
  Peer& peer = peers_[index_of(link)];
  if (header.kind == MessageKind::kNotice || header.kind == MessageKind::kAbort) return take_notice(peer, header);
  Operation& operation = this->operation(header.op.op_index);
  PeerProgress& progress = operation.by_peer[index_of(link)];
  ChunkPool::Block* const block = std::exchange(peer.filling, nullptr);
  if (header.kind == MessageKind::kReduceScatter) {
    progress.contributions.push(block);
    ++progress.arrived;
    ++progress_;
    return;
  }
  ++progress_;
  if (block == nullptr) {
    ++progress.collected;
  } else if (operation.open) {
    // Opened while it came in.
    const Chunk chunk = operation.plan.chunk(link.host(), number_, progress.collected++);
    std::memcpy(operation.op.data + chunk.begin, block->bytes, chunk.bytes);
    pool_.give_back(block);
  } else {
    progress.early.push(block);
  }
}

void Channel::take_notice(Peer& peer, const MessageHeader& header) {
  if (header.kind == MessageKind::kAbort) {
    const auto reason = AbortReason::decode({reinterpret_cast<const char*>(peer.words.data()), header.bytes});
    if (!reason) not_understood(peer.link, "an abort reason that is none");
    peer.knows = true;
    if (!abort_reason_) abort_reason_ = reason;
  } else {
    peer.said_index = header.op.op_index;
    peer.said.resize(std::min<std::size_t>(header.bytes / sizeof(std::int32_t), NodeControlBlock::kMostBlamed));
    static_assert(sizeof(int) == sizeof(std::int32_t));
    std::memcpy(peer.said.data(), peer.words.data(), peer.said.size() * sizeof(int));
  }
  // A peer that waits, or ends, in another operation under the same number will never match this rank's. This rank
  // compares them now, or when it posts its own.
  if (header.op.op_index <= opened_) return compare_with_known(header, peer.link);
  if (header.op.op_index > closed_ + kWindow) return;
  PeerProgress& progress = operation(header.op.op_index).by_peer[index_of(peer.link)];
  progress.heard = true;
  progress.first = header;
}

/// Of an operation that this rank has come to: as long as it is remembered.
void Channel::compare_with_known(const MessageHeader& header, const Link& link) const {
  if (header.op.op_index > 0 && header.op.op_index + kWindow > opened_)
    compare(header, operation(header.op.op_index), link);
}

void Channel::compare(const MessageHeader& header, const Operation& operation, const Link& link) const {
  if (header.op.history != operation.op.history) out_of_step(link, header, &operation.op);
}

// ---- The arithmetic ----

bool Channel::look_for_locals() {
  bool moved = false;
  for (std::uint64_t index = closed_ + 1; index <= opened_; ++index) {
    Operation& operation = this->operation(index);
    if (operation.together || !sync_.all_posted(operation.op)) continue;
    operation.together = moved = true;
  }
  return moved;
}

bool Channel::may_reduce(const Operation& operation) const {
  if (!operation.together || operation.reduced >= operation.plan.chunk_count(host_, number_)) return false;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const PeerProgress& progress = operation.by_peer[i];
    if (operation.plan.scatters(peers_[i].link.host()) && progress.arrived <= operation.reduced) return false;
    // What is sent is what the result overwrites.
    if (operation.plan.small() && operation.plan.scatters(host_) &&
        progress.scattered < operation.plan.chunk_count(peers_[i].link.host(), number_))
      return false;
  }
  return true;
}

bool Channel::reduce_all() {
  bool moved = false;
  for (std::uint64_t index = closed_ + 1; index <= opened_; ++index) {
    Operation& operation = this->operation(index);
    while (may_reduce(operation)) {
      reduce_next(operation);
      moved = true;
    }
  }
  return moved;
}

void Channel::reduce_next(Operation& operation) {
  const Plan& plan = operation.plan;
  const Op& op = operation.op;
  const Chunk chunk = plan.chunk(host_, number_, operation.reduced++);
  const std::size_t hosts = hosts_.size();
  // Where the result is made: with the rank that it is for, or here.
  const int at = chunk.rank >= 0 ? local_of(chunk.rank) : sync_.local();
  if (reduces(op.kind)) {
    const std::byte* const mine = contribution(operation, chunk, own_partial_.get());
    sources_.clear();
    for (std::size_t h = 0; h < hosts; ++h) {
      const std::byte* const theirs =
          static_cast<int>(h) == host_
              ? mine
              : operation.by_peer[peer_of_host(static_cast<int>(h))].contributions.first()->bytes;
      const std::size_t partials = operation.tree == nullptr ? 1 : operation.tree->partials[h];
      for (std::size_t p = 0; p < partials; ++p) sources_.push_back(theirs + p * chunk.bytes);
    }
    std::byte* const to = copy_of(operation, at) + chunk.begin;
    const std::size_t count = chunk.bytes / size_of(op.dtype);
    if (operation.tree != nullptr)
      reduce_along_tree(op.dtype, to, sources_, operation.tree->all.additions, count);
    else
      reduce_partials(op.dtype, op.reduce, plan.widened(), to, sources_, count);
    if (op.kind != OpKind::kReduceScatter) spread(operation, chunk, at);
  } else if (op.kind == OpKind::kAllGather) {
    spread(operation, chunk, at);
  } else if (op.kind == OpKind::kBroadcast) {
    int from = sync_.local();
    if (plan.scatters(host_)) {
      from = local_of(op.root);
    } else if (chunk.bytes > 0) {
      for (std::size_t i = 0; i < peers_.size(); ++i)
        if (plan.scatters(peers_[i].link.host()))
          std::memcpy(op.data + chunk.begin, operation.by_peer[i].contributions.first()->bytes, chunk.bytes);
    }
    spread(operation, chunk, from);
  }
  for (std::size_t i = 0; i < peers_.size(); ++i)
    if (plan.scatters(peers_[i].link.host())) pool_.give_back(operation.by_peer[i].contributions.pop());
}

/// What this host has for a chunk of another one's part, or of its own, as it travels: where it lies, or in `staging`.
const std::byte* Channel::contribution(Operation& operation, const Chunk& chunk, std::byte* staging) {
  const Op& op = operation.op;
  if (op.kind == OpKind::kBroadcast) return copy_of(operation, local_of(op.root)) + chunk.begin;
  if (chunk.bytes == 0) return op.data;
  if (operation.tree != nullptr) return partials_along_tree(operation, chunk, staging);
  if (sync_.size() == 1 && !operation.plan.widened()) return op.data + chunk.begin;
  sources_.resize(static_cast<std::size_t>(sync_.size()));
  for (int i = 0; i < sync_.size(); ++i) sources_[static_cast<std::size_t>(i)] = copy_of(operation, i) + chunk.begin;
  reduce_partial(op.dtype, op.reduce, operation.plan.widened(), staging, sources_, chunk.bytes / size_of(op.dtype));
  return staging;
}

/// The same along a tree: this host's partial sums, one after the other.
const std::byte* Channel::partials_along_tree(const Operation& operation, const Chunk& chunk, std::byte* staging) {
  const Op& op = operation.op;
  const TreeProgram& program = operation.tree->own;
  sources_.clear();
  const auto& ranks = hosts_[static_cast<std::size_t>(host_)];
  for (int i = 0; i < sync_.size(); ++i)
    for (std::size_t p = 0; p < op.along->partials_of(ranks[static_cast<std::size_t>(i)]).size(); ++p)
      sources_.push_back(copy_of(operation, i) + p * op.partial_stride + chunk.begin);
  if (sources_.size() == 1) return sources_.front();
  const std::span<const std::byte* const> sources(sources_);
  const std::span<const std::uint8_t> additions(program.additions);
  std::size_t begin = 0;
  for (std::size_t result = 0; result < program.results(); ++result) {
    const std::size_t count = program.ends[result] - begin;
    reduce_along_tree(op.dtype, staging + result * chunk.bytes, sources.subspan(begin, count),
                      additions.subspan(begin, count), chunk.bytes / size_of(op.dtype));
    begin = program.ends[result];
  }
  return staging;
}

/// From one local copy to the others, as far as their ranks get the result.
void Channel::spread(const Operation& operation, const Chunk& chunk, int from) const {
  if (chunk.bytes == 0 || !operation.plan.ends_at(host_)) return;
  const int only = operation.op.kind == OpKind::kReduce ? local_of(operation.op.root) : -1;
  const std::byte* const source = copy_of(operation, from) + chunk.begin;
  for (int i = 0; i < sync_.size(); ++i)
    if (i != from && (only < 0 || i == only)) std::memcpy(copy_of(operation, i) + chunk.begin, source, chunk.bytes);
}

bool Channel::spread_all() {
  bool moved = false;
  for (std::uint64_t index = closed_ + 1; index <= opened_; ++index) {
    Operation& operation = this->operation(index);
    if (!operation.together) continue;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      PeerProgress& progress = operation.by_peer[i];
      for (; progress.spread < progress.collected; ++progress.spread, moved = true)
        if (sync_.size() > 1)
          spread(operation, operation.plan.chunk(peers_[i].link.host(), number_, progress.spread), sync_.local());
    }
  }
  return moved;
}

// ---- What goes out ----

bool Channel::send_all() {
  bool moved = false;
  // Every host begins with another one, so that they do not all send to the same.
  for (std::size_t n = 0; n < peers_.size(); ++n)
    moved |= send_to((static_cast<std::size_t>(host_) + n) % peers_.size());
  return moved;
}

bool Channel::send_to(std::size_t index) {
  Peer& peer = peers_[index];
  if (peer.link.is_down()) return false;
  bool moved = false;
  for (int turn = 0; turn < kTurns; ++turn) {
    if (!peer.link.sending() && !begin_next(index)) break;
    if (!peer.link.send_some()) break;
    moved = true;
    if (peer.link.sending()) continue;
    if (Operation* const operation = std::exchange(peer.sending, nullptr)) {
      PeerProgress& progress = operation->by_peer[index];
      ++(peer.sending_kind == MessageKind::kReduceScatter ? progress.scattered : progress.gathered);
      ++progress_;
    }
  }
  return moved;
}

bool Channel::begin_next(std::size_t index) {
  Peer& peer = peers_[index];
  const int other = peer.link.host();
  if (!peer.outgoing.empty() && told_index_ <= closed_) peer.outgoing.clear();
  if (!peer.outgoing.empty()) {
    // In place of `outgoing`, which may be set anew meanwhile.
    std::memcpy(peer.staging.get(), peer.outgoing.data(), peer.outgoing.size());
    MessageHeader header = header_for(operation(told_index_).op, MessageKind::kNotice);
    header.bytes = static_cast<std::uint32_t>(peer.outgoing.size());
    peer.outgoing.clear();
    peer.link.begin(header, peer.staging.get());
    return true;
  }
  for (std::uint64_t op_index = closed_ + 1; op_index <= opened_; ++op_index) {
    Operation& operation = this->operation(op_index);
    if (!operation.together) continue;
    const Plan& plan = operation.plan;
    PeerProgress& progress = operation.by_peer[index];
    const bool scatters = plan.scatters(host_) && progress.scattered < plan.chunk_count(other, number_);
    if (!scatters && !(plan.gathers(host_, other) && progress.gathered < operation.reduced)) continue;
    const std::uint32_t number = scatters ? progress.scattered : progress.gathered;
    const Chunk chunk = plan.chunk(scatters ? other : host_, number_, number);
    MessageHeader header = header_for(operation.op, scatters ? MessageKind::kReduceScatter : MessageKind::kAllGather);
    header.chunk = number;
    header.bytes = static_cast<std::uint32_t>(scatters ? plan.wire_bytes(chunk, host_) : chunk.bytes);
    const std::byte* const payload =
        scatters ? contribution(operation, chunk, peer.staging.get())
                 : copy_of(operation, chunk.rank >= 0 ? local_of(chunk.rank) : sync_.local()) + chunk.begin;
    // Nobody gathers at the root's host: what it sends away its other ranks take here.
    if (scatters && operation.op.kind == OpKind::kBroadcast && !plan.small())
      spread(operation, chunk, local_of(operation.op.root));
    peer.sending = &operation;
    peer.sending_kind = header.kind;
    peer.link.begin(header, payload);
    return true;
  }
  return false;
}

// ---- Together ----

bool Channel::advance() {
  bool moved = listen();
  moved |= look_for_locals();
  moved |= spread_all();
  moved |= reduce_all();
  moved |= send_all();
  // Small reductions wait for their sends.
  moved |= reduce_all();
  return moved;
}

bool Channel::listen() {
  listen_to(ready_);
  if (::poll(ready_.data(), ready_.size(), 0) <= 0) {
    for (Peer& peer : peers_)
      if (peer.link.is_held()) peer.link.receive_some(*this);
    return false;
  }
  bool moved = false;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    Link& link = peers_[i].link;
    if (!link.is_held() && (ready_[i].revents & (POLLIN | POLLHUP | POLLERR)) == 0) continue;
    for (int turn = 0; turn < kTurns && link.receive_some(*this); ++turn) moved = true;
  }
  found(ready_.data());
  return moved;
}

}  // namespace lockstep::comm
