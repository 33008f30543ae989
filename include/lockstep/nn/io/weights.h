// Weight files of all kinds, by their content.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lockstep/nn/io/safetensors.h"

namespace lockstep::nn {

struct ReadOptions {
  /// Of a file of torch.save() that holds several dictionaries of tensors, or dictionaries within others, the one that
  /// is meant: the keys that lead to it, with dots between ("model", "ema.state_dict"). Empty: the model's, which is
  /// the only one, or the only one under a key that is usual for models (docs/weights.md).
  std::string key = {};
};

/// Reads a safetensors file, what torch.save() has written of a state dict, or the index of several of either
/// (model.safetensors.index.json: a JSON object whose "weight_map" names the file of each tensor, which lies beside the
/// index). If the tensors are not at the top level of a file, a line of the log says under which key. Throws IoError,
/// naming file and place, for content that is missing, malformed or in conflict with the index. Throws UsageError,
/// naming the keys, if the model's dictionary is ambiguous, if none has `options.key`, or for a key of a safetensors
/// file.
std::vector<HostTensor> read_weights(const std::string& path, const ReadOptions& options = {});

/// What a file of write_weights() or any safetensors file says beside its tensors; nothing for files of other kinds.
/// Throws as read_weights() does.
std::map<std::string, std::string> read_weights_metadata(const std::string& path);

/// Throws UsageError for a path whose ending says that the file is of a format that write_weights() does not write.
void check_weights_path(const std::string& path);

/// Writes what the ending of `path` says: what torch.load() reads for .pt, .pth and .bin, else safetensors. `path` is
/// either the old file or the whole new one. The tensors have different names. Throws as check_weights_path() does, and
/// IoError naming the file.
void write_weights(const std::string& path, const std::vector<HostTensor>& tensors,
                   const std::map<std::string, std::string>& metadata = {});

}  // namespace lockstep::nn
