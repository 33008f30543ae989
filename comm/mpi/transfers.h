// Messages under way.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/mpi/session.h"
#include "comm/mpi/tag.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {

class CollectiveAlgorithm;

/// For memory of messages that are not complete when their group ends, as it does after an error: MPI, which may run on
/// (Note [Whose MPI]), still reads and writes there. It stays until this process ends.
void keep_for_mpi(std::shared_ptr<void> memory);

/// One message of one operation.
struct Message {
  enum class Direction : std::uint8_t { kSend, kReceive };
  CollectiveAlgorithm* owner = nullptr;  // notified when the message is complete
  Direction direction = Direction::kSend;
  std::uint8_t phase = 0;
  int peer = 0;
  std::uint32_t chunk = 0;
  std::size_t bytes = 0;
};

/// Starts messages and notifies their owners when they are complete. A receive that gets another number of bytes than
/// it expects, and any failure of MPI, throw an error that names the peer and the operation. Not thread-safe; the
/// memory of a message must stay until its owner has been notified.
class Transfers {
 public:
  /// Up to `most_under_way` messages at once need no allocation.
  Transfers(const Session& session, std::size_t most_under_way);

  void send(const Op& op, const Message& transfer, const std::byte* from);
  void receive(const Op& op, const Message& transfer, std::byte* to);

  /// Lets MPI make progress and notifies the owners of complete messages; whether there were any.
  bool test();

  /// The ranks whose messages `owner` is waiting for: to come first of all, else to be taken.
  std::vector<int> missing(const CollectiveAlgorithm& owner) const;

  const TagLayout& tags() const { return tags_; }

 private:
  void add(const Message& transfer, MPI_Request request);
  void remove(std::size_t index);
  void check_status(const Message& transfer, const MPI_Status& status) const;
  [[noreturn]] void fail(int code, const char* doing, const Message& transfer, const Op& op) const;

  const Session& session_;
  TagLayout tags_;
  // Parallel arrays, dense: MPI takes the requests as they lie.
  std::vector<MPI_Request> requests_;
  std::vector<Message> transfers_;
  // Scratch of test().
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<Message> completed_;
};

}  // namespace lockstep::comm
