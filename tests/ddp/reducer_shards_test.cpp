// The reducer where shards are summed along a tree: the bits of one that has all of them, gradients that some shards
// lack, and calls out of order.
#include <gmock/gmock.h>

#include <bit>
#include <cstring>
#include <map>

#include "base/error.h"
#include "lockstep/ddp/reducer.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::ddp {
namespace {

using lockstep::testing::group;

const std::vector<SlotSpec> kSlots = {{"a", 300}, {"b", 1}, {"c", 4000}, {"d", 17, DType::kF64}};

template <class T>
T value_of(std::size_t shard, std::size_t slot, std::size_t i, int step) {
  return static_cast<T>(1) /
         static_cast<T>(3 + (shard * 101 + slot * 37 + i * 7 + static_cast<std::size_t>(step)) % 997);
}

/// Shards [begin, end) that `has` says have it, as Note [Reduction tree] adds them; the others are zeros.
template <class T, class Has>
T sum_of(std::size_t begin, std::size_t end, std::size_t slot, std::size_t i, int step, const Has& has) {
  if (end - begin == 1) return has(begin, slot) ? value_of<T>(begin, slot, i, step) : T{};
  const std::size_t left = std::bit_floor(end - begin - 1);
  return sum_of<T>(begin, begin + left, slot, i, step, has) + sum_of<T>(begin + left, end, slot, i, step, has);
}

template <class T>
void write(std::span<std::byte> to, std::size_t shard, std::size_t slot, int step) {
  for (std::size_t i = 0; i < kSlots[slot].count; ++i) {
    const T value = value_of<T>(shard, slot, i, step);
    std::memcpy(to.data() + i * sizeof(T), &value, sizeof(T));
  }
}

template <class T, class Has>
void expect_sum(std::span<const std::byte> bytes, std::size_t shards, std::size_t slot, int step, const Has& has) {
  for (std::size_t i = 0; i < kSlots[slot].count; ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    ASSERT_EQ(value, sum_of<T>(0, shards, slot, i, step, has)) << "slot " << slot << " element " << i;
  }
}

std::vector<std::uint32_t> all_but_one_for_the_last(std::size_t shards) {
  const auto ranks = static_cast<std::size_t>(group().size());
  std::vector<std::uint32_t> shares(ranks, 1);
  shares.back() += static_cast<std::uint32_t>(shards - ranks);
  return shares;
}

bool is_f64(std::size_t slot) { return kSlots[slot].dtype == DType::kF64; }

TEST(ReducerShards, SumsAlongTheTreeWhateverIsMissing) {
  const auto ranks = static_cast<std::size_t>(group().size());
  for (const std::size_t shards : {ranks, ranks + 3, std::size_t{16}})
    for (const std::size_t at_once : {1u, 2u, 3u})
      for (const std::size_t bucket_bytes : {64u, 1u << 20}) {
        SCOPED_TRACE(fmt::format("{} shards, {} at once, {} bytes a bucket", shards, at_once, bucket_bytes));
        Reducer reducer(group(), kSlots, {.first_bucket_bytes = bucket_bytes, .bucket_bytes = bucket_bytes},
                        {.find_unused = true,
                         .tree = &group().define_tree(shards),
                         .shards_at_once = at_once,
                         .more_tail_floats = 3});
        for (int step = 1; step <= 4; ++step) {
          // Shards without samples; slot 1 is in every third shard, slot 2 in none of step 4.
          const auto has_samples = [&](std::size_t shard) { return step < 3 || shard % 2 == 1; };
          const auto has = [&](std::size_t shard, std::size_t slot) {
            return has_samples(shard) && (slot != 1 || shard % 3 == 0) && (slot != 2 || step != 4);
          };
          reducer.begin_step(step);
          do {
            const comm::TreeNode turn = reducer.begin_shards();
            for (std::uint32_t i = 0; i < turn.count; ++i) {
              const std::size_t shard = turn.first + i;
              auto* const tail = reinterpret_cast<float*>(reducer.tail(i).data());
              tail[0] = 1;
              tail[Reducer::kTailFloats + 2] = static_cast<float>(shard);
              for (std::size_t slot = 0; slot < kSlots.size() && has_samples(shard); ++slot) {
                if (!has(shard, slot)) continue;
                is_f64(slot) ? write<double>(reducer.storage(slot, i), shard, slot, step)
                             : write<float>(reducer.storage(slot, i), shard, slot, step);
              }
              if (!has_samples(shard)) reducer.skip_shard(i);
            }
            for (std::size_t slot = 0; slot < kSlots.size(); ++slot) {
              if (reducer.decided(slot)) continue;  // all were skipped
              bool any = false;
              for (std::uint32_t i = 0; i < turn.count; ++i) any = any || has(turn.first + i, slot);
              if (!any) continue;  // left undecided: unused
              for (std::uint32_t i = 0; i < turn.count; ++i)
                if (has_samples(turn.first + i) && !has(turn.first + i, slot)) reducer.note_unused(slot, i);
              reducer.mark_ready(slot);
              reducer.poll();
            }
            if (!reducer.was_last_turn()) reducer.end_shards();
          } while (!reducer.was_last_turn());
          std::vector<std::size_t> seen;
          reducer.finish({},
                         [&](std::span<const std::size_t> done) { seen.insert(seen.end(), done.begin(), done.end()); });
          std::ranges::sort(seen);
          std::vector<std::size_t> expected;
          for (std::size_t slot = 0; slot < kSlots.size(); ++slot)
            for (std::size_t shard = 0; shard < shards; ++shard)
              if (has(shard, slot)) {
                expected.push_back(slot);
                break;
              }
          ASSERT_EQ(seen, expected) << "step " << step;
          for (const std::size_t slot : seen)
            is_f64(slot) ? expect_sum<double>(reducer.storage(slot), shards, slot, step, has)
                         : expect_sum<float>(reducer.storage(slot), shards, slot, step, has);
          const auto* const tail = reinterpret_cast<const float*>(reducer.tail().data());
          ASSERT_EQ(tail[0], static_cast<float>(shards));
          ASSERT_EQ(tail[Reducer::kTailFloats + 2], static_cast<float>(shards * (shards - 1) / 2));
          if (step == 1) reducer.rebuild_buckets(reducer.observed_order());
          // Other ranks compute other shards from here on, and later the first ones again.
          if (step == 2) reducer.set_tree(group().define_tree(shards, all_but_one_for_the_last(shards)));
          if (step == 3) reducer.set_tree(group().define_tree(shards));
        }
      }
}

TEST(ReducerShards, AnUnusedGradientEndsTheStepOnEveryRank) {
  const auto shards = static_cast<std::size_t>(group().size()) + 1;
  Reducer reducer(group(), kSlots, {}, {.tree = &group().define_tree(shards)});
  reducer.begin_step(1);
  do {
    const comm::TreeNode turn = reducer.begin_shards();
    for (std::size_t slot = 0; slot < kSlots.size(); ++slot)
      if (slot != 2 || turn.first != 0) reducer.mark_ready(slot);
    if (!reducer.was_last_turn()) reducer.end_shards();
  } while (!reducer.was_last_turn());
  EXPECT_REFUSED("no gradient for c on ", reducer.finish({}, [](auto) {}));
}

TEST(ReducerShards, CallsOutOfOrderAreRefused) {
  const auto ranks = static_cast<std::size_t>(group().size());
  Reducer plain(group(), kSlots, {});
  plain.begin_step(1);
  EXPECT_REFUSED("where ranks are summed", plain.begin_shards());
  plain.contribute_nothing();
  plain.finish({}, [](auto) {});

  Reducer reducer(group(), kSlots, {}, {.tree = &group().define_tree(2 * ranks)});
  EXPECT_REFUSED("outside of a step", reducer.begin_shards());
  EXPECT_REFUSED("as many leaves", reducer.set_tree(group().define_tree(2 * ranks + 1)));
  EXPECT_REFUSED("as many leaves", plain.set_tree(group().define_tree(2 * ranks)));
  reducer.begin_step(1);
  EXPECT_REFUSED("between steps", reducer.set_tree(group().define_tree(2 * ranks)));
  EXPECT_REFUSED("was not begun", reducer.mark_ready(0));
  EXPECT_REFUSED("in a step in shards", reducer.contribute_nothing());
  reducer.begin_shards();
  EXPECT_REFUSED("before those before them have ended", reducer.begin_shards());
  EXPECT_REFUSED("before this rank's last shards", reducer.finish({}, [](auto) {}));
  EXPECT_REFUSED("not to be computed", reducer.skip_shard(1));
  reducer.skip_shard(0);
  EXPECT_REFUSED("not to be computed", reducer.skip_shard(0));
  EXPECT_REFUSED("twice", reducer.mark_ready(0));
  reducer.end_shards();
  EXPECT_REFUSED("not under way", reducer.end_shards());
  reducer.begin_shards();
  reducer.skip_shard(0);
  reducer.finish({}, [](auto) {});
  EXPECT_REFUSED("outside of a step", reducer.begin_shards());
}

}  // namespace
}  // namespace lockstep::ddp
