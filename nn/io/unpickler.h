// Reads what Python has pickled, as far as the state of a model needs: numbers, text, containers, tensors. Nothing is
// ever called or executed: names of functions and classes are compared with the few that torch.save() writes, and
// everything else is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/dtype.h"

namespace lockstep::nn {

struct PickledValue;
/// Values are shared, as in Python. Trees of them are at most 64 deep.
using Pickled = std::shared_ptr<PickledValue>;

/// The memory that tensors lie in; the bytes are elsewhere in the file, under `key`.
struct PickledStorage {
  DType dtype = DType::kF32;
  bool half = false;  // IEEE 16-bit numbers, which DType does not have
  std::string key;
  std::int64_t elements = 0;
};

struct PickledTensor {
  PickledStorage storage;
  std::int64_t offset = 0;  // elements
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
  std::variant<None, bool, std::int64_t, double, std::string, Name, Sequence, Dict, PickledStorage, PickledTensor> is;
  int depth = 1;
  bool sealed = false;  // within another value: nothing is added any more, so none can come to contain itself
};

/// The value that starts at `at`, which is moved behind it. Throws IoError naming `source` and the byte for what is
/// cut, malformed or not among the things above. Allocates in proportion to the bytes read.
Pickled unpickle(std::span<const std::byte> bytes, std::size_t& at, const std::string& source);

}  // namespace lockstep::nn
