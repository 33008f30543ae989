// Sends and receives between two ranks, beside a group's collectives.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/base/dtype.h"

namespace lockstep::comm {

/// Note [Pairs]
/// Sends and receives are no part of a group's sequence of collectives (Note [Same order]): two ranks issue them, and
/// the others do not know. Each ordered pair of ranks has a stream of bytes of its own, and numbers of its own: what a
/// rank sends to another one is received in the order sent. Each transfer is a header, which says what the sender
/// means, and the values. The receiver compares the header with what it expects before it takes a value, so ranks that
/// mean different sizes or types find out (OutOfStepError) and no wrong byte is delivered.
///
/// An engine moves the streams (PairStreams) whenever it is advanced, all at once: a rank that waits for one transfer
/// moves all others meanwhile, so a ring in which everybody sends before it receives comes to its end. A send is done
/// when the stream has taken all its bytes. A stream holds some bytes for a receiver that has not come, from none to
/// megabytes (docs/collectives.md), and programs must not count on it.

/// What the two ranks of a transfer must agree on.
struct PairDescriptor {
  std::uint64_t number = 0;      // counts what one rank has sent to another one, from 1
  std::uint64_t count = 0;       // elements
  std::uint64_t all_to_all = 0;  // the all-to-all, counted from 1, that it is a part of; 0: a send
  DType dtype = DType::kU8;
  std::uint8_t reserved[7] = {};

  std::size_t bytes() const { return count * size_of(dtype); }
  friend bool operator==(const PairDescriptor&, const PairDescriptor&) = default;
};
static_assert(std::has_unique_object_representations_v<PairDescriptor>);

/// One end of a transfer.
struct PairTransfer {
  PairDescriptor what;
  bool sends = false;
  int peer = 0;
  std::byte* data = nullptr;          // what a send only reads
  std::shared_ptr<const void> keeps;  // what owns that, where it is the transfer's to keep
  std::uint64_t end = 0;              // of a send that has been taken: where it ends in the stream
  std::atomic<bool> done{false};
};

/// "send #3 to rank 1 (4096 f32)"; `peer` is the other rank as messages name it.
std::string describe(const PairTransfer& transfer, const std::string& peer);

/// Throws the OutOfStepError of a rank that has `sent` something else than this one expects; `peer` is that rank as
/// messages name it.
[[noreturn]] void throw_mismatch(const PairTransfer& expected, const PairDescriptor& sent, const std::string& peer);
/// Throws the TimeoutError of a wait for `transfer`; `job_rank` and `peer` are the other rank, in the job and as
/// messages name it; `trouble`, if any, is what is known of the way to it.
[[noreturn]] void throw_transfer_timeout(const PairTransfer& transfer, double waited_seconds, int job_rank,
                                         const std::string& peer, const std::string& trouble = {});
/// Says that it has waited so long (Note [Stall notices]).
void warn_of_stall(const PairTransfer& transfer, double waited_seconds, int job_rank, const std::string& peer);

/// Streams of bytes between this rank and each other one. Nothing of it blocks.
class PairStreams {
 public:
  virtual ~PairStreams() = default;
  /// "rank 1 (host b)".
  virtual std::string name_of(int rank) const = 0;
  /// All of them are about to be asked; all of them have been.
  virtual void begin_round() {}
  virtual void end_round() {}
  /// There will be a transfer to or from `peer`.
  virtual void open_stream(int peer) { static_cast<void>(peer); }
  /// Takes some of `header` and the `values` that follow it for `to`, from their beginning; how many bytes.
  virtual std::size_t write_some(int to, std::span<const std::byte> header, std::span<const std::byte> values) = 0;
  /// Whether the first `bytes` of all that was ever taken for `to` need nothing more of this rank.
  virtual bool is_flushed(int to, std::uint64_t bytes) = 0;
  /// Fills some of `bytes` with what `from` has sent; how many. Throws what is wrong with the stream, when all that had
  /// come before has been read.
  virtual std::size_t read_some(int from, std::span<std::byte> bytes) = 0;
};

/// Copies as many bytes of `header`, and then of `values`, as fit into `out`; how many.
std::size_t join_some(std::span<const std::byte> header, std::span<const std::byte> values, std::span<std::byte> out);

/// The transfers of one rank that are not done. One thread uses it.
class PairQueues {
 public:
  /// `streams` must outlive it.
  PairQueues(int size, PairStreams& streams) : size_(size), streams_(streams) {}

  /// Moves a short transfer that is not one of them, if none comes before it and all of it can be moved now; whether it
  /// was. Else add() has to follow, of the same one, which continues it.
  bool move_at_once(const PairTransfer& transfer);
  void add(std::shared_ptr<PairTransfer> transfer);
  bool idle() const { return under_way_ == 0; }
  /// Changes when something has moved.
  std::uint64_t progress() const { return progress_; }
  /// Moves what can be moved now; whether anything was. Throws OutOfStepError where another rank sends something else
  /// than this one receives.
  bool advance();
  /// The same for sends alone, without a look at what arrives: that memory is being written by other ranks.
  void advance_sends();
  /// Whether `transfer`, of which nothing is read, is one of them.
  bool has(const PairTransfer* transfer) const;
  /// The next transfer to or from each rank, which waits for that one.
  std::vector<const PairTransfer*> waiting() const;
  /// At the end: throws OutOfStepError where another rank has sent what this one has not received.
  void check_nothing_left();

 private:
  /// Transfers one way, to or from one rank.
  struct Queue {
    std::deque<std::shared_ptr<PairTransfer>> transfers;
    std::size_t taken = 0;           // sends that the stream has taken, but still needs
    std::uint64_t stream_bytes = 0;  // that it has taken, ever
    std::size_t header_bytes = 0;    // of the first one that is not taken, moved
    std::size_t bytes = 0;           // of its values, moved
    PairDescriptor header = {};      // as it arrives
  };

  Queue& queue_of(const PairTransfer& transfer);
  bool send_all();
  bool send(Queue& queue, int to);
  bool write(Queue& queue, const PairTransfer& transfer);
  bool receive(Queue& queue);
  bool read(Queue& queue, const PairTransfer& transfer);
  void finish(Queue& queue);

  const int size_;
  PairStreams& streams_;
  std::vector<Queue> out_, in_;  // by rank; empty before the first transfer
  std::size_t under_way_ = 0;
  std::uint64_t progress_ = 0;
};

}  // namespace lockstep::comm
