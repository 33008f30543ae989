// What handles of the C interface hold.
#pragma once

#include <lockstep/lockstep.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "bindings/handle.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::bindings {

struct Group {
  std::unique_ptr<comm::ProcessGroup> group;
  std::string backend;
  std::uint64_t issued = 0;                                // the last work that was handed out
  std::uint64_t transfers = 0;                             // that were handed out
  std::map<std::uint64_t, comm::Transfer> under_way = {};  // of those, the ones that have not been waited for
  bool ended = false;
};

/// The group of a handle, which may be used. Throws UsageError otherwise.
std::shared_ptr<Group> group_of(lockstep_group* handle);
/// The enumerations, checked.
DType dtype_of(int dtype);
comm::ReduceOp op_of(int op);
/// The caller's memory of `count` values, for each of so many ranks. Throws UsageError where there is none.
const void* buffer(const void* values, std::size_t count, DType dtype, int ranks, const char* name);
void* buffer(void* values, std::size_t count, DType dtype, int ranks, const char* name);

}  // namespace lockstep::bindings

struct lockstep_group final : lockstep::bindings::Handle<lockstep::bindings::Group> {
  using Handle::Handle;
};
