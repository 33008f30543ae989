#include "nn/io/torch_file.h"

#include <zlib.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "base/error.h"
#include "base/file.h"

namespace lockstep::nn {
namespace {

constexpr std::uint64_t kAlignment = 64;
constexpr std::string_view kFolder = "archive/";

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string number(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i, value >>= 8) text += static_cast<char>(value & 0xff);
  return text;
}

std::uint32_t checksum(std::span<const std::byte> bytes) {
  return static_cast<std::uint32_t>(
      ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), static_cast<z_size_t>(bytes.size())));
}

/// A zip archive of stored entries (PKWARE's APPNOTE 6.3.10), written from front to back.
class ArchiveWriter {
 public:
  ArchiveWriter(const std::string& path, std::uint64_t zip64_from) : file_(path), zip64_from_(zip64_from) {}

  /// Its bytes begin at a multiple of kAlignment.
  void add(const std::string& name, std::span<const std::byte> bytes) {
    const std::string path = std::string(kFolder) + name;
    const std::uint64_t offset = written_;
    const bool large = is_large(bytes.size());
    const std::string size = large ? number(kLarge, 4) : number(bytes.size(), 4);
    const std::string zip64 = large ? zip64_field({bytes.size(), bytes.size()}) : "";
    const std::string facts =
        number(kStored, 2) + kTime + number(checksum(bytes), 4) + size + size + number(path.size(), 2);

    constexpr std::uint64_t kHeaderBytes = 30, kFieldBytes = 4;
    const std::uint64_t plain = offset + kHeaderBytes + path.size() + zip64.size() + kFieldBytes;
    const std::uint64_t padding = (kAlignment - plain % kAlignment) % kAlignment;
    const std::string extra = zip64 + "FB" + number(padding, 2) + std::string(padding, 'Z');
    write("PK\3\4" + number(large ? kVersion64 : kVersion, 2) + kFlags + facts + number(extra.size(), 2) + path +
          extra);
    write(bytes);

    std::vector<std::uint64_t> wide;
    if (large) wide = {bytes.size(), bytes.size()};
    if (is_large(offset)) wide.push_back(offset);
    const std::string more = wide.empty() ? "" : zip64_field(wide);
    const std::string version = number(wide.empty() ? kVersion : kVersion64, 2);
    directory_ += "PK\1\2" + version + version + kFlags + facts + number(more.size(), 2) + number(0, 10) +
                  (is_large(offset) ? number(kLarge, 4) : number(offset, 4)) + path + more;
    ++entries_;
  }

  void commit() {
    const std::uint64_t directory_at = written_;
    write(directory_);
    constexpr std::uint64_t kMostEntries = 0xffff;
    const bool large = is_large(directory_at) || is_large(directory_.size()) || entries_ >= kMostEntries;
    if (large) {
      const std::uint64_t end_at = written_;
      constexpr std::uint64_t kEndBytes = 44;  // after this number
      write("PK\6\6" + number(kEndBytes, 8) + number(kVersion64, 2) + number(kVersion64, 2) + number(0, 8) +
            number(entries_, 8) + number(entries_, 8) + number(directory_.size(), 8) + number(directory_at, 8));
      write("PK\6\7" + number(0, 4) + number(end_at, 8) + number(1, 4));
    }
    const std::string count = number(large ? kMostEntries : entries_, 2);
    write("PK\5\6" + number(0, 4) + count + count + number(large ? kLarge : directory_.size(), 4) +
          number(large ? kLarge : directory_at, 4) + number(0, 2));
    file_.commit();
  }

 private:
  static constexpr std::uint64_t kLarge = 0xffffffff, kStored = 0, kVersion = 20, kVersion64 = 45;
  // Names are UTF-8. The time is 1980's first: a file is a function of what is in it.
  inline static const std::string kFlags = number(0x800, 2), kTime = number(0, 2) + number(0x21, 2);

  bool is_large(std::uint64_t value) const { return value >= zip64_from_; }

  static std::string zip64_field(const std::vector<std::uint64_t>& values) {
    std::string field = number(1, 2) + number(8 * values.size(), 2);
    for (const std::uint64_t value : values) field += number(value, 8);
    return field;
  }

  void write(std::string_view text) { write(bytes_of(text)); }
  void write(std::span<const std::byte> bytes) {
    file_.write(bytes);
    written_ += bytes.size();
  }

  AtomicFile file_;
  std::uint64_t zip64_from_;
  std::uint64_t written_ = 0, entries_ = 0;
  std::string directory_;
};

const char* storage_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "FloatStorage";
    case DType::kF64: return "DoubleStorage";
    case DType::kBF16: return "BFloat16Storage";
    case DType::kI32: return "IntStorage";
    case DType::kI64: return "LongStorage";
    case DType::kU8: return "ByteStorage";
    case DType::kF16: return "HalfStorage";
  }
  return "?";
}

/// The operations of Python's pickle protocol 2 that make a value on a stack (Lib/pickletools.py).
class Pickle {
 public:
  void op(std::string_view ops) { bytes_ += ops; }
  void name(const std::string& module, const std::string& name) { bytes_ += 'c' + module + '\n' + name + '\n'; }
  void text(const std::string& value) { bytes_ += 'X' + number(value.size(), 4) + value; }
  void integer(std::int64_t value) {
    if (value <= std::numeric_limits<std::int32_t>::max())
      bytes_ += 'J' + number(static_cast<std::uint64_t>(value), 4);
    else
      bytes_ += std::string("\x8a\x08", 2) + number(static_cast<std::uint64_t>(value), 8);
  }
  void tuple(const std::vector<std::int64_t>& values) {
    op("(");
    for (const std::int64_t value : values) integer(value);
    op("t");
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

std::vector<std::int64_t> strides_of(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t axis = shape.size(); axis > 1; --axis)
    strides[axis - 2] = strides[axis - 1] * std::max<std::int64_t>(shape[axis - 1], 1);
  return strides;
}

// OrderedDict((name, tensor), …), each tensor of the storage with its number.
std::string pickled(const std::vector<HostTensor>& tensors) {
  Pickle pickle;
  pickle.op("\x80\x02");
  pickle.name("collections", "OrderedDict");
  pickle.op(")R(");
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const HostTensor& tensor = tensors[i];
    pickle.text(tensor.name);
    pickle.name("torch._utils", "_rebuild_tensor_v2");
    pickle.op("((");
    pickle.text("storage");
    pickle.name("torch", storage_of(tensor.dtype));
    pickle.text(std::to_string(i));
    pickle.text("cpu");
    pickle.integer(static_cast<std::int64_t>(tensor.bytes.size() / size_of(tensor.dtype)));
    pickle.op("tQ");
    pickle.integer(0);
    pickle.tuple(tensor.shape);
    pickle.tuple(strides_of(tensor.shape));
    pickle.op("\x89");  // no gradient, and no hooks
    pickle.name("collections", "OrderedDict");
    pickle.op(")RtR");
  }
  pickle.op("u.");
  return pickle.bytes();
}

}  // namespace

void write_torch_file(const std::string& path, const std::vector<HostTensor>& tensors,
                      const std::map<std::string, std::string>& metadata, const TorchFileOptions& options) {
  ArchiveWriter archive(path, options.zip64_from);
  archive.add("data.pkl", bytes_of(pickled(tensors)));
  archive.add(".format_version", bytes_of("1"));
  archive.add(".storage_alignment", bytes_of(std::to_string(kAlignment)));
  archive.add("byteorder", bytes_of("little"));
  for (std::size_t i = 0; i < tensors.size(); ++i) archive.add("data/" + std::to_string(i), tensors[i].bytes);
  for (const auto& [key, value] : metadata) archive.add(kTorchMetadataFolder + key, bytes_of(value));
  archive.add("version", bytes_of("3\n"));
  archive.commit();
}

}  // namespace lockstep::nn
