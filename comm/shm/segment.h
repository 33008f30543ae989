// Memory that all ranks of a host have mapped.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace lockstep::comm {

/// One stretch of memory, mapped by every rank at an address of its own: zeroed parts of equal size side by side, one
/// per rank. Its pages exist from the start, each rank's part near that rank, so that no later access can fail or
/// fault.
///
/// It is a memfd that rank 0 makes and the others open through /proc: it has no name that could remain, however its
/// processes end, and does not count against the size of /dev/shm, which is 64 MB in containers.
class Segment {
 public:
  /// Every rank's text (at most kMostText bytes) on every rank, in rank order; collective.
  using Exchange = std::function<std::vector<std::string>(const std::string&)>;
  static constexpr std::size_t kMostText = 240;

  /// Collective. `part_bytes` is rounded up to pages. Throws std::bad_alloc for sizes that no machine has. Where a rank
  /// gets no memory, or cannot reach rank 0's, the lowest such rank throws DeviceError and the others PeerError; they
  /// are still in step.
  static Segment map(int rank, int size, std::size_t part_bytes, const Exchange& exchange);

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  /// Unmaps this rank's view; the others keep theirs.
  ~Segment();

  std::byte* part(int rank) const { return data_ + static_cast<std::size_t>(rank) * part_bytes_; }
  std::size_t part_bytes() const { return part_bytes_; }
  /// Leaves the memory mapped until this process ends.
  void leak() { data_ = nullptr; }

 private:
  std::byte* data_ = nullptr;
  std::size_t part_bytes_ = 0;
  std::size_t mapped_bytes_ = 0;
};

/// Throws DeviceError if `asked_bytes` of shared memory for `ranks` ranks exceed `available_bytes`.
void check_shared_memory(std::size_t asked_bytes, int ranks, std::size_t available_bytes);

/// Free memory of this machine, or of this process's control group; a guess if the system does not report it.
std::size_t available_memory_bytes();

}  // namespace lockstep::comm
