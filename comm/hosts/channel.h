// One rank's share of what travels between hosts.
#pragma once

#include <poll.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/hosts/chunk_pool.h"
#include "comm/hosts/intra_host_sync.h"
#include "comm/hosts/link.h"
#include "comm/hosts/message.h"
#include "comm/hosts/plan.h"
#include "comm/shm/peers.h"
#include "lockstep/comm/op.h"
#include "lockstep/comm/reduction_tree.h"

namespace lockstep::comm {

/// Note [Channels]
/// A channel is one rank of each host, connected with each other. It moves its chunks of an operation (Note [Two
/// levels]) once all ranks of its host have posted it: it reduces what they have put in and sends it, reduces what
/// comes in from the other hosts, in their order, into its own chunks, and writes what is final into the copies of all
/// ranks of its host. Chunks follow each other, so both phases, both directions and the arithmetic overlap.
///
/// Several operations are under way at once. A message may come before this rank has posted its operation: its payload
/// then waits in a block of the pool. It may be too early to be remembered (kWindow operations after the first that is
/// unfinished here); then nothing more is read from that link. That ends: its sender has finished the first one, so
/// what this rank needs for that has come before.
class Channel final : private Link::Sink {
 public:
  static constexpr std::uint64_t kWindow = 8;
  static_assert(kWindow <= RankControlBlock::kSlots);

  /// `peers` and `sync` outlive it. `host` is this rank's; links[i] is to hosts in ascending order, without its own.
  Channel(int number, int host, const Peers& peers, const IntraHostSync& sync, const HostTuning& tuning,
          std::vector<Link> links);

  /// This rank has posted `op`, the next one.
  /// Throws OutOfStepError where another host has come to something else there.
  void open(const Op& op);
  /// Whether all that this channel has to do for an open operation is done.
  bool is_done(std::uint64_t index) const;
  /// The first one, which is done, is forgotten.
  void close(std::uint64_t index);

  /// Does what can be done now; whether anything was. Throws OutOfStepError, and DeviceError for messages that are
  /// none or not as they were sent.
  bool advance();
  /// Reads what has come, for a rank that has nothing under way.
  bool listen();

  std::size_t links() const { return peers_.size(); }
  Link& link(std::size_t i) { return peers_[i].link; }
  const Link& link(std::size_t i) const { return peers_[i].link; }
  /// Whether the first operation cannot be finished without data from the other end, or space there.
  bool waits_for(std::size_t i) const;
  /// What the other end said last that it waits for in operation `index`; nothing if it has said nothing about it.
  const std::vector<int>* said_to_wait_for(std::size_t i, std::uint64_t index) const;
  /// Whether somebody has said that it waits in the first operation.
  bool others_say_they_wait() const;
  /// Reports to the others whom this rank waits for in the first operation, unless it has already.
  void announce_wait(const std::vector<int>& ranks);
  /// Sends the reason of the abort to the other ranks, as far as they accept it before `deadline`: to all but the one
  /// that sent it here, because that one may not reach the others.
  void announce_abort(const AbortReason& reason, Deadline deadline);
  /// What came from a link.
  const std::optional<AbortReason>& abort_reason() const { return abort_reason_; }
  /// Counts up with every chunk that is sent or has come; words do not count.
  std::uint64_t progress() const { return progress_; }

  /// What poll(2) waits for, one entry per link; and its results.
  void listen_to(std::vector<pollfd>& entries) const;
  void found(const pollfd* entries);

 private:
  /// Of a reduction tree.
  struct HostTree {
    std::vector<std::size_t> partials;  // by host: how many it sends
    TreeProgram own;                    // of the ranks here, to what this host sends
    TreeProgram all;                    // of all hosts', to the sum
  };
  /// One operation's way to and from one host. Chunks in either direction come in order.
  struct PeerProgress {
    std::uint32_t scattered = 0;  // chunks of their part, sent
    std::uint32_t gathered = 0;   // chunks of our part, sent
    std::uint32_t arrived = 0;    // chunks of our part that they have scattered
    std::uint32_t collected = 0;  // chunks of their part that are here
    std::uint32_t spread = 0;     // of those, in all copies
    BlockQueue contributions;     // arrived, not reduced
    BlockQueue early;             // collected before the operation was open
    bool heard = false;
    MessageHeader first;  // if heard
  };
  struct Operation {
    bool open = false;
    bool together = false;  // all ranks of this host have posted it
    Op op;
    Plan plan;
    const HostTree* tree = nullptr;     // that it sums along; nullptr: none
    std::uint32_t reduced = 0;          // chunks of our part that are final
    std::vector<PeerProgress> by_peer;  // by peer
  };
  struct Peer {
    explicit Peer(Link l) : link(std::move(l)) {}
    Link link;
    Operation* sending = nullptr;  // whose message is on its way out, if any
    MessageKind sending_kind = MessageKind::kReduceScatter;
    std::unique_ptr<std::byte[]> staging;  // for payloads that are made for sending
    ChunkPool::Block* filling = nullptr;   // what is arriving
    std::vector<int> said;                 // its last notice
    std::uint64_t said_index = 0;
    bool knows = false;                                      // it has sent an abort reason
    std::string outgoing;                                    // a notice that waits for its turn
    std::array<std::byte, AbortReason::kMostBytes> words{};  // of notices and abort reasons that arrive
  };

  std::byte* room_for(Link& link, const MessageHeader& header) override;
  void arrived(Link& link, const MessageHeader& header) override;
  [[noreturn]] void altered(Link& link, Link::Part part, const MessageHeader& header) override;
  void take_notice(Peer& peer, const MessageHeader& header);
  void compare_with_known(const MessageHeader& header, const Link& link) const;

  Operation& operation(std::uint64_t index) { return window_[index % kWindow]; }
  const Operation& operation(std::uint64_t index) const { return window_[index % kWindow]; }
  std::size_t index_of(const Link& link) const;
  std::size_t peer_of_host(int host) const { return static_cast<std::size_t>(host < host_ ? host : host - 1); }
  std::byte* copy_of(const Operation& operation, int local) const {
    return operation.op.data + (local - sync_.local()) * static_cast<std::ptrdiff_t>(operation.op.stride_bytes);
  }
  int local_of(int rank) const;
  void compare(const MessageHeader& header, const Operation& operation, const Link& link) const;
  [[noreturn]] void out_of_step(const Link& link, const MessageHeader& header, const Op* ours) const;
  [[noreturn]] void not_understood(const Link& link, const char* why) const;

  bool look_for_locals();
  bool reduce_all();
  bool may_reduce(const Operation& operation) const;
  void reduce_next(Operation& operation);
  bool spread_all();
  bool send_all();
  bool send_to(std::size_t index);
  bool begin_next(std::size_t index);
  const HostTree* tree_of(const Op& op);
  const std::byte* partials_along_tree(const Operation& operation, const Chunk& chunk, std::byte* staging);
  const std::byte* contribution(Operation& operation, const Chunk& chunk, std::byte* staging);
  void spread(const Operation& operation, const Chunk& chunk, int from) const;

  const int number_;
  const int host_;
  const Peers& names_;
  const Hosts& hosts_;
  const IntraHostSync& sync_;
  const HostTuning tuning_;
  std::vector<Peer> peers_;
  std::vector<Operation> window_;
  std::uint64_t closed_ = 0;  // operations up to this op_index are done and forgotten
  std::uint64_t opened_ = 0;
  std::vector<std::unique_ptr<const HostTree>> trees_;  // by number
  ChunkPool pool_;
  std::unique_ptr<std::byte[]> own_partial_;
  std::vector<const std::byte*> sources_;  // scratch
  std::vector<pollfd> ready_;              // scratch
  std::uint64_t told_index_ = 0;
  std::vector<int> told_ranks_;
  std::optional<AbortReason> abort_reason_;
  std::uint64_t progress_ = 0;
};

}  // namespace lockstep::comm
