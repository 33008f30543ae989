// Arenas in a GPU's memory, and what moves bytes into and out of them.
#pragma once

#include <cstddef>
#include <memory>

#include "base/cuda/runtime.h"
#include "comm/nccl/communicator.h"
#include "lockstep/comm/arena.h"

namespace lockstep::comm {

/// Throws DeviceError unless this process may use GPU `device`.
void check_device(int device);

/// Memory of the current GPU. It is from NCCL, and registered where NCCL can do without copies of it, if there is a
/// communicator; from CUDA otherwise. Freed with the arena, when the GPU has done all that it was given, unless
/// operations on it may be under way or the communicator was aborted: then kernels, here or on other GPUs, may still be
/// at it until this process ends.
class DeviceArena final : public Arena {
 public:
  /// Throws std::bad_alloc for a size that no GPU can have.
  static void check_size(std::size_t bytes);
  /// Zeroed. Throws CudaError where there is too little memory.
  static std::unique_ptr<DeviceArena> allocate(std::size_t bytes, std::shared_ptr<Communicator> communicator);
  ~DeviceArena() override;

  /// The ranks have learnt that not all of them could register theirs, which NCCL does not want mixed.
  void deregister();
  bool registered() const { return registration_ != nullptr; }

 private:
  enum class Source { kNone, kCuda, kNccl };
  DeviceArena(std::byte* data, std::size_t bytes, Source source, int device, std::shared_ptr<Communicator> communicator)
      : Arena(data, bytes), source_(source), device_(device), communicator_(std::move(communicator)) {}
  void register_it();

  Source source_;
  int device_;
  std::shared_ptr<Communicator> communicator_;
  void* registration_ = nullptr;
};

/// Copies and zeroes for a group whose arenas are on the current GPU.
class DeviceBytes {
 public:
  /// `producer` is the stream whose work comes first; it must outlive this.
  explicit DeviceBytes(StreamView producer) : producer_(producer) {}

  /// ProcessGroup::copy(), after the producer's work.
  void copy(void* to, const void* from, std::size_t bytes);
  /// ProcessGroup::zero(), in the producer's order.
  void zero(void* data, std::size_t bytes);

 private:
  StreamView producer_;
  CudaStream stream_;
  CudaEvent ready_;
};

}  // namespace lockstep::comm
