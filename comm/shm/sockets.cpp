#include "comm/shm/sockets.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/text.h"
#include "comm/reduce.h"
#include "devices/binding.h"

namespace lockstep::comm {
namespace {

constexpr const char* kVariable = "LOCKSTEP_SHM_SOCKETS";
constexpr std::int64_t kMostParts = 64;

}  // namespace

SocketSetting SocketSetting::from(const EnvLookup& lookup) {
  const std::string value = lookup(kVariable).value_or("none");
  if (value == "none") return {};
  if (value == "auto") return {.by_processors = true};
  const auto parts = parse_int(value);
  if (!parts || *parts < 1 || *parts > kMostParts)
    throw UsageError(fmt::format("{}=\"{}\" in the environment is no number of sockets", kVariable, value),
                     fmt::format("set it to none, auto, or 1 to {}", kMostParts));
  return {.parts = static_cast<int>(*parts)};
}

int socket_of(const devices::CpuMask& cpus) {
  const auto cores = devices::discover_cores(cpus);
  const bool one = !cores.empty() && std::ranges::all_of(cores, [&](const devices::Core& core) {
    return core.socket == cores.front().socket;
  });
  return one ? cores.front().socket : -1;
}

SocketLevels::SocketLevels(const std::vector<int>& socket_of_rank, int rank)
    : rank_(rank), size_(static_cast<int>(socket_of_rank.size())) {
  std::vector<int> known;
  for (int r = 0; r < size_; ++r) {
    const int socket = socket_of_rank[static_cast<std::size_t>(r)];
    auto at = std::ranges::find(known, socket);
    if (at == known.end()) {
      at = known.insert(at, socket);
      ranks_.emplace_back();
    }
    const auto index = static_cast<std::size_t>(at - known.begin());
    if (r == rank) {
      own_socket_ = index;
      own_place_ = static_cast<int>(ranks_[index].size());
    }
    ranks_[index].push_back(r);
  }
}

bool SocketLevels::help() const { return sockets() > 1 && static_cast<std::size_t>(size_) > sockets(); }

Slice SocketLevels::own_slice(const Op& op) const {
  return slice_of(op.count, size_of(op.dtype), own_place_, static_cast<int>(own().size()));
}

void SocketLevels::reduce_inside(const Op& op, CopyOf copy_of) {
  const Slice slice = own_slice(op);
  sources_.clear();
  for (const int r : own()) sources_.push_back(copy_of(r) + slice.begin * size_of(op.dtype));
  reduce_in_order(op.dtype, op.reduce, copy_of(rank_) + slice.begin * size_of(op.dtype), sources_, slice.count);
}

// Sockets with other numbers of ranks are cut at other places: from each cut to the next one.
void SocketLevels::reduce_between(const Op& op, CopyOf copy_of) {
  const std::size_t element = size_of(op.dtype);
  const Slice mine = slice_of(op.count, element, rank_, size_);
  for (std::size_t at = mine.begin, end = mine.begin + mine.count; at < end;) {
    std::size_t next = end;
    copies_.clear();
    for (const auto& ranks : ranks_) {
      const auto count = static_cast<int>(ranks.size());
      int place = 0;
      Slice slice = slice_of(op.count, element, place, count);
      while (slice.begin + slice.count <= at) slice = slice_of(op.count, element, ++place, count);
      next = std::min(next, slice.begin + slice.count);
      copies_.push_back(copy_of(ranks[static_cast<std::size_t>(place)]) + at * element);
    }
    reduce_into_all(op.dtype, op.reduce, copies_, next - at);
    at = next;
  }
}

void SocketLevels::spread_inside(const Op& op, CopyOf copy_of) const {
  const Slice slice = own_slice(op);
  const std::size_t element = size_of(op.dtype);
  const std::byte* const from = copy_of(rank_) + slice.begin * element;
  if (slice.count == 0) return;
  for (const int r : own())
    if (r != rank_) std::memcpy(copy_of(r) + slice.begin * element, from, slice.count * element);
}

}  // namespace lockstep::comm
