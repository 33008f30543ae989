// The safetensors file format: a JSON header that names tensors, then their bytes. Nothing in a file is executed.
// https://huggingface.co/docs/safetensors
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/dtype.h"

namespace lockstep::nn {

/// A tensor in host memory, in file layout (PyTorch's). It has as many bytes as type and shape say: readers see to
/// that, writers and load_entries() rely on it.
struct HostTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;  // little-endian, row-major
};

/// The name of a tensor, as messages have it: its first 80 columns.
std::string shown_name(std::string_view name);

/// What stands of a tensor in the header.
struct TensorHeader {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::size_t bytes = 0;
};

/// Writes to a temporary name beside `path`, flushes it to the disk and renames it: `path` is either the old file or
/// the whole new one. Throws IoError naming the file (a full disk, a missing directory), and InternalError for two
/// tensors of one name.
void write_safetensors(const std::string& path, const std::vector<HostTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

/// Reads the whole file. F16 comes as f32 and BOOL as u8. Throws IoError that names file and byte for anything that is
/// missing, cut, overlapping or otherwise not as the format says. Nothing is allocated from a length that has not been
/// checked.
std::vector<HostTensor> read_safetensors(const std::string& path);

/// What a file says beside its tensors (its "__metadata__"); reads the header alone. Throws as read_safetensors does.
std::map<std::string, std::string> read_safetensors_metadata(const std::string& path);

}  // namespace lockstep::nn
