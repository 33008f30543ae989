#include "checkpoint/folder.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/scope.h"
#include "base/text.h"

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "step-";
constexpr const char* kHalfPrefix = ".step-";
constexpr std::uint64_t kMostManifestBytes = std::uint64_t{64} << 20;
constexpr const char* kRemedy = "use an existing, writable directory with free space";

std::string name_of(std::int64_t step) { return fmt::format("{}{:010}", kPrefix, step); }

[[noreturn]] void fail(const char* doing, const std::string& path, int error_number) {
  throw IoError(fmt::format("cannot {} {}: {}", doing, path, errno_text(error_number)),
                doing == std::string_view("read") ? "give a directory that can be read" : kRemedy);
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw IoError(fmt::format("{} cannot be used: {}", path, why), "use another checkpoint");
}

// Some file systems flush no directories, and say so.
void flush_directory(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) fail("open", path, errno);
  if (::fsync(fd.get()) != 0 && errno != EINVAL && errno != ENOTSUP) fail("flush", path, errno);
}

// What is flushed in a directory is lost with it, if the one that holds it does not know of it.
void make_directories(const std::string& directory) {
  std::error_code failed;
  std::vector<std::string> holders;
  fs::path at = (fs::absolute(directory, failed) / "").lexically_normal().parent_path();  // without a slash at its end
  for (; at.has_relative_path() && !fs::exists(at, failed); at = at.parent_path())
    holders.push_back(at.parent_path().string());
  fs::create_directories(directory, failed);
  if (failed) fail("create", directory, failed.value());
  for (const std::string& holder : holders)
    if (::access(holder.c_str(), R_OK) == 0) flush_directory(holder);
}

void remove(const std::string& path) {
  std::error_code failed;
  fs::remove_all(path, failed);
  if (failed) fail("remove", path, failed.value());
}

std::string half_name(const std::string& directory, const std::string& name, const char* what,
                      const std::string& attempt = {}) {
  return fmt::format("{}/.{}.{}-{}", directory, name, what, attempt.empty() ? fmt::to_string(::getpid()) : attempt);
}

std::string receipt_path(const std::string& path, std::size_t part, std::size_t count) {
  return fmt::format("{}/{}.sha256", path, part_file(part, count));
}

// Under its final name it is whole to the last moment.
void remove_checkpoint(const std::string& directory, const std::string& path) {
  const std::string name = fs::path(path).filename().string();
  const std::string replaced = half_name(directory, name, "old");
  if (std::rename(path.c_str(), replaced.c_str()) != 0) fail("remove", path, errno);
  remove(replaced);
}

void put_in_place(const std::string& from, const std::string& to, const std::string& replaced) {
  if (std::rename(from.c_str(), to.c_str()) == 0) return;
  if (errno != ENOTEMPTY && errno != EEXIST && errno != ENOTDIR) fail("rename", from, errno);
  // One of the same step is there. At best the two change places at once; not all file systems can.
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
    remove(from);
    return;
  }
  if (std::rename(to.c_str(), replaced.c_str()) != 0) fail("rename", to, errno);
  if (std::rename(from.c_str(), to.c_str()) != 0) fail("rename", from, errno);
  remove(replaced);
}

CheckpointManifest read_manifest_file(const std::string& path) {
  std::error_code failed;
  if (!fs::is_regular_file(path, failed)) refuse(path, "it is missing");
  RegularFile file = open_regular(path);
  if (!file.problem.empty()) refuse(path, file.problem);
  if (file.size > kMostManifestBytes) refuse(path, fmt::format("{} bytes are no manifest", file.size));
  std::string text(file.size, '\0');
  std::size_t count = 0;
  const std::string problem = file.read(std::as_writable_bytes(std::span(text)), count);
  if (!problem.empty() || count < text.size()) refuse(path, "it cannot be read: " + problem);
  return decode_checkpoint_manifest(text, path);
}

void verify_file(const std::string& path, const CheckpointManifest::File& expected) {
  std::error_code failed;
  if (!fs::is_regular_file(path, failed)) refuse(path, "it is missing");
  const std::uint64_t bytes = fs::file_size(path, failed);
  if (failed) refuse(path, failed.message());
  if (bytes != expected.bytes) refuse(path, fmt::format("it has {} bytes and should have {}", bytes, expected.bytes));
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) refuse(path, "it cannot be read: " + errno_text(errno));
  Sha256 hash;
  std::vector<std::byte> piece(std::size_t{1} << 20);
  for (;;) {
    const ssize_t got = ::read(fd.get(), piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path, "it cannot be read: " + errno_text(errno));
    if (got == 0) break;
    hash.update(std::span(piece).first(static_cast<std::size_t>(got)));
  }
  if (hash.finish() != expected.sha256) refuse(path, "it has been changed: its SHA-256 is another");
}

/// Removes what it names unless it is let go.
class RemoveOnFailure {
 public:
  explicit RemoveOnFailure(const std::string& path) : path_(path) {}
  ~RemoveOnFailure() {
    std::error_code ignored;
    if (!done_) fs::remove_all(path_, ignored);
  }
  RemoveOnFailure(const RemoveOnFailure&) = delete;
  RemoveOnFailure& operator=(const RemoveOnFailure&) = delete;
  void let_go() { done_ = true; }

 private:
  const std::string& path_;
  bool done_ = false;
};

}  // namespace

std::vector<StoredCheckpoint> list_checkpoints(const std::string& directory) {
  std::vector<StoredCheckpoint> all;
  std::error_code failed;
  fs::directory_iterator at(directory, failed);
  if (failed == std::errc::no_such_file_or_directory) return {};
  for (; !failed && at != fs::directory_iterator(); at.increment(failed)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    const auto step = parse_int(name.substr(std::string_view(kPrefix).size()));
    if (step && *step > 0 && name_of(*step) == name) all.push_back({*step, at->path().string()});
  }
  if (failed) fail("read", directory, failed.value());
  std::ranges::sort(all, std::ranges::greater{}, &StoredCheckpoint::step);
  return all;
}

CheckpointManifest read_manifest(const std::string& path) {
  return read_manifest_file(fmt::format("{}/{}", path, kManifestFile));
}

std::vector<std::string> files_of(const std::string& path, const CheckpointManifest& manifest) {
  std::vector<std::string> files = {kWeightsFile};
  if (manifest.parts.empty()) files.emplace_back(kOptimizerFile);
  for (std::size_t part = 0; part < manifest.parts.size(); ++part)
    files.push_back(part_file(part, manifest.parts.size()));
  for (const std::string& name : files)
    if (!manifest.files.contains(name)) refuse(path, fmt::format("its manifest does not list {}", name));
  for (const char* name : {kAverageFile, kCarriedFile, kHookFile, kScalerFile})
    if (manifest.files.contains(name)) files.emplace_back(name);
  return files;
}

void verify_file(const std::string& path, const CheckpointManifest& manifest, const std::string& name) {
  const auto file = manifest.files.find(name);
  if (file == manifest.files.end()) refuse(path, fmt::format("its manifest does not list {}", name));
  verify_file(fmt::format("{}/{}", path, name), file->second);
}

CheckpointManifest verify_checkpoint(const std::string& path) {
  CheckpointManifest manifest = read_manifest(path);
  for (const std::string& name : files_of(path, manifest)) verify_file(path, manifest, name);
  return manifest;
}

Search newest_whole(const std::string& directory) {
  return newest_whole(directory, [](const std::string& path) { return verify_checkpoint(path); });
}

Search newest_whole(const std::string& directory, Verify verify) {
  Search search;
  for (const auto& stored : list_checkpoints(directory)) {
    try {
      search.found = FoundCheckpoint{stored.path, verify(stored.path)};
      break;
    } catch (const IoError& error) {
      search.corrupt.push_back({stored.path, error.what(), stored.step});
    }
  }
  return search;
}

void write_checkpoint(const std::string& directory, std::int64_t step,
                      const std::function<CheckpointManifest(const std::string& path)>& write_files,
                      const std::string& attempt) {
  const std::string name = name_of(step), half = half_name(directory, name, "new", attempt);
  const std::string whole = fmt::format("{}/{}", directory, name);
  if (attempt.empty()) remove(half);
  if (::mkdir(half.c_str(), 0755) != 0 && (attempt.empty() || errno != EEXIST)) fail("create", half, errno);
  RemoveOnFailure guard(half);
  const std::string manifest = encode(write_files(half));
  AtomicFile file(fmt::format("{}/{}", half, kManifestFile));
  file.write(std::as_bytes(std::span(manifest)));
  file.commit();
  flush_directory(half);
  put_in_place(half, whole, half_name(directory, name, "old"));
  guard.let_go();
  flush_directory(directory);
}

CheckpointManifest::File write_part(
    const std::string& directory, std::int64_t step, const OwnPart& part,
    const std::function<CheckpointManifest::File(const std::string& path)>& write_file) {
  const std::string half = half_name(directory, name_of(step), "new", part.attempt);
  if (::mkdir(half.c_str(), 0755) != 0 && errno != EEXIST) fail("create", half, errno);
  const CheckpointManifest::File written = write_file(half);
  const std::string text = encode_receipt(written);
  AtomicFile receipt(receipt_path(half, part.index, part.count));
  receipt.write(std::as_bytes(std::span(text)));
  receipt.commit();
  return written;
}

std::optional<CheckpointManifest::File> find_receipt(const std::string& path, std::size_t part, std::size_t count) {
  constexpr std::size_t kMostBytes = 128;
  RegularFile file = open_regular(receipt_path(path, part, count));
  if (!file.problem.empty() || file.size > kMostBytes) return std::nullopt;
  std::string text(file.size, '\0');
  std::size_t got = 0;
  if (!file.read(std::as_writable_bytes(std::span(text)), got).empty() || got != text.size()) return std::nullopt;
  return decode_receipt(text);
}

void remove_receipts(const std::string& path, std::size_t count) {
  for (std::size_t part = 0; part < count; ++part) ::unlink(receipt_path(path, part, count).c_str());
}

std::string encode_receipt(const CheckpointManifest::File& file) {
  return fmt::format("{} {}\n", file.sha256, file.bytes);
}

std::optional<CheckpointManifest::File> decode_receipt(std::string_view text) {
  constexpr std::size_t kDigits = 64;
  constexpr std::string_view kHex = "0123456789abcdef";
  if (text.size() < kDigits + 3 || text[kDigits] != ' ' || text.back() != '\n') return std::nullopt;
  const std::string_view digest = text.substr(0, kDigits);
  const auto bytes = parse_int(text.substr(kDigits + 1, text.size() - kDigits - 2));
  if (digest.find_first_not_of(kHex) != std::string_view::npos || !bytes || *bytes <= 0) return std::nullopt;
  return CheckpointManifest::File{.bytes = static_cast<std::uint64_t>(*bytes), .sha256 = std::string(digest)};
}

void prune_checkpoints(const std::string& directory, std::int64_t step, std::int64_t keep,
                       const std::vector<CorruptCheckpoint>& corrupt, const std::vector<BestEvaluation>& best) {
  std::int64_t kept = 0;
  for (const auto& stored : list_checkpoints(directory)) {
    if (stored.step > step) continue;
    const bool bad = std::ranges::find(corrupt, stored.path, &CorruptCheckpoint::path) != corrupt.end();
    const bool is_best = std::ranges::find(best, stored.step, &BestEvaluation::step) != best.end();
    if (!bad && (keep == 0 || ++kept <= keep || is_best)) continue;
    remove_checkpoint(directory, stored.path);
  }
}

void make_checkpoint_directory(const std::string& directory) { make_directories(directory); }

void prepare_checkpoints(const std::string& directory) {
  make_directories(directory);
  std::error_code failed;
  std::vector<std::string> half;
  for (fs::directory_iterator at(directory, failed); !failed && at != fs::directory_iterator(); at.increment(failed))
    if (at->path().filename().string().starts_with(kHalfPrefix)) half.push_back(at->path().string());
  if (failed) fail("read", directory, failed.value());
  const std::string probe = half_name(directory, "step-probe", "new");
  if (::mkdir(probe.c_str(), 0755) != 0) fail("write to", directory, errno);
  if (::rmdir(probe.c_str()) != 0) fail("write to", directory, errno);
  std::ranges::for_each(half, remove);
}

}  // namespace lockstep::checkpoint
