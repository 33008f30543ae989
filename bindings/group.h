// What handles of the C interface hold.
#pragma once

#include <lockstep/lockstep.h>

#include <cstdint>
#include <memory>
#include <string>

#include "bindings/handle.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::bindings {

struct Group {
  std::unique_ptr<comm::ProcessGroup> group;
  std::string backend;
  std::uint64_t issued = 0;  // the last work that was handed out
  bool ended = false;
};

/// The group of a handle, which may be used. Throws UsageError otherwise.
std::shared_ptr<Group> group_of(lockstep_group* handle);
/// The enumerations, checked.
DType dtype_of(int dtype);
comm::ReduceOp op_of(int op);

}  // namespace lockstep::bindings

struct lockstep_group final : lockstep::bindings::Handle<lockstep::bindings::Group> {
  using Handle::Handle;
};
