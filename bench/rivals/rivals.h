// Other libraries' collectives, measured in the same process and the same rounds as ours.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "bench/collectives.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/world.h"

namespace lockstep::bench {

/// A library that joins the same ranks. Its memory is the caller's, as its users have it, or that of its GPU.
class Rival {
 public:
  virtual ~Rival() = default;
  Rival(const Rival&) = delete;
  Rival& operator=(const Rival&) = delete;

  /// Whether it has this collective of this type and operation.
  virtual bool has(const CollectiveOptions& options) const = 0;
  /// Not timed: copies what run() takes, `bytes` each, into memory of its own, and back, where it has any.
  virtual void put(const std::byte* /*values*/, const std::byte* /*other*/, std::size_t /*bytes*/) {}
  virtual void get(std::byte* /*values*/, std::byte* /*other*/, std::size_t /*bytes*/) {}
  /// Once, of send-recv window_of(bytes) messages for the patterns that have many. `values` are the larger one of a
  /// rank's buffers, `other` the smaller one where a collective has two (a reduce_scatter's result, an allgather's
  /// part), or a second one as large (an all-to-all's result). Blocking.
  virtual void run(const CollectiveOptions& options, std::byte* values, std::byte* other, std::size_t bytes) = 0;
  /// Collective, after run(), not timed: when it returns, no rank waits for another one inside of the library, which
  /// may move nothing on a rank that does not call it.
  virtual void settle() {}
  /// Collective: its orderly end.
  virtual void shutdown() {}

 protected:
  Rival() = default;
};

/// Collective: `name` as --compare has it. Throws UsageError on every rank where it is not there, or does not work on a
/// device of this kind, with what to do. `group` joins the ranks.
std::unique_ptr<Rival> make_rival(const std::string& name, const comm::World& world, comm::ProcessGroup& group,
                                  DeviceKind device);
/// The names that there are, in this build or another.
std::vector<std::string> rival_names();

/// nullptr, and why in `missing`, where there is none.
std::unique_ptr<Rival> make_mpi_rival(const comm::World& world, comm::ProcessGroup& group, std::string& missing);
std::unique_ptr<Rival> make_nccl_rival(const comm::World& world, comm::ProcessGroup& group, std::string& missing);

}  // namespace lockstep::bench
