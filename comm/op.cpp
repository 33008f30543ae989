#include "comm/op.h"

#include <fmt/format.h>

namespace lockstep::comm {

bool same_operation(const Op& a, const Op& b) {
  return a.kind == b.kind && a.reduce == b.reduce && a.root == b.root && a.region.count == b.region.count &&
         a.region.dtype == b.region.dtype && a.region.offset_bytes == b.region.offset_bytes;
}

std::string describe(const Op& op) {
  std::string details;
  const auto add = [&](const std::string& text) { details += (details.empty() ? "" : ", ") + text; };
  if (op.kind != OpKind::kBarrier) {
    const bool reduces = op.kind == OpKind::kAllReduce || op.kind == OpKind::kReduceScatter;
    add(fmt::format("{}{} {} at byte {}", reduces ? fmt::format("{} of ", name_of(op.reduce)) : std::string(),
                    op.region.count, lockstep::name_of(op.region.dtype), op.region.offset_bytes));
  }
  if (op.kind == OpKind::kBroadcast) add(fmt::format("from rank {}", op.root));
  if (op.step >= 0) add(fmt::format("step {}", op.step));
  const std::string name = fmt::format("{} #{}", name_of(op.kind), op.sequence);
  return details.empty() ? name : fmt::format("{} ({})", name, details);
}

}  // namespace lockstep::comm
