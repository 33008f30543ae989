#include "ddp/replicate.h"

#include <algorithm>
#include <vector>

#include "base/sha256.h"

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

void check_replicas(comm::ProcessGroup& group, std::span<const NamedBytes> pieces) {
  if (group.size() == 1) return;
  constexpr std::size_t kDigits = 64;
  // What a core's cache holds, so that the copy costs little next to the hash.
  constexpr std::size_t kMostBytes = std::size_t{256} << 10;
  std::vector<std::byte> copied;
  std::string mine;
  for (const auto& piece : pieces) {
    Sha256 hash;
    for (std::size_t at = 0; at < piece.bytes.size(); at += kMostBytes) {
      copied.resize(std::min(kMostBytes, piece.bytes.size() - at));
      group.copy(copied.data(), piece.bytes.data() + at, copied.size());
      hash.update(copied);
    }
    mine += hash.finish();
  }
  const auto all = group.all_gather_text(mine);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    for (std::size_t i = 0; i < pieces.size(); ++i)
      if (all[rank].compare(i * kDigits, kDigits, all[0], i * kDigits, kDigits) != 0)
        throw OutOfStepError(fmt::format("{} differs between rank 0 and rank {}", pieces[i].name, rank),
                             "the replicas are no longer in lockstep: this is a hardware fault or a bug; report it");
    throw OutOfStepError(fmt::format("rank {} has other parameters than rank 0", rank),
                         "start every rank with the same model");
  }
}

}  // namespace lockstep::ddp
