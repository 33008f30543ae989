// What channels say to each other beside the data, and what they make of it.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "comm/hosts/channel.h"

namespace lockstep::comm {

bool Channel::waits_for(std::size_t i) const {
  if (opened_ == closed_) return false;
  const Operation& operation = this->operation(closed_ + 1);
  if (!operation.together) return false;
  const Plan& plan = operation.plan;
  const PeerProgress& progress = operation.by_peer[i];
  const int other = peers_[i].link.host();
  const std::uint32_t own = plan.chunk_count(host_, number_), theirs = plan.chunk_count(other, number_);
  return (plan.scatters(other) && operation.reduced < own && progress.arrived <= operation.reduced) ||
         (plan.gathers(other, host_) && progress.collected < theirs) ||
         (plan.scatters(host_) && progress.scattered < theirs) ||
         (plan.gathers(host_, other) && progress.gathered < operation.reduced);
}

const std::vector<int>* Channel::said_to_wait_for(std::size_t i, std::uint64_t index) const {
  return peers_[i].said_index == index ? &peers_[i].said : nullptr;
}

bool Channel::others_say_they_wait() const {
  return opened_ > closed_ &&
         std::ranges::any_of(peers_, [&](const Peer& peer) { return peer.said_index == closed_ + 1; });
}

void Channel::announce_wait(const std::vector<int>& ranks) {
  if (opened_ == closed_) return;
  if (told_index_ == closed_ + 1 && told_ranks_ == ranks) return;
  told_index_ = closed_ + 1;
  told_ranks_ = ranks;
  const std::size_t count = std::min(ranks.size(), NodeControlBlock::kMostBlamed);
  for (Peer& peer : peers_) peer.outgoing.assign(reinterpret_cast<const char*>(ranks.data()), count * sizeof(int));
  for (Peer& peer : peers_)
    if (count == 0) peer.outgoing.assign(sizeof(int), '\xff');  // rank -1: it waits, and knows of nobody to name
  send_all();
}

void Channel::announce_abort(const AbortReason& reason, Deadline deadline) {
  const std::string words = reason.encode();
  MessageHeader header;
  if (opened_ > closed_) header = header_for(operation(closed_ + 1).op, MessageKind::kAbort);
  header.kind = MessageKind::kAbort;
  header.bytes = static_cast<std::uint32_t>(words.size());
  std::vector<bool> told(peers_.size());
  for (;;) {
    bool unsaid = false;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      Link& link = peers_[i].link;
      if (peers_[i].knows || link.is_down()) continue;
      link.discard_incoming();
      if (link.sending()) link.send_some();
      if (!link.sending() && !told[i]) {
        told[i] = true;
        link.begin(header, reinterpret_cast<const std::byte*>(words.data()));
        link.send_some();
      }
      unsaid = unsaid || (!link.is_down() && (link.sending() || !told[i] || !link.is_delivered()));
    }
    if (!unsaid || deadline.expired()) return;
    std::vector<pollfd> entries;
    for (const Peer& peer : peers_)
      entries.push_back({peer.knows || peer.link.is_down() ? -1 : peer.link.fd(),
                         static_cast<short>(POLLIN | (peer.link.sending() ? POLLOUT : 0)), 0});
    ::poll(entries.data(), entries.size(), 10);
  }
}

void Channel::listen_to(std::vector<pollfd>& entries) const {
  entries.clear();
  for (const Peer& peer : peers_) {
    const Link& link = peer.link;
    const int events = (link.is_held() ? 0 : POLLIN) | (link.is_full() && link.sending() ? POLLOUT : 0);
    entries.push_back({link.is_down() || events == 0 ? -1 : link.fd(), static_cast<short>(events), 0});
  }
}

void Channel::found(const pollfd* entries) {
  for (std::size_t i = 0; i < peers_.size(); ++i)
    if (peers_[i].link.is_held() && (entries[i].revents & (POLLERR | POLLHUP)) != 0) peers_[i].link.take_down();
}

void Channel::out_of_step(const Link& link, const MessageHeader& header, const Op* ours) const {
  const std::string who = names_.name_of(link.rank());
  if (ours != nullptr) throw OutOfStepError(out_of_step_text(who, header.op, *ours), kSameProgram);
  throw OutOfStepError(fmt::format("out of step: {} is in {}, and this rank has done another operation instead", who,
                                   describe(header.op)),
                       kSameProgram);
}

void Channel::not_understood(const Link& link, const char* why) const {
  throw DeviceError(fmt::format("{} is no longer understood: it sent {}", names_.name_of(link.rank()), why),
                    "start every rank with the same binary, on machines of one kind");
}

void Channel::altered(Link& link, Link::Part part, const MessageHeader& header) {
  const bool known = part == Link::Part::kPayload;
  std::string what = known ? fmt::format("{} bytes", header.bytes) : std::string("a header");
  if (known && header.op.op_index > 0)
    what += fmt::format(" of {}", describe(header.op));
  else if (opened_ > closed_)
    what += fmt::format(" in {}", describe(operation(closed_ + 1).op));
  const int own = hosts_[static_cast<std::size_t>(host_)][static_cast<std::size_t>(sync_.local())];
  if (link.encrypts())
    throw DeviceError(
        fmt::format("bytes between {} and {} were altered on their way, or come from somebody else: {} came "
                    "with a wrong tag",
                    names_.name_of(link.rank()), names_.name_of(own), what),
        "the data was discarded; check the network cards, switches and tunnels between these hosts and who else is on "
        "this network, and resume from a checkpoint");
  throw DeviceError(fmt::format("the network altered bytes between {} and {}: {} came with a wrong checksum",
                                names_.name_of(link.rank()), names_.name_of(own), what),
                    "the data was discarded; check the network cards, switches and tunnels between these hosts, and "
                    "resume from a checkpoint (a program that writes into a region during its sending looks the same)");
}

}  // namespace lockstep::comm
