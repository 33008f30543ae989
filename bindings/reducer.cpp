#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/group.h"
#include "lockstep/ddp/reducer.h"

struct lockstep_reducer final : lockstep::bindings::Handle<lockstep::ddp::Reducer> {
  lockstep_reducer(lockstep_group* of, std::shared_ptr<lockstep::ddp::Reducer> reducer)
      : Handle(std::move(reducer)), group(of) {}
  lockstep_group* const group;
};

namespace lockstep::bindings {
namespace {

lockstep_reducer_options reducer_defaults() {
  const ddp::BucketLimits limits;
  return {sizeof(lockstep_reducer_options), limits.first_bucket_bytes, limits.bucket_bytes, 0};
}

lockstep_reducer_options reducer_options_from(const lockstep_reducer_options* given) {
  lockstep_reducer_options options = reducer_defaults();
  if (given == nullptr) return options;
  if (given->size < offsetof(lockstep_reducer_options, first_bucket_bytes) + sizeof(std::size_t))
    throw UsageError(fmt::format("options.size is {}", given->size), "call lockstep_reducer_options_init() first");
  std::memcpy(&options, given, std::min(given->size, sizeof options));
  return options;
}

/// Runs `action` on the reducer of a handle, whose group may be used.
int on_reducer(lockstep_reducer* handle, FunctionRef<void(ddp::Reducer&)> action) {
  return run([&] {
    const auto reducer = deref(handle, "the reducer").held("a reducer");
    const auto group = group_of(handle->group);  // stays where a callback destroys it
    action(*reducer);
  });
}

}  // namespace
}  // namespace lockstep::bindings

using namespace lockstep;
using namespace lockstep::bindings;

int lockstep_reducer_options_init(lockstep_reducer_options* options, size_t size) {
  return run([&] { init_options(options, size, reducer_defaults()); });
}

int lockstep_reducer_make(lockstep_group* group, const lockstep_slot* slots, size_t count,
                          const lockstep_reducer_options* options, lockstep_reducer** reducer) {
  return run([&] {
    auto& result = deref(reducer, "reducer");
    const auto held = group_of(group);
    std::vector<ddp::SlotSpec> specs;
    for (std::size_t i = 0; i < count; ++i) {
      const lockstep_slot& slot = (&deref(slots, "slots"))[i];
      specs.push_back({.name = &deref(slot.name, "slots[].name"), .count = slot.count});
    }
    const lockstep_reducer_options chosen = reducer_options_from(options);
    result = new lockstep_reducer(
        group, std::make_shared<ddp::Reducer>(*held->group, std::move(specs),
                                              ddp::BucketLimits{chosen.first_bucket_bytes, chosen.bucket_bytes},
                                              ddp::Reducer::Options{.find_unused = chosen.find_unused != 0}));
  });
}

int lockstep_reducer_gradient(lockstep_reducer* reducer, size_t slot, float** values, size_t* count) {
  return on_reducer(reducer, [&](ddp::Reducer& of) {
    const auto gradient = of.gradient<float>(slot);
    auto& first = deref(values, "values");
    deref(count, "count") = gradient.size();
    first = gradient.data();
  });
}
int lockstep_reducer_begin_step(lockstep_reducer* reducer, int64_t step) {
  return on_reducer(reducer, [&](ddp::Reducer& of) { of.begin_step(step); });
}
int lockstep_reducer_mark_ready(lockstep_reducer* reducer, size_t slot) {
  return on_reducer(reducer, [&](ddp::Reducer& of) { of.mark_ready(slot); });
}
int lockstep_reducer_mark_unused(lockstep_reducer* reducer, size_t slot) {
  return on_reducer(reducer, [&](ddp::Reducer& of) { of.mark_slot_unused(slot); });
}
int lockstep_reducer_contribute_nothing(lockstep_reducer* reducer) {
  return on_reducer(reducer, [](ddp::Reducer& of) { of.contribute_nothing(); });
}
int lockstep_reducer_poll(lockstep_reducer* reducer) {
  return on_reducer(reducer, [](ddp::Reducer& of) { of.poll(); });
}
int lockstep_reducer_finish(lockstep_reducer* reducer, lockstep_on_bucket on_bucket, void* user) {
  return on_reducer(reducer, [&](ddp::Reducer& of) {
    of.finish({}, [&](std::span<const std::size_t> slots) {
      const int answer = on_bucket == nullptr ? 0 : on_bucket(user, slots.data(), slots.size());
      if (answer != 0)
        throw UsageError(fmt::format("on_bucket returned {}", answer),
                         "return 0 to continue; end the process otherwise");
    });
  });
}
int lockstep_reducer_destroy(lockstep_reducer* reducer) {
  return run([&] {
    if (reducer != nullptr) reducer->destroy("a reducer");
  });
}
