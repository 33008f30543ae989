// Reads and writes the files that PyTorch's torch.save() makes of state dicts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/nn/io/safetensors.h"

namespace lockstep::nn {

/// Whether a file that starts so is one of them: a zip archive, or what PyTorch wrote before version 1.6.
bool is_torch_file(std::span<const std::byte> start);

/// A state dict, with its tensors in its order.
struct TorchState {
  std::string key;  // where it lies in the file (find_state_dict()); empty: it is the whole file
  std::vector<HostTensor> tensors;
};

/// The model's, or that under `key` (nn/io/unpickler.h, which says what it throws). Numbers of 16 bits of either kind
/// come as f32. Nothing in a file is executed (nn/io/unpickler.h). Throws IoError, naming file and byte, for content
/// that is cut, contradictory or no state dict. Nothing is allocated from an unchecked length.
TorchState read_torch_file(const std::string& path, const std::string& key = {});

/// Throws the IoError of a file that is none of PyTorch's, or holds no state dict: `why`.
[[noreturn]] void refuse_torch_file(const std::string& path, const std::string& why);

/// What write_torch_file() has written beside the tensors under `key`, if there is that. Throws as read_torch_file()
/// does.
std::optional<std::string> read_torch_metadata(const std::string& path, const std::string& key);

/// Entry of an archive for each key of `metadata`: where others may keep what PyTorch does not look at.
inline constexpr const char* kTorchMetadataFolder = "extra/";

struct TorchFileOptions {
  /// Sizes and places from this number on are written as zip64 has them: those that do not fit into 32 bits. For tests.
  std::uint64_t zip64_from = 0xffffffff;
};

/// What torch.load(weights_only=True) reads: an ordered dictionary of `tensors`, each with a storage of its own that is
/// not compressed and begins at a multiple of 64 bytes, as torch.save() writes it. `path` is either the old file or the
/// whole new one. Throws IoError naming the file.
void write_torch_file(const std::string& path, const std::vector<HostTensor>& tensors,
                      const std::map<std::string, std::string>& metadata = {}, const TorchFileOptions& options = {});

}  // namespace lockstep::nn
