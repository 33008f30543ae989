// Gradients that are not there: Note [Unused gradients], Note [Static graph].
#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <string>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/ddp/reducer.h"

namespace lockstep::ddp {

void Reducer::write_counts() {
  std::vector<float> counts;
  for (std::size_t shard = 0; shard < unused_by_shard_.size(); ++shard) {
    auto& unused = unused_by_shard_[shard];
    if (unused.empty()) continue;
    counts.assign(1 + slots_.size(), 0.0f);
    counts[0] = static_cast<float>(unused.size());
    for (const std::size_t slot : unused) counts[1 + slot] = 1.0f;
    group_.copy(at(counts_offset(), place_of(shard)), counts.data(), counts.size() * sizeof(float));
    unused.clear();
  }
}

void Reducer::send_unused() {
  if (graph_known_) compare_graph();
  write_counts();
  add_up(counts_offset(), counts_bytes() / sizeof(float), DType::kF32);
  if (unused_.empty() || finds_unused() || !refused_.empty()) return;
  for (const std::size_t slot : unused_) refused_.push_back(2 * slot + (graph_known_ && used_[slot] ? 1 : 0));
  refused_step_ = step_;
}

std::vector<float> Reducer::unused_counts() const {
  std::vector<float> counts(1 + slots_.size());
  group_.copy(counts.data(), unused_count().data(), counts.size() * sizeof(float));
  return counts;
}

// After all counts: which slots some rank has a gradient of.
void Reducer::find_present() {
  const auto counts = unused_counts();
  const auto everybody =
      static_cast<float>(options_.tree == nullptr ? static_cast<std::size_t>(group_.size()) : options_.tree->leaves());
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) somewhere_[slot] = counts[1 + slot] < everybody;
  if (!options_.static_graph || std::ranges::none_of(somewhere_, std::identity())) return;
  graph_known_ = true;
  note_used();
  if (!ready_order_.empty()) here_ = used_;
}

void Reducer::note_used() {
  used_.assign(slots_.size(), true);
  for (const std::size_t slot : unused_) used_[slot] = false;
}

// What is other than in this rank's first step is counted, in place of what is unused. In its own first step a rank
// that had no samples before may lack what others have.
void Reducer::compare_graph() {
  unused_by_shard_.front().clear();
  if (ready_order_.empty()) return unused_.clear();
  note_used();
  unused_.clear();
  for (std::size_t slot = 0; slot < slots_.size(); ++slot)
    if (here_ ? used_[slot] != (*here_)[slot] : used_[slot] && !somewhere_[slot]) unused_.push_back(slot);
  unused_by_shard_.front() = unused_;
  if (!here_) here_ = used_;
}

std::span<const std::size_t> Reducer::present_in(std::size_t bucket) {
  const auto& slots = plan_.buckets[bucket].slots;
  if (!options_.find_unused && !graph_known_) return slots;
  const auto is_present = [&](std::size_t slot) { return somewhere_[slot]; };
  present_.clear();
  if (hook_ != nullptr) {
    std::ranges::copy_if(slots, std::back_inserter(present_), std::not_fn(is_present));
    if (!present_.empty()) hook_->drop(bucket_for_hook(bucket), present_);
    present_.clear();
  }
  std::ranges::copy_if(slots, std::back_inserter(present_), is_present);
  return present_;
}

void Reducer::refuse_unused_if_known() {
  if (group_.device().kind != DeviceKind::kCpu && !options_.wait_for_unused) return;
  float count = 0;
  group_.copy(&count, unused_count().data(), sizeof count);
  if (count > 0) refuse_unused();
}

namespace {

constexpr std::size_t kMostNamed = 8;  // a message is a line

/// "a, b on rank 1, nor for c on ranks 2, 3": slots by where they are, of those lists of ranks.
std::string describe_slots(const std::vector<std::vector<std::uint64_t>>& slots_by_rank,
                           const std::vector<SlotSpec>& slots) {
  std::map<std::size_t, std::vector<std::string>> ranks_of;  // by slot
  for (std::size_t rank = 0; rank < slots_by_rank.size(); ++rank)
    for (const std::uint64_t slot : slots_by_rank[rank]) ranks_of[slot].push_back(fmt::to_string(rank));
  std::map<std::vector<std::string>, std::vector<std::string>> names_of;  // by where
  std::size_t named = 0;
  for (const auto& [slot, ranks] : ranks_of)
    if (named++ < kMostNamed) names_of[ranks].push_back(slots[slot].name);
  std::vector<std::string> parts;
  for (const auto& [ranks, names] : names_of)
    parts.push_back(fmt::format("{} on {}", join(names, ", "),
                                ranks.size() == slots_by_rank.size()
                                    ? "all ranks"
                                    : (ranks.size() == 1 ? "rank " : "ranks ") + join(ranks, ", ")));
  const std::string more = named > kMostNamed ? fmt::format(", and for {} more parameters", named - kMostNamed) : "";
  return join(parts, ", nor for ") + more;
}

}  // namespace

// Each rank's list, if it has one: the step, then refused_.
void Reducer::refuse_unused() {
  std::vector<std::uint64_t> mine;
  if (!refused_.empty()) mine.push_back(static_cast<std::uint64_t>(refused_step_));
  mine.insert(mine.end(), refused_.begin(), refused_.end());
  const auto all = group_.all_gather_objects(std::as_bytes(std::span(mine)));
  std::vector<std::vector<std::uint64_t>> lacking(all.size()), extra(all.size());
  std::uint64_t step = 0;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    std::vector<std::uint64_t> theirs(all[rank].size() / sizeof(std::uint64_t));
    if (theirs.empty()) continue;
    std::memcpy(theirs.data(), all[rank].data(), all[rank].size());
    step = theirs.front();
    for (const std::uint64_t entry : std::span(theirs).subspan(1))
      (entry % 2 == 0 ? lacking : extra)[rank].push_back(entry / 2);
  }
  if (!graph_known_)
    throw UsageError(fmt::format("no gradient for {} in step {}", describe_slots(lacking, slots_), step),
                     "use every parameter in the forward pass, freeze those that are not used, or look for them "
                     "(--find-unused, find_unused_parameters)");
  std::vector<std::string> changes;
  if (const auto text = describe_slots(lacking, slots_); !text.empty()) changes.push_back("no gradient for " + text);
  if (const auto text = describe_slots(extra, slots_); !text.empty()) changes.push_back("a gradient for " + text);
  throw UsageError(
      fmt::format("the graph is not static: step {} has {}, other than the first step", step, join(changes, ", and ")),
      "leave static_graph out, and look for unused parameters in each step (--find-unused, find_unused_parameters)");
}

}  // namespace lockstep::ddp
