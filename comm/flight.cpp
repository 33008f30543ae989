#include "comm/flight.h"

#include <atomic>
#include <chrono>

#include "base/flight_record.h"
#include "base/flight_snapshot.h"
#include "base/status_report.h"
#include "base/text.h"
#include "comm/stall.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"

namespace lockstep::comm {
namespace {

static_assert(static_cast<int>(OpKind::kAllReduce) == static_cast<int>(flight::Kind::kAllReduce) &&
              static_cast<int>(OpKind::kReduceScatter) == static_cast<int>(flight::Kind::kReduceScatter) &&
              static_cast<int>(OpKind::kAllGather) == static_cast<int>(flight::Kind::kAllGather) &&
              static_cast<int>(OpKind::kBroadcast) == static_cast<int>(flight::Kind::kBroadcast) &&
              static_cast<int>(OpKind::kBarrier) == static_cast<int>(flight::Kind::kBarrier) &&
              static_cast<int>(OpKind::kReduce) == static_cast<int>(flight::Kind::kReduce));

std::atomic<std::uint16_t> g_groups{0};

}  // namespace

std::uint16_t next_flight_group() { return static_cast<std::uint16_t>(g_groups.fetch_add(1) + 1); }

std::uint64_t record_issue(const OpDescriptor& op, std::uint16_t group) {
  return flight::issue({.sequence = op.sequence,
                        .bytes = op.bytes(),
                        .step = op.step,
                        .bucket = op.bucket,
                        .kind = static_cast<flight::Kind>(op.kind),
                        .group = group});
}

std::string where_is(int job_rank, std::size_t nth) {
  if (flight::directory().empty() || nth >= kNamedRanks) return {};
  const auto snapshot = flight::read(flight::directory(), job_rank);
  if (!snapshot || snapshot->host != printable(host_name())) return {};
  const auto now = Clock::now().time_since_epoch();
  std::string text = ", " + flight::describe_state(*snapshot, std::chrono::nanoseconds(now).count());
  if (const auto why = flight::standstill_of(*snapshot); !why.empty()) text += "; " + why;
  return text;
}

void give_up_on(std::span<const int> job_ranks) noexcept {
  flight::give_up_on(job_ranks);
  report_missing_ranks(job_ranks);
}

}  // namespace lockstep::comm
