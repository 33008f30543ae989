#include "comm/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <limits>
#include <new>
#include <optional>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/scope.h"
#include "base/text.h"
#include "lockstep/comm/arena.h"

namespace lockstep::comm {
namespace {

constexpr const char* kRemedy = "use --backend mpi, which needs no shared memory";

/// The place of rank 0's memory for the other ranks, and the means to verify it.
struct Address {
  long pid = 0;
  int fd = -1;
  unsigned long device = 0;
  unsigned long inode = 0;
};

struct stat status_of(const UniqueFd& fd) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) throw DeviceError(fmt::format("fstat of shared memory: {}", errno_text(errno)));
  return status;
}

UniqueFd create(std::size_t bytes, int ranks) {
  check_shared_memory(bytes, ranks, available_memory_bytes());
  UniqueFd fd(::memfd_create("lockstep", MFD_CLOEXEC));
  if (!fd) throw DeviceError(fmt::format("no shared memory: memfd_create: {}", errno_text(errno)), kRemedy);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    throw DeviceError(
        fmt::format("no {} of shared memory: {}", human_bytes(static_cast<double>(bytes)), errno_text(errno)), kRemedy);
  return fd;
}

std::string text_of(const UniqueFd& fd) {
  const struct stat status = status_of(fd);
  return fmt::format("{} {} {} {}", ::getpid(), fd.get(), status.st_dev, status.st_ino);
}

UniqueFd open_at(const std::string& text) {
  Address address;
  std::istringstream(text) >> address.pid >> address.fd >> address.device >> address.inode;
  const std::string path = fmt::format("/proc/{}/fd/{}", address.pid, address.fd);
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd && errno == ENOENT && ::kill(address.pid, 0) != 0 && errno == ESRCH)
    throw DeviceError(
        fmt::format("rank 0's process {} is not there: it has ended, or ranks cannot see each other", address.pid),
        "look at the log of rank 0; in containers that hide processes, use --backend mpi");
  if (!fd)
    throw DeviceError(fmt::format("cannot open rank 0's shared memory {}: {}", path, errno_text(errno)), kRemedy);
  const struct stat status = status_of(fd);
  if (status.st_dev != address.device || status.st_ino != address.inode)
    throw DeviceError(fmt::format("{} is not rank 0's shared memory: the ranks see other processes", path), kRemedy);
  return fd;
}

/// Runs `work` on every rank, and returns only if it succeeded on all.
void together(int rank, const Segment::Exchange& exchange, const std::function<std::string()>& work,
              std::vector<std::string>& results) {
  std::optional<DeviceError> mine;
  std::string text;
  try {
    text = "+" + work();
  } catch (const DeviceError& error) {
    mine = error;
    text = fmt::format("-{}", error.what());
  }
  results = exchange(std::string(utf8_prefix(text, Segment::kMostText)));
  for (std::size_t r = 0; r < results.size(); ++r) {
    if (results[r].starts_with("+")) {
      results[r].erase(0, 1);
      continue;
    }
    if (static_cast<int>(r) == rank && mine) throw *mine;
    throw PeerError(static_cast<int>(ExitCode::kDevice), fmt::format("rank {}: {}", r, results[r].substr(1)));
  }
}

std::optional<std::size_t> number_in(const char* path) {
  std::ifstream file(path);
  std::size_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

}  // namespace

std::size_t available_memory_bytes() {
  auto available = std::numeric_limits<std::size_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, rest; meminfo >> key;) {
    std::size_t kib = 0;
    if (key == "MemAvailable:" && meminfo >> kib) available = kib * 1024;
    std::getline(meminfo, rest);
  }
  const auto limit = number_in("/sys/fs/cgroup/memory.max");  // "max" is no number
  const auto used = number_in("/sys/fs/cgroup/memory.current");
  if (limit && used) available = std::min(available, *limit - std::min(*limit, *used));
  return available;
}

void check_shared_memory(std::size_t asked_bytes, int ranks, std::size_t available_bytes) {
  if (asked_bytes <= available_bytes) return;
  throw DeviceError(
      fmt::format("not enough memory: {} ranks ask for {} of shared memory, {} are free", ranks,
                  human_bytes(static_cast<double>(asked_bytes)), human_bytes(static_cast<double>(available_bytes))),
      "train a smaller model, start fewer ranks, or give the machine (a container: --memory) more");
}

Segment Segment::map(int rank, int size, std::size_t part_bytes, const Exchange& exchange) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto ranks = static_cast<std::size_t>(size);
  if (part_bytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()) / ranks - page) throw std::bad_alloc();

  Segment segment;
  segment.part_bytes_ = align_up(std::max<std::size_t>(part_bytes, 1), page);
  segment.mapped_bytes_ = segment.part_bytes_ * ranks;
  std::vector<std::string> texts;
  UniqueFd fd;
  together(
      rank, exchange,
      [&] {
        if (rank != 0) return std::string();
        fd = create(segment.mapped_bytes_, size);
        return text_of(fd);
      },
      texts);
  const std::string address = texts[0];
  // Rank 0's descriptor stays open until all have said how they fared.
  together(
      rank, exchange,
      [&] {
        if (rank != 0) fd = open_at(address);
        const auto begin = static_cast<off_t>(segment.part_bytes_ * static_cast<std::size_t>(rank));
        int code = EINTR;
        while (code == EINTR) code = ::posix_fallocate(fd.get(), begin, static_cast<off_t>(segment.part_bytes_));
        if (code != 0)
          throw DeviceError(
              fmt::format("no {} of shared memory ({} for all {} ranks): {}",
                          human_bytes(static_cast<double>(segment.part_bytes_)),
                          human_bytes(static_cast<double>(segment.mapped_bytes_)), size, errno_text(code)),
              kRemedy);
        void* data = ::mmap(nullptr, segment.mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
        if (data == MAP_FAILED)
          throw DeviceError(fmt::format("mapping {} of shared memory: {}",
                                        human_bytes(static_cast<double>(segment.mapped_bytes_)), errno_text(errno)),
                            kRemedy);
        segment.data_ = static_cast<std::byte*>(data);
        return std::string();
      },
      texts);
#ifdef MADV_POPULATE_WRITE
  // All pages are there: this only spares the first step their minor faults. Older kernels decline.
  ::madvise(segment.data_, segment.mapped_bytes_, MADV_POPULATE_WRITE);
#endif
  return segment;
}

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), part_bytes_(other.part_bytes_), mapped_bytes_(other.mapped_bytes_) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(part_bytes_, other.part_bytes_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, mapped_bytes_);
}

}  // namespace lockstep::comm
