// Reads what Python has pickled, as far as the state of a model needs: numbers, text, containers, tensors. Nothing is
// ever called or executed: of functions and classes there are only the names, which are compared with the few that
// torch.save() writes. What others would have made is an Opaque value, which holds nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/base/dtype.h"

namespace lockstep::nn {

struct PickledValue;
/// A value of an Unpickled, which owns it. Values are shared, and may contain themselves, as in Python: whoever walks
/// them must not go round in circles.
using Pickled = PickledValue*;

/// The memory that tensors lie in; the bytes are elsewhere in the file, under `key`.
struct PickledStorage {
  std::string type;            // "torch FloatStorage"
  std::optional<DType> dtype;  // what its elements come as; none: a type that is not read
  bool half = false;           // IEEE 16-bit numbers, which DType does not have
  std::size_t element_bytes = 0;
  std::string key;
  std::int64_t elements = 0;
};

struct PickledTensor {
  const PickledStorage* storage = nullptr;  // the Unpickled's
  std::int64_t offset = 0;                  // elements
  std::vector<std::int64_t> shape, strides;
};

struct PickledValue {
  struct None {};
  struct Name {
    std::string text;  // "collections OrderedDict"
  };
  struct Sequence {
    std::vector<Pickled> items;  // a tuple or a list
    bool tuple = false;
  };
  struct Dict {
    std::vector<std::pair<Pickled, Pickled>> items;  // in order
  };
  /// What is of no use here, or unknown: an object of some class, bytes, a set, a huge integer.
  struct Opaque {
    std::string what;  // "an object of 'argparse Namespace'"
  };
  std::variant<None, bool, std::int64_t, double, std::string, Name, Sequence, Dict, Opaque, const PickledStorage*,
               PickledTensor>
      is;
};

struct Unpickled {
  std::deque<PickledValue> values;
  std::deque<PickledStorage> storages;  // all that are named, in that order; a key may repeat
  Pickled root = nullptr;
};

/// What `value` is, for people: "a tuple", "an object of 'argparse Namespace'".
std::string kind_of(const PickledValue& value);

/// The value that starts at `at`, which is moved past it. Throws IoError naming `source` and the byte for what is cut,
/// malformed or not among the things above. Allocates in proportion to the bytes read.
Unpickled unpickle(std::span<const std::byte> bytes, std::size_t& at, const std::string& source);

/// A dictionary of tensors in what torch.save() has written, at the top level or within others, beside the state of an
/// optimizer, an epoch and the like.
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
