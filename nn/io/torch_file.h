// The files that PyTorch's torch.save() writes of state dicts.
#pragma once

#include <cstddef>
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

/// The model's, or that under `key` (nn/io/state_dicts.h, which says what it throws). Numbers of 16 bits of either kind
/// come as f32. Nothing in a file is executed (nn/io/unpickler.h). Throws IoError, naming file and byte, for content
/// that is cut, contradictory or no state dict. Nothing is allocated from an unchecked length.
TorchState read_torch_file(const std::string& path, const std::string& key = {});

/// Throws the IoError of a file that is none of PyTorch's, or holds no state dict: `why`.
[[noreturn]] void refuse_torch_file(const std::string& path, const std::string& why);

/// What write_torch_file() has written beside the tensors under `key`, if there is that. Throws as read_torch_file()
/// does.
std::optional<std::string> read_torch_metadata(const std::string& path, const std::string& key);

}  // namespace lockstep::nn
