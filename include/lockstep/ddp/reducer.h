// Sums the ranks' gradients, bucket by bucket, while backward is still producing them.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/comm_hook.h"

namespace lockstep::ddp {

/// When the buckets of one step became ready, started and ended.
struct BucketTimes {
  std::size_t bytes = 0;
  Clock::time_point ready;  // its last gradient was there
  Clock::time_point start;  // its collective was issued
  Clock::time_point end{};  // first seen to be complete; Clock::time_point{}: not yet
};

struct StepTimeline {
  Clock::time_point begin;       // of the step
  Clock::time_point last_ready;  // the last gradient of all was there
  Clock::time_point waits_from;  // backward was over
  std::vector<BucketTimes> buckets;
};

/// One line a bucket and one for the step, times in ms since it began:
///   bucket 0 (1.2 MB): ready 3.10, allreduce 3.11–4.02 ms
///   last gradient ready at 9.70 ms
std::string describe(const StepTimeline& timeline);

class ShardSums;

/// Gradients are slots in one arena: the producer writes them where `storage` says and calls mark_ready. A bucket whose
/// slots are all ready is summed over the ranks at once, but never before the earlier buckets.
///
/// A step on every rank:
///   begin_step(); write tail(); mark_ready(slot) or mark_slot_unused(slot) for each, or contribute_nothing();
///   finish(…).
/// Calls out of this order, and slots that there are not, throw UsageError and change nothing.
///
/// Note [Unused gradients]
/// A slot may have no gradient on a rank in a step: the forward pass did not use the parameter there. Its part of the
/// sum is then zero, and it is counted: for each slot, the number of ranks without a gradient is sent after the last
/// bucket. The last bucket starts when all slots are decided. So every rank knows, without a further collective, which
/// slots are unused on all ranks. Where unused gradients are not expected, all ranks end with the same error. A rank
/// never leaves the others waiting.
///
/// Note [Static graph]
/// With static_graph, slots may be absent too, but always the same ones on a rank. They are found, as with find_unused,
/// in the first step with a gradient on any rank. Later steps hand buckets over without waiting for counts. They count
/// the slots that differ from the first step on a rank: any such slot ends the step on every rank, as an unused one
/// does without either option. Not with shards.
///
/// Note [Tail and counts]
/// The tail (kTailFloats numbers of the caller) and the counts of unused slots are regions of their own, before the
/// first bucket and after the last one: no hook touches them. Without a hook each of the two is summed in one
/// collective with the bucket beside it, which costs nothing; where that bucket is f64, in a small one of its own.
///
/// Note [Exact gradients]
/// Collectives only sum. Producers scale by 1 / global count before they write, so uneven shards need no weights, and
/// a rank without samples contributes zeros.
///
/// Note [Sums along a tree]
/// With Options::tree a step is that of several shards, of which this rank has ReductionTree::run_of(rank), and its
/// sums are the same bits at any number of ranks (Note [Reduction tree]). A step on every rank is then
///   begin_step();
///   until was_last_turn(): begin_shards(); for each of these shards its tail and gradients, or skip_shard();
///     mark_ready(slot) or mark_slot_unused(slot), for all of them together; after the last turn finish(…), after the
///     others end_shards().
/// Gradients start on their way in the last turn. Counts of unused slots are then of shards, not of ranks.
///
/// The thread that uses the group uses it. The group may have several, and must outlive all calls but storage(), tail()
/// and the destructor, which issues nothing; begin_step() of a group that is gone is a UsageError. What it returns by
/// reference, pointer or span is its own. A step that an exception cuts short, a producer's, a hook's or a callback's,
/// leaves collectives under way, and the other ranks in them: end the process then.
class Reducer {
 public:
  /// Numbers that are summed along with the first bucket, and never compressed.
  static constexpr std::size_t kTailFloats = 16;

  struct Options {
    bool find_unused = false;      // gradients may be absent
    bool static_graph = false;     // the same ones in each step (Note [Static graph]); not with find_unused
    bool start_late = false;       // no collective before finish(), whatever is ready
    bool wait_for_unused = false;  // finish() itself refuses unused gradients, also where it has to wait for a device

    const comm::ReductionTree* tree = nullptr;  // define_tree()'s, along which shards are summed; nullptr: ranks are
    std::size_t shards_at_once = 1;             // of this rank, in a turn
    std::size_t more_tail_floats = 0;           // beside kTailFloats
    /// `count` elements from `from` added to those at `to`, or copied there, after the work that the producer's stream
    /// was given before. For a group that is not on the CPU, where the reducer does it itself. They are called in the
    /// reducer's calls, on its thread.
    using Arithmetic = std::function<void(std::byte* to, const std::byte* from, std::size_t count, DType dtype)>;
    Arithmetic add = nullptr;
    Arithmetic copy = nullptr;
  };

  /// Collective: compares slots, f32 or f64, and limits (OutOfStepError where ranks differ), and allocates the arena. A
  /// bucket holds slots of one type. The first order is that of `slots` reversed: what backward produces first usually
  /// was registered last. Throws UsageError, as comm::run_collectively() does, for other types and for options that
  /// exclude each other.
  Reducer(comm::ProcessGroup& group, std::vector<SlotSpec> slots, const BucketLimits& limits, Options options);
  Reducer(comm::ProcessGroup& group, std::vector<SlotSpec> slots, const BucketLimits& limits)
      : Reducer(group, std::move(slots), limits, {}) {}
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Collective, before the first step, once: buckets, all f32, are carried by `hook`, which the reducer keeps. Throws
  /// OutOfStepError if ranks name different ones; UsageError, as comm::run_collectively() does, for nullptr, a second
  /// hook, another reducer's hook, slots of f64, a tree, and a refusal of CommHook::check().
  void register_comm_hook(std::shared_ptr<CommHook> hook);
  /// nullptr: there is none.
  CommHook* comm_hook() const { return hook_.get(); }
  /// Payload of gradients that a rank sends in a step if each rank has a link of its own, and what it would send
  /// without a hook, in bytes. Nothing where the hook does not say.
  struct BytesSent {
    double sent = 0, without_hook = 0;
  };
  std::optional<BytesSent> bytes_sent() const;

  std::size_t slots() const { return slots_.size(); }
  /// Where slot `slot`'s gradient goes. Valid until rebuild_buckets() returns true; with shards, until the next turn:
  /// that of the turn's shard number `shard`, from 0. Between steps it is where the sum is.
  std::span<std::byte> storage(std::size_t slot, std::size_t shard = 0) const;
  /// The same as numbers, for groups on the CPU. Throws UsageError where the slot's are of another type.
  template <class T>
  std::span<T> gradient(std::size_t slot) const {
    check_type(slot, dtype_of<T>());
    const auto bytes = storage(slot);
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  /// kTailFloats f32, zeroed by begin_step. Write it between begin_step and the first mark_ready; after finish it holds
  /// the sums over all ranks. In the arena's memory, which may be a device's. Options::more_tail_floats follow. With
  /// shards, as storage(): each shard of a turn has its own.
  std::span<std::byte> tail(std::size_t shard = 0) const;

  /// Starts step `step` (for messages). All slots become not ready.
  void begin_step(std::int64_t step);
  /// Forgets a step whose collectives were captured in a graph and never done.
  void abandon_step() {
    started_ = finished_ = 0;
    open_ = turn_open_ = false;
  }
  /// Whether a step waits for the counts of unused slots: with find_unused, and with static_graph in the first one.
  bool finds_unused() const { return options_.find_unused || (options_.static_graph && !graph_known_); }
  /// Whether there is a tree.
  bool in_shards() const { return options_.tree != nullptr; }
  /// Collective, between steps: shards are summed along `tree` from now on, of as many leaves, whose ranks have other
  /// runs: the same bits. True when storage has moved, with its content lost, and producers must ask for it again. It
  /// may take memory; what it throws leaves a reducer that can only be destroyed.
  bool set_tree(const comm::ReductionTree& tree);
  /// Starts the next turn: all slots become not ready. What it says are the turn's shards.
  comm::TreeNode begin_shards();
  /// Whether the turn that was begun last is this rank's last one of the step.
  bool was_last_turn() const;
  /// Shard number `shard` of the turn has no samples: zeros for all its slots, which are absent if that may be.
  void skip_shard(std::size_t shard);
  /// Shard number `shard` of the turn has no gradient of `slot`, which others have: zeros. Before mark_ready(slot).
  void note_unused(std::size_t slot, std::size_t shard);
  /// Ends a turn that is not the last one. Slots that are not decided are absent.
  void end_shards();
  /// The gradient of `slot` is complete in its storage. Throws UsageError when it already was in this step.
  void mark_ready(std::size_t slot);
  /// `slot` has no gradient on this rank in this step: its storage becomes zero. A slot that is not decided yet.
  void mark_slot_unused(std::size_t slot);
  bool decided(std::size_t slot) const;
  /// This rank has no samples in this step: zeros for every slot, all of which are absent if that may be.
  void contribute_nothing();
  /// Lets collectives progress where they have no thread of their own; call it now and then during backward.
  void poll();

  /// Makes `stream` wait for the buckets in order and hands each one's slots to `on_bucket` when work given to the
  /// stream finds its sums there; on the CPU, where a stream is the calling thread, this blocks. Slots that are not
  /// decided are absent. Throws whatever the collectives fail with. `on_bucket` is called on this thread, with a span
  /// that is good until it returns, and begins no step and moves no bucket; what it throws passes through, and ends the
  /// step.
  ///
  /// With find_unused, it waits for all buckets first, on a device for the device too, and `on_bucket` gets the slots
  /// that some rank had a gradient for. Without, an unused slot ends the step on every rank: refuse_unused() is called
  /// before the last bucket is handed over where the sums are in the host's memory, or with wait_for_unused. Otherwise,
  /// on a device, somebody else has to look at unused_count() when it is there, and call it.
  void finish(StreamView stream, FunctionRef<void(std::span<const std::size_t>)> on_bucket);
  /// An f32 in the arena's memory: after finish(), how many unused slots all ranks had together.
  std::span<std::byte> unused_count() const;
  /// Collective: throws UsageError on every rank, naming the first slots that were absent, and where.
  [[noreturn]] void refuse_unused();

  /// Collective, between steps: the order in which the slots became ready in the last step, on the first rank that had
  /// samples; empty where none had.
  std::vector<std::size_t> observed_order();
  /// Between steps: buckets follow `order`, every slot once, the same on all ranks. True when storage has moved, with
  /// its content lost, and producers must ask for it again.
  bool rebuild_buckets(std::vector<std::size_t> order) {
    return rebuild_buckets(std::move(order), limits_.bucket_bytes);
  }
  /// The same with buckets of `bytes` (BucketLimits::bucket_bytes).
  bool rebuild_buckets(std::vector<std::size_t> order, std::size_t bytes);
  /// The slots as buckets take them; rebuild_buckets() changes this, plan() and limits().
  const std::vector<std::size_t>& order() const { return order_; }

  const BucketPlan& plan() const { return plan_; }
  const std::vector<SlotSpec>& specs() const { return slots_; }
  const BucketLimits& limits() const { return limits_; }
  /// Of the arena: what a step sums, in bytes.
  std::size_t bytes() const { return arena_->bytes(); }
  /// Of the last finished step, until the next one begins. On a device, a bucket may end later than finish() returns:
  /// its end is then unknown.
  const StepTimeline& timeline() const { return timeline_; }
  /// Time that finish() has stood waiting in the last step.
  Clock::duration waited() const { return waited_; }

 private:
  void check_group(const char* doing) const;
  void check_slot(std::size_t slot, const char* doing) const;
  void check_type(std::size_t slot, DType asked) const;
  void check_begun(const char* doing) const;
  void settle(std::size_t slot);
  void check_turn() const;
  void zero_slot(std::size_t slot, std::size_t shard);
  void mark_rest_unused();
  void find_present();
  void note_used();
  void compare_graph();
  std::span<const std::size_t> present_in(std::size_t bucket);
  void write_counts();
  void send_unused();
  void refuse_unused_if_known();
  std::vector<float> unused_counts() const;
  std::size_t counts_bytes() const;
  std::size_t counts_offset() const { return tail_bytes_ + plan_.bytes; }
  std::size_t place_of(std::size_t shard) const;
  std::byte* at(std::size_t offset, std::size_t place) const { return arena_->data() + place * stride_ + offset; }
  void zero(std::size_t offset, std::size_t bytes, std::size_t place);
  void add_up(std::size_t offset, std::size_t count, DType dtype);
  void begin_turn();
  bool starts_buckets() const { return sums_ == nullptr || was_last_turn(); }
  void check_shards(const char* doing) const;
  void lay_out(std::vector<std::size_t> order, const BucketLimits& limits);
  std::size_t take_shards();
  void allocate(std::size_t places);
  void start_full_buckets();
  void start_bucket(std::size_t bucket);
  void wait_for_bucket(std::size_t bucket, StreamView stream);
  void note_finished();
  bool is_last(std::size_t bucket) const { return bucket + 1 == plan_.buckets.size(); }
  bool has_tail(std::size_t bucket) const;    // it is summed along with the tail
  bool has_counts(std::size_t bucket) const;  // with the counts
  GradBucket bucket_for_hook(std::size_t bucket) const;
  comm::Region region_of(std::size_t bucket) const;
  comm::Region floats_at(std::size_t offset, std::size_t bytes) const;
  comm::Region bytes_at(std::size_t offset, std::size_t count) const;

  comm::ProcessGroup& group_;
  Lifetime::Ref group_lifetime_;
  std::vector<SlotSpec> slots_;
  BucketLimits limits_;
  Options options_;
  std::vector<std::size_t> order_;
  BucketPlan plan_;
  std::size_t tail_bytes_;
  std::size_t arena_places_ = 1;     // that it has
  std::size_t stride_ = 0;           // between places; 0: there is one
  std::unique_ptr<ShardSums> sums_;  // nullptr: ranks are summed
  std::size_t turns_ = 0;            // of this step that have begun
  bool turn_open_ = false;
  std::vector<bool> skipped_;              // of the turn's shards
  std::vector<const std::byte*> sources_;  // of one sum
  std::vector<std::size_t> places_;
  std::unique_ptr<comm::Arena> arena_;
  std::shared_ptr<CommHook> hook_;      // nullptr: allreduce
  comm::Work tail_work_, counts_work_;  // of this step, where the bucket beside it does without

  bool open_ = false;  // between begin_step() and finish()

  // This step.
  std::vector<bool> is_ready_;                             // by slot
  std::vector<std::size_t> missing_;                       // by bucket: slots not ready
  std::vector<comm::Work> works_;                          // by bucket
  std::vector<std::size_t> ready_order_;                   // slots as they became ready; empty without a backward pass
  std::vector<std::size_t> unused_;                        // on this rank; in this turn
  std::vector<std::vector<std::size_t>> unused_by_shard_;  // of a turn
  std::size_t started_ = 0, finished_ = 0;                 // buckets
  std::size_t ready_count_ = 0;
  bool may_start_ = true;
  StepTimeline timeline_;
  Clock::duration waited_{};

  std::vector<bool> somewhere_;            // by slot: some rank has a gradient, where they may be absent
  bool graph_known_ = false;               // with static_graph: it was the first step that had a gradient
  std::optional<std::vector<bool>> here_;  // then: this rank has; nothing: it has had no samples yet
  std::vector<bool> used_;                 // of this step: it has

  // Of the first step with slots that must not be absent here, or there: each slot twice, and one more where it is
  // there.
  std::vector<std::size_t> refused_;
  static constexpr std::int64_t kNoStep = -1;
  std::int64_t step_ = kNoStep;
  std::int64_t refused_step_ = 0;
  std::vector<std::size_t> present_;  // of one bucket
};

}  // namespace lockstep::ddp
