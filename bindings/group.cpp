#include "bindings/group.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "lockstep/comm/make_group.h"

namespace lockstep::bindings {
namespace {

static_assert(LOCKSTEP_F32 == static_cast<int>(DType::kF32) && LOCKSTEP_F64 == static_cast<int>(DType::kF64) &&
              LOCKSTEP_BF16 == static_cast<int>(DType::kBF16) && LOCKSTEP_I32 == static_cast<int>(DType::kI32) &&
              LOCKSTEP_I64 == static_cast<int>(DType::kI64) && LOCKSTEP_U8 == static_cast<int>(DType::kU8) &&
              LOCKSTEP_F16 == static_cast<int>(DType::kF16));
static_assert(LOCKSTEP_SUM == static_cast<int>(comm::ReduceOp::kSum) &&
              LOCKSTEP_MIN == static_cast<int>(comm::ReduceOp::kMin) &&
              LOCKSTEP_MAX == static_cast<int>(comm::ReduceOp::kMax) &&
              LOCKSTEP_PROD == static_cast<int>(comm::ReduceOp::kProd));
static_assert(LOCKSTEP_PROGRESS_THREAD == static_cast<int>(comm::GroupOptions::Progress::kThread) &&
              LOCKSTEP_PROGRESS_INLINE == static_cast<int>(comm::GroupOptions::Progress::kInline));

int checked(int value, int last, const char* what) {
  if (value < 0 || value > last)
    throw UsageError(fmt::format("{} {}, where 0 to {} are known", what, value, last),
                     "use the enumerations of lockstep.h");
  return value;
}

lockstep_group_options defaults() {
  static const comm::GroupOptions options;
  return {sizeof(lockstep_group_options), options.timeout_seconds,
          options.stall_warning_seconds,  comm::kAutoBackend,
          LOCKSTEP_PROGRESS_AUTO,         0};
}

comm::GroupOptions options_from(const lockstep_group_options* given) {
  lockstep_group_options options = defaults();
  if (given != nullptr) {
    if (given->size < offsetof(lockstep_group_options, timeout_seconds) + sizeof(double))
      throw UsageError(fmt::format("options.size is {}", given->size), "call lockstep_group_options_init() first");
    std::memcpy(&options, given, std::min(given->size, sizeof options));
  }
  comm::GroupOptions result;
  result.timeout_seconds = options.timeout_seconds;
  result.stall_warning_seconds = options.stall_warning_seconds;
  result.backend = &deref(options.backend, "options.backend");
  result.progress = static_cast<comm::GroupOptions::Progress>(
      checked(options.progress, LOCKSTEP_PROGRESS_INLINE, "options.progress"));
  result.encrypt = options.encrypt != 0;
  return result;
}

lockstep_group* handle_of(std::unique_ptr<comm::ProcessGroup> group) {
  auto held = std::make_shared<Group>();
  held->backend = group->name();
  held->group = std::move(group);
  return new lockstep_group(std::move(held));
}

}  // namespace

std::shared_ptr<Group> group_of(lockstep_group* handle) {
  auto group = deref(handle, "the group").held("a group");
  check_usage(!group->ended, "a group that has been shut down", "issue nothing after lockstep_group_shutdown()");
  return group;
}

DType dtype_of(int dtype) { return static_cast<DType>(checked(dtype, LOCKSTEP_F16, "dtype")); }
comm::ReduceOp op_of(int op) { return static_cast<comm::ReduceOp>(checked(op, LOCKSTEP_PROD, "op")); }

const void* buffer(const void* values, std::size_t count, DType dtype, int ranks, const char* name) {
  if (count > std::numeric_limits<std::ptrdiff_t>::max() / size_of(dtype) / static_cast<std::size_t>(ranks))
    throw UsageError(fmt::format("{} values of {} for each of {} ranks", count, lockstep::name_of(dtype), ranks),
                     "pass a count of elements");
  if (count > 0) static_cast<void>(deref(static_cast<const char*>(values), name));
  return values;
}
void* buffer(void* values, std::size_t count, DType dtype, int ranks, const char* name) {
  return const_cast<void*>(buffer(static_cast<const void*>(values), count, dtype, ranks, name));
}

}  // namespace lockstep::bindings

using namespace lockstep;
using namespace lockstep::bindings;

int lockstep_group_options_init(lockstep_group_options* options, size_t size) {
  return run([&] { init_options(options, size, defaults()); });
}

int lockstep_group_make(const lockstep_group_options* options, lockstep_group** group) {
  return run([&] {
    auto& result = deref(group, "group");
    result = handle_of(comm::make_group(options_from(options)));
  });
}

int lockstep_group_split(lockstep_group* group, int color, int key, lockstep_group** part) {
  return run([&] {
    auto& result = deref(part, "part");
    auto made = group_of(group)->group->split(color, key);
    result = made == nullptr ? nullptr : handle_of(std::move(made));
  });
}

int lockstep_group_rank(lockstep_group* group, int* rank) {
  return run([&] { deref(rank, "rank") = group_of(group)->group->rank(); });
}
int lockstep_group_size(lockstep_group* group, int* size) {
  return run([&] { deref(size, "size") = group_of(group)->group->size(); });
}
int lockstep_group_job_rank(lockstep_group* group, int rank, int* job_rank) {
  return run([&] { deref(job_rank, "job_rank") = group_of(group)->group->job_rank(rank); });
}
int lockstep_group_backend(lockstep_group* group, const char** backend) {
  return run([&] { deref(backend, "backend") = group_of(group)->backend.c_str(); });
}

int lockstep_group_shutdown(lockstep_group* group) {
  return run([&] {
    const auto held = group_of(group);
    held->group->shutdown();
    held->ended = true;
  });
}
int lockstep_group_destroy(lockstep_group* group) {
  return run([&] {
    if (group != nullptr) group->destroy("a group");
  });
}

int lockstep_all_reduce(lockstep_group* group, void* values, size_t count, int dtype, int op) {
  return run([&] {
    const auto held = group_of(group);
    const DType type = bindings::dtype_of(dtype);
    held->group->all_reduce_host(buffer(values, count, type, 1, "values"), count, type, op_of(op));
  });
}
int lockstep_reduce(lockstep_group* group, void* values, size_t count, int dtype, int op, int root) {
  return run([&] {
    const auto held = group_of(group);
    const DType type = bindings::dtype_of(dtype);
    held->group->reduce_host(buffer(values, count, type, 1, "values"), count, type, op_of(op), root);
  });
}
int lockstep_broadcast(lockstep_group* group, void* values, size_t count, int dtype, int root) {
  return run([&] {
    const auto held = group_of(group);
    const DType type = bindings::dtype_of(dtype);
    held->group->broadcast_host(buffer(values, count, type, 1, "values"), count, type, root);
  });
}
int lockstep_all_gather(lockstep_group* group, const void* mine, size_t count, int dtype, void* all) {
  return run([&] {
    const auto held = group_of(group);
    const DType type = bindings::dtype_of(dtype);
    const int ranks = held->group->size();
    held->group->all_gather_host(buffer(mine, count, type, ranks, "mine"), count, type,
                                 buffer(all, count, type, ranks, "all"));
  });
}
int lockstep_reduce_scatter(lockstep_group* group, const void* all, void* mine, size_t count, int dtype, int op) {
  return run([&] {
    const auto held = group_of(group);
    const DType type = bindings::dtype_of(dtype);
    const int ranks = held->group->size();
    held->group->reduce_scatter_host(buffer(all, count, type, ranks, "all"), buffer(mine, count, type, ranks, "mine"),
                                     count, type, op_of(op));
  });
}
int lockstep_barrier(lockstep_group* group) {
  return run([&] { group_of(group)->group->barrier().wait_host(); });
}
