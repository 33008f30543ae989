#include "lockstep/ddp/replicate.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "comm/agree.h"

namespace lockstep::ddp {

void broadcast_state(comm::ProcessGroup& group, std::span<const NamedBytes> pieces, int root) {
  if (group.size() == 1) return;
  constexpr std::size_t kMostBytes = std::size_t{4} << 20;
  std::size_t total = 0;
  for (const auto& piece : pieces) total += piece.bytes.size();
  if (total == 0) return;
  const auto arena = group.allocate(std::min(total, kMostBytes));

  // Pieces are packed end to end; a full arena travels, then the next one is filled.
  std::size_t piece = 0, offset = 0;
  while (piece < pieces.size()) {
    const std::size_t first = piece, first_offset = offset;
    std::size_t used = 0;
    while (piece < pieces.size() && used < arena->bytes()) {
      const auto bytes = pieces[piece].bytes;
      const std::size_t n = std::min(bytes.size() - offset, arena->bytes() - used);
      if (group.rank() == root && n > 0) group.copy(arena->data() + used, bytes.data() + offset, n);
      used += n;
      offset += n;
      if (offset == bytes.size()) {
        ++piece;
        offset = 0;
      }
    }
    group.broadcast({.arena = arena.get(), .count = used, .dtype = DType::kU8}, root).wait_host();
    if (group.rank() == root) continue;
    std::size_t p = first, o = first_offset;
    for (std::size_t at = 0; at < used;) {
      const auto bytes = pieces[p].bytes;
      const std::size_t n = std::min(bytes.size() - o, used - at);
      if (n > 0) group.copy(bytes.data() + o, arena->data() + at, n);
      at += n;
      o += n;
      if (o == bytes.size()) {
        ++p;
        o = 0;
      }
    }
  }
}

namespace {

std::uint64_t hash_of(comm::ProcessGroup& group, const NamedBytes& piece, std::vector<std::byte>& copied) {
  Hash64 hash;
  if (group.device().kind == DeviceKind::kCpu) {
    hash.update(piece.bytes);
    return hash.finish();
  }
  constexpr std::size_t kMostBytes = std::size_t{4} << 20;
  for (std::size_t at = 0; at < piece.bytes.size(); at += kMostBytes) {
    copied.resize(std::min(kMostBytes, piece.bytes.size() - at));
    group.copy(copied.data(), piece.bytes.data() + at, copied.size());
    hash.update(copied);
  }
  return hash.finish();
}

/// Every rank's numbers, by rank.
std::vector<std::vector<std::uint64_t>> gather(comm::ProcessGroup& group, std::span<const std::uint64_t> mine) {
  std::vector<std::vector<std::uint64_t>> all;
  for (const auto& bytes : group.all_gather_objects(std::as_bytes(mine))) {
    auto& numbers = all.emplace_back(bytes.size() / sizeof(std::uint64_t));
    if (!bytes.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  }
  return all;
}

/// Throws, if `all`, each rank's hashes of `pieces`, differ.
void compare(std::span<const NamedBytes> pieces, const std::vector<std::vector<std::uint64_t>>& all) {
  constexpr const char* kRemedy =
      "the replicas are no longer in lockstep, and nothing of them is saved: memory or a network has failed, or this "
      "is a bug; --resume auto resumes from the last checkpoint";
  comm::Division first;
  std::size_t first_piece = 0, count = 0;
  for (std::size_t piece = 0; piece < pieces.size(); ++piece) {
    std::vector<std::uint64_t> hashes;
    for (const auto& theirs : all) hashes.push_back(theirs[piece]);
    const comm::Division division = comm::divide(hashes);
    if (division.others.empty() || count++ > 0) continue;
    first = division;
    first_piece = piece;
  }
  if (count == 0) return;
  const std::string what =
      count == 1 ? pieces[first_piece].name : fmt::format("{} (and {} more)", pieces[first_piece].name, count - 1);
  if (first.has_majority() && first.most.size() > 1)
    throw OutOfStepError(fmt::format("{} on {} differs from that of the other {} ranks", what,
                                     comm::ranks_text(first.others), first.most.size()),
                         kRemedy);
  throw OutOfStepError(
      fmt::format("{} differs between {} and {}", what, comm::ranks_text(first.most), comm::ranks_text(first.others)),
      kRemedy);
}

}  // namespace

void check_replicas(comm::ProcessGroup& group, std::span<const NamedBytes> pieces) {
  if (group.size() == 1) return;
  group.check_in_step();
  std::vector<std::byte> copied;
  std::vector<std::uint64_t> mine;
  for (const auto& piece : pieces) mine.push_back(hash_of(group, piece, copied));
  // One number says whether they all are equal, and in the usual case that is all that is said.
  Hash64 total;
  total.update(std::as_bytes(std::span(mine)));
  const std::uint64_t one = total.finish();
  const auto totals = gather(group, std::span(&one, 1));
  if (std::ranges::all_of(totals, [&](const auto& theirs) { return theirs == totals.front(); })) return;
  const auto all = gather(group, mine);
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank].size() != all[0].size())
      throw OutOfStepError(fmt::format("rank {} has other parameters than rank 0", rank),
                           "start every rank with the same model");
  compare(pieces, all);
}

}  // namespace lockstep::ddp
