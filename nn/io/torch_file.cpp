#include "nn/io/torch_file.h"

#include <zip.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <memory>

#include "base/error.h"
#include "base/file.h"
#include "nn/io/unpickler.h"

namespace lockstep::nn {
namespace {

constexpr std::array<unsigned char, 4> kZip = {'P', 'K', 3, 4};
// Torch's magic number 0x1950a86a20f9469cfc6c, the first value of a file without an archive.
constexpr std::array<unsigned char, 13> kMagic = {0x8a, 10,   0x6c, 0xfc, 0x9c, 0x46, 0xf9,
                                                  0x20, 0x6a, 0xa8, 0x50, 0x19, '.'};
constexpr std::array<unsigned char, 5> kTar = {'u', 's', 't', 'a', 'r'};

template <std::size_t kSize>
bool starts_with(std::span<const std::byte> bytes, const std::array<unsigned char, kSize>& start) {
  return bytes.size() >= kSize && std::memcmp(bytes.data(), start.data(), kSize) == 0;
}

bool is_pickle(std::span<const std::byte> bytes) {
  constexpr std::byte kProtocol{0x80}, kOldest{2}, kNewest{5};
  // The length of a safetensors file's header may begin so.
  const bool safetensors = bytes.size() > 8 && bytes[7] == std::byte{0} && bytes[8] == std::byte{'{'};
  return bytes.size() > 2 && bytes[0] == kProtocol && bytes[1] >= kOldest && bytes[1] <= kNewest && !safetensors;
}

bool is_tar(std::span<const std::byte> bytes) {
  constexpr std::size_t kAt = 257;
  return bytes.size() > kAt && starts_with(bytes.subspan(kAt), kTar);
}

/// How many bytes the magic number takes at the beginning, which no archive has; 0: it is not there. From protocol 4 on
/// values come in frames.
std::size_t legacy_start(std::span<const std::byte> bytes) {
  constexpr std::size_t kFrameBytes = 9;
  if (!is_pickle(bytes)) return 0;
  std::size_t at = 2;
  if (bytes[at] == std::byte{0x95}) at += kFrameBytes;
  return bytes.size() > at && starts_with(bytes.subspan(at), kMagic) ? at + kMagic.size() : 0;
}

// Copies a tensor's elements out of its storage, last axis fastest; `width` bytes each.
void gather(const std::byte* storage, const PickledTensor& tensor, std::size_t width, std::size_t axis,
            std::int64_t offset, std::byte*& to) {
  if (axis == tensor.shape.size()) {
    std::memcpy(to, storage + static_cast<std::size_t>(offset) * width, width);
    to += width;
    return;
  }
  const bool row = axis + 1 == tensor.shape.size() && tensor.strides[axis] == 1;
  if (row) {
    const std::size_t bytes = static_cast<std::size_t>(tensor.shape[axis]) * width;
    std::memcpy(to, storage + static_cast<std::size_t>(offset) * width, bytes);
    to += bytes;
    return;
  }
  for (std::int64_t i = 0; i < tensor.shape[axis]; ++i)
    gather(storage, tensor, width, axis + 1, offset + i * tensor.strides[axis], to);
}

/// Tensors may share storages, as tied weights do, but a small file must not become a huge model by that.
class Budget {
 public:
  Budget(const std::string& path, std::size_t file_bytes) : path_(path), left_(16 * file_bytes + (1 << 20)) {}
  void take(std::size_t bytes) {
    if (bytes > left_)
      refuse_torch_file(path_, "its tensors share storages so often that they have 16 times the file's bytes");
    left_ -= bytes;
  }

 private:
  const std::string& path_;
  std::size_t left_;
};

/// The tensors of a state dict.
class State {
 public:
  State(const std::string& path, const StateDict& dict, std::size_t file_bytes)
      : path_(path), key_(dict.key), budget_(path, file_bytes) {
    for (const auto& [key, value] : dict.entries->items) {
      const auto& name = std::get<std::string>(key->is);
      const auto& tensor = std::get<PickledTensor>(value->is);
      if (!tensor.storage->dtype)
        refuse_torch_file(
            path_, fmt::format("'{}' is a tensor of '{}', which is not read", shown_name(name), tensor.storage->type));
      entries_.push_back({&name, &tensor});
    }
  }

  /// How many of the tensors lie in each storage.
  std::map<std::string, std::size_t> uses() const {
    std::map<std::string, std::size_t> counts;
    for (const auto& entry : entries_) ++counts[entry.tensor->storage->key];
    return counts;
  }

  /// `bytes_of_storage(storage)` gives all bytes that the file has of it.
  template <class Find>
  TorchState tensors(const Find& bytes_of_storage) {
    TorchState made{.key = key_, .tensors = {}};
    for (const auto& [name, tensor] : entries_)
      made.tensors.push_back(read(*name, *tensor, bytes_of_storage(*tensor->storage)));
    return made;
  }

 private:
  struct Entry {
    const std::string* name;
    const PickledTensor* tensor;
  };

  HostTensor read(const std::string& name, const PickledTensor& tensor, std::span<const std::byte> storage) {
    const PickledStorage& kind = *tensor.storage;
    const std::size_t width = kind.element_bytes;
    const auto elements = static_cast<std::uint64_t>(kind.elements);
    if (storage.size() / width < elements)
      refuse_torch_file(path_, fmt::format("the storage of '{}' has {} bytes, too few for {} elements",
                                           shown_name(name), storage.size(), elements));
    if (tensor.shape.size() != tensor.strides.size())
      refuse_torch_file(path_, fmt::format("'{}' has {} sizes and {} strides", shown_name(name), tensor.shape.size(),
                                           tensor.strides.size()));
    // Elements may be shared, never more of them than the storage has: a few bytes cannot stand for a huge tensor.
    std::uint64_t count = 1, last = static_cast<std::uint64_t>(std::max<std::int64_t>(tensor.offset, 0));
    bool empty = false;
    for (const std::int64_t extent : tensor.shape) empty = empty || extent == 0;
    for (std::size_t axis = 0; axis < tensor.shape.size() && !empty; ++axis) {
      std::uint64_t reach = 0;
      const auto extent = static_cast<std::uint64_t>(tensor.shape[axis]);
      if (__builtin_mul_overflow(count, extent, &count) || count > elements ||
          __builtin_mul_overflow(extent - 1, static_cast<std::uint64_t>(tensor.strides[axis]), &reach) ||
          __builtin_add_overflow(last, reach, &last))
        refuse_torch_file(path_, fmt::format("'{}' is larger than its storage", shown_name(name)));
    }
    if (tensor.offset < 0 || (!empty && last >= elements))
      refuse_torch_file(path_,
                        fmt::format("'{}' reaches element {} of a storage of {}", shown_name(name), last, elements));

    HostTensor host{name, *kind.dtype, tensor.shape, {}};
    if (empty) return host;
    budget_.take(count * width);
    std::vector<std::byte> raw(count * width);
    std::byte* to = raw.data();
    gather(storage.data(), tensor, width, 0, tensor.offset, to);
    if (width == 2) {
      host.dtype = DType::kF32;
      host.bytes = widened(raw, kind.half);
    } else {
      host.bytes = std::move(raw);
    }
    return host;
  }

  static std::vector<std::byte> widened(const std::vector<std::byte>& raw, bool half) {
    std::vector<std::byte> bytes(raw.size() * 2);
    for (std::size_t i = 0; i * 2 < raw.size(); ++i) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, raw.data() + 2 * i, 2);
      const float value = half ? Float16{bits}.to_float() : BFloat16{bits}.to_float();
      std::memcpy(bytes.data() + 4 * i, &value, 4);
    }
    return bytes;
  }

  const std::string& path_;
  const std::string key_;
  std::vector<Entry> entries_;
  Budget budget_;
};

struct ZipCloser {
  void operator()(zip_t* archive) const { zip_discard(archive); }
};
struct EntryCloser {
  void operator()(zip_file_t* entry) const { zip_fclose(entry); }
};

// The zip archive that torch.save() has written since 1.6: NAME/data.pkl, and NAME/data/KEY for each storage.
class ArchiveReader {
 public:
  ArchiveReader(const std::string& path, std::size_t file_bytes) : path_(path), file_bytes_(file_bytes) {
    int code = 0;
    archive_.reset(zip_open(path.c_str(), ZIP_RDONLY | ZIP_CHECKCONS, &code));
    if (archive_ == nullptr) {
      zip_error_t error;
      zip_error_init_with_code(&error, code);
      const std::string why = zip_error_strerror(&error);
      zip_error_fini(&error);
      refuse_torch_file(path_, why);
    }
    for (zip_int64_t i = 0; i < zip_get_num_entries(archive_.get(), 0); ++i) {
      const char* const name = zip_get_name(archive_.get(), static_cast<zip_uint64_t>(i), ZIP_FL_ENC_RAW);
      if (name == nullptr) continue;
      const std::string_view text = name;
      const auto slash = text.find('/');
      if (slash != std::string_view::npos && text.substr(slash) == "/data.pkl") folder_ = text.substr(0, slash + 1);
    }
    if (folder_.empty()) refuse_torch_file(path_, without_pickle());
    if (has("constants.pkl")) refuse_torch_file(path_, "it is a TorchScript program, of torch.jit.save()");
    if (has("byteorder")) {
      const auto order = read("byteorder");
      if (std::string_view(reinterpret_cast<const char*>(order.data()), order.size()) != "little")
        refuse_torch_file(path_, "its numbers are not little-endian");
    }
  }

  bool has(const std::string& name) const { return find(folder_ + name) >= 0; }

  std::vector<std::byte> read(const std::string& within) const {
    const zip_int64_t index = find(folder_ + within);
    if (index < 0) refuse_torch_file(path_, fmt::format("the archive has no {}", shown_name(folder_ + within)));
    const std::string name = shown_name(within);
    zip_stat_t status;
    zip_stat_init(&status);
    constexpr zip_uint64_t kNeeded = ZIP_STAT_SIZE | ZIP_STAT_COMP_METHOD | ZIP_STAT_ENCRYPTION_METHOD;
    if (zip_stat_index(archive_.get(), static_cast<zip_uint64_t>(index), 0, &status) != 0 ||
        (status.valid & kNeeded) != kNeeded)
      refuse_torch_file(path_, fmt::format("nothing is known of {}", name));
    // torch.save() does not compress, so no entry is larger than the file: there can be no bombs.
    if (status.comp_method != ZIP_CM_STORE || status.encryption_method != ZIP_EM_NONE || status.size > file_bytes_)
      refuse_torch_file(path_, fmt::format("{} is compressed or encrypted, or larger than the file", name));
    const std::unique_ptr<zip_file_t, EntryCloser> entry(
        zip_fopen_index(archive_.get(), static_cast<zip_uint64_t>(index), 0));
    if (entry == nullptr) refuse_torch_file(path_, fmt::format("{}: {}", name, zip_strerror(archive_.get())));
    std::vector<std::byte> bytes(status.size);
    std::size_t got = 0;
    while (got < bytes.size()) {
      const zip_int64_t more = zip_fread(entry.get(), bytes.data() + got, bytes.size() - got);
      if (more <= 0) refuse_torch_file(path_, fmt::format("{} is cut or corrupt", name));
      got += static_cast<std::size_t>(more);
    }
    // The checksum is compared at the end; torch.serialization.set_crc32_options(False) leaves it out.
    std::byte beyond{};
    const zip_int64_t more = zip_fread(entry.get(), &beyond, 1);
    const bool unchecked = (status.valid & ZIP_STAT_CRC) != 0 && status.crc == 0;
    if (more != 0 && (more > 0 || !unchecked || zip_error_code_zip(zip_file_get_error(entry.get())) != ZIP_ER_CRC))
      refuse_torch_file(path_, fmt::format("{} is corrupt", name));
    return bytes;
  }

 private:
  std::string without_pickle() const {
    std::string_view found = "the archive has no data.pkl";
    for (zip_int64_t i = 0; i < zip_get_num_entries(archive_.get(), 0); ++i) {
      const char* const name = zip_get_name(archive_.get(), static_cast<zip_uint64_t>(i), ZIP_FL_ENC_RAW);
      const std::string_view text = name != nullptr ? name : "";
      if (text.ends_with(".npy")) found = "it is an archive of NumPy's arrays";
      if (text.ends_with("archive_format") || text.ends_with("serialized_exported_program.json"))
        return "it is a program, of torch.export.save()";
    }
    return std::string(found);
  }

  zip_int64_t find(const std::string& name) const {
    return zip_name_locate(archive_.get(), name.c_str(), ZIP_FL_ENC_RAW);
  }

  const std::string& path_;
  std::size_t file_bytes_;
  std::unique_ptr<zip_t, ZipCloser> archive_;
  std::string folder_;
};

TorchState read_archive(const std::string& path, std::size_t file_bytes, const std::string& wanted) {
  const ArchiveReader archive(path, file_bytes);
  const auto pickled = archive.read("data.pkl");
  std::size_t at = 0;
  const Unpickled root = unpickle(pickled, at, path);
  State state(path, find_state_dict(root, path, wanted), file_bytes);
  // A storage may serve several tensors, and is read once: it is held until the last of them has been made.
  struct Held {
    std::vector<std::byte> bytes;
    std::size_t uses_left = 0;
  };
  std::map<std::string, Held> held;
  for (const auto& [key, count] : state.uses()) held[key].uses_left = count;
  std::string last_key;
  std::size_t left = file_bytes;  // entries that lie within each other would be more together
  return state.tensors([&](const PickledStorage& storage) -> std::span<const std::byte> {
    if (const auto last = held.find(last_key); last != held.end() && last->second.uses_left == 0) held.erase(last);
    Held& here = held.at(storage.key);
    if (here.bytes.empty()) {
      here.bytes = archive.read("data/" + storage.key);
      if (here.bytes.size() > left) refuse_torch_file(path, "its entries overlap");
      left -= here.bytes.size();
    }
    --here.uses_left;
    last_key = storage.key;
    return here.bytes;
  });
}

std::int64_t number_of(const std::string& path, const Unpickled& value, const char* what) {
  const auto* const number = std::get_if<std::int64_t>(&value.root->is);
  if (number == nullptr) refuse_torch_file(path, fmt::format("{} is no number", what));
  return *number;
}

// Before 1.6, and of torch.save(…, _use_new_zipfile_serialization=False): magic number, protocol, a description of the
// machine, the object, the storages' keys, then for each of them its number of elements (8 bytes) and its elements.
TorchState read_legacy(const std::string& path, std::span<const std::byte> bytes, const std::string& wanted) {
  std::size_t at = legacy_start(bytes);
  if (number_of(path, unpickle(bytes, at, path), "its protocol") != 1001)
    refuse_torch_file(path, "its protocol is not known");
  const Unpickled machine = unpickle(bytes, at, path);
  if (const auto* const facts = std::get_if<PickledValue::Dict>(&machine.root->is))
    for (const auto& [key, value] : facts->items) {
      const auto* const name = std::get_if<std::string>(&key->is);
      const auto* const yes = std::get_if<bool>(&value->is);
      if (name != nullptr && *name == "little_endian" && yes != nullptr && !*yes)
        refuse_torch_file(path, "its numbers are not little-endian");
    }
  const Unpickled root = unpickle(bytes, at, path);
  State state(path, find_state_dict(root, path, wanted), bytes.size());
  const Unpickled keys = unpickle(bytes, at, path);
  const auto* const list = std::get_if<PickledValue::Sequence>(&keys.root->is);
  if (list == nullptr) refuse_torch_file(path, "its list of storages is no list");

  // How wide a storage's elements are only those who use it know, whether or not they are of the state dict.
  std::map<std::string, std::size_t> widths;
  for (const PickledStorage& storage : root.storages) widths.emplace(storage.key, storage.element_bytes);
  std::map<std::string, std::span<const std::byte>> storages;
  for (const Pickled item : list->items) {
    const auto* const key = std::get_if<std::string>(&item->is);
    const auto width = key != nullptr ? widths.find(*key) : widths.end();
    if (width == widths.end()) refuse_torch_file(path, "it lists a storage that nothing names, or of an unknown type");
    std::uint64_t elements = 0;
    if (bytes.size() - at < sizeof elements) refuse_torch_file(path, fmt::format("it is cut at byte {}", at));
    std::memcpy(&elements, bytes.data() + at, sizeof elements);
    at += sizeof elements;
    if (elements > (bytes.size() - at) / width->second)
      refuse_torch_file(path, fmt::format("byte {} claims a storage of {} elements in the {} bytes that are left",
                                          at - 8, elements, bytes.size() - at));
    storages[*key] = bytes.subspan(at, elements * width->second);
    at += elements * width->second;
  }
  return state.tensors([&](const PickledStorage& storage) {
    const auto found = storages.find(storage.key);
    if (found == storages.end())
      refuse_torch_file(path, fmt::format("the storage {} is missing", shown_name(storage.key)));
    return found->second;
  });
}

}  // namespace

std::optional<std::string> read_torch_metadata(const std::string& path, const std::string& key) {
  const MappedFile file(path);
  if (!starts_with(file.bytes(), kZip)) return std::nullopt;
  const ArchiveReader archive(path, file.bytes().size());
  const std::string name = kTorchMetadataFolder + key;
  if (!archive.has(name)) return std::nullopt;
  const auto bytes = archive.read(name);
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

bool is_torch_file(std::span<const std::byte> start) {
  return starts_with(start, kZip) || is_pickle(start) || is_tar(start);
}

TorchState read_torch_file(const std::string& path, const std::string& key) {
  const MappedFile file(path);
  if (starts_with(file.bytes(), kZip)) return read_archive(path, file.bytes().size(), key);
  if (legacy_start(file.bytes()) > 0) return read_legacy(path, file.bytes(), key);
  if (is_pickle(file.bytes())) refuse_torch_file(path, "it is a pickle, but none of torch.save()");
  if (is_tar(file.bytes()))
    refuse_torch_file(path,
                      "it is a tar archive, as torch.save() made them before 0.1.10: load it there, and save it anew");
  refuse_torch_file(path, "it starts as neither a zip archive nor as PyTorch's older files do");
}

void refuse_torch_file(const std::string& path, const std::string& why) {
  throw IoError(fmt::format("{} is not a usable PyTorch file: {}", path, why),
                "load files of tensors alone: torch.save(model.state_dict(), FILE)");
}

}  // namespace lockstep::nn
