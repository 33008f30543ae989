#include "comm/hosts/pair_links.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/pairs.h"

namespace lockstep::comm {
namespace {

// Of one message: what is checked at a time should fit a cache.
constexpr std::size_t kMessageBytes = 64 << 10;

}  // namespace

struct PairLinks::Peer {
  explicit Peer(int r, std::optional<Link> l = {}) : rank(r), link(std::move(l)) {}

  const int rank;
  std::optional<Link> link;
  std::unique_ptr<std::byte[]> out = std::make_unique_for_overwrite<std::byte[]>(kMessageBytes);
  std::unique_ptr<std::byte[]> in = std::make_unique_for_overwrite<std::byte[]>(kMessageBytes);
  std::size_t begin = 0, end = 0;  // what has not been read of the message that came last
};

PairLinks::PairLinks(std::unique_ptr<PeerConnector> connector, const Peers& peers)
    : connector_(std::move(connector)), names_(peers) {}
PairLinks::~PairLinks() = default;

PairLinks::Peer* PairLinks::find(int rank) const {
  const auto found = std::ranges::find_if(peers_, [&](const auto& one) { return one->rank == rank; });
  return found == peers_.end() ? nullptr : found->get();
}

void PairLinks::open(int rank) {
  if (find(rank) != nullptr) return;
  connector_->want(rank);
  peers_.push_back(std::make_unique<Peer>(rank));
}

void PairLinks::advance() {
  if (std::ranges::any_of(peers_, [](const auto& peer) { return !peer->link; })) connector_->advance();
}

/// A rank with which this one has no transfer may have connected while another one was waited for.
PairLinks::Peer* PairLinks::connected(int rank) {
  Peer* const peer = find(rank);
  if (peer != nullptr && peer->link) return peer;
  auto link = connector_->take(rank);
  if (!link) return nullptr;
  if (peer == nullptr) return peers_.emplace_back(std::make_unique<Peer>(rank, std::move(link))).get();
  peer->link = std::move(link);
  return peer;
}

std::size_t PairLinks::write_some(int to, std::span<const std::byte> header, std::span<const std::byte> values) {
  if (!is_flushed(to)) return 0;
  Peer* const peer = connected(to);
  if (peer == nullptr || peer->link->is_down()) return 0;
  MessageHeader message;
  message.kind = MessageKind::kPair;
  message.bytes = static_cast<std::uint32_t>(join_some(header, values, {peer->out.get(), kMessageBytes}));
  peer->link->begin(message, peer->out.get());
  peer->link->send_some();
  return message.bytes;
}

bool PairLinks::is_flushed(int to) {
  Peer* const peer = connected(to);
  if (peer == nullptr) return true;
  if (peer->link->sending()) peer->link->send_some();
  return !peer->link->sending();
}

std::size_t PairLinks::read_some(int from, std::span<std::byte> bytes) {
  Peer* const peer = connected(from);
  if (peer == nullptr) return 0;
  read_ahead(*peer);
  const std::size_t count = std::min(bytes.size(), peer->end - peer->begin);
  if (count > 0) std::memcpy(bytes.data(), peer->in.get() + peer->begin, count);
  peer->begin += count;
  return count;
}

void PairLinks::read_ahead() {
  for (const auto& peer : peers_)
    if (peer->link) read_ahead(*peer);
}

void PairLinks::read_ahead(Peer& peer) {
  while (peer.begin == peer.end && peer.link->receive_some(*this)) {
  }
}

std::byte* PairLinks::room_for(Link& link, const MessageHeader& header) {
  Peer& peer = *find(link.rank());
  if (peer.begin < peer.end) return nullptr;
  if (header.magic != MessageHeader::kMagic || header.kind != MessageKind::kPair || header.bytes > kMessageBytes)
    throw DeviceError(fmt::format("{} is no longer understood: it sent a message that belongs to no send",
                                  names_.name_of(link.rank())),
                      "start every rank with the same binary, on machines of one kind");
  return peer.in.get();
}

void PairLinks::arrived(Link& link, const MessageHeader& header) {
  Peer& peer = *find(link.rank());
  peer.begin = 0;
  peer.end = header.bytes;
}

void PairLinks::altered(Link& link, Link::Part, const MessageHeader&) {
  throw DeviceError(fmt::format("the network altered bytes that {} has sent: they came with a wrong {}",
                                names_.name_of(link.rank()), link.encrypts() ? "tag" : "checksum"),
                    "the data was discarded; check the network cards, switches and tunnels between these hosts");
}

Link* PairLinks::link_with(int rank) const {
  Peer* const peer = find(rank);
  return peer != nullptr && peer->link ? &*peer->link : nullptr;
}

std::string PairLinks::trouble_with(int rank) const {
  const Peer* const peer = find(rank);
  return peer == nullptr || peer->link ? std::string() : connector_->trouble_with(rank);
}

void PairLinks::listen_to(std::vector<pollfd>& entries) const {
  bool connecting = false;
  for (const auto& peer : peers_) {
    connecting |= !peer->link;
    if (!peer->link || peer->link->is_down()) continue;
    const bool can_read = peer->begin == peer->end && !peer->link->is_held();
    const int events = (can_read ? POLLIN : 0) | (peer->link->sending() ? POLLOUT : 0);
    if (events != 0) entries.push_back({peer->link->fd(), static_cast<short>(events), 0});
  }
  if (connecting) connector_->listen_to(entries);
}

}  // namespace lockstep::comm
