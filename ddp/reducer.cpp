#include "lockstep/ddp/reducer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "comm/agree.h"
#include "comm/reduce.h"
#include "ddp/shard_sums.h"

namespace lockstep::ddp {

// The arena: [tail | bucket 0 | bucket 1 | … | counts]. Tail and counts are f32: the latter are the number of unused
// slots of all ranks, then for each slot the number of ranks without it. Without a hook, the tail and bucket 0 are
// reduced as one region, and so are the last bucket and the counts, where that bucket is f32 too: neither costs a
// collective of its own. With shards (Note [Shards]) there are several such places, stride_ bytes apart.
namespace {

// Places whose addresses end in the same bits would share few lines of a cache.
constexpr std::size_t kPlaceAlignment = 4096, kStaggerBytes = 256;

// Slots of other sizes may fill the same bytes: their collectives would not show it.
comm::Manifest manifest_of(const std::vector<SlotSpec>& slots, const BucketLimits& limits,
                           const Reducer::Options& options) {
  comm::Manifest manifest = {{"gradients", fmt::to_string(slots.size())},
                             {"bytes of a bucket", fmt::to_string(limits.bucket_bytes)},
                             {"bytes of the first bucket", fmt::to_string(limits.first_bucket_bytes)},
                             {"bytes that a bucket is a multiple of", fmt::to_string(limits.bucket_multiple)},
                             {"bytes that a gradient begins at a multiple of", fmt::to_string(limits.slot_alignment)},
                             {"find_unused_parameters", options.find_unused ? "true" : "false"},
                             {"static_graph", options.static_graph ? "true" : "false"}};
  for (std::size_t i = 0; i < slots.size(); ++i)
    manifest.emplace_back(fmt::format("gradient {} ({})", i, slots[i].name),
                          fmt::format("{} {}", slots[i].count, lockstep::name_of(slots[i].dtype)));
  return manifest;
}
}  // namespace

Reducer::Reducer(comm::ProcessGroup& group, std::vector<SlotSpec> slots, const BucketLimits& limits, Options options)
    : group_(group),
      group_lifetime_(group.lifetime()),
      slots_(std::move(slots)),
      limits_(limits),
      options_(std::move(options)),
      tail_bytes_(comm::align_up((kTailFloats + options_.more_tail_floats) * sizeof(float))),
      is_ready_(slots_.size(), false),
      may_start_(!options_.start_late) {
  comm::run_collectively(group_, [&] {
    check_usage(!options_.static_graph || !options_.find_unused, "static_graph with find_unused_parameters",
                "give one of the two: a static graph finds unused parameters in its first step");
    check_usage(!options_.static_graph || options_.tree == nullptr, "a static graph with shards",
                "leave static_graph out: find_unused_parameters looks for unused parameters of each shard");
    if (options_.tree != nullptr && group_.device().kind != DeviceKind::kCpu)
      check_usage(options_.add != nullptr && options_.copy != nullptr,
                  "shards on a device, and nothing says how to add there", "give Options::add and copy");
    for (const auto& slot : slots_)
      if (slot.dtype != DType::kF32 && slot.dtype != DType::kF64)
        throw UsageError(fmt::format("the gradient of {} is {}", slot.name, lockstep::name_of(slot.dtype)),
                         "gradients are summed in f32 or f64: write others into slots of those");
  });
  comm::compare_manifests(group_, manifest_of(slots_, limits_, options_));
  std::vector<std::size_t> reversed(slots_.size());
  std::iota(reversed.rbegin(), reversed.rend(), std::size_t{0});
  lay_out(std::move(reversed), limits_);
  if (options_.tree == nullptr) unused_by_shard_.emplace_back().reserve(slots_.size());
  allocate(options_.tree != nullptr ? take_shards() : 1);
  ready_order_.reserve(slots_.size());
  unused_.reserve(slots_.size());
  present_.reserve(slots_.size());
  somewhere_.resize(slots_.size());
}

// Of the tree. The most places that a rank needs.
std::size_t Reducer::take_shards() {
  sums_ = std::make_unique<ShardSums>(*options_.tree, group_.rank(), options_.shards_at_once);
  const auto all = group_.all_gather_numbers(static_cast<std::int64_t>(sums_->places()));
  unused_by_shard_.resize(sums_->most_in_a_turn());
  for (auto& unused : unused_by_shard_) unused.reserve(slots_.size());
  return static_cast<std::size_t>(std::ranges::max(all));
}

void Reducer::allocate(std::size_t places) {
  const std::size_t bytes = counts_offset() + counts_bytes();
  arena_places_ = places;
  stride_ = places > 1 ? comm::align_up(bytes, kPlaceAlignment) + kStaggerBytes : 0;
  arena_.reset();  // before the next one, which is larger
  arena_ = group_.allocate(bytes + (places - 1) * stride_);
}

bool Reducer::set_tree(const comm::ReductionTree& tree) {
  check_group("set_tree()");
  check_usage(!open_, "set_tree() within a step", "call it between steps");
  check_usage(options_.tree != nullptr && tree.leaves() == options_.tree->leaves(),
              "set_tree() of other shards than the reducer has", "give a tree of as many leaves");
  options_.tree = &tree;
  const std::size_t places = take_shards();
  if (places <= arena_places_) return false;
  allocate(places);
  return true;
}

std::size_t Reducer::counts_bytes() const { return comm::align_up((1 + slots_.size()) * sizeof(float)); }

void Reducer::lay_out(std::vector<std::size_t> order, const BucketLimits& limits) {
  plan_ = plan_buckets(slots_, order, limits);  // refuses an order that is none
  order_ = std::move(order);
  limits_ = limits;
  if (plan_.buckets.empty()) plan_.buckets.emplace_back();  // nothing to train: the tail still travels
  missing_.resize(plan_.buckets.size());
  works_.resize(plan_.buckets.size());
  timeline_.buckets.resize(plan_.buckets.size());
}

void Reducer::check_group(const char* doing) const {
  if (group_lifetime_.alive()) return;
  throw UsageError(fmt::format("{} of a reducer whose group has ended", doing),
                   "keep the group as long as its reducer");
}

bool Reducer::decided(std::size_t slot) const {
  check_slot(slot, "asked about");
  return is_ready_[slot];
}

void Reducer::check_slot(std::size_t slot, const char* doing) const {
  if (slot < slots_.size()) return;
  throw UsageError(fmt::format("{} slot {}, where there are {}", doing, slot, slots_.size()),
                   "slots are counted from 0, in the order in which the reducer was given them");
}

void Reducer::check_type(std::size_t slot, DType asked) const {
  check_slot(slot, "asked for");
  check_group("a gradient");
  if (slots_[slot].dtype != asked)
    throw UsageError(fmt::format("the gradient of {} is {}, and {} was asked for", slots_[slot].name,
                                 lockstep::name_of(slots_[slot].dtype), lockstep::name_of(asked)));
  check_usage(group_.device().kind == DeviceKind::kCpu, "gradients on a GPU are asked for as the host's numbers",
              "storage() has their address there");
}

void Reducer::check_begun(const char* doing) const {
  if (!open_)
    throw UsageError(fmt::format("{} outside of a step", doing),
                     "call begin_step() before it, and finish() once after it");
}

Reducer::~Reducer() = default;

std::size_t Reducer::place_of(std::size_t shard) const {
  if (!turn_open_) return 0;
  return sums_->turns()[turns_ - 1].first_place + shard;
}

std::span<std::byte> Reducer::storage(std::size_t slot, std::size_t shard) const {
  check_slot(slot, "asked for the storage of");
  return arena_->view<std::byte>(place_of(shard) * stride_ + tail_bytes_ + plan_.slot_offset_bytes[slot],
                                 slots_[slot].count * size_of(slots_[slot].dtype));
}

std::span<std::byte> Reducer::tail(std::size_t shard) const {
  return arena_->view<std::byte>(place_of(shard) * stride_, tail_bytes_);
}

std::span<std::byte> Reducer::unused_count() const { return arena_->view<std::byte>(counts_offset(), sizeof(float)); }

comm::Region Reducer::bytes_at(std::size_t offset, std::size_t count) const {
  return {.arena = arena_.get(), .offset_bytes = offset, .count = count, .dtype = DType::kU8};
}

void Reducer::zero(std::size_t offset, std::size_t bytes, std::size_t place) {
  group_.zero(bytes_at(place * stride_ + offset, bytes));
}

/// What all shards of the turn have at `offset`, to what waits for it.
void Reducer::add_up(std::size_t offset, std::size_t count, DType dtype) {
  if (sums_ == nullptr) return;
  for (const ShardSums::Sum& sum : sums_->turns()[turns_ - 1].sums) {
    if (group_.device().kind == DeviceKind::kCpu) {
      sources_.clear();
      for (const std::size_t place : sum.sources) sources_.push_back(at(offset, place));
      comm::reduce_along_tree(dtype, at(offset, sum.into), sources_, sum.additions, count);
      continue;
    }
    places_.clear();  // of values that wait
    for (std::size_t i = 0; i < sum.sources.size(); ++i) {
      places_.push_back(sum.sources[i]);
      for (std::uint8_t n = sum.additions[i]; n > 0; --n) {
        const std::size_t right = places_.back();
        places_.pop_back();
        const bool into_right = right == sum.into;
        const std::size_t into = into_right ? right : places_.back();
        options_.add(at(offset, into), at(offset, into_right ? places_.back() : right), count, dtype);
        places_.back() = into;
      }
    }
    if (places_.back() != sum.into) options_.copy(at(offset, sum.into), at(offset, places_.back()), count, dtype);
  }
}

comm::Region Reducer::region_of(std::size_t bucket) const {
  const auto& b = plan_.buckets[bucket];
  const std::size_t lead = has_tail(bucket) ? tail_bytes_ : 0;
  const std::size_t trail = has_counts(bucket) ? counts_bytes() : 0;
  return {.arena = arena_.get(),
          .offset_bytes = tail_bytes_ + b.offset_bytes - lead,
          .count = (b.bytes + lead + trail) / size_of(b.dtype),
          .dtype = b.dtype};
}

bool Reducer::has_tail(std::size_t bucket) const {
  return bucket == 0 && hook_ == nullptr && plan_.buckets[bucket].dtype == DType::kF32;
}

bool Reducer::has_counts(std::size_t bucket) const {
  return is_last(bucket) && hook_ == nullptr && plan_.buckets[bucket].dtype == DType::kF32;
}

GradBucket Reducer::bucket_for_hook(std::size_t bucket) const {
  return {.index = bucket,
          .step = step_,
          .gradients = region_of(bucket),
          .slots = plan_.buckets[bucket].slots,
          .last = is_last(bucket)};
}

comm::Region Reducer::floats_at(std::size_t offset, std::size_t bytes) const {
  return {.arena = arena_.get(), .offset_bytes = offset, .count = bytes / sizeof(float), .dtype = DType::kF32};
}

void Reducer::register_comm_hook(std::shared_ptr<CommHook> hook) {
  check_group("a communication hook");
  comm::run_collectively(group_, [&] {
    check_usage(options_.tree == nullptr, "a communication hook where shards are summed along a tree",
                "leave the hook out, or sum over ranks");
    check_usage(hook != nullptr, "no communication hook is given",
                "give one, or leave the call out: that is an allreduce");
    check_usage(hook_ == nullptr && step_ == kNoStep, "a second communication hook, or one after the first step",
                "register one hook before the first step");
    check_usage(!hook->registered_, "a communication hook that another reducer has already", "make one for each");
    for (const auto& slot : slots_)
      if (slot.dtype != DType::kF32)
        throw UsageError(fmt::format("a communication hook where the gradient of {} is {}", slot.name,
                                     lockstep::name_of(slot.dtype)),
                         "hooks carry f32: leave the hook out, or have all gradients in f32");
  });
  comm::compare_manifests(group_, {{"communication hook", hook->name()}});
  comm::run_collectively(group_, [&] { hook->check(group_); });
  hook->lay_out(slots_, plan_, group_);
  hook_ = std::move(hook);
  hook_->registered_ = true;
}

std::optional<Reducer::BytesSent> Reducer::bytes_sent() const {
  check_group("what was sent");
  BytesSent all;
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
    const double without = bytes_sent_by_all_reduce(static_cast<double>(plan_.buckets[b].bytes), group_.size());
    const auto sent = hook_ == nullptr ? without : hook_->bytes_sent(b, group_.size());
    if (!sent) return std::nullopt;
    all.sent += *sent;
    all.without_hook += without;
  }
  return all;
}

void Reducer::begin_step(std::int64_t step) {
  check_group("a step");
  if (started_ != finished_)
    throw UsageError(
        fmt::format("step {} begins while {} buckets of step {} are under way", step, started_ - finished_, step_),
        "call finish() once for each step");
  step_ = step;
  open_ = true;
  group_.set_step(step);
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) missing_[b] = plan_.buckets[b].slots.size();
  ready_order_.clear();
  unused_.clear();
  started_ = finished_ = ready_count_ = turns_ = 0;
  may_start_ = !options_.start_late;
  timeline_.begin = Clock::now();
  waited_ = {};
  if (sums_ == nullptr) begin_turn();
}

void Reducer::begin_turn() {
  std::fill(is_ready_.begin(), is_ready_.end(), false);
  const std::size_t shards = sums_ == nullptr ? 1 : sums_->turns()[turns_ - 1].shards.count;
  for (std::size_t shard = 0; shard < shards; ++shard) {
    zero(0, tail_bytes_, place_of(shard));
    zero(counts_offset(), counts_bytes(), place_of(shard));
    unused_by_shard_[shard].clear();
  }
}

void Reducer::check_shards(const char* doing) const {
  check_begun(doing);
  check_usage(sums_ != nullptr, "a step in shards where ranks are summed", "give Options::tree");
}

comm::TreeNode Reducer::begin_shards() {
  check_shards("shards begin");
  check_usage(!turn_open_, "shards begin before those before them have ended", "call end_shards() first");
  check_usage(turns_ < sums_->turns().size(), "more shards than this rank has",
              "stop at was_last_turn(), and finish() the step");
  ++turns_;
  turn_open_ = true;
  skipped_.assign(sums_->turns()[turns_ - 1].shards.count, false);
  begin_turn();
  return sums_->turns()[turns_ - 1].shards;
}

bool Reducer::was_last_turn() const { return sums_ != nullptr && turns_ == sums_->turns().size(); }

void Reducer::skip_shard(std::size_t shard) {
  check_shards("a shard is skipped");
  check_usage(turn_open_ && shard < skipped_.size() && !skipped_[shard],
              "a shard is skipped that is not to be computed",
              "name each of the turn's shards at most once, counted from 0");
  zero(tail_bytes_, plan_.bytes, place_of(shard));
  skipped_[shard] = true;
  if (finds_unused()) {
    unused_by_shard_[shard].resize(slots_.size());
    std::iota(unused_by_shard_[shard].begin(), unused_by_shard_[shard].end(), std::size_t{0});
  }
  if (!std::ranges::all_of(skipped_, std::identity())) return;
  if (finds_unused()) unused_ = unused_by_shard_[shard];
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) settle(slot);
  start_full_buckets();
}

void Reducer::zero_slot(std::size_t slot, std::size_t shard) {
  zero(tail_bytes_ + plan_.slot_offset_bytes[slot], slots_[slot].count * size_of(slots_[slot].dtype), place_of(shard));
  unused_by_shard_[shard].push_back(slot);
}

void Reducer::note_unused(std::size_t slot, std::size_t shard) {
  check_slot(slot, "marked unused:");
  check_shards("a gradient is marked unused");
  check_usage(turn_open_ && shard < skipped_.size() && !skipped_[shard] && !is_ready_[slot],
              "a gradient is marked unused that is decided, or of a shard that is not computed",
              "call it before mark_ready(), for shards of the turn");
  zero_slot(slot, shard);
  if (!finds_unused() && std::ranges::find(unused_, slot) == unused_.end()) unused_.push_back(slot);
}

void Reducer::end_shards() {
  check_shards("shards end");
  check_usage(turn_open_ && !was_last_turn(), "the end of shards that are not under way, or are the last ones",
              "finish() ends the last turn");
  mark_rest_unused();
  write_counts();
  add_up(0, tail_bytes_ / sizeof(float), DType::kF32);
  add_up(counts_offset(), counts_bytes() / sizeof(float), DType::kF32);
  turn_open_ = false;
}

void Reducer::mark_ready(std::size_t slot) {
  check_slot(slot, "marked ready:");
  check_begun("a gradient is marked ready");
  check_turn();
  if (is_ready_[slot])
    throw UsageError(fmt::format("the gradient of {} became ready twice in one step", slots_[slot].name),
                     "run backward once between begin_step and finish");
  if (starts_buckets()) ready_order_.push_back(slot);
  settle(slot);
  start_full_buckets();
}

void Reducer::mark_slot_unused(std::size_t slot) {
  check_slot(slot, "marked unused:");
  check_begun("a gradient is marked unused");
  check_turn();
  if (is_ready_[slot])
    throw UsageError(fmt::format("the gradient of {} is marked unused after it was marked", slots_[slot].name),
                     "mark each gradient once between begin_step and finish");
  const std::size_t shards = sums_ == nullptr ? 1 : sums_->turns()[turns_ - 1].shards.count;
  for (std::size_t shard = 0; shard < shards; ++shard)
    if (sums_ == nullptr || !skipped_[shard]) zero_slot(slot, shard);
  unused_.push_back(slot);
  settle(slot);
  start_full_buckets();
}

void Reducer::check_turn() const {
  check_usage(sums_ == nullptr || turn_open_, "a gradient of a shard that was not begun",
              "call begin_shards() before each turn");
}

void Reducer::settle(std::size_t slot) {
  note_finished();  // before this gradient counts as ready, so that the timeline shows what was done by then
  is_ready_[slot] = true;
  add_up(tail_bytes_ + plan_.slot_offset_bytes[slot], slots_[slot].count, slots_[slot].dtype);
  if (!starts_buckets()) return;
  const auto now = Clock::now();
  const std::size_t bucket = plan_.slot_bucket[slot];
  if (--missing_[bucket] == 0) timeline_.buckets[bucket].ready = now;
  if (++ready_count_ == slots_.size()) timeline_.last_ready = now;
}

void Reducer::contribute_nothing() {
  check_begun("zeros are contributed");
  check_usage(sums_ == nullptr, "zeros are contributed in a step in shards", "call skip_shard()");
  check_usage(started_ == 0 && ready_count_ == 0, "zeros are contributed after gradients of the same step",
              "a rank without samples marks no gradient ready");
  zero(tail_bytes_, plan_.bytes, 0);
  if (finds_unused()) {
    unused_.resize(slots_.size());
    std::iota(unused_.begin(), unused_.end(), std::size_t{0});
    unused_by_shard_.front() = unused_;
  }
  std::fill(is_ready_.begin(), is_ready_.end(), true);
  std::fill(missing_.begin(), missing_.end(), std::size_t{0});
  ready_count_ = slots_.size();
  timeline_.last_ready = Clock::now();
  for (auto& bucket : timeline_.buckets) bucket.ready = timeline_.last_ready;
  start_full_buckets();
}

// Note [Bucket order]
// A bucket starts only when all earlier ones have: ranks may finish their gradients in different orders, their
// collectives must not.
void Reducer::start_full_buckets() {
  if (!may_start_ || !starts_buckets()) return;
  while (started_ < plan_.buckets.size() && missing_[started_] == 0) {
    if (started_ == 0) add_up(0, tail_bytes_ / sizeof(float), DType::kF32);
    if (is_last(started_)) send_unused();
    start_bucket(started_);
    ++started_;
  }
}

void Reducer::start_bucket(std::size_t bucket) {
  const auto region = region_of(bucket);
  timeline_.buckets[bucket].bytes = region.bytes();
  timeline_.buckets[bucket].start = Clock::now();
  const auto number = static_cast<std::int32_t>(bucket);
  const auto all_reduce = [&](const comm::Region& what) {
    return options_.tree == nullptr ? group_.all_reduce(what, comm::ReduceOp::kSum, number)
                                    : group_.all_reduce(what, *options_.tree, stride_, number);
  };
  if (bucket == 0 && !has_tail(bucket)) tail_work_ = all_reduce(floats_at(0, tail_bytes_));
  if (hook_ == nullptr)
    works_[bucket] = all_reduce(region);
  else
    works_[bucket] = region.count > 0 ? hook_->start(bucket_for_hook(bucket), group_) : comm::Work();
  if (is_last(bucket) && !has_counts(bucket)) counts_work_ = all_reduce(floats_at(counts_offset(), counts_bytes()));
}

void Reducer::wait_for_bucket(std::size_t bucket, StreamView stream) {
  const bool done_before = bucket < finished_;
  const auto from = Clock::now();
  if (!done_before) works_[bucket].wait(stream);
  if (bucket == 0 && !has_tail(bucket)) tail_work_.wait(stream);
  if (hook_ != nullptr && plan_.buckets[bucket].bytes > 0) hook_->finish(bucket_for_hook(bucket), stream);
  if (is_last(bucket) && !has_counts(bucket)) counts_work_.wait(stream);
  if (done_before) return;
  const auto now = Clock::now();
  timeline_.buckets[bucket].end = works_[bucket].done() ? now : Clock::time_point{};
  waited_ += now - from;
  finished_ = bucket + 1;
}

void Reducer::note_finished() {
  while (finished_ < started_ && works_[finished_].done()) timeline_.buckets[finished_++].end = Clock::now();
}

void Reducer::poll() {
  check_group("poll()");
  group_.poll();
  note_finished();
}

void Reducer::mark_rest_unused() {
  for (std::size_t slot = 0; slot < slots_.size(); ++slot)
    if (!is_ready_[slot]) mark_slot_unused(slot);
}

void Reducer::finish(StreamView stream, FunctionRef<void(std::span<const std::size_t>)> on_bucket) {
  check_begun("finish()");
  check_usage(sums_ == nullptr || (turn_open_ && was_last_turn()), "finish() before this rank's last shards",
              "go through all of them first (begin_shards(), end_shards())");
  may_start_ = true;
  mark_rest_unused();
  start_full_buckets();
  open_ = turn_open_ = false;
  timeline_.waits_from = Clock::now();
  const std::size_t buckets = plan_.buckets.size();
  if (finds_unused()) {
    for (std::size_t b = 0; b < buckets; ++b) wait_for_bucket(b, stream);
    find_present();
    for (std::size_t b = 0; b < buckets; ++b) on_bucket(present_in(b));
    return;
  }
  for (std::size_t b = 0; b < buckets; ++b) {
    wait_for_bucket(b, stream);
    if (b + 1 == buckets) refuse_unused_if_known();
    on_bucket(present_in(b));
  }
}

std::vector<std::size_t> Reducer::observed_order() {
  check_group("the order");
  std::vector<std::uint64_t> mine(ready_order_.begin(), ready_order_.end());
  // Of several shards, one may have had what another one had not.
  for (const std::size_t slot : unused_)
    if (!mine.empty() && std::ranges::find(mine, slot) == mine.end()) mine.push_back(slot);
  const auto all = group_.all_gather_objects(std::as_bytes(std::span(mine)));
  const auto first = std::find_if(all.begin(), all.end(), [](const auto& bytes) { return !bytes.empty(); });
  if (first == all.end()) return {};
  std::vector<std::uint64_t> order(slots_.size());
  LOCKSTEP_ASSERT(first->size() == order.size() * sizeof(std::uint64_t));
  std::memcpy(order.data(), first->data(), first->size());
  return {order.begin(), order.end()};
}

bool Reducer::rebuild_buckets(std::vector<std::size_t> order, std::size_t bytes) {
  check_group("other buckets");
  check_usage(!open_, "other buckets within a step", "call it between finish() and begin_step()");
  if (order == order_ && bytes == limits_.bucket_bytes) return false;
  BucketLimits limits = limits_;
  limits.bucket_bytes = bytes;
  lay_out(std::move(order), limits);
  if (hook_ != nullptr) hook_->lay_out(slots_, plan_, group_);
  // What was a gradient may be padding now, and padding is summed with the rest: it must be zero.
  group_.zero(bytes_at(0, arena_->bytes()));
  return true;
}

std::string describe(const StepTimeline& timeline) {
  const auto ms = [&](Clock::time_point t) { return 1e3 * seconds_between(timeline.begin, t); };
  std::string text;
  for (std::size_t i = 0; i < timeline.buckets.size(); ++i) {
    const auto& bucket = timeline.buckets[i];
    const std::string end = bucket.end == Clock::time_point{} ? "?" : fmt::format("{:.2f}", ms(bucket.end));
    text += fmt::format("bucket {} ({}): ready {:.2f}, allreduce {:.2f}–{} ms\n", i,
                        human_bytes(static_cast<double>(bucket.bytes)), ms(bucket.ready), ms(bucket.start), end);
  }
  return text + fmt::format("last gradient ready at {:.2f} ms", ms(timeline.last_ready));
}

}  // namespace lockstep::ddp
