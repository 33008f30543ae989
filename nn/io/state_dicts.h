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

/// The model's state dict in `file`, which was read from `path`: the one under `key`, or, where that is empty, the only
/// one, or the only one under keys that people use for a model's ("model", "state_dict", "model_state_dict", …). What
/// lies under a key that begins with "optim" is an optimizer's. Nothing is guessed: throws UsageError, naming them,
/// where there are several of which none is the only usual one, or another one has the same names and shapes (a moving
/// average of the parameters), and where none has the key `key`. Throws IoError where there is none at all, naming what
/// is there instead.
StateDict find_state_dict(const Unpickled& file, const std::string& path, const std::string& key);

}  // namespace lockstep::nn
