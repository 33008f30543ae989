#include <memory>

#include "base/error.h"
#include "bindings/group.h"
#include "lockstep/comm/arena.h"

struct lockstep_arena final : lockstep::bindings::Handle<lockstep::comm::Arena> {
  lockstep_arena(lockstep_group* of, std::shared_ptr<lockstep::comm::Arena> arena)
      : Handle(std::move(arena)), group(of) {}
  lockstep_group* const group;
};

namespace lockstep::bindings {
namespace {

std::shared_ptr<comm::Arena> arena_of(lockstep_arena* handle) { return deref(handle, "the arena").held("an arena"); }

/// Issues what `issue` returns the work of, on a region of the arena.
int issue(lockstep_arena* handle, std::size_t offset, std::size_t count, int dtype, lockstep_work* work,
          FunctionRef<comm::Work(comm::ProcessGroup&, const comm::Region&)> issue) {
  return run([&] {
    const auto arena = arena_of(handle);
    const auto group = group_of(handle->group);
    const comm::Work issued = issue(*group->group, {arena.get(), offset, count, bindings::dtype_of(dtype)});
    group->issued = issued.sequence();
    if (work != nullptr) *work = {handle->group, issued.sequence()};
  });
}

/// The group of a work that it has handed out.
std::shared_ptr<Group> group_of_work(const lockstep_work& work) {
  auto group = group_of(work.group);
  if (work.sequence == 0 || work.sequence > group->issued)
    throw UsageError(
        fmt::format("work {}, and the last that this group has issued is {}", work.sequence, group->issued),
        "pass what a function of lockstep.h has written");
  return group;
}

}  // namespace
}  // namespace lockstep::bindings

using namespace lockstep;
using namespace lockstep::bindings;

int lockstep_arena_allocate(lockstep_group* group, size_t bytes, lockstep_arena** arena) {
  return run([&] {
    auto& result = deref(arena, "arena");
    result = new lockstep_arena(group, group_of(group)->group->allocate(bytes));
  });
}
int lockstep_arena_data(lockstep_arena* arena, void** data) {
  return run([&] { deref(data, "data") = arena_of(arena)->data(); });
}
int lockstep_arena_bytes(lockstep_arena* arena, size_t* bytes) {
  return run([&] { deref(bytes, "bytes") = arena_of(arena)->bytes(); });
}
int lockstep_arena_destroy(lockstep_arena* arena) {
  return run([&] {
    if (arena != nullptr) arena->destroy("an arena");
  });
}

int lockstep_arena_all_reduce(lockstep_arena* arena, size_t offset, size_t count, int dtype, int op,
                              lockstep_work* work) {
  return issue(arena, offset, count, dtype, work,
               [&](auto& group, const auto& region) { return group.all_reduce(region, op_of(op)); });
}
int lockstep_arena_reduce(lockstep_arena* arena, size_t offset, size_t count, int dtype, int op, int root,
                          lockstep_work* work) {
  return issue(arena, offset, count, dtype, work,
               [&](auto& group, const auto& region) { return group.reduce(region, op_of(op), root); });
}
int lockstep_arena_broadcast(lockstep_arena* arena, size_t offset, size_t count, int dtype, int root,
                             lockstep_work* work) {
  return issue(arena, offset, count, dtype, work,
               [&](auto& group, const auto& region) { return group.broadcast(region, root); });
}
int lockstep_arena_all_gather(lockstep_arena* arena, size_t offset, size_t count, int dtype, lockstep_work* work) {
  return issue(arena, offset, count, dtype, work,
               [&](auto& group, const auto& region) { return group.all_gather(region); });
}
int lockstep_arena_reduce_scatter(lockstep_arena* arena, size_t offset, size_t count, int dtype, int op,
                                  lockstep_work* work) {
  return issue(arena, offset, count, dtype, work,
               [&](auto& group, const auto& region) { return group.reduce_scatter(region, op_of(op)); });
}
int lockstep_slice(lockstep_group* group, size_t count, int dtype, int rank, size_t* first, size_t* elements) {
  return run([&] {
    const auto held = group_of(group);
    static_cast<void>(held->group->job_rank(rank));  // refuses those that there are not
    const auto slice = comm::slice_of(count, size_of(bindings::dtype_of(dtype)), rank, held->group->size());
    deref(first, "first");
    deref(elements, "elements") = slice.count;
    *first = slice.begin;
  });
}

int lockstep_work_wait(lockstep_work work) {
  return run([&] {
    const auto held = group_of_work(work);
    comm::Work(held->group.get(), work.sequence).wait_host();
  });
}
int lockstep_work_done(lockstep_work work, int* done) {
  return run([&] {
    auto& result = deref(done, "done");
    const auto held = group_of_work(work);
    result = comm::Work(held->group.get(), work.sequence).done() ? 1 : 0;
  });
}
