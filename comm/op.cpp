#include "lockstep/comm/op.h"

#include <fmt/format.h>

namespace lockstep::comm {
namespace {

std::string describe(const OpDescriptor& op, bool with_arena) {
  if (op.sequence == 0) return "an allocation";
  std::string details;
  const auto add = [&](const std::string& text) { details += (details.empty() ? "" : ", ") + text; };
  if (op.kind != OpKind::kBarrier) {
    add(fmt::format("{}{} {} at byte {}", reduces(op.kind) ? fmt::format("{} of ", name_of(op.reduce)) : std::string(),
                    op.count, lockstep::name_of(op.dtype), op.offset_bytes));
  }
  if (op.rounding() == Rounding::kPerHost)
    add("each host's rounded");
  else if (op.tree > 0)
    add(fmt::format("along tree {}", op.tree));
  if (with_arena) add(fmt::format("arena {} of {} bytes", op.arena_id, op.arena_bytes));
  if (has_root(op.kind)) add(fmt::format("{} rank {}", reduces(op.kind) ? "to" : "from", op.root));
  if (op.step >= 0) add(fmt::format("step {}", op.step));
  if (op.bucket >= 0) add(fmt::format("bucket {}", op.bucket));
  const std::string name = fmt::format("{} #{}", name_of(op.kind), op.sequence);
  return details.empty() ? name : fmt::format("{} ({})", name, details);
}

}  // namespace

std::string describe(const OpDescriptor& op) { return describe(op, false); }

std::string out_of_step_text(const std::string& who, const OpDescriptor& theirs, const OpDescriptor& ours) {
  const bool arenas_differ = theirs.kind != OpKind::kBarrier && ours.kind != OpKind::kBarrier &&
                             (theirs.arena_id != ours.arena_id || theirs.arena_bytes != ours.arena_bytes);
  return fmt::format("out of step: {} is in {}{}, this rank is in {}", who, describe(theirs, arenas_differ),
                     is_same_operation(theirs, ours) ? " after other operations" : "", describe(ours, arenas_differ));
}

}  // namespace lockstep::comm
