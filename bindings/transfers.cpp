#include <span>
#include <vector>

#include "base/error.h"
#include "bindings/group.h"

namespace lockstep::bindings {
namespace {

std::span<const std::size_t> counts_of(const std::size_t* counts, int ranks, const char* name) {
  static_cast<void>(deref(counts, name));
  return {counts, static_cast<std::size_t>(ranks)};
}

std::size_t sum_of(std::span<const std::size_t> counts) {
  std::size_t sum = 0;
  for (const std::size_t count : counts)
    if (__builtin_add_overflow(sum, count, &sum))
      throw UsageError("counts of more values than memory has", "pass counts of elements");
  return sum;
}

comm::Transfer issue(comm::ProcessGroup& group, bool sends, void* values, std::size_t count, int dtype, int peer) {
  const DType type = bindings::dtype_of(dtype);
  void* const checked = buffer(values, count, type, 1, "values");
  return sends ? group.isend(checked, count, type, peer) : group.irecv(checked, count, type, peer);
}

int start(lockstep_group* handle, bool sends, void* values, std::size_t count, int dtype, int peer,
          lockstep_transfer* transfer) {
  return run([&] {
    auto& result = deref(transfer, "transfer");
    const auto group = group_of(handle);
    const comm::Transfer issued = issue(*group->group, sends, values, count, dtype, peer);
    result = {handle, ++group->transfers};
    group->under_way.emplace(result.number, issued);
  });
}

int block(lockstep_group* handle, bool sends, void* values, std::size_t count, int dtype, int peer) {
  return run([&] { issue(*group_of(handle)->group, sends, values, count, dtype, peer).wait(); });
}

comm::Transfer& find(Group& group, const lockstep_transfer& transfer) {
  const auto found = group.under_way.find(transfer.number);
  if (found != group.under_way.end()) return found->second;
  throw UsageError(
      fmt::format("transfer {}, of which this group knows nothing, or which has been waited for", transfer.number),
      "wait once for what lockstep_isend() or lockstep_irecv() has written");
}

}  // namespace
}  // namespace lockstep::bindings

using namespace lockstep;
using namespace lockstep::bindings;

int lockstep_send(lockstep_group* group, const void* values, size_t count, int dtype, int to) {
  return block(group, true, const_cast<void*>(values), count, dtype, to);
}
int lockstep_recv(lockstep_group* group, void* values, size_t count, int dtype, int from) {
  return block(group, false, values, count, dtype, from);
}
int lockstep_isend(lockstep_group* group, const void* values, size_t count, int dtype, int to,
                   lockstep_transfer* transfer) {
  return start(group, true, const_cast<void*>(values), count, dtype, to, transfer);
}
int lockstep_irecv(lockstep_group* group, void* values, size_t count, int dtype, int from,
                   lockstep_transfer* transfer) {
  return start(group, false, values, count, dtype, from, transfer);
}

int lockstep_transfer_wait(lockstep_transfer transfer) {
  return run([&] {
    const auto group = group_of(transfer.group);
    find(*group, transfer).wait();
    group->under_way.erase(transfer.number);
  });
}
int lockstep_transfer_done(lockstep_transfer transfer, int* done) {
  return run([&] {
    auto& result = deref(done, "done");
    const auto group = group_of(transfer.group);
    result = find(*group, transfer).done() ? 1 : 0;
  });
}

int lockstep_all_to_all(lockstep_group* group, const void* from, void* to, size_t count, int dtype) {
  return run([&] {
    const auto held = group_of(group);
    const DType type = bindings::dtype_of(dtype);
    const int ranks = held->group->size();
    const std::vector<std::size_t> counts(static_cast<std::size_t>(ranks), count);
    const void* const source = buffer(from, count, type, ranks, "from");
    held->group->all_to_all_host(source, counts, buffer(to, count, type, ranks, "to"), counts, type);
  });
}
int lockstep_all_to_all_v(lockstep_group* group, const void* from, const size_t* from_counts, void* to,
                          const size_t* to_counts, int dtype) {
  return run([&] {
    const auto held = group_of(group);
    const DType type = bindings::dtype_of(dtype);
    const auto out = counts_of(from_counts, held->group->size(), "from_counts");
    const auto in = counts_of(to_counts, held->group->size(), "to_counts");
    const void* const source = buffer(from, sum_of(out), type, 1, "from");
    held->group->all_to_all_host(source, out, buffer(to, sum_of(in), type, 1, "to"), in, type);
  });
}
