// A store over MPI.
#pragma once

#include <mpi.h>

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/mpi/session.h"
#include "comm/store.h"
#include "lockstep/comm/failure.h"

namespace lockstep::comm {

/// Every rank has the whole table: what one sets goes to all others at once, as messages on a communicator of their
/// own. So nobody depends on a rank that is busy: MPI moves on while this rank is inside a call of the store, and a
/// value of more than a few KiB arrives when both sides are. The thread that makes it is the one that calls MPI. It has
/// a session of MPI, until leave().
class MpiStore final : public Store {
 public:
  /// Starts MPI, unless it runs; throws what Session does.
  MpiStore(const World& world, Deadline deadline, MpiRanks ranks = {});

  ~MpiStore() override;

  const Session& session() const { return session_; }

  void leave(Deadline deadline) override;

 private:
  struct Outgoing {
    std::string message;
    std::vector<MPI_Request> requests;
  };
  struct Incoming {
    std::string message;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  void do_set(const std::string& key, std::string_view value) override;
  std::vector<std::optional<std::string>> do_get(std::span<const std::string> keys, Deadline deadline) override;
  std::vector<Attendance> attendance() override;
  void give_up(const TimeoutError& error) override;

  /// Whether anything came or got out.
  bool advance();
  bool receive();
  /// False when `deadline` passes first.
  template <class Condition>
  bool advance_until(Condition&& done, Deadline deadline);

  Session session_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::unordered_map<std::string, std::string> values_;
  std::list<Outgoing> sending_;
  std::unique_ptr<Incoming> receiving_;  // one at a time: so that a rank's sets arrive in their order
  Failure failure_;
};

}  // namespace lockstep::comm
