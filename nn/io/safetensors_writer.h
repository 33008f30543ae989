// Writes a safetensors file piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/hash.h"
#include "lockstep/nn/io/safetensors.h"

namespace lockstep::nn {

/// Writes a file tensor by tensor, so that they need not be in memory together. Nothing is at `path` before commit().
/// Throws IoError naming the file.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, const std::vector<TensorHeader>& tensors,
                    const std::map<std::string, std::string>& metadata = {});
  /// The tensors' bytes, in the header's order.
  void add(std::span<const std::byte> bytes);

  struct Written {
    std::uint64_t bytes = 0;
    std::string sha256;  // of the whole file
  };
  Written commit();

 private:
  AtomicFile file_;
  Sha256 hash_;
  std::uint64_t written_ = 0, expected_ = 0;
};

}  // namespace lockstep::nn
