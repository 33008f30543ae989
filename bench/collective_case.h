// One collective as this rank takes part in it, over and over: buffers, operation, check.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bench/collectives.h"
#include "bench/rivals/rivals.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::bench {

/// Memory for the largest size; one operation at a time.
class CollectiveCase {
 public:
  enum class Way : std::uint8_t { kOutOfPlace, kInPlace };

  /// Collective. `group` joins the memory of the ranks' devices, `host` the ranks. Both outlive it.
  CollectiveCase(comm::ProcessGroup& group, comm::ProcessGroup& host, const CollectiveOptions& options);

  /// Collective: `bytes` from now on; all inputs are zero. Zeros stay zeros however often they are summed, and take as
  /// long as any other number.
  void resize(std::int64_t bytes);

  /// Does it once: as often at a time as options.in_flight says. Blocking.
  void run(Way way);
  void run(Rival& rival);
  /// Gives it the inputs, where it has memory of its own.
  void put(Rival& rival) const { rival.put(values_.data(), other_.data(), bytes_); }
  /// How many messages or operations run() is, by which its time is divided.
  double units() const;
  /// Of a message or an operation, for bandwidth.
  double bytes_moved() const;

  /// Collective: elements, of all ranks, that are not what they should be after one operation. Inputs are zero again.
  std::int64_t count_wrong(Way way);
  std::int64_t count_wrong(Rival& rival);

 private:
  comm::Region region(const comm::Arena& arena, int number = 0) const;
  void issue(Way way, int number);
  void exchange(const comm::Region& from, const comm::Region& to);
  template <class Send, class Receive>
  void run_pattern(const Send& send, const Receive& receive);
  void run_own(Way way);

  void fill();
  void fill_own();
  void zero();
  bool is_in_values(Way way) const;
  comm::Slice part_of(int rank, bool in_arena) const;
  int sender() const;
  std::int64_t wrong_in(const std::byte* result, bool in_arena) const;
  std::int64_t sum_of_ranks(std::int64_t wrong);

  comm::ProcessGroup& group_;
  comm::ProcessGroup& host_;
  const CollectiveOptions& options_;
  const CollectiveFamily& family_;
  const int rank_, ranks_;
  std::size_t stride_ = 0;  // between operations under way at a time
  std::size_t bytes_ = 0, part_bytes_ = 0;
  std::unique_ptr<comm::Arena> source_, arena_;
  std::vector<std::byte> values_, other_;  // of the host, outside of arenas
  std::vector<comm::Work> works_;
  std::vector<comm::Transfer> transfers_;
};

}  // namespace lockstep::bench
