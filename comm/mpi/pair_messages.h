// Streams between two ranks as MPI's messages.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "comm/mpi/session.h"

namespace lockstep::comm {

/// What is written to a rank goes into messages of at most kMessageBytes, one at a time, on a communicator of their
/// own. All on the thread that owns MPI.
class PairMessages {
 public:
  static constexpr std::size_t kMessageBytes = 128 << 10;

  /// `session` must outlive it.
  explicit PairMessages(const Session& session) : session_(session) {}
  ~PairMessages();
  PairMessages(const PairMessages&) = delete;
  PairMessages& operator=(const PairMessages&) = delete;

  /// How many of `bytes`, from their beginning, have been taken.
  std::size_t write_some(int to, std::span<const std::byte> header, std::span<const std::byte> values);
  bool is_flushed(int to);
  /// How many of `bytes` have been filled.
  std::size_t read_some(int from, std::span<std::byte> bytes);

 private:
  struct Peer {
    std::shared_ptr<std::byte[]> out;  // of the message that is being sent
    MPI_Request outgoing = MPI_REQUEST_NULL;
    std::shared_ptr<std::byte[]> in;  // of the message that is coming, or has come last
    MPI_Request incoming = MPI_REQUEST_NULL;
    std::size_t begin = 0, end = 0;  // what has not been read of it
  };

  Peer& peer(int rank);
  void receive(Peer& peer, int from);

  const Session& session_;
  std::vector<Peer> peers_;  // by rank; empty before the first transfer
};

}  // namespace lockstep::comm
