// Writes what torch.load(weights_only=True) reads: the zip archive of torch.save().
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/nn/io/safetensors.h"

namespace lockstep::nn {

/// Entry of an archive for each key of `metadata`: where others may keep what PyTorch does not look at.
inline constexpr const char* kTorchMetadataFolder = "extra/";

struct TorchFileOptions {
  /// Sizes and places from this number on are written as zip64 has them: those that do not fit into 32 bits. For tests.
  std::uint64_t zip64_from = 0xffffffff;
};

/// An ordered dictionary of `tensors`, each with a storage of its own that is not compressed and begins at a multiple
/// of 64 bytes, as torch.save() writes it. `path` is either the old file or the whole new one. Throws IoError naming
/// the file.
void write_torch_file(const std::string& path, const std::vector<HostTensor>& tensors,
                      const std::map<std::string, std::string>& metadata = {}, const TorchFileOptions& options = {});

}  // namespace lockstep::nn
