// Streams between two ranks of different hosts.
#pragma once

#include <poll.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/hosts/link.h"
#include "comm/hosts/peer_connector.h"
#include "comm/shm/peers.h"

namespace lockstep::comm {

/// Bytes to and from ranks of other hosts, each over a connection of its own, as messages whose checksums or tags are
/// checked before anything of them is delivered. A connection is made when both ranks want it. Not thread-safe.
class PairLinks final : private Link::Sink {
 public:
  /// `peers` must outlive it.
  PairLinks(std::unique_ptr<PeerConnector> connector, const Peers& peers);
  ~PairLinks() override;

  /// There will be a transfer to or from `rank`.
  void open(int rank);
  /// Does what can be done now for connections that are wanted.
  void advance();
  /// How many of `bytes`, from their beginning, have been taken.
  std::size_t write_some(int to, std::span<const std::byte> header, std::span<const std::byte> values);
  bool is_flushed(int to);
  /// How many of `bytes` have been filled. Throws DeviceError for messages that are not as they were sent.
  std::size_t read_some(int from, std::span<std::byte> bytes);

  /// Reads a message ahead from each rank of which none is waiting to be read: what nobody receives yet would end each
  /// sleep, and hide the end of the connection after it. Throws as read_some() does.
  void read_ahead();
  /// The connection with `rank`, if there is one. Once it is down, all that had come before has been read.
  Link* link_with(int rank) const;
  /// Why there is no connection with `rank` yet; empty: there is one, or nobody has wanted one.
  std::string trouble_with(int rank) const;
  /// What poll(2) waits for.
  void listen_to(std::vector<pollfd>& entries) const;

 private:
  struct Peer;

  Peer* find(int rank) const;
  Peer* connected(int rank);
  void read_ahead(Peer& peer);
  std::byte* room_for(Link& link, const MessageHeader& header) override;
  void arrived(Link& link, const MessageHeader& header) override;
  [[noreturn]] void altered(Link& link, Link::Part part, const MessageHeader& header) override;

  std::unique_ptr<PeerConnector> connector_;
  const Peers& names_;
  std::vector<std::unique_ptr<Peer>> peers_;  // those that are wanted
};

}  // namespace lockstep::comm
