#include "comm/hosts/plan.h"

#include <algorithm>

#include "base/error.h"
#include "comm/reduce.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {
namespace {

std::size_t small_limit(const HostTuning& tuning, std::size_t hosts) {
  return std::max<std::size_t>(tuning.small_bytes / (hosts - 1), 256);
}

}  // namespace

Plan::Plan(const Op& op, const Hosts& hosts, int channels, const HostTuning& tuning,
           std::span<const std::size_t> partials)
    : hosts_(&hosts),
      partials_(partials),
      count_(op.count),
      element_(size_of(op.dtype)),
      channels_(static_cast<std::size_t>(channels)),
      by_rank_(op.kind == OpKind::kReduceScatter || op.kind == OpKind::kAllGather) {
  bool crowded = false;
  for (const auto& ranks : hosts) {
    ranks_ += static_cast<int>(ranks.size());
    crowded = crowded || ranks.size() > 1;
  }
  widened_ = crowded && reduces(op.kind) && rounds(op.dtype, op.reduce) && op.rounding() == Rounding::kOnce;
  const std::size_t most_partials = partials.empty() ? 1 : *std::ranges::max_element(partials);
  small_ = !by_rank_ && op.bytes() * most_partials <= small_limit(tuning, hosts.size());
  if (op.kind != OpKind::kAllGather) scatterers_ = kAll;
  gathers_ = !small_ && op.kind != OpKind::kReduceScatter;
  at_root_ = op.kind == OpKind::kReduce;
  if (has_root(op.kind)) {
    for (std::size_t h = 0; h < hosts.size(); ++h)
      if (std::binary_search(hosts[h].begin(), hosts[h].end(), op.root)) root_host_ = static_cast<int>(h);
    if (op.kind == OpKind::kBroadcast) scatterers_ = root_host_;
  }
  if (small_) {
    chunk_bytes_ = std::max<std::size_t>(op.bytes(), 1);
    return;
  }
  // Large parts in the largest chunks; smaller ones in so many that both phases are under way at once.
  const std::size_t part = op.bytes() / hosts.size();
  const std::size_t most = tuning.chunk_bytes / (widened_ ? 2 : most_partials) / 64 * 64;
  LOCKSTEP_ASSERT(most > 0, "chunks of {} bytes for {} partial sums", tuning.chunk_bytes, most_partials);
  chunk_bytes_ =
      std::clamp(part / (channels_ * tuning.chunks_a_slice) / 64 * 64, std::min(tuning.least_chunk_bytes, most), most);
}

std::size_t Plan::piece_count(int host) const {
  return by_rank_ ? (*hosts_)[static_cast<std::size_t>(host)].size() : 1;
}

Plan::Piece Plan::piece(int host, std::size_t index) const {
  const Slice slice = by_rank_ ? slice_of(count_, element_, (*hosts_)[static_cast<std::size_t>(host)][index], ranks_)
                               : slice_of(count_, element_, host, static_cast<int>(hosts_->size()));
  return {slice.begin * element_, slice.count * element_};
}

std::uint64_t Plan::all_chunks(int host) const {
  if (small_) return ends_at(host) ? 1 : 0;
  std::uint64_t chunks = 0;
  for (std::size_t i = 0; i < piece_count(host); ++i) chunks += chunks_in(piece(host, i));
  return chunks;
}

std::uint32_t Plan::chunk_count(int host, int channel) const {
  const auto first = static_cast<std::uint64_t>(channel);
  const std::uint64_t all = all_chunks(host);
  return all <= first ? 0 : static_cast<std::uint32_t>((all - first + channels_ - 1) / channels_);
}

Chunk Plan::chunk(int host, int channel, std::uint32_t number) const {
  if (small_) return {0, count_ * element_, -1};
  std::size_t left = static_cast<std::size_t>(number) * channels_ + static_cast<std::size_t>(channel);
  for (std::size_t i = 0;; ++i) {
    const Piece at = piece(host, i);
    const std::size_t chunks = chunks_in(at);
    if (left >= chunks) {
      left -= chunks;
      continue;
    }
    const std::size_t begin = left * chunk_bytes_;
    return {at.begin + begin, std::min(chunk_bytes_, at.bytes - begin),
            by_rank_ ? (*hosts_)[static_cast<std::size_t>(host)][i] : -1};
  }
}

}  // namespace lockstep::comm
