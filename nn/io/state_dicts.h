// The state dicts within what torch.save() has written: dictionaries of tensors, at the file's top level or within
// others, beside the state of an optimizer, an epoch and the like.
#pragma once

#include <string>

#include "nn/io/unpickler.h"

namespace lockstep::nn {

/// One of them.
struct StateDict {
  /// "model.state_dict": the keys that lead to it, with dots between; empty: it is all that the file holds.
  std::string key;
  const PickledValue::Dict* entries = nullptr;  // names and tensors alone; the Unpickled's
};

/// The model's state dict in `file`, which was read from `path`: the one under `key`; if that is empty the only one, or
/// the only one under a usual key for models ("model", "state_dict", "model_state_dict", …). Content under a key that
/// begins with "optim" belongs to an optimizer. Nothing is guessed. Throws UsageError, naming the candidates, if there
/// are several and not exactly one under a usual key, if another one has the same names and shapes (a moving average of
/// the parameters), or if none has the key `key`. Throws IoError, naming the content, if there is none at all.
StateDict find_state_dict(const Unpickled& file, const std::string& path, const std::string& key);

}  // namespace lockstep::nn
